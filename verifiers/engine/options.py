"""Read the sampling arguments of OpenAI's and vLLM's clients into the engine's `Sampling`; refuse wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.engine.constraints import Constraint
from verifiers.engine.sequence import GREEDY_BELOW, LARGEST, NO_TOP_K, Sampling
from verifiers.engine.structured import ResponseFormat, ToolChoice, read_format, read_tool_choice
from verifiers.errors import RequestRefusedError

DEFAULT_MAX_TOKENS = 1024
MOST_CHOICES = 1024
MOST_STOPS = 64
MOST_ALTERNATIVES = 20  # per token: OpenAI's limit
INT64 = 1 << 63

# Arguments that are accepted with any value and have no effect. docs/server.md lists them.
WITHOUT_EFFECT = frozenset((
    "extra_headers", "extra_query", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
    "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
))  # fmt: skip
# Arguments that are accepted only with these values, which have no effect.
_ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "stream": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}  # and their neutral values
_RECORDED = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """One request's arguments, parsed and checked. ``max_tokens`` is None if the caller did not set it."""

    distribution: Mapping[str, Any]  # the given ones of `_RECORDED`, `_PENALTIES` and logit_bias, for `Sampling`
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    echo: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    raw_logprobs: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    template: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    @property
    def is_of_plain_values(self) -> bool:
        """Whether it can be cached: it holds no mutable object of the caller (tools, template variables, a schema)."""
        return self.tools is None and not self.template and self.response_format.is_text

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of the prompt's own tokens are requested."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs)

    def sampling(
        self, room: int, further_stop_ids: frozenset[int] = frozenset(), constraint: Constraint | None = None
    ) -> Sampling:
        """The engine's arguments for a prompt that leaves ``room`` tokens of the context."""
        wanted = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        most = max(1, min(wanted, room))  # with max_tokens=0 one token is sampled and dropped
        of_prompt = max(self.prompt_logprobs or 0, self.top_logprobs if self.echo else 0)
        return Sampling(
            **self.distribution,
            max_tokens=most,
            min_tokens=min(self.min_tokens, most),
            stop_ids=self.stop_ids if self.ignore_eos else self.stop_ids | further_stop_ids,
            ignore_eos=self.ignore_eos,
            constraint=constraint,
            top_logprobs=self.top_logprobs if self.logprobs else 0,
            prompt_logprobs=of_prompt if self.scores_prompt else None,
        )

    def record(self) -> dict[str, Any]:
        """The arguments that a trainer needs to interpret the logprobs."""
        sampling = self.sampling(1)
        record = {**{name: getattr(sampling, name) for name in _RECORDED}, "logit_bias": dict(sampling.logit_bias)}
        record |= {name: value for name, none in _PENALTIES.items() if (value := getattr(sampling, name)) != none}
        if self.min_tokens:
            record["min_tokens"] = self.min_tokens
        if not self.response_format.is_text:
            record["response_format"] = {"type": self.response_format.type}
        if self.tool_choice.is_forced:
            record["tool_choice"] = self.tool_choice.record()
        return record


def read_options(given: Mapping[str, Any], *, vocabulary: int | None = None) -> Options:
    """Parse sampling arguments. A wrong value or an unknown name raises an error that names the argument.

    >>> read_options({"temperature": 0.7, "max_completion_tokens": 8, "extra_body": {"top_k": 5}}).distribution
    {'temperature': 0.7, 'top_k': 5}
    >>> read_options({"beam_width": 4})
    Traceback (most recent call last):
    ...
    verifiers.errors.RequestRefusedError: the local engine does not know the sampling argument 'beam_width'
    """
    further = given.get("extra_body") or {}
    if not isinstance(further, Mapping):
        raise _refuse("extra_body", "a dict of further arguments", further)
    read: dict[str, Any] = {}
    said: dict[str, str] = {}
    template: dict[str, Any] = {}
    for name, value, spelled in _items(given, further):
        if name in _ONLY:
            _check_neutral(name, value)
        elif name in _TEMPLATE:
            template |= _TEMPLATE[name](name, value)
        elif name in _READERS:
            target, found = _FIELDS.get(name, name), _READERS[name](name, value)
            if target in read and read[target] != found:
                both = f"{said[target]}={read[target]!r:.80} and {spelled}={found!r:.80}"
                raise RequestRefusedError(f"{both} are two values for one thing; keep one")
            read[target], said[target] = found, spelled
        else:
            raise RequestRefusedError(f"the local engine does not know the sampling argument {name!r}")
    _settle_logprobs(read)
    if unknown := [token for token in read.get("logit_bias", ()) if vocabulary is not None and token >= vocabulary]:
        raise RequestRefusedError(f"logit_bias has token {unknown[0]}, but the model's vocabulary has {vocabulary}")
    distribution = {name: read.pop(name) for name in (*_RECORDED, *_PENALTIES, "logit_bias") if name in read}
    options = Options(**read, distribution=distribution, template=template)
    _check_together(options)
    try:
        options.sampling(1)
    except ValueError as error:
        raise RequestRefusedError(f"a sampling argument is out of range: {error}") from error
    return options


