"""A caller's arguments → the call of ``rollout`` in one of its two forms, the sampling arguments, and the client."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

from verifiers.clients import as_client, resolve_endpoint
from verifiers.clients.protocol import Client, check_sampling
from verifiers.errors import GraderError, HookError
from verifiers.messages import role_of
from verifiers.rollout import no_trajectory, split_response
from verifiers.signatures import signature_of
from verifiers.types import Messages, MessageType, Row, SamplingArgs, State

SAMPLING_KEYS = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "max_completion_tokens",
        "max_new_tokens",
        "stop",
        "seed",
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "response_format",
        "reasoning_effort",
        "tool_choice",
        "parallel_tool_calls",
        "modalities",
        "service_tier",
        "user",
        "verbosity",
        "extra_body",
        "extra_headers",
        "extra_query",
        "timeout",
    )
)


def sampling_from(kwargs: Mapping[str, Any], *, known: tuple[str, ...] = (), where: str) -> SamplingArgs:
    """Keywords such as ``temperature=0.7`` as sampling arguments; any other keyword is an error.

    >>> sampling_from({"temprature": 1.0}, where="generate")
    Traceback (most recent call last):
    TypeError: generate() got an unknown keyword 'temprature'; did you mean 'temperature'?
    """
    for key in kwargs:
        if key not in SAMPLING_KEYS:
            close = difflib.get_close_matches(key, [*SAMPLING_KEYS, *known], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; other request fields go into extra_body={…}"
            raise TypeError(f"{where}() got an unknown keyword {key!r}{hint}")
    sampling = dict(kwargs)
    if "max_new_tokens" in sampling:
        sampling["max_tokens"] = sampling.pop("max_new_tokens")
    return sampling


def merge_sampling(*given: Mapping[str, Any] | None) -> SamplingArgs:
    """Merge sampling arguments: later ones override earlier ones, ``extra_body`` is merged, and inputs are not changed.

    >>> merge_sampling({"n": 1, "extra_body": {"top_k": 5}}, {"extra_body": {"min_p": 0.1}})
    {'n': 1, 'extra_body': {'top_k': 5, 'min_p': 0.1}}
    """
    merged: SamplingArgs = {}
    for sampling in given:
        for key, value in (sampling or {}).items():
            if key == "extra_body" and isinstance(value, Mapping):
                value = {**merged.get("extra_body", {}), **value}
            merged[key] = value
    check_sampling(merged)
    return merged


@dataclass(frozen=True, slots=True)
class Answerer:
    """The client as it was passed (which hooks get), the same as our protocol, and the model's name."""

    given: Any
    client: Client
    model: str


def find_answerer(client: Any, model: Any) -> Answerer:
    """Resolve what was passed as client and model. A model in this process is its own client."""
    if model is not None and not isinstance(model, str):
        if not getattr(client, "needs_no_model", False):
            name = getattr(model, "name_or_path", None) or getattr(model, "name", None) or type(model).__name__
            return Answerer(model, as_client(model), str(name))
        model = None  # the client needs no model name: this is the module that it serves
    if client is None and model is not None:
        resolved, name = resolve_endpoint(model)
        return Answerer(resolved, resolved, name)
    resolved = as_client(client)
    if model is None:
        model = getattr(client, "model", None)
        model = model if isinstance(model, str) else None
    if model is None:
        if not getattr(resolved, "needs_no_model", False):
            raise ValueError("there is no model: pass model='…' here or to the environment")
        model = type(resolved).__name__
    return Answerer(client if client is not None else resolved, resolved, model)


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """The arguments of one call of ``rollout``; ``gives_pair`` if it must return ``(completion, state)``."""

    row: Row
    client: Any
    model: Any
    sampling_args: SamplingArgs | None
    gives_pair: bool


_ROW_KEYS = ("input", "client", "model", "sampling_args")
_PAIR_ARGS = ("client", "model", "prompt", "answer")
_PAIR_KEYS = (*_PAIR_ARGS, "task", "info", "sampling_args")  # in the order of 0.1.2 to 0.1.5


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RolloutCall:
    """``(input, client, model, sampling_args)`` or ``(client, model, prompt, answer, task, info, sampling_args, …)``.

    Sampling arguments may also come right after the answer, or as keywords: ``temperature=0.7``.
    """
    is_row = (bool(args) and isinstance(args[0], Mapping)) or "input" in kwargs
    names = _ROW_KEYS if is_row else _PAIR_KEYS
    if not is_row and len(args) == 5 and not isinstance(args[4], str):
        names = (*_PAIR_ARGS, "sampling_args", "task", "info")
    if len(args) > len(names):
        raise TypeError(f"rollout() takes at most {', '.join(names)} as positional arguments")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    names = names if is_row else (*names, "example_id")
    loose = {key: given.pop(key) for key in list(given) if key not in names}
    sampling = merge_sampling(given.get("sampling_args"), sampling_from(loose, known=names, where="rollout"))
    row = dict(given["input"]) if is_row else _row_from(given)
    return RolloutCall(row, given.get("client"), given.get("model"), sampling or None, not is_row)


