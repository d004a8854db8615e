"""``/tokenize`` and ``/detokenize``, as in vLLM: texts and conversations ↔ token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from verifiers import errors
from verifiers.dialects.completions import with_known_role
from verifiers.dialects.http import json_reply, read_body
from verifiers.engine.server.serving import Serving

_TEXT = frozenset(("add_special_tokens", "return_token_strs"))
_CHAT = frozenset(
    ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "return_token_strs", "tools")
)


class TokenEndpoints:
    """The two endpoints over one model."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        self._serving.check_model(body.pop("model", None))
        messages, text = body.pop("messages", None), body.pop("prompt", None)
        if isinstance(messages, list) == isinstance(text, str):
            raise errors.RequestRefusedError("pass either 'prompt' (a text) or 'messages' (a list of messages)")
        _check_names(body, _TEXT if messages is None else _CHAT)
        with_pieces = body.pop("return_token_strs", None) is True
        async with self._serving.turn(http):
            ids = await (self._of_text(text, body) if isinstance(text, str) else self._of_chat(messages, body))
        loaded = await self._serving.model.ready()
        written: dict[str, Any] = {"count": len(ids), "max_model_len": loaded.engine.length, "tokens": ids}
        if with_pieces:
            written["token_strs"] = loaded.codec.pieces(ids)
        return json_reply(written)

    async def _of_chat(self, messages: list[Any], settings: dict[str, Any]) -> list[int]:
        tools = settings.pop("tools", None)
        request = self._serving.request([with_known_role(one) for one in messages], settings, tools=tools)
        return await self._serving.model.prompt_ids(request)

    async def _of_text(self, text: str, settings: dict[str, Any]) -> list[int]:
        codec = (await self._serving.model.ready()).codec
        special = settings.get("add_special_tokens") is not False
        return await asyncio.to_thread(codec.encode, text, special=special)

    async def detokenize(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        self._serving.check_model(body.pop("model", None))
        ids = body.pop("tokens", None)
        _check_names(body, frozenset())
        loaded = await self._serving.model.ready()
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < loaded.vocabulary for one in ids):
            raise errors.RequestRefusedError(f"'tokens' must be a list of token ids below {loaded.vocabulary}")
        async with self._serving.turn(http):
            text = await asyncio.to_thread(loaded.codec.decode, ids, special=True)
        return json_reply({"prompt": text})


def _check_names(body: dict[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(body.keys() - known):
        raise errors.RequestRefusedError(f"this endpoint does not know the field {unknown[0]!r}")
