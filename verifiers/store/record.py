"""The state of a finished rollout → one record → one line of ``results.jsonl``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from verifiers.errors import describe
from verifiers.messages import template_settings
from verifiers.store.config import without_secrets
from verifiers.store.plain import describe_object, plain, sanitise_text, to_json
from verifiers.types import LARGEST_SCORE, Usage

Record = dict[str, Any]
Key = tuple[int | str, int]  # (example_id, rollout)

CORE_COLUMNS = (
    "example_id",
    "rollout",
    "task",
    "prompt",
    "completion",
    "answer",
    "info",
    "reward",
    "error",
    "metrics",
    "generation_ms",
    "scoring_ms",
    "total_ms",
    "stop_condition",
    "is_truncated",
    "usage",
)


def to_record(state: Mapping[str, Any], *, rollout: int, state_columns: Collection[str] = ()) -> Record:
    """One rollout as plain data: the core columns, the given state columns, and each metric as a column too.

    >>> record = to_record({"example_id": 3, "reward": 1.0, "metrics": {"exact": 1.0}}, rollout=0)
    >>> record["example_id"], record["reward"], record["exact"], record["error"]
    (3, 1.0, 1.0, None)
    """
    error = _error_of(state.get("error"))
    timing = _mapping(state.get("timing"))
    metrics = _mapping(state.get("metrics"))
    info = state.get("info")
    record: Record = {
        "example_id": example_key(state.get("example_id")),
        "rollout": rollout,
        "task": state.get("task", "default"),
        "prompt": state.get("prompt"),
        "completion": state.get("completion"),
        "answer": state.get("answer", ""),
        "info": {} if info is None else info,
        "reward": None if _is_failure(error) else state.get("reward"),
        "error": error,
        "metrics": metrics,
        "generation_ms": timing.get("generation_ms"),
        "scoring_ms": timing.get("scoring_ms"),
        "total_ms": timing.get("total_ms"),
        "stop_condition": state.get("stop_condition"),
        "is_truncated": bool(state.get("is_truncated", False)),
        "usage": _usage_of(state.get("usage")),
    }
    if tools := state.get("oai_tools"):
        record["oai_tools"] = tools
    if settings := template_settings(state):
        record["chat_template_kwargs"] = settings
    if replies := _mapping(state.get("judge_response")):
        record["judge_response"] = replies  # {judge prompt: judge reply}, which explains the reward
    for column in state_columns:
        if column not in record:
            record[column] = _kept_of(column, state.get(column))
    for name, value in metrics.items():
        record.setdefault(name, value)
    made: Record = plain(record)
    return made


def encode(record: Record) -> bytes:
    r"""One line of ``results.jsonl``, newline included; does not raise, whatever the record contains.

    >>> encode({"reward": float("nan"), "text": "two\nlines"})
    b'{"reward":null,"text":"two\\nlines"}\n'
    """
    return to_json(record) + b"\n"


def is_failed(record: Record) -> bool:
    """Whether a rollout failed for a reason other than the policy; then it has no reward, and resume reruns it.

    >>> is_failed({"error": None}), is_failed({"error": {"type": "JudgeError", "blame": "grader"}})
    (False, True)
    """
    return _is_failure(record.get("error")) or not is_usable(record.get("reward"))


def is_usable(reward: Any) -> bool:
    """Whether a reward can be averaged. Runs of earlier versions may contain values that cannot.

    >>> is_usable(0.5), is_usable(None), is_usable(1e101), is_usable("1.0")
    (True, True, False, False)
    """
    if reward is None:
        return True
    return isinstance(reward, (int, float)) and abs(reward) <= LARGEST_SCORE


def example_key(example_id: Any) -> int | str:
    """An example id as it is stored and compared: an int or a string.

    >>> example_key(7), example_key("a-7"), example_key((1, 2))
    (7, 'a-7', '[1,2]')
    """
    if type(example_id) is int or (type(example_id) is str and example_id.isascii()):
        return example_id
    value = plain(example_id)
    if type(value) is int:
        return value
    if type(value) is str:
        return sanitise_text(value)  # as in the file
    return to_json(value).decode()


def _is_failure(error: Any) -> bool:
    return error is not None and not (isinstance(error, dict) and error.get("blame") == "policy")


def _error_of(error: Any) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, dict):
        return error
    try:
        if isinstance(error, BaseException):
            return describe(error)
        message = str(error)
    except Exception:  # a foreign exception whose __str__ raises
        message = describe_object(error)
    return {"type": type(error).__name__, "blame": "environment", "message": message, "cause": None, "traceback": ""}


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one: a hook may have written anything into the state."""
    return value if isinstance(value, Mapping) else {}


def _usage_of(usage: Any) -> dict[str, Any] | None:
    if not isinstance(usage, Usage):
        return None if usage is None else dict(_mapping(usage))
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost_usd": usage.cost_usd,
    }


def read_usage(saved: Any) -> Usage | None:
    """The saved token usage; None if it is missing or was edited into something invalid."""
    if not saved:
        return None
    try:
        return msgspec.convert(saved, Usage)
    except msgspec.ValidationError:
        return None


def _kept_of(column: str, value: Any) -> Any:
    if column == "trajectory":
        return _without_responses(value)
    return without_secrets(plain(value)) if column == "sampling_args" else value


def _without_responses(trajectory: Any) -> Any:
    """The steps without the endpoint's raw response: its messages and tokens are stored separately."""
    if not isinstance(trajectory, (list, tuple)):
        return trajectory
    return [
        {key: value for key, value in step.items() if key != "response"} if isinstance(step, Mapping) else step
        for step in trajectory
    ]
