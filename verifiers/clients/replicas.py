"""Several clients for one model → one client: a request goes to the least busy, or the next one if that is down."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verifiers.clients.protocol import Client, Completion, Request
from verifiers.errors import (
    ConnectionFailedError,
    DeadlineError,
    EndpointDownError,
    ModelError,
    RateLimitError,
    ServerError,
)

ROUNDS = 2
REST_S = 10.0  # how long a failed replica is avoided while another one is up


@dataclass(slots=True, eq=False)
class _Replica:
    client: Client
    model: str | None
    in_flight: int = 0
    last_used: int = 0
    rests_until: float = 0.0


class ReplicaClient:
    """Distributes requests over replicas by load; a failed replica is avoided for a while.

    ``models`` are the replicas' names for the model, if they differ.
    """

    def __init__(self, clients: Sequence[Client], *, models: Sequence[str] | None = None) -> None:
        if not clients:
            raise ValueError("there must be at least one replica")
        if models is not None and len(models) != len(clients):
            raise ValueError(f"{len(clients)} replicas but {len(models)} models")
        names = models if models is not None else [None] * len(clients)
        self._replicas = [_Replica(client, model) for client, model in zip(clients, names, strict=True)]
        self._turns = itertools.count(1)

    @property
    def base_url(self) -> str:
        urls = [str(getattr(replica.client, "base_url", "")) for replica in self._replicas]
        return ",".join(dict.fromkeys(url for url in urls if url))

    @property
    def api_keys(self) -> list[str]:
        """The keys of all replicas, so that they can be redacted."""
        keys = [getattr(replica.client, "api_key", None) for replica in self._replicas]
        return [key for key in keys if isinstance(key, str) and key]

    async def complete(self, request: Request) -> Completion:
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        last: ModelError | None = None
        for _ in range(ROUNDS):
            tried: list[_Replica] = []
            while len(tried) < len(self._replicas):
                replica = self._least_busy(tried)
                tried.append(replica)
                try:
                    return await self._ask(replica, request, deadline)
                except (ConnectionFailedError, ServerError, RateLimitError, EndpointDownError) as error:
                    replica.rests_until = time.monotonic() + REST_S
                    last = error
        raise last or ModelError("no replica was asked")

    def _least_busy(self, tried: list[_Replica]) -> _Replica:
        now = time.monotonic()
        untried = [replica for replica in self._replicas if replica not in tried]
        return min(untried, key=lambda replica: (replica.rests_until > now, replica.in_flight, replica.last_used))

    async def _ask(self, replica: _Replica, request: Request, deadline: float | None) -> Completion:
        if replica.model is not None and replica.model != request.model:
            request = replace(request, model=replica.model)
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(f"no replica replied within {request.timeout_s:g} s")
            request = replace(request, timeout_s=left_s)
        replica.in_flight += 1
        replica.last_used = next(self._turns)
        try:
            completion = await replica.client.complete(request)
        finally:
            replica.in_flight -= 1
        replica.rests_until = 0.0
        return completion
