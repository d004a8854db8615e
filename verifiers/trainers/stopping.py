"""What went wrong in a training becomes the sentence that it stops with."""

from __future__ import annotations

from typing import Any

from verifiers.trainers.processes import gathered


class TrainingStoppedError(RuntimeError):
    """A training cannot go on; the message says why, and what is left of it."""


class NotFiniteError(TrainingStoppedError):
    """A weight is NaN or infinite."""


def check_scored(batch: Any, processes: Any) -> None:
    """Stop where rollouts were made and every one of them failed, in all processes: there is nothing to learn from."""
    failed = getattr(batch, "failed", ())
    first = failed[0]["error"] if failed else None
    cause = None if first is None else f"{type(first).__name__}: {first}"
    found = gathered(processes, (len(batch["rewards"]), len(failed), cause))
    count = sum(n for _, n, _ in found)
    if count and not any(scored for scored, _, _ in found):
        words = next(one for _, _, one in found if one is not None)
        raise TrainingStoppedError(
            f"all {count} rollouts of a step failed, and a failed rollout trains nothing; the first one with {words}"
        ) from first
