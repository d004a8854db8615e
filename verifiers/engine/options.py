"""Sampling arguments as OpenAI's and vLLM's clients write them → what the engine is told, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.engine.sequence import NO_TOP_K, Sampling
from verifiers.errors import RequestRefusedError

DEFAULT_MAX_TOKENS = 1024
MOST_CHOICES = 1024
MOST_STOPS = 64
LARGEST = 1e30  # that float32 arithmetic can still take times something
INT64 = 1 << 63
GREEDY_BELOW = 1e-6  # a temperature that float32 arithmetic cannot divide by

# Arguments that change nothing here, whatever they are.
_WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "extra_headers", "extra_query")
)
# Arguments that are known for the one value that changes nothing.
_ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "prompt_logprobs": (0, False),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "store": (False,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """One request's sampling arguments, read and checked. ``max_tokens`` is None where the caller did not say."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    raw_logprobs: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str = "auto"
    template: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    def sampling(self, room: int, further_stop_ids: frozenset[int] = frozenset()) -> Sampling:
        """What the engine is told, for a prompt that leaves ``room`` tokens of the context."""
        wanted = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return Sampling(
            max_tokens=min(wanted, room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop_ids=self.stop_ids | further_stop_ids,
            logit_bias=self.logit_bias,
        )

    def record(self) -> dict[str, Any]:
        """How tokens were drawn: what a trainer needs to know of the logprobs."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "logit_bias": dict(self.logit_bias),
        }


def read_options(given: Mapping[str, Any], *, vocabulary: int | None = None) -> Options:
    """Read sampling arguments; a wrong value or a name that means nothing here is refused by its name.

    >>> read_options({"temperature": 0.7, "max_completion_tokens": 8, "extra_body": {"top_k": 5}}).top_k
    5
    >>> read_options({"beam_width": 4})
    Traceback (most recent call last):
    ...
    verifiers.errors.RequestRefusedError: the local engine does not know the sampling argument 'beam_width'
    """
    further = given.get("extra_body") or {}
    if not isinstance(further, Mapping):
        raise _refuse("extra_body", "a dict of further arguments", further)
    args = {**given, **further}
    args.pop("extra_body", None)
    args = {name: value for name, value in args.items() if value is not None and name not in _WITHOUT_EFFECT}
    read: dict[str, Any] = {}
    template: dict[str, Any] = {}
    for name, value in args.items():
        if name in _ONLY:
            _check_neutral(name, value)
        if name in _TEMPLATE:
            template |= _TEMPLATE[name](name, value)
        elif name in _READERS:
            target, reader = _READERS[name]
            read[target] = reader(name, value)
        elif name not in _ONLY:
            raise RequestRefusedError(f"the local engine does not know the sampling argument {name!r}")
    if unknown := [token for token in read.get("logit_bias", ()) if vocabulary is not None and token >= vocabulary]:
        raise RequestRefusedError(f"logit_bias names token {unknown[0]}, and the model has {vocabulary}")
    options = Options(**read, template=template)
    try:
        options.sampling(1)
    except ValueError as error:
        raise RequestRefusedError(f"a sampling argument is out of range: {error}") from error
    return options


def _check_neutral(name: str, value: Any) -> None:
    if value not in _ONLY[name]:
        allowed = " or ".join(repr(one) for one in _ONLY[name])
        raise RequestRefusedError(f"the local engine does not support {name}={value!r}; leave it out, or say {allowed}")


# --- one value ----------------------------------------------------------------------------------------------------


def _refuse(name: str, wanted: str, value: Any) -> RequestRefusedError:
    return RequestRefusedError(f"sampling argument {name!r} must be {wanted}, not {value!r:.80}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise _refuse(name, f"a finite number, of at most {LARGEST:g}", value)
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < INT64 or int(value) != value:
        raise _refuse(name, "a whole number of 64 bits", value)
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, "true or false", value)
    return value


def _temperature(name: str, value: Any) -> float:
    number = _number(name, value)
    return 0.0 if 0.0 < number < GREEDY_BELOW else number


def _tokens(name: str, value: Any) -> int:
    number = _integer(name, value)
    if number < 1:
        raise _refuse(name, "at least 1", value)
    return number


def _top_k(name: str, value: Any) -> int:
    number = _integer(name, value)
    return 0 if number == -1 or number >= NO_TOP_K else number  # more than any vocabulary has: no limit


def _seed(name: str, value: Any) -> int:
    return _integer(name, value) % (1 << 62)


def _choices(name: str, value: Any) -> int:
    number = _integer(name, value)
    if not 1 <= number <= MOST_CHOICES:
        raise _refuse(name, f"between 1 and {MOST_CHOICES}", value)
    return number


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refuse(name, "a text, or a list of texts that are not empty", value)
    if len(stops) > MOST_STOPS:
        raise _refuse(name, f"at most {MOST_STOPS} texts", value)
    return tuple(stops)


def _ids(name: str, value: Any) -> frozenset[int]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _refuse(name, "a list of token ids", value)
    return frozenset(_integer(name, token) for token in value)


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refuse(name, "a dict from token ids to numbers", value)
    bias = {}
    for token, number in value.items():
        if not str(token).isdecimal() or len(str(token)) > 18:
            raise _refuse(name, "a dict from token ids to numbers", value)
        bias[int(token)] = _number(name, number)
    return bias


def _logprobs(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value not in (0, 1):  # plain completions count the alternatives they want
        raise _refuse(name, "true, false, 0 or 1 (alternatives to the sampled token are not given)", value)
    return True


def _tools(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in value):
        raise _refuse(name, "a list of tools", value)
    return list(value)


def _seconds(name: str, value: Any) -> float:
    number = _number(name, value)
    if number <= 0:
        raise _refuse(name, "a number of seconds", value)
    return number


_READERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "logit_bias": ("logit_bias", _bias),
    "logprobs": ("logprobs", _logprobs),
    "max_tokens": ("max_tokens", _tokens),
    "max_completion_tokens": ("max_tokens", _tokens),
    "max_new_tokens": ("max_tokens", _tokens),
    "min_p": ("min_p", _number),
    "n": ("n", _choices),
    "raw_logprobs": ("raw_logprobs", _flag),
    "return_token_ids": ("return_token_ids", _flag),
    "return_tokens_as_token_ids": ("return_tokens_as_token_ids", _flag),
    "seed": ("seed", _seed),
    "stop": ("stop", _stops),
    "stop_token_ids": ("stop_ids", _ids),
    "temperature": ("temperature", _temperature),
    "timeout": ("timeout_s", _seconds),
    "tool_choice": ("tool_choice", lambda _, value: str(value)),
    "tools": ("tools", _tools),
    "top_k": ("top_k", _top_k),
    "top_p": ("top_p", _number),
}
_OURS = frozenset(("tools", "tokenize", "messages", "conversation", "chat_template", "return_dict", "return_tensors"))


def _template_kwargs(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or any(str(key) in _OURS for key in value):
        raise _refuse(name, f"a dict of variables of the template (none of {', '.join(sorted(_OURS))})", value)
    return {str(key): item for key, item in value.items()}


_TEMPLATE: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "chat_template_kwargs": _template_kwargs,
    "add_generation_prompt": lambda name, value: {name: _flag(name, value)},
    "continue_final_message": lambda name, value: {name: _flag(name, value)},
}
