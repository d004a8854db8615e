"""vLLM's API server with one addition: every choice has the version of the weights that sampled each token.

vLLM's engine tracks the versions (`CompletionOutput.weight_versions`), but only its endpoint for token ids returns
them. `vf-vllm` runs this file, which adds ``weight_versions`` to the choices of chats and completions, in the format
of that endpoint and of `vf serve`, and then runs vLLM's own server.
It does not import this package, because vLLM may be in a separate environment.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import runpy
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict, fields
from typing import Any

SERVER = "vllm.entrypoints.openai.api_server"
FIELD = "weight_versions"
Found = dict[int, list[dict[str, Any]]]  # choice index → spans


class _Noting:
    """Passes the engine's outputs on, and records their weight versions.

    ``choices`` is the number per prompt: with several prompts, each output comes with the index of its prompt.
    """

    def __init__(self, results: AsyncIterator[Any], found: Found, choices: int) -> None:
        self._results, self._found, self._choices = results, found, choices

    def __aiter__(self) -> _Noting:
        return self

    async def __anext__(self) -> Any:
        result = await anext(self._results)
        prompt, made = result if isinstance(result, tuple) else (0, result)
        for one in made.outputs:
            if (spans := _spans(one)) is not None:
                self._found[prompt * self._choices + one.index] = spans
        return result


def _spans(output: Any) -> list[dict[str, Any]] | None:
    """The spans of an output; only the last output of a choice has them."""
    spans = getattr(output, FIELD)
    return None if spans is None else [asdict(span) for span in spans]


def _add(response: Any, found: Found) -> None:
    for choice in getattr(response, "choices", ()):  # an error has no choices
        if choice.index in found:
            setattr(choice, FIELD, found[choice.index])


def _add_to_event(event: str, found: Found) -> str:
    """Add the spans to the last event of each choice in a stream."""
    if not found or not event.startswith("data: {"):
        return event
    chunk = json.loads(event.removeprefix("data: "))
    for choice in chunk.get("choices", ()):
        if choice.get("finish_reason") is not None and choice["index"] in found:
            choice[FIELD] = found.pop(choice["index"])
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def _streaming(stream: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Wrap a method that converts the engine's outputs, its argument at ``place``, to events."""

    @functools.wraps(stream)
    async def streaming(self: Any, request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        found: Found = {}
        given = list(args)
        given[place] = _Noting(given[place], found, request.n or 1)
        async with aclosing(stream(self, request, *given, **kwargs)) as events:
            async for event in events:
                yield _add_to_event(event, found)

    return streaming


def _answering_chat(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    async def answering(self: Any, request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any) -> Any:
        found: Found = {}
        response = await answer(self, request, _Noting(results, found, 1), *args, **kwargs)
        _add(response, found)
        return response

    return answering


def _answering_completion(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    def answering(self: Any, results: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = answer(self, results, *args, **kwargs)
        outputs = [one for result in results for one in result.outputs]  # choices are numbered in this order
        _add(response, {index: spans for index, one in enumerate(outputs) if (spans := _spans(one)) is not None})
        return response

    return answering


def install() -> None:
    """Patch vLLM's classes; raises ImportError that says what is missing if this vLLM has a different structure."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.outputs import CompletionOutput

    chat, completion, results = OpenAIServingChat, OpenAIServingCompletion, "result_generator"
    known: list[tuple[Any, str, tuple[str, ...], Callable[..., Any]]] = [
        (chat, "chat_completion_full_generator", ("request", results), _answering_chat),
        (chat, "chat_completion_stream_generator", ("request", results), functools.partial(_streaming, place=0)),
        (completion, "request_output_to_completion_response", ("final_res_batch",), _answering_completion),
        (
            completion,
            "completion_stream_generator",
            ("request", "engine_inputs", results),
            functools.partial(_streaming, place=1),
        ),
    ]
    if FIELD not in {one.name for one in fields(CompletionOutput)}:
        raise ImportError(f"CompletionOutput has no {FIELD}")
    for owner, name, arguments, _ in known:
        method = getattr(owner, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1 : 1 + len(arguments)] != arguments:
            raise ImportError(f"{owner.__name__} has no {name}({', '.join(arguments)}, …)")
    for owner, name, _, adding in known:
        setattr(owner, name, adding(getattr(owner, name)))


def main() -> None:
    try:
        install()
    except ImportError as error:
        sys.stderr.write(
            f"vf-vllm: the weight version of each token cannot be added to this vLLM ({error}); install vLLM 0.32, or "
            "start it by `vllm serve`, whose replies count as sampled from the oldest weights possible\n"
        )
        sys.exit(2)
    sys.path[0] = os.getcwd()  # like `python -m`: plug-ins may be there
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
