"""Replays a saved run in its environment from the recorded replies, and reports the differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose
from typing import Any

from verifiers.clients import Cassette
from verifiers.clients.asking_for import name_rollout
from verifiers.clients.cassette import NotRecordedError
from verifiers.clients.protocol import Client, Completion, Request
from verifiers.envs.environment import Environment
from verifiers.messages import role_of
from verifiers.reruns.judges import judges_answer
from verifiers.reruns.play import play
from verifiers.reruns.rescore import row_of, rows_by_id
from verifiers.store import Record, RunDir, is_failed
from verifiers.types import State

CASSETTE = "cassette.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A rollout whose replay differs from its record."""

    example_id: Any
    rollout: int
    what: str


@dataclass(kw_only=True)
class Replayed:
    """The states of a replay, and how they compare with the saved records."""

    states: list[State] = field(default_factory=list)
    rollouts: list[int] = field(default_factory=list)
    same: int = 0
    changes: list[Change] = field(default_factory=list)
    left_out: int = 0


class Recorded:
    """A client that returns the replies of one saved rollout, turn by turn."""

    base_url = "recorded:"

    def __init__(self, record: Record) -> None:
        completion = record.get("completion")
        self.replies: list[Any] = (
            [{"role": "assistant", "content": completion}]
            if isinstance(completion, str)
            else [message for message in completion if role_of(message) == "assistant"]
            if isinstance(completion, list)
            else []
        )
        self.is_truncated = bool(record.get("is_truncated"))
        self.asked = 0

    async def complete(self, request: Request) -> Completion:
        self.asked += 1
        if self.asked > len(self.replies):
            raise NotRecordedError(
                f"the environment asks for reply {self.asked}, but only {len(self.replies)} were recorded"
            )
        message = self.replies[self.asked - 1]
        is_last = self.asked == len(self.replies)
        reason = "tool_calls" if message.get("tool_calls") else "length" if is_last and self.is_truncated else "stop"
        return Completion(message=message, finish_reason=reason, model=request.model)


class NoJudge:
    """A client for judges without a recording; it is asked only for replies that were not saved, and always raises."""

    base_url = "recorded:"

    async def complete(self, request: Request) -> Completion:
        raise NotRecordedError("no judge reply to this prompt was saved; record a run with: vf eval … --record")


async def replay(env: Environment, run: RunDir, *, metadata: Mapping[str, Any] | None = None) -> Replayed:
    """Replay a saved run. Judge replies are those saved with each rollout, or those in the run's cassette."""
    rows = rows_by_id(env)
    found = Replayed()
    records = []
    for record in run.sorted_records():
        if is_failed(record):
            found.left_out += 1
        else:
            records.append(record)
    metadata = run.metadata if metadata is None else metadata
    cassette = run.path / CASSETTE
    pairs = [(row_of(record, rows), Recorded(record)) for record in records]

    def judge_at(server: str) -> Client:
        return Cassette(cassette, mode="replay", namespace=server) if cassette.is_file() else NoJudge()

    with judges_answer(env, judge_at):
        found.states = await play(
            env,
            pairs,
            model=str(metadata.get("model", "")),
            sampling_args=metadata.get("sampling_args"),
            names=[name_rollout(record["example_id"], record.get("rollout") or 0) for record in records],
            judged=[record.get("judge_response") for record in records],
        )
    for record, state in zip(records, found.states, strict=True):
        rollout = record.get("rollout") or 0
        found.rollouts.append(rollout)
        what = _difference(record, state)
        if what is None:
            found.same += 1
        else:
            found.changes.append(Change(example_id=record["example_id"], rollout=rollout, what=what))
    return found


def _difference(record: Record, state: State) -> str | None:
    error = state.get("error")
    if error is not None:
        return f"failed: {type(error).__name__}: {error}"
    was, now = record.get("reward"), state.get("reward")
    if was is not None and now is not None and not isclose(was, now, rel_tol=1e-9, abs_tol=1e-9):
        return f"reward {was:.3f} → {now:.3f}"
    if (was is None) != (now is None):
        return f"reward {was} → {now}"
    before, after = _conversation(record.get("completion")), _conversation(state.get("completion"))
    if before != after:
        turn = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        return f"message {turn + 1} of the completion differs"
    return None


def _conversation(completion: Any) -> list[Any]:
    if isinstance(completion, str):
        return [completion]
    return [(role_of(message), message.get("content")) for message in completion or ()]
