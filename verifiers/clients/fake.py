"""A reply (a text, a function, a list of them) → a client that answers with it: for tests, docs and dry runs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from verifiers import calls, deadlines, messages
from verifiers.clients.openai_looks import OpenAILooks
from verifiers.clients.protocol import Completion, Request, Tokens
from verifiers.clients.recording import record_completion
from verifiers.errors import DeadlineError, ModelError, RequestRefusedError, wrap
from verifiers.signatures import signature_of
from verifiers.types import Usage

START, END = 256, 257  # each byte is a token; these two mark the start and the end of a message


class FakeClient(OpenAILooks):
    """A client that answers with ``reply``, and keeps its requests in ``.requests``.

    ``reply`` is a text, a message, a `Completion` or an error to raise; a function (sync or async) of the messages, or
    of the whole `Request` if its argument is called ``request``; a list of these, used in a cycle; or a dict from the
    last user message to one of these. With ``tokens=True`` completions have exact token ids and log-probabilities, one
    token per byte.

    >>> client = FakeClient(lambda messages: "4" if "2+2" in messages[-1]["content"] else "?")
    >>> client.chat.completions.create(model="m", messages=[{"role": "user", "content": "2+2?"}]).text
    '4'
    """

    base_url = "fake://"
    api_key = ""

    def __init__(self, reply: Any = "", *, latency_s: float = 0.0, tokens: bool = False) -> None:
        _check(reply)
        self.reply = reply
        self.latency_s = latency_s
        self.tokens = tokens
        self.requests: list[Request] = []
        self._turns = itertools.count()

    async def complete(self, request: Request) -> Completion:
        request, ids = _read(request)
        self.requests.append(request)
        try:
            with deadlines.within(request.timeout_s):
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                said = await self._say(self.reply, request)
        except TimeoutError as error:
            raise DeadlineError(f"the fake reply took longer than {request.timeout_s} s") from error
        except BaseException as error:  # the reply function is the caller's code
            failure = wrap(calls.contained(error), ModelError, "the fake reply")
            raise failure from failure.__cause__
        completion = _counted(_as_completion(said, request), request, ids, with_tokens=self.tokens)
        return record_completion(self, request, completion)

    async def _say(self, reply: Any, request: Request) -> Any:
        if isinstance(reply, BaseException) or (isinstance(reply, type) and issubclass(reply, BaseException)):
            raise reply
        if callable(reply):
            subject = request if _wants_request(reply) else request.prompt
            return await self._say(await calls.maybe_await(reply, subject), request)
        if isinstance(reply, Mapping) and not _is_message(reply):
            return await self._say(_look_up(reply, request), request)
        if isinstance(reply, Sequence) and not isinstance(reply, str):
            return await self._say(reply[next(self._turns) % len(reply)], request)
        return reply


def _check(reply: Any) -> None:
    if isinstance(reply, (str, Completion, BaseException)) or (callable(reply) and not isinstance(reply, Mapping)):
        return
    if isinstance(reply, Mapping) or hasattr(reply, "model_dump"):
        return
    if not isinstance(reply, Sequence):
        raise TypeError(f"a reply must be a text, a message, a function, or a list or dict of these, not {reply!r:.80}")
    if not reply:
        raise ValueError("a list of replies needs at least one")
    for item in reply:
        _check(item)


def _read(request: Request) -> tuple[Request, list[int] | None]:
    """The request with its prompt as text or messages, and the prompt's token ids if it was given as ids."""
    prompt: Any = request.prompt
    if isinstance(prompt, str):
        return request, None
    prompt = list(prompt)
    if request.message_type == "completion" and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return _read(replace(request, prompt=prompt[0]))  # a batch of one
    if prompt and all(type(token) is int for token in prompt):
        if odd := [token for token in prompt if not 0 <= token <= END]:
            raise RequestRefusedError(
                f"the prompt has the token {odd[0]}; the tokens of a FakeClient are bytes (0 to 255), {START} and {END}"
            )
        return replace(request, prompt=decode_tokens(prompt)), prompt
    if odd := [item for item in prompt if item is None or isinstance(item, str | int | float | list)]:
        raise RequestRefusedError(
            f"a prompt must be a text, a list of token ids or a list of messages; this one contains {odd[0]!r:.80}"
        )
    return replace(request, prompt=prompt), None


