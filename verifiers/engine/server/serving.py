"""What the endpoints of a local model share: taking turns by client, and counting requests and tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from verifiers.clients.protocol import Completion, Request
from verifiers.clients.server_access import key_of
from verifiers.dialects.http import UnknownModelError
from verifiers.engine.local_model import LocalModel
from verifiers.engine.server.shares import Shares
from verifiers.engine.text.prompts import SHORT_CHARS
from verifiers.engine.text.streams import ReplyStream
from verifiers.types import MessageType

WORK_BYTES = 64 << 10  # this many bytes of a request body cost as much as one reply
QUEUED = 2  # replies submitted at once, in multiples of the engine's rows; enough to keep it busy


class Serving:
    """The state that all endpoints share."""

    def __init__(self, model: LocalModel) -> None:
        self.model = model
        self.name = served_name(model.model)
        self.counts: Counter[str] = Counter()
        self.started = int(time.time())
        self._shares: Shares | None = None

    @property
    def waiting(self) -> int:
        return 0 if self._shares is None else self._shares.waiting

    def check_model(self, name: Any) -> None:
        """Refuse a request that names another model. It may also name none."""
        if name not in (None, "", self.name):
            raise UnknownModelError(f"the model {name!r:.200} is not served here; this server has {self.name!r}")

    def request(
        self, prompt: Any, sampling: Mapping[str, Any], *, tools: Any = None, message_type: MessageType = "chat"
    ) -> Request:
        return Request(model=self.model.model, prompt=prompt, tools=tools, sampling=sampling, message_type=message_type)

    @asynccontextmanager
    async def turn(self, http: web.Request, replies: int = 1) -> AsyncIterator[None]:
        """Wait for this client's turn. A request costs its number of replies, plus its size if it is long."""
        self.counts["requests"] += 1
        engine = (await self.model.ready()).engine
        if self._shares is None:
            self._shares = Shares(QUEUED * engine.rows, most_waiting=engine.max_waiting)
        client = http.remote, key_of(http)  # the key too, because several clients may share an address
        async with self._shares.turn(client, replies + (http.content_length or 0) // WORK_BYTES):
            yield

    async def complete(self, http: web.Request, request: Request) -> Completion:
        """The reply to a request. A long request is tokenized in a thread."""
        is_long = (http.content_length or 0) > SHORT_CHARS
        completion = await (self.model.complete_in_thread if is_long else self.model.complete)(request)
        completion.raw["model"] = self.name
        self.count(completion.raw["usage"])
        return completion

    async def stream(self, http: web.Request, request: Request) -> ReplyStream:
        return await self.model.stream(request)

    async def prompt_ids(self, request: Request) -> list[int]:
        return await self.model.prompt_ids(request)

    def count(self, usage: Mapping[str, Any]) -> None:
        self.counts["done"] += 1
        self.counts["prompt_tokens"] += usage["prompt_tokens"]
        self.counts["completion_tokens"] += usage["completion_tokens"]
        self.counts["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]


def served_name(name: str) -> str:
    """The name of a model for clients: only the last part of a path.

    >>> served_name("/home/me/policy-step-100"), served_name("weights/policy.gguf"), served_name("Qwen/Qwen3-0.6B")
    ('policy-step-100', 'policy', 'Qwen/Qwen3-0.6B')
    """
    path = Path(name).expanduser()
    is_path = name.startswith((".", "/", "~")) or name.endswith(".gguf") or path.exists()
    return path.resolve().name.removesuffix(".gguf") if is_path else name
