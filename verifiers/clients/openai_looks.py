"""The call interface of OpenAI's client objects, so that hooks written for them work with our clients unchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verifiers import calls
from verifiers.clients.protocol import Completion, Request


class OpenAILooks:
    """Adds ``chat.completions.create(…)`` and ``completions.create(…)`` to a client, for sync and async callers."""

    model: str = ""

    @property
    def chat(self) -> SimpleNamespace:
        return SimpleNamespace(completions=SimpleNamespace(create=self._create_chat))

    @property
    def completions(self) -> SimpleNamespace:
        return SimpleNamespace(create=self._create_text)

    async def complete(self, request: Request) -> Completion:
        raise NotImplementedError

    @calls.both
    async def _create_chat(
        self, *, messages: Any, model: str | None = None, tools: Any = None, **sampling: Any
    ) -> Completion:
        name = model or self.model
        return await self.complete(Request(model=name, prompt=messages, tools=tools, sampling=sampling))

    @calls.both
    async def _create_text(self, *, prompt: Any, model: str | None = None, **sampling: Any) -> Completion:
        name = model or self.model
        return await self.complete(Request(model=name, prompt=prompt, sampling=sampling, message_type="completion"))
