"""The run directory of an evaluation: created, or opened to resume it, and its saved rollouts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.envs.calling import Answerer
from verifiers.envs.run_steps import key_of
from verifiers.envs.states import note_missed, state_to_rescore
from verifiers.runner import Job
from verifiers.store import DEFAULT_ROOT, RunDir, encode, read_records
from verifiers.store.config import ROWS, stable
from verifiers.types import Row, State

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.envs.evaluation import Options

_HOW_SCORED = ("score", "independent_scoring", "reward_weights")  # missing in run directories of earlier versions


def open_store(
    env: Environment,
    jobs: Sequence[Job],
    answerer: Answerer,
    metadata: Mapping[str, Any],
    options: Options,
    locked: ExitStack,
    *,
    is_scored: bool,
) -> tuple[RunDir | None, set[tuple[Any, int]]]:
    """The run directory (None if the run is not saved), locked during the run, and the keys of finished rollouts."""
    path = options.resume if isinstance(options.resume, str | Path) else options.results_path
    if path is None and options.resume:
        raise ValueError("resume=True needs results_path=…, the run directory to resume; or pass resume='its path'")
    if path is None and not options.save_results:
        return None, set()
    config = {key: metadata[key] for key in ("env_id", "env_args", "model", "sampling_args", "rollouts_per_example")}
    config |= {
        "num_examples": metadata["num_examples"],
        "message_type": env.message_type,
        "max_turns": getattr(env, "max_turns", None),
        ROWS: _fingerprint(jobs),
        "score": is_scored,
        "independent_scoring": options.independent_scoring,
        "reward_weights": env.rubric.weights_by_name(),
    }
    if path is None:
        run_dir = RunDir.create(DEFAULT_ROOT, env_id=metadata["env_id"], model=answerer.model, config=config)
        locked.enter_context(run_dir.lock())
        return run_dir, set()
    exists = Path(path, "metadata.json").exists() or Path(path, "results.jsonl").exists()
    if not exists:
        if options.resume:
            raise FileNotFoundError(f"there is no run to resume in {path}")
        run_dir = RunDir.create_at(path, env_id=metadata["env_id"], model=answerer.model, config=config)
        locked.enter_context(run_dir.lock())
        return run_dir, set()
    if not options.resume:
        raise FileExistsError(f"{path} already contains a run; pass resume=True to resume it, or another results_path")
    run_dir = RunDir.open(path)
    run_dir.check_same(config, unless_unknown=_HOW_SCORED)
    locked.enter_context(run_dir.lock())
    run_dir.update_metadata({"finished": False, **dict.fromkeys(("num_rollouts", "ended_early", "interrupted"))})
    finished = set(run_dir.compact().finished)
    run_dir.update_metadata({"retried_usage": run_dir.retried_usage()})
    return run_dir, finished


def partial_groups(
    run_dir: RunDir, jobs: Sequence[Job], kept: set[tuple[Any, int]]
) -> tuple[dict[tuple[Any, int], State], set[str]]:
    """Saved rollouts of incomplete groups, which are scored again with their group, but not generated again.

    The second value collects the names of keys that functions do not find in their states, because they are not saved.
    """
    sizes = Counter(job.row["example_id"] for job in jobs)
    partial = {job.row["example_id"] for job in jobs if job.key not in kept}
    for record in read_records(run_dir.path, ["example_id", "group_size"]):
        if record["group_size"] not in (None, sizes[record["example_id"]]):
            partial.add(record["example_id"])
    again = {key for key in kept if key[0] in partial}
    missed: set[str] = set()
    if not again:
        return {}, missed
    keyed = ((key_of(record), record) for record in read_records(run_dir.path))
    rows = {job.key: job.row for job in jobs if job.key in again}
    states = {key: note_missed(state_to_rescore(record, rows[key]), missed) for key, record in keyed if key in rows}
    return states, missed


def failed_before(run_dir: RunDir | None) -> set[Any]:
    """The examples with a rollout that failed before the run was resumed."""
    if run_dir is None or not run_dir.attempts_path.is_file():
        return set()
    return {record["example_id"] for record in read_records(run_dir.attempts_path, ["example_id"])}


def rewards_of(run_dir: RunDir | None, kept: set[tuple[Any, int]]) -> Iterator[tuple[Any, float | None]]:
    """The example ids and rewards of saved rollouts."""
    if run_dir is not None and kept:
        for record in read_records(run_dir.path, ["example_id", "rollout", "reward"]):
            if key_of(record) in kept:
                yield record["example_id"], record["reward"]


def _fingerprint(jobs: Sequence[Job]) -> str:
    """A digest of the rows, so that a run is not resumed with different ones."""
    digest = hashlib.sha256()
    first: dict[Any, Row] = {}
    for job in jobs:
        known = first.setdefault(job.row["example_id"], job.row)
        # Rows that a host passed may have the same id and yet differ.
        is_other = known is not job.row and _identity(known) != _identity(job.row)
        if job.repeat == 0 or is_other:
            digest.update(_identity(job.row))
    return digest.hexdigest()[:16]


def _identity(row: Row) -> bytes:
    given = {key: row.get(key) for key in ("example_id", "prompt", "answer", "task", "info")}
    return encode({**given, "answer": stable(given["answer"]), "info": stable(given["info"])})
