"""A request → a completion from any OpenAI-compatible endpoint, chat or plain completions."""

from __future__ import annotations

from typing import Any

from verifiers.clients.protocol import Completion, Request
from verifiers.clients.reading import read_response
from verifiers.clients.remote import RemoteClient
from verifiers.errors import RequestRefusedError, ServerError
from verifiers.messages import has_audio


class HTTPClient(RemoteClient):
    """Any OpenAI-compatible endpoint: ``{base_url}/chat/completions`` and ``{base_url}/completions``.

    >>> HTTPClient("http://localhost:8000/v1", "sk-secret")
    HTTPClient('http://localhost:8000/v1', api_key='sk-…')
    """

    def _write(self, request: Request, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if request.message_type == "completion":
            if not isinstance(request.prompt, str) and any(isinstance(item, dict) for item in request.prompt):
                raise RequestRefusedError("the prompt of a completion must be a string or token ids, not messages")
            return "/completions", {"model": request.model, "prompt": request.prompt, **args}
        if isinstance(request.prompt, str):
            raise RequestRefusedError("the prompt of a chat must be a list of messages, not a string")
        if "max_tokens" in args:
            args.setdefault("max_completion_tokens", args["max_tokens"])
            del args["max_tokens"]
        if "modalities" not in args and has_audio(request.prompt):
            args["modalities"] = ["text"]
        if request.tools:
            args.setdefault("tools", request.tools)
        return "/chat/completions", {"model": request.model, "messages": request.prompt, **args}

    def _read(self, reply: dict[str, Any], request: Request) -> Completion:
        completion = read_response(reply, request.message_type, prices=self.prices)
        if completion.finish_reason == "error":  # how gateways say that the model behind them broke off
            raise ServerError("the reply broke off with an error")
        return completion
