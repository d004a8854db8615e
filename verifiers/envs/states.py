"""A row becomes the state its rollout starts from; a saved record becomes the state it was."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from verifiers.errors import GraderError
from verifiers.store import Record
from verifiers.store.record import is_usable
from verifiers.types import MessageType, Row, SamplingArgs, State, Usage, unique_id


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
    """The state a rollout of this row starts from; the row itself stays as it is."""
    fields: Row = _copied(dict(row))
    if isinstance(fields.get("info"), str):
        fields["info"] = msgspec.json.decode(fields["info"])
    fields.setdefault("task", task)
    fields.setdefault("example_id", 0)
    info = fields.get("info")
    tools = info.get("oai_tools") if info is not None and isinstance(info, (dict, Mapping)) else None
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
        oai_tools=tools if tools is not None else oai_tools,
        trajectory=[],
        trajectory_id=unique_id(),
        responses=[],
        turn=0,
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


def _copied(value: Any) -> Any:
    """A copy deep enough that a rollout can change what it was given; leaves are shared."""
    if type(value) is dict:
        return {key: _copied(item) if type(item) in (dict, list) else item for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


_TIMING_FIELDS = ("generation_ms", "scoring_ms", "total_ms")


def restored_state(record: Record, row: Row) -> State:
    """A saved rollout as a state again: all that was saved of it, and the row it was made from."""
    state = State({"trajectory": [], **row, **record})
    for key in (*State.INPUT_FIELDS, *_TIMING_FIELDS):
        state.pop(key, None)
    state["input"] = {**row, **{key: record.get(key) for key in State.INPUT_FIELDS}}
    state["timing"] = {key: record.get(key) or 0.0 for key in _TIMING_FIELDS}
    state["usage"] = _usage_of(record.get("usage"))
    if state.get("error") is None and not is_usable(state.get("reward")):
        said = f"the saved reward {state['reward']!r:.100} cannot be averaged; resuming the run makes it again"
        state["error"], state["reward"] = GraderError(said), None
    if isinstance(metrics := state.get("metrics"), dict):
        state["metrics"] = {name: value if is_usable(value) else None for name, value in metrics.items()}
    return state


def _usage_of(saved: Any) -> Usage | None:
    """Tokens as they were saved; None where a file without checksums holds something else by now."""
    if not saved:
        return None
    try:
        return msgspec.convert(saved, Usage)
    except msgspec.ValidationError:
        return None