def _row_from(given: Mapping[str, Any]) -> Row:
    if given.get("prompt") is None:
        raise TypeError("rollout() needs a row (input=…) or a prompt (client, model, prompt, answer)")
    row = {"prompt": given["prompt"], "answer": given.get("answer", ""), "example_id": given.get("example_id", 0)}
    return row | {key: given[key] for key in ("task", "info") if given.get(key) is not None}


_ASK_KEYS_BEFORE_STATES = ("client", "model", "prompt", "oai_tools", "sampling_args", "message_type")


def read_ask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``get_model_response(state, prompt, …)``, also from 0.1.8's ``(client, model, prompt, …)``."""
    if "tool_defs" in kwargs:  # from 0.1.11 on
        kwargs = {"oai_tools" if name == "tool_defs" else name: value for name, value in kwargs.items()}
    if "state" in kwargs or (args and isinstance(args[0], Mapping)):
        return args, kwargs
    if len(args) > len(_ASK_KEYS_BEFORE_STATES):
        raise TypeError(f"get_model_response() takes state, prompt, … or {', '.join(_ASK_KEYS_BEFORE_STATES)}")
    by_position = dict(zip(_ASK_KEYS_BEFORE_STATES, args, strict=False))
    if twice := by_position.keys() & kwargs.keys():
        raise TypeError(f"get_model_response() got {', '.join(sorted(twice))} by position and by name")
    given = by_position | {name: value for name, value in kwargs.items() if name != "initial_prompt"}
    if given.get("prompt") is None:
        raise TypeError("get_model_response() needs a prompt: (state, prompt, …), or (client, model, prompt, …)")
    blank = State({name: given.get(name) for name in ("client", "model", "oai_tools", "sampling_args")})
    return (blank,), given


def ask_arguments(
    function: Callable[..., Any], state: State, prompt: Messages, message_type: MessageType
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a subclass's ``get_model_response``, in the form of its signature."""
    if next(iter(signature_of(function).parameters), None) != "client":
        return (state, prompt), {}
    named = {"prompt": prompt, "message_type": message_type}
    return (), named | {name: state[name] for name in ("client", "model", "oai_tools", "sampling_args")}


def override_arguments(
    function: Callable[..., Any], row: Row, answerer: Answerer, sampling_args: SamplingArgs
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a subclass's ``rollout``, in the form of its signature."""
    parameters = signature_of(function).parameters
    if "prompt" not in parameters:
        return (row, answerer.given, answerer.model, sampling_args), {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    extra = {"task": row.get("task"), "info": row.get("info") or {}, "example_id": row.get("example_id")}
    if "sampling_args" in parameters:
        extra["sampling_args"] = sampling_args
    else:
        extra |= sampling_args
    kwargs = {key: value for key, value in extra.items() if takes_all or key in parameters}
    given, answer = (answerer.given, answerer.model, row["prompt"]), row.get("answer", "")
    if "completion" in parameters:  # it precedes the answer, as in 0.1.6
        return given, kwargs | {"answer": answer}
    return (*given, answer), kwargs


def adopt_result(result: Any, blank: State) -> State:
    """What a subclass's ``rollout`` returned (a state, a pair, or only a completion) as a whole state."""
    completion, update = split_response(result)
    if update is None and isinstance(completion, Mapping) and "role" not in completion:
        completion, update = None, completion
    if completion is None and update is None:
        raise HookError("rollout returned None; it must return the state, the completion, or both")
    is_odd = isinstance(completion, tuple) and any(role_of(message) is None for message in completion)
    if is_odd or isinstance(completion, Number | bytes):
        raise HookError(f"rollout returned {result!r:.200}; it must return the state, the completion, or both")
    completion = list(completion) if isinstance(completion, tuple) else completion
    state = blank if update is None else _as_rollout_of(blank, update)
    if completion is not None:
        state["completion"] = [completion] if isinstance(completion, Mapping) else completion
    return state


def _as_rollout_of(blank: State, update: Mapping[str, Any]) -> State:
    """A whole state (from another call of ``rollout``) or a partial one, with the columns of this row."""
    if "trajectory" not in update:
        for key, value in update.items():
            blank[key] = value
        return blank
    if not isinstance(update["trajectory"], list | None):
        raise no_trajectory(update["trajectory"])
    state = update if isinstance(update, State) else State(update)
    if getattr(state, "is_adopted", False):  # it comes from a cache, and two rollouts must not share one score
        state = _unscored_copy(state)
    state.is_adopted = True
    own = {key: blank["input"][key] for key in ("example_id", "task")}
    state["input"] = {**blank["input"], **(state.get("input") or {}), **own}
    for key in blank.keys() - state.keys():
        state[key] = blank[key]
    return state


def _unscored_copy(state: State) -> State:
    copy = State(state)
    if reason := getattr(state, "not_sampled", None):
        copy.not_sampled = reason
    copy.update(reward=None, metrics=None, advantage=None, timing=dict(state.get("timing") or {}))
    copy["trajectory"] = [{**step, "reward": None, "advantage": None} for step in state["trajectory"]]
    if isinstance(state.get("error"), GraderError):
        copy["error"] = None
    return copy