def _wants_request(function: Any) -> bool:
    try:
        parameters = signature_of(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return next(iter(parameters), "") == "request"


def _is_message(reply: Mapping[Any, Any]) -> bool:
    return "role" in reply or "choices" in reply or "tool_calls" in reply or set(reply) == {"content"}


def _look_up(replies: Mapping[Any, Any], request: Request) -> Any:
    asked = request.prompt
    if not isinstance(asked, str):
        users = [message for message in asked if messages.role_of(message) == "user"]
        asked = messages.text_of(users[-1]) if users else ""
    if asked not in replies:
        raise RequestRefusedError(f"this FakeClient has no reply to {asked!r:.200}; it knows {list(replies)!r:.200}")
    return replies[asked]


def _as_completion(said: Any, request: Request) -> Completion:
    if isinstance(said, Completion):
        return said
    if isinstance(said, Mapping) and "choices" in said:
        from verifiers.clients.reading import read_response

        return read_response(said, request.message_type)
    if isinstance(said, str):
        said = {"content": said}
    elif hasattr(said, "model_dump"):
        said = said.model_dump(exclude_none=True)
    if not isinstance(said, Mapping):
        raise ModelError(f"a fake reply must be a text, a message or a Completion, not {said!r:.80}")
    message = {"role": "assistant", "content": None, **said}
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    return Completion(message=message, finish_reason=finish_reason, model=request.model)


def _counted(completion: Completion, request: Request, ids: list[int] | None, *, with_tokens: bool) -> Completion:
    if completion.usage is not None and (completion.tokens is not None or not with_tokens):
        return completion
    if not with_tokens:
        prompt_size = _prompt_size(request.prompt) if ids is None else len(ids)
        reply_size = len(_body(completion.message)) + 1
        usage = Usage(prompt_tokens=prompt_size, completion_tokens=reply_size)
        return replace(completion, usage=completion.usage or usage)
    tokens = completion.tokens or _tokens(completion, encode_prompt(request.prompt) if ids is None else ids)
    usage = Usage(prompt_tokens=len(tokens.prompt_ids), completion_tokens=len(tokens.completion_ids))
    return replace(completion, usage=completion.usage or usage, tokens=tokens)


# --- one token per byte -------------------------------------------------------------------------------------------


def encode_prompt(prompt: str | Sequence[Any]) -> list[int]:
    """The token ids of a prompt: a string's bytes, or for each message a start mark, role, content and an end mark.

    >>> encode_prompt("hi")
    [104, 105]
    """
    if isinstance(prompt, str):
        return list(prompt.encode(errors="replace"))
    ids: list[int] = []
    for message in prompt:
        ids += [START, *_role(message), *_body(message), END]
    return [*ids, START, *_role({"role": "assistant"})]


def decode_tokens(ids: Sequence[int]) -> str:
    """The text of token ids, without the marks.

    >>> decode_tokens([256, 104, 105, 257])
    'hi'
    """
    return bytes(token for token in ids if token < START).decode(errors="replace")


def _tokens(completion: Completion, prompt_ids: list[int]) -> Tokens:
    ids = list(_body(completion.message))
    if not completion.is_truncated:
        ids.append(END)
    logprobs = [-((7 * token + 13 * position) % 50 + 1) / 100 for position, token in enumerate(ids)]
    return Tokens(prompt_ids=prompt_ids, completion_ids=ids, logprobs=logprobs)


def _prompt_size(prompt: str | Sequence[Any]) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace"))
    sizes = [len(_role(message)) + len(_body(message)) + 2 for message in prompt]
    return sum(sizes) + len(_role({"role": "assistant"})) + 1


def _role(message: Any) -> bytes:
    return f"{messages.role_of(message)}\n".encode()


def _body(message: Any) -> bytes:
    body = messages.text_of(message).encode(errors="replace")  # half a surrogate pair has no bytes
    tool_calls = message.get("tool_calls") if isinstance(message, dict) else getattr(message, "tool_calls", None)
    if not tool_calls:
        return body
    dumped = [call.model_dump() if hasattr(call, "model_dump") else call for call in tool_calls]
    return body + msgspec.json.encode(dumped, order="sorted")
