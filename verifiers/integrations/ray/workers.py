"""A Ray cluster → workers that play rollouts; one per CPU, replaced if it dies."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from verifiers.clients.hosts import is_loopback
from verifiers.clients.protocol import Client
from verifiers.integrations.ray.cluster import ClusterError, connect, import_ray

if TYPE_CHECKING:
    from verifiers.envs.calling import Answerer
    from verifiers.envs.environment import Environment
    from verifiers.envs.remote.host import Terms
    from verifiers.envs.remote.workers import Share
    from verifiers.integrations.ray.player import RayPlayer

logger = logging.getLogger("verifiers.ray")

CLOSING_S = 10.0


class RayWorkers:
    """Worker processes on a Ray cluster, for one run (``workers=RayWorkers()``) or all runs in ``with RayWorkers():``.

    ``address`` is HOST:PORT of the cluster. Without it, the cluster in RAY_ADDRESS or on this machine is used, or one
    is started on this machine and stopped after the block. ``count`` workers (default: one per CPU) request ``cpus``
    CPUs each.
    """

    def __init__(self, address: str | None = None, *, count: int | None = None, cpus: float = 1.0) -> None:
        if count is not None and count < 1:
            raise ValueError(f"count={count!r} must be a number of workers, 1 or more")
        if not cpus > 0:
            raise ValueError(f"cpus={cpus!r} must be above 0")
        self.address, self.count, self.cpus = address, count, cpus
        self.handles: list[Any] = []
        self._users = 0
        self._has_connected = False
        self._lock = threading.Lock()
        self._stored: dict[Any, Any] = {}  # values in the object store: environments by digest, data sets by id

    def __enter__(self) -> Self:
        with self._lock:
            self._users += 1
            if self._users == 1:
                try:
                    self._open()
                except BaseException:
                    self._users = 0
                    self._shut()
                    raise
        return self

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._close()

    def _open(self) -> None:
        self.ray = import_ray()
        self._has_connected = connect(self.ray, self.address)
        cpus = int(self.ray.cluster_resources().get("CPU", 0) // self.cpus)
        wanted = self.count or cpus
        if not wanted or cpus < 1:
            raise ClusterError(f"no node of the Ray cluster has the {self.cpus:g} CPUs that a worker needs")
        if wanted > cpus:
            raise ClusterError(
                f"{wanted} workers of {self.cpus:g} CPUs do not fit on the Ray cluster: it has room for {cpus}"
            )
        self.handles = [self._make() for _ in range(wanted)]

    def _make(self) -> Any:
        worker = importlib.import_module("verifiers.integrations.ray.actor").RolloutWorker
        # With Ray's default limit on concurrent calls, answers would queue behind the rollouts that wait for them.
        return self.ray.remote(worker).options(num_cpus=self.cpus, max_concurrency=100_000, max_restarts=0).remote()

    def _close(self) -> None:
        ended = [handle.close.remote() for handle in self.handles]
        if ended:
            self.ray.wait(ended, num_returns=len(ended), timeout=CLOSING_S)
        for handle in self.handles:
            self.ray.kill(handle)
        self._shut()

    def _shut(self) -> None:
        self.handles, self._stored = [], {}
        if self._has_connected:
            self._has_connected = False
            self.ray.shutdown()

    # --- the interface for players --------------------------------------------------------------------------------

    def player(self, env: Environment, answerer: Answerer, terms: Terms, share: Share) -> RayPlayer:
        """The player of one run on these workers."""
        player: type[RayPlayer] = importlib.import_module("verifiers.integrations.ray.player").RayPlayer
        return player(self, env, answerer, terms, share)

    def replace(self, at: int, dead: Any) -> None:
        """Start a worker in place of a dead one, unless another run has done so."""
        with self._lock:
            if at < len(self.handles) and self.handles[at] is dead:
                logger.warning("a Ray worker died and is replaced")
                self.ray.kill(dead)
                self.handles[at] = self._make()

    def store(self, key: Any, held: Any, value: Any) -> Any:
        """A reference to a value in Ray's object store, which is stored once; ``held`` is kept alive with it."""
        with self._lock:
            if key not in self._stored:
                self._stored[key] = (held, self.ray.put(value))
            return self._stored[key][1]


def direct_client(client: Client) -> Client | None:
    """The client if workers can use it directly: an HTTP client whose endpoint is not on the caller's machine."""
    from verifiers.clients.anthropic import AnthropicClient
    from verifiers.clients.http import HTTPClient
    from verifiers.clients.responses import ResponsesClient

    if type(client) not in (AnthropicClient, HTTPClient, ResponsesClient):
        return None
    host = urlsplit(str(getattr(client, "base_url", ""))).hostname or ""
    return None if is_loopback(host) else client
