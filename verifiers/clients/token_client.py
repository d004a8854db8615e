"""A function from prompt ids to sampled ids → a client that renders messages and keeps the exact sampled ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.chat import ChatWriter
from verifiers.chat.tool_calls import parse
from verifiers.clients.protocol import Completion, Request, Tokens
from verifiers.errors import BadReplyError, RequestRefusedError
from verifiers.types import Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What an engine sampled after a prompt. ``is_cut``: a limit ended it (None: inferred from the last token)."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool | None = None


Generate = Callable[[list[int], Mapping[str, Any]], Awaitable[Sampled]]


class TokenClient:
    """Calls ``generate(prompt_ids, sampling)`` for each turn.

    The sampled ids of a reply are remembered: the prompt of the next turn begins with them, and only the new messages
    are tokenized. If a template rewrites a reply, the whole prompt is tokenized again.
    """

    def __init__(self, tokenizer: Any, generate: Generate, *, template: Mapping[str, Any] | None = None) -> None:
        self.base_url = "tokens:"
        self._generate = generate
        self._writer = ChatWriter(tokenizer)
        self._settings = dict(template or {})
        ends = (tokenizer.eos_token_id, self._writer.template.end_of_turn(self._writer.codec))
        self._stop_ids = frozenset(end for end in ends if end is not None)

    async def complete(self, request: Request) -> Completion:
        if isinstance(request.prompt, str):
            text, prompt = self._writer.text_prompt(request.prompt)
        else:
            text, prompt = self._writer.prompt(request.prompt, request.tools or None, **self._settings)
        if not prompt:
            raise RequestRefusedError("the prompt is empty: it needs at least one token")
        sampled = await self._generate(prompt, request.sampling)
        ids = list(sampled.ids)
        if len(ids) != len(sampled.logprobs):
            raise BadReplyError(f"{len(ids)} token ids but {len(sampled.logprobs)} logprobs")
        body = len(ids) - 1 if ids and ids[-1] in self._stop_ids else len(ids)
        is_cut = body == len(ids) if sampled.is_cut is None else sampled.is_cut
        content, written = self._writer.codec.continuations(prompt, ids[:body])
        self._writer.remember(text, written, prompt, ids[:body])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if request.tools:
            message |= self._calls(written, request.tools, len(prompt))
        return Completion(
            message=message,
            finish_reason="length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop",
            tokens=Tokens(prompt_ids=prompt, completion_ids=ids, logprobs=[float(one) for one in sampled.logprobs]),
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(ids)),
            model=request.model,
        )

    def _calls(self, written: str, tools: Sequence[Mapping[str, Any]], salt: int) -> dict[str, Any]:
        schemas = {str(tool["function"]["name"]): tool["function"].get("parameters") for tool in tools}
        reply = parse(written, self._writer.template.style(tools), tools=schemas, salt=str(salt))
        content = self._writer.codec.without_special(reply.content or "").rstrip() or None
        return {"content": content, "tool_calls": reply.calls} if reply.calls else {}
