"""A row → the initial state of its rollout; a saved record → its state."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import msgspec

from verifiers.errors import GraderError
from verifiers.message_types import as_tool
from verifiers.messages import as_messages, make_readable, readable_messages, role_of
from verifiers.rubrics.score import Score, forget_score
from verifiers.store import Record
from verifiers.store.plain import to_json
from verifiers.store.record import is_usable, read_usage
from verifiers.types import MessageType, Row, SamplingArgs, State, unique_id
from verifiers.views import copied


def fresh_state(
    row: Mapping[str, Any],
    *,
    client: Any,
    model: str,
    sampling_args: SamplingArgs | None,
    task: str,
    oai_tools: list[dict[str, Any]] | None,
    message_type: MessageType,
) -> State:
    """The initial state of a rollout of this row. The row itself is not changed."""
    fields: Row = copied(dict(row))
    if isinstance(fields.get("info"), str):
        fields["info"] = msgspec.json.decode(fields["info"])
    fields.setdefault("task", task)
    fields.setdefault("example_id", 0)
    info = fields.get("info")
    fields["prompt"] = readable_messages(fields.get("prompt"))
    tools = tools_in(info)
    tools = oai_tools if tools is None else tools
    extra = {key: value for key, value in fields.items() if key not in State.INPUT_FIELDS}
    state = State(
        extra,
        input=fields,
        client=client,
        model=model,
        sampling_args=sampling_args,
        is_completed=False,
        is_truncated=False,
        stop_condition=None,
        oai_tools=tools and [as_tool(tool) for tool in tools],
        trajectory=[],
        trajectory_id=unique_id(),
        completion=[] if message_type == "chat" else "",
        reward=None,
        advantage=None,
        metrics=None,
        usage=None,
        error=None,
        final_env_response=None,
        timing={"start_time": time.time(), "generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
    )
    state.began_at = time.perf_counter()
    return state


def tools_in(info: Any) -> Any:
    """The tools that a row brings in its ``info``: ``oai_tools``, or ``tool_defs`` as from 0.1.11 on."""
    if info is None or not isinstance(info, (dict, Mapping)):
        return None
    return info.get("oai_tools", info.get("tool_defs"))


_TIMING_FIELDS = ("generation_ms", "scoring_ms", "total_ms")


def restored_state(record: Record, row: Row) -> State:
    """The state of a saved rollout, from its record and its row."""
    state = State({"trajectory": [], **row, **record})
    for key in (*State.INPUT_FIELDS, *_TIMING_FIELDS):
        state.pop(key, None)
    state["input"] = {**row, **{key: _as_it_was(record.get(key), row.get(key)) for key in State.INPUT_FIELDS}}
    if not (isinstance(steps := state["trajectory"], list) and all(isinstance(step, dict) for step in steps)):
        state["trajectory"] = []
    for key in ("task", "stop_condition"):
        if isinstance(value := state.get(key), list | dict):  # from another program; reports need hashable values
            state[key] = str(value)
    times = {key: record.get(key) for key in _TIMING_FIELDS}
    state["timing"] = {key: took if took is not None and is_usable(took) else 0.0 for key, took in times.items()}
    state["usage"] = read_usage(record.get("usage"))
    if state.get("error") is None and not is_usable(state.get("reward")):
        message = f"the saved reward {state['reward']!r:.100} cannot be averaged; resuming runs the rollout again"
        state["error"], state["reward"] = GraderError(message), None
    make_readable(state)
    metrics = metrics if isinstance(metrics := state.get("metrics"), dict) else {}
    state["metrics"] = {name: value if is_usable(value) else None for name, value in metrics.items()}
    return state


def _as_it_was(saved: Any, given: Any) -> Any:
    """The row's value if it equals the saved one in JSON, which has no tuples, dates or integer keys."""
    if given is None or (type(given) is str and given == saved):
        return saved
    return copied(given) if to_json(given) == to_json(saved) else saved


class ScoredAgain(State):
    """A saved rollout that is scored again. It records the keys that user code looks up and does not find.

    A function that then uses a default may return another score than before, without any sign of it.
    """

    missed: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        if not State.__contains__(self, key) and _is_foreign(sys._getframe(1)):
            self.missed.add(key)
        return super().get(key, default)

    def __missing__(self, key: str) -> Any:
        if key == "responses":  # of the endpoint, which are never saved
            raise KeyError(key)
        if _is_foreign(sys._getframe(2)):  # the environment may have counted turns otherwise
            self.missed.add(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        is_there = super().__contains__(key)
        if not is_there and isinstance(key, str) and _is_foreign(sys._getframe(1)):
            self.missed.add(key)
        return is_there


def _is_foreign(frame: FrameType) -> bool:
    return not str(frame.f_globals.get("__name__", "")).startswith("verifiers.")


def note_missed(state: State, missed: set[str]) -> State:
    """Make a state record the keys that are not found in it, in ``missed``."""
    state.__class__ = ScoredAgain
    state.missed = missed  # type: ignore[attr-defined]
    return state


def in_words(missed: Iterable[str]) -> str:
    """The message about keys that were looked up and not found."""
    names = sorted(missed)
    listed, columns = ", ".join(map(repr, names)), " ".join(f"-C {name}" for name in names)
    return (
        f"reward functions read {listed} in the saved states, which was not saved: if the environment sets it, scores "
        f"may differ from those of a new rollout; save it with state_columns={names} (vf eval {columns})"
    )


def state_to_rescore(record: Record, row: Row) -> State:
    """The state of a saved rollout to be scored again with its group, with its turns and its saved score alone."""
    state = restored_state(record, row)
    forget_score(state)
    if not state.get("trajectory"):
        state["trajectory"] = list(turns_of(record))
    if isinstance(alone := record.get("score_alone"), dict):  # runs of earlier versions do not have it
        state.saved_score = Score(reward=alone.get("reward", math.nan), metrics=dict(alone.get("metrics") or {}))
    return state


def from_rollout(state: State, name: str) -> Any:
    """A value that the environment wrote into the state during the rollout. A saved rollout may not have it."""
    if name not in state:
        raise not_saved(name)
    return state[name]


def not_saved(name: str) -> GraderError:
    """The error for a saved rollout that cannot be scored again because a key is missing."""
    return GraderError(
        f"state[{name!r}] is missing: it was not saved with the rollout, which cannot be scored again without it; "
        f"save it with state_columns=[{name!r}] (vf eval -C {name})"
    )


def turns_of(record: Record) -> Iterator[dict[str, Any]]:
    """The turns of a conversation whose trajectory was not saved: each reply with the messages before it.

    Their rewards are not known, so they do not have the key ``reward``.
    """
    prompt, completion = readable_messages(record.get("prompt")), readable_messages(record.get("completion"))
    if isinstance(completion, str):
        yield {"prompt": prompt, "completion": completion, "extras": {}}
        return
    try:
        before = as_messages(prompt or [])
    except TypeError:  # another program's: neither a text nor messages
        return
    for message in completion if isinstance(completion, list) else ():
        if role_of(message) == "assistant":
            yield {"prompt": list(before), "completion": [message], "extras": {}}
        before.append(message)
