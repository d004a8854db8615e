"""An OpenAI-shaped response (a dict, an SDK object, a mock of one) → a `Completion`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from verifiers.clients.protocol import Completion, Tokens
from verifiers.errors import BadReplyError, EmptyModelResponseError
from verifiers.types import ChatMessage, MessageType, Usage, VersionSpan

Prices = Mapping[str, float]

_OVERLONG = re.compile(
    r"context[_ ]length|context[_ ]size|context[_ ]window|context limit|context shift"
    r"|(?:prompt|input|conversation|request)[_ ](?:is )?too[_ ]l(?:ong|arge)\b"
    r"|maximum (?:context|prompt|input|model|sequence|allowed)[a-z ]{0,20} length|max_(?:model|input|seq)_len"
    r"|reduce (?:the length of|your prompt)|string_above_max_length|request exceeds the maximum size"
    r"|exceeds? (?:the )?(?:configured limit|maximum number of (?:input )?tokens|number of tokens allowed)"
    r"|tokens \+ `?max_new_tokens`? must be|must have less than \d+ tokens|max_tokens must be at least 1, got -"
    r"|too many (?:input )?tokens(?! per)|(?:input|prompt) (?:token count|length)[^\n]{0,40} exceeds?",
    re.IGNORECASE,
)


def is_overlong(text: str) -> bool:
    """Does this error message say that the conversation exceeds the model's context?

    >>> is_overlong("This model's maximum context length is 4096 tokens. However, you requested 5000 tokens")
    True
    >>> is_overlong("Rate limit reached: 30000 tokens per minute")
    False
    """
    return _OVERLONG.search(text) is not None and "per minute" not in text


def read_response(response: Any, message_type: MessageType = "chat", *, prices: Prices | None = None) -> Completion:
    """Read the first choice of a response. Missing fields, and the auto-created attributes of mocks, are left out.

    >>> reply = {"choices": [{"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}]}
    >>> read_response(reply).text
    '4'
    """
    choices = field(response, "choices")
    if not isinstance(choices, (list, tuple)) or not choices or choices[0] is None:
        raise EmptyModelResponseError(_nothing(response))
    choice = choices[0]
    if message_type == "chat":
        source = field(choice, "message")
        if source is None:
            raise EmptyModelResponseError("the first choice has no message")
        message = read_message(_shaped(source, "message"))
        _check_content(source, field(source, "content"), response, choice)
    else:
        text = field(choice, "text")
        _check_content(choice, text, response, choice)
        message = {"role": "assistant", "content": text if isinstance(text, str) else ""}
    reason = field(choice, "finish_reason")
    model = field(response, "model")
    return Completion(
        message=message,
        finish_reason=reason if isinstance(reason, str) else None,
        tokens=read_tokens(response, choice),
        usage=read_usage(field(response, "usage"), prices),
        model=model if isinstance(model, str) else "",
        raw=response,
    )


def field(source: Any, name: str) -> Any:
    """A key of a dict or an attribute of an object; None if it is missing."""
    return source.get(name) if isinstance(source, dict) else getattr(source, name, None)


def _shaped(source: Any, what: str) -> Any:
    if isinstance(source, (str, int, float, list)):
        raise BadReplyError(f"the {what} is a {type(source).__name__}, not an object")
    return source


# Fields that a reply without content may have instead.
_INSTEAD = frozenset(
    ("tool_calls", "function_call", "refusal", "audio", "images", "reasoning", "reasoning_content", "reasoning_details")
)


def _check_content(holder: Any, content: Any, response: Any, choice: Any) -> None:
    """Raise if completion tokens were billed but the text is missing: it was lost, which is not an empty answer."""
    if content is not None:
        if isinstance(holder, dict) and not isinstance(content, (str, list)):
            raise BadReplyError(f"the content of the reply is a {type(content).__name__}")
        return
    if any(field(holder, name) for name in _INSTEAD) or field(choice, "finish_reason") == "content_filter":
        return
    tokens = _spent(field(response, "usage"))
    if tokens > 0:
        raise BadReplyError(f"the reply has no content, although its usage counts {tokens} tokens")


def _spent(usage: Any) -> int:
    """The completion tokens that must appear as text, which excludes hidden reasoning tokens."""
    completion = field(usage, "completion_tokens")
    hidden = field(field(usage, "completion_tokens_details"), "reasoning_tokens")
    if not isinstance(completion, int):
        return 0
    return completion - (hidden if isinstance(hidden, int) else 0)


def _nothing(response: Any) -> str:
    if response is None:
        return "the endpoint's reply is empty"
    return "the endpoint's reply has no choices"


# --- the message --------------------------------------------------------------------------------------------------

_READ = frozenset(("role", "content", "tool_calls", "reasoning"))
_EXTRAS = ("refusal", "name", "reasoning_content")


def read_message(source: Any) -> ChatMessage:
    """A message as a plain dict: role, content, tool calls, reasoning, and any other text fields."""
    content, calls = field(source, "content"), field(source, "tool_calls")
    message: ChatMessage = {"role": "assistant"}  # it is the reply, whatever role the server reports
    tool_calls = [_tool_call(call, i) for i, call in enumerate(calls)] if isinstance(calls, (list, tuple)) else []
    if isinstance(content, (str, list)):
        message["content"] = content
    else:
        message["content"] = None if tool_calls else ""  # endpoints refuse null content without tool calls
    if tool_calls:
        message["tool_calls"] = tool_calls
    for name, value in _extras(source):
        if isinstance(value, str) and name not in _READ:
            message[name] = value
    if isinstance(reasoning := field(source, "reasoning"), str):
        message.setdefault("reasoning_content", reasoning)
    return message


def _extras(source: Any) -> Any:
    if isinstance(source, dict):
        return source.items()
    further = getattr(source, "model_extra", None)
    known = [(name, getattr(source, name, None)) for name in _EXTRAS]
    return known + list(further.items()) if isinstance(further, dict) else known


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    if not isinstance(call, dict):
        call = _plain(_shaped(call, "tool call"))
    function = call.get("function")
    if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
        arguments = function.get("arguments")
        text = "{}" if arguments is None else msgspec.json.encode(arguments).decode()
        call = {**call, "function": {**function, "arguments": text}}
    return call if call.get("id") else {**call, "id": f"call_{index}"}


def _plain(call: Any) -> dict[str, Any]:
    dump = getattr(call, "model_dump", None)
    dumped = dump(exclude_none=True) if callable(dump) else None
    if isinstance(dumped, dict):
        return dumped
    function = getattr(call, "function", None)
    parts = {"id": getattr(call, "id", None)}
    named = {name: getattr(function, name, None) for name in ("name", "arguments")}
    return {
        **{name: value for name, value in parts.items() if isinstance(value, str)},
        "type": "function",
        "function": {name: value for name, value in named.items() if isinstance(value, str)},
    }


# --- usage and tokens ---------------------------------------------------------------------------------------------


def read_usage(source: Any, prices: Prices | None = None) -> Usage | None:
    """Token counts, with their cost if prices (US dollars per million tokens) are given.

    >>> read_usage({"prompt_tokens": 1000, "completion_tokens": 500}, {"prompt": 2.0, "completion": 8.0}).cost_usd
    0.006
    """
    if source is None:
        return None
    prompt, completion = field(source, "prompt_tokens"), field(source, "completion_tokens")
    if not isinstance(prompt, int) or prompt < 0:
        return None
    if not isinstance(completion, int) or completion < 0:
        completion = 0
    if prices is None:
        return Usage(prompt_tokens=prompt, completion_tokens=completion)
    cost_usd = (prompt * prices.get("prompt", 0.0) + completion * prices.get("completion", 0.0)) / 1e6
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cost_usd=cost_usd)


def read_tokens(response: Any, choice: Any) -> Tokens | None:
    """Token ids and sampling logprobs, if the engine reported all of them."""
    if (in_message := _read_nemo_tokens(field(choice, "message"))) is not None:
        return in_message
    logprobs = field(choice, "logprobs")
    if logprobs is None:
        return None
    entries, texts, values = _logprob_lists(logprobs)
    if not values or not all(isinstance(value, (float, int)) for value in values):
        return None
    prompt_ids = _ids(field(response, "prompt_token_ids")) or _ids(field(choice, "prompt_token_ids"))
    if prompt_ids is None:
        return None
    token_ids = _ids(field(choice, "token_ids"))
    completion_ids = token_ids or _ids_in_text(texts or [field(entry, "token") for entry in entries])
    if completion_ids is None:
        return None
    if len(completion_ids) != len(values):
        raise BadReplyError(f"the reply has {len(completion_ids)} token ids but {len(values)} logprobs")
    drawn = field(response, "sampling")  # our own engine reports its sampling arguments
    sampling = drawn if isinstance(drawn, dict) else None
    return Tokens(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=values,
        sampling=sampling,
        weight_versions=_version_spans(field(choice, "weight_versions"), len(values)),
    )


def _version_spans(spans: Any, tokens: int) -> tuple[VersionSpan, ...]:
    """Which weights sampled each token, as reported by our engine and by vLLM under `vf-vllm`."""
    if spans is None or spans == []:
        return ()
    found = [[field(one, name) for name in VersionSpan._fields] for one in spans] if isinstance(spans, list) else []
    end = 0
    for version, start, after in found:
        if not isinstance(version, str) or (type(start), type(after)) != (int, int) or not start == end < after:
            break
        end = after
    else:
        if end == tokens:
            return tuple(VersionSpan(*one) for one in found)
    raise BadReplyError(f"weight_versions of the reply do not cover each of its {tokens} tokens once: {spans!r:.200}")


def _read_nemo_tokens(message: Any) -> Tokens | None:
    """Tokens in the message itself, where the model server of NeMo Gym puts them."""
    completion_ids = _ids(field(message, "generation_token_ids"))
    prompt_ids, logprobs = _ids(field(message, "prompt_token_ids")), field(message, "generation_log_probs")
    if completion_ids is None or prompt_ids is None or not isinstance(logprobs, list):
        return None
    if len(completion_ids) != len(logprobs):
        raise BadReplyError(f"the reply has {len(completion_ids)} token ids but {len(logprobs)} logprobs")
    return Tokens(prompt_ids=prompt_ids, completion_ids=completion_ids, logprobs=logprobs)


def _logprob_lists(logprobs: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The entries (of a chat), the token texts (of a completion), and the logprobs (of both)."""
    entries = field(logprobs, "content")
    if isinstance(entries, list):
        return entries, [], [field(entry, "logprob") for entry in entries]
    texts, values = field(logprobs, "tokens"), field(logprobs, "token_logprobs")
    return [], texts if isinstance(texts, list) else [], list(values) if isinstance(values, (list, tuple)) else []


def _ids(value: Any) -> list[int] | None:
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
        return value if isinstance(value, list) else list(value)
    return None


def _ids_in_text(texts: list[Any]) -> list[int] | None:
    """The ids of tokens written as ``token_id:N``, as vLLM does with ``return_tokens_as_token_ids``."""
    if not texts or not isinstance(texts[0], str) or not texts[0].startswith("token_id:"):
        return None
    try:
        return [int(text.removeprefix("token_id:")) for text in texts]
    except (AttributeError, ValueError):
        return None
