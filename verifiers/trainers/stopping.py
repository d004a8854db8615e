"""Errors that end a training."""

from __future__ import annotations

from typing import Any

from verifiers.trainers.distributed.processes import all_gather


class TrainingStoppedError(RuntimeError):
    """A training cannot continue; the message says why, and what was saved."""


class NotFiniteError(TrainingStoppedError):
    """A weight is NaN or infinite."""


def nothing_scored(batch: Any, processes: Any) -> TrainingStoppedError | None:
    """The error to raise if every rollout of a step failed, in all processes."""
    failed = getattr(batch, "failed", ())
    first = failed[0]["error"] if failed else None
    cause = None if first is None else f"{type(first).__name__}: {first}"
    found = all_gather(processes, (len(batch["rewards"]), len(failed), cause))
    count = sum(n for _, n, _ in found)
    if not count or any(scored for scored, _, _ in found):
        return None
    first_cause = next(one for _, _, one in found if one is not None)
    error = TrainingStoppedError(
        f"all {count} rollouts of a step failed, so that there is nothing to train on; the first error is {first_cause}"
    )
    error.__cause__ = first
    return error
