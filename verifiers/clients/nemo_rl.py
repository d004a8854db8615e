"""The model server of NeMo Gym → a client. Its replies contain token ids, which the next turn must send back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from verifiers.clients.protocol import Completion, Request, Tokens
from verifiers.clients.sdk import SDKClient

REMEMBERED = 20_000


class NeMoRLChatCompletionsClient(SDKClient):
    """Sends the token ids of earlier replies back to the server, so that it does not tokenize them again.

    A reply is found by the whole conversation up to it; the latest 20,000 are kept.

    >>> from verifiers.clients.fake import FakeClient
    >>> NeMoRLChatCompletionsClient(FakeClient("4")).base_url
    'fake:'
    """

    def __init__(self, sdk: Any, **kwargs: Any) -> None:
        super().__init__(sdk, **kwargs)
        self._known: OrderedDict[bytes, Tokens] = OrderedDict()

    async def complete(self, request: Request) -> Completion:
        if isinstance(request.prompt, str):
            return await super().complete(request)
        completion = await super().complete(replace(request, prompt=self._with_tokens(request.prompt)))
        if completion.tokens is not None:
            self._known[_key([*request.prompt, completion.message])] = completion.tokens
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return completion

    def _with_tokens(self, messages: Sequence[Any]) -> list[Any]:
        shown = list(messages)
        for i, message in enumerate(messages):
            tokens = self._known.get(_key(messages[: i + 1])) if message.get("role") == "assistant" else None
            if tokens is not None:
                shown[i] = {
                    **message,
                    "prompt_token_ids": tokens.prompt_ids,
                    "generation_token_ids": tokens.completion_ids,
                    "generation_log_probs": tokens.logprobs,
                }
        return shown


def _key(messages: Sequence[Any]) -> bytes:
    told = [[m.get("role"), m.get("content"), m.get("tool_calls"), m.get("tool_call_id")] for m in messages]
    return msgspec.json.encode(told)