def _items(given: Mapping[str, Any], further: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """The name and value of each argument that has an effect, and its full name ("extra_body.top_k")."""
    for where, args in (("", given), ("extra_body.", further)):
        for name, value in args.items():
            if value is not None and name not in WITHOUT_EFFECT and not (name == "extra_body" and not where):
                yield name, value, f"{where}{name}"


def _settle_logprobs(read: dict[str, Any]) -> None:
    """Convert ``logprobs: 5`` of plain completions to ``logprobs: true, top_logprobs: 5`` of chat completions."""
    wanted = read.get("logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        if read.get("top_logprobs", wanted) != wanted:
            raise RequestRefusedError(
                f"logprobs={wanted} and top_logprobs={read['top_logprobs']} are two values for one thing; keep one"
            )
        read["logprobs"], read["top_logprobs"] = True, wanted


def _check_together(options: Options) -> None:
    """Refuse arguments that contradict each other."""
    if options.top_logprobs and not options.logprobs:
        raise RequestRefusedError("top_logprobs are returned only together with logprobs: set logprobs=true")
    if options.max_tokens == 0 and not (options.echo or options.scores_prompt):
        raise RequestRefusedError("max_tokens is 0, which only makes sense with echo or prompt_logprobs")
    if options.max_tokens is not None and options.min_tokens > max(options.max_tokens, 1):
        raise RequestRefusedError(f"min_tokens is {options.min_tokens}, but max_tokens is only {options.max_tokens}")
    is_constrained = not options.response_format.is_text or options.tool_choice.is_forced
    if options.ignore_eos and is_constrained:
        raise RequestRefusedError("ignore_eos cannot be combined with response_format or a forced tool_choice")


def _check_neutral(name: str, value: Any) -> None:
    if value not in _ONLY[name]:
        allowed = " or ".join(repr(one) for one in _ONLY[name])
        raise RequestRefusedError(f"the local engine does not support {name}={value!r}; omit it or use {allowed}")


# --- one value ----------------------------------------------------------------------------------------------------


def _refuse(name: str, wanted: str, value: Any) -> RequestRefusedError:
    return RequestRefusedError(f"sampling argument {name!r} must be {wanted}, not {value!r:.80}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise _refuse(name, f"a finite number of magnitude at most {LARGEST:g}", value)
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < INT64 or int(value) != value:
        raise _refuse(name, "a whole number that fits into 64 bits", value)
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, "true or false", value)
    return value


def _temperature(name: str, value: Any) -> float:
    number = _number(name, value)
    return 0.0 if 0.0 < number < GREEDY_BELOW else number


def _between(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        number = _integer(name, value)
        if not low <= number <= high:
            raise _refuse(name, f"{low} or more" if high == INT64 else f"between {low} and {high}", value)
        return number

    return read


_count, _choices, _alternatives = _between(0, INT64), _between(1, MOST_CHOICES), _between(0, MOST_ALTERNATIVES)


def _top_k(name: str, value: Any) -> int:
    number = _integer(name, value)
    return 0 if number == -1 or number >= NO_TOP_K else number  # larger than any vocabulary: no limit


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refuse(name, "a non-empty text or a list of non-empty texts", value)
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


def _tools(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in value):
        raise _refuse(name, "a list of tools", value)
    return list(value)


def _seconds(name: str, value: Any) -> float:
    number = _number(name, value)
    if number <= 0:
        raise _refuse(name, "a positive number of seconds", value)
    return number


_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("echo", "ignore_eos", "raw_logprobs", "return_token_ids", "return_tokens_as_token_ids"), _flag),
    **dict.fromkeys((*_PENALTIES, "min_p", "top_p"), _number),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens"), _count),
    "logit_bias": _bias,
    "logprobs": lambda name, value: value if isinstance(value, bool) else _alternatives(name, value),
    "n": _choices,
    "prompt_logprobs": lambda name, value: None if value is False else _alternatives(name, value),
    "response_format": read_format,
    "seed": lambda name, value: _integer(name, value) % (1 << 62),
    "stop": _stops,
    "stop_token_ids": _ids,
    "temperature": _temperature,
    "timeout": _seconds,
    "tool_choice": read_tool_choice,
    "tools": _tools,
    "top_k": _top_k,
    "top_logprobs": _alternatives,
}
_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_token_ids": "stop_ids",
    "timeout": "timeout_s",
}
# Arguments of `apply_chat_template` that the engine sets itself.
_RESERVED = frozenset(
    ("tools", "tokenize", "messages", "conversation", "chat_template", "return_dict", "return_tensors")
)


def _template_kwargs(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or any(str(key) in _RESERVED for key in value):
        raise _refuse(name, f"a dict of template variables (without {', '.join(sorted(_RESERVED))})", value)
    return {str(key): item for key, item in value.items()}


_TEMPLATE: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "chat_template_kwargs": _template_kwargs,
    "add_generation_prompt": lambda name, value: {name: _flag(name, value)},
    "continue_final_message": lambda name, value: {name: _flag(name, value)},
}
