"""vLLM's API server, with one thing added: every choice says which weights made each of its tokens.

vLLM's engine tracks that (`CompletionOutput.weight_versions`), but of its endpoints only the one for token ids passes
it on. `vf-vllm` runs this file, which adds ``weight_versions`` to the choices of chats and completions, in the shape
that the endpoint for token ids and `vf serve` have, and then runs vLLM's own server.
It imports nothing of the package: vLLM may be in an environment of its own.
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
Found = dict[int, list[dict[str, Any]]]  # of each choice


class _Noting:
    """The engine's outputs as they come; what they say of their weights is noted.

    ``choices`` is how many there are of one prompt: outputs of several prompts come with the number of theirs.
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
    """Only the last output of a choice says it."""
    spans = getattr(output, FIELD)
    return None if spans is None else [asdict(span) for span in spans]


def _add(response: Any, found: Found) -> None:
    for choice in getattr(response, "choices", ()):  # an error has none
        if choice.index in found:
            setattr(choice, FIELD, found[choice.index])


def _add_to_event(event: str, found: Found) -> str:
    """A choice of a stream says it where it ends."""
    if not found or not event.startswith("data: {"):
        return event
    chunk = json.loads(event.removeprefix("data: "))
    for choice in chunk.get("choices", ()):
        if choice.get("finish_reason") is not None and choice["index"] in found:
            choice[FIELD] = found.pop(choice["index"])
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def _streaming(stream: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A method that turns the engine's outputs, its argument at ``place``, into events."""

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
    """Add it; ImportError, which says what is missing, in a vLLM that is made in another way."""
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
            f"vf-vllm: this vLLM cannot be made to say which weights made a token ({error}); install vLLM 0.32, or "
            "start it by `vllm serve`, whose replies count as being of the oldest weights that they can be from\n"
        )
        sys.exit(2)
    sys.path[0] = os.getcwd()  # as `python -m` has it: plug-ins may be there
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
