"""rLLM's rollout engine → a client with the exact prompt tokens, sampled tokens and logprobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.clients.protocol import Completion, Request, Tokens
from verifiers.errors import RequestRefusedError
from verifiers.types import Usage

_NOT_FOR_ENGINES = ("extra_body", "logprobs", "modalities", "n", "return_token_ids")


class EngineClient:
    """Calls a rollout engine of rLLM (for verl, Tinker or an endpoint) once per turn.

    ``application_id`` keeps the turns of one rollout on one server; ``outputs`` has the engine's own reply objects.
    """

    def __init__(self, engine: Any, application_id: str = "verifiers") -> None:
        self.engine = engine
        self.application_id = application_id
        self.base_url = "rllm:"
        self.outputs: list[Any] = []

    async def complete(self, request: Request) -> Completion:
        if isinstance(request.prompt, str):
            raise RequestRefusedError("rLLM's engines only take messages, not message_type='completion'")
        output = await self.engine.get_model_response(
            messages=request.prompt,
            application_id=self.application_id,
            tools=request.tools or [],
            **sampling_for(request.sampling),
        )
        self.outputs.append(output)
        prompt, reply = list(output.prompt_ids or ()), list(output.completion_ids or ())
        return Completion(
            message=_message(output),
            finish_reason=output.finish_reason or "stop",
            tokens=_tokens(output, prompt, reply),
            usage=Usage(
                prompt_tokens=output.prompt_length or len(prompt),
                completion_tokens=output.completion_length or len(reply),
            ),
            model=request.model,
        )


def sampling_for(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling arguments in the format of rLLM's engines.

    >>> sampling_for({"max_completion_tokens": 8, "temperature": 0.7, "logprobs": True, "seed": None})
    {'temperature': 0.7, 'max_tokens': 8}
    """
    given = {name: value for name, value in sampling.items() if value is not None and name not in _NOT_FOR_ENGINES}
    limit = given.pop("max_completion_tokens", None)
    return given if limit is None else {**given, "max_tokens": limit}


def _tokens(output: Any, prompt: list[int], reply: list[int]) -> Tokens | None:
    if not prompt or not reply or not output.logprobs:
        return None
    return Tokens(prompt_ids=prompt, completion_ids=reply, logprobs=[float(value) for value in output.logprobs])


def _message(output: Any) -> Any:
    content = output.content if output.content is not None else output.text
    message: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    if output.tool_calls:
        message["tool_calls"] = _tool_calls(output.tool_calls)
    return message


def _tool_calls(calls: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert tool calls, which are OpenAI objects or rLLM's own with a name and arguments, to dicts."""
    read = []
    for i, call in enumerate(calls):
        if callable(dump := getattr(call, "model_dump", None)):
            read.append(dump())
            continue
        found = call if isinstance(call, Mapping) else vars(call)
        arguments = found.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": str(found.get("name") or ""), "arguments": text}
        read.append({"id": str(found.get("id") or f"call_{i}"), "type": "function", "function": function})
    return read
