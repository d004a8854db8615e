"""An environment, rows and a model → results: the implementation of ``generate``, ``evaluate`` and ``run_group``."""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from verifiers.clients.activity import Activity, count_here
from verifiers.clients.secrets import hide_in_url
from verifiers.envs.calling import Answerer, find_answerer, merge_sampling, sampling_from
from verifiers.envs.hub_errors import in_a_sentence
from verifiers.envs.jobs import jobs_of, jobs_of_inputs
from verifiers.envs.remote.workers import check_workers, open_player
from verifiers.envs.rows import RowFormat, Rows
from verifiers.envs.run_steps import Player, RunSteps, score_alone, score_group
from verifiers.envs.run_store import failed_before, open_store, partial_groups, rewards_of
from verifiers.envs.saved_state import SavedState
from verifiers.envs.states import in_words, restored_state
from verifiers.envs.stopping import EarlyStop, bounds_of
from verifiers.errors import Interrupted
from verifiers.foreign import time_limits
from verifiers.progress import Progress, Tally, make_progress
from verifiers.results import Results
from verifiers.rubrics.score import note_scoring_time, write_advantages, write_score
from verifiers.runner import Job, Limits, Run, RunInterruptedError, long_lived
from verifiers.store import (
    Appender,
    RunDir,
    SavedRollouts,
    to_hf_dataset,
    to_record,
)
from verifiers.types import SamplingArgs, State

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment

GROUP_COLUMNS = ("group_size", "score_alone")  # needed to score a rollout again with the rest of its group


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run, without the sampling arguments."""

    max_concurrent: int = -1
    max_concurrent_generation: int | None = None
    max_concurrent_scoring: int | None = None
    results_path: str | Path | None = None
    save_results: bool = False
    resume: bool | str | Path = False
    state_columns: Sequence[str] | None = None
    save_every: int = -1
    use_tqdm: bool | Progress = True
    independent_scoring: bool = False
    score: bool | None = None
    deadline_s: float | None = None
    reward_timeout_s: float | None = None
    hook_timeout_s: float | None = None
    until: float | None = None
    reward_range: tuple[float, float] | None = None
    workers: Any = None

    def __post_init__(self) -> None:
        for name in ("deadline_s", "reward_timeout_s", "hook_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and (not isinstance(seconds, int | float) or not seconds > 0):
                raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0")
        if isinstance(self.state_columns, str):
            raise TypeError(f"state_columns={self.state_columns!r} must be a list of names")
        if self.reward_range is not None and self.until is None:
            raise ValueError("reward_range needs until=…, the half width of the interval to stop at")
        if self.save_every > 0:
            warnings.warn("save_every has no effect: every rollout is saved as soon as it is done", stacklevel=4)
        check_workers(self.workers)


_OPTION_NAMES = tuple(field.name for field in fields(Options))


def split_options(where: str, kwargs: dict[str, Any]) -> tuple[Options, SamplingArgs]:
    """Split keywords into the options of a run and sampling arguments; an unknown keyword is an error."""
    options = {name: kwargs.pop(name) for name in list(kwargs) if name in _OPTION_NAMES}
    if kwargs.pop("batch_size", None) is not None:
        warnings.warn("batch_size has no effect: a rollout starts as soon as another ends", stacklevel=3)
    if kwargs.pop("interleave_scoring", True) is False:
        warnings.warn("interleave_scoring has no effect: a rollout is scored as soon as it is done", stacklevel=3)
    for alias, name in (("progress", "use_tqdm"), ("score_rollouts", "score")):
        if alias in kwargs:
            if name in options:
                raise TypeError(f"{alias}= and {name}= are two names for the same argument; pass one")
            options[name] = kwargs.pop(alias)
    sampling = sampling_from(kwargs, known=(*_OPTION_NAMES, "n_samples", "num_examples"), where=where)
    return Options(**options), sampling


async def generate(
    env: Environment,
    inputs: Any = None,
    client: Any = None,
    model: Any = None,
    sampling_args: SamplingArgs | None = None,
    *,
    n_samples: int | None = None,
    rollouts_per_example: int = 1,
    system_prompt: str | None = None,
    **kwargs: Any,
) -> Results:
    """Roll out rows: ``inputs``, or the environment's (all, or ``n_samples``, repeating rows if there are too few)."""
    options, loose = split_options("generate", kwargs)
    _check_counts(rollouts_per_example, n_samples=n_samples)
    if n_samples is not None and n_samples < 0:
        n_samples = None
    row_format = env._format
    if system_prompt is not None:
        row_format = RowFormat(**{**vars(row_format), "system_prompt": system_prompt})
    if inputs is None:
        rows = env.get_dataset() if env.dataset is not None else env.get_eval_dataset()
        jobs = jobs_of(_reformatted(rows, row_format), rollouts_per_example, n_samples)
    else:
        jobs = jobs_of_inputs(inputs, row_format, rollouts_per_example)[:n_samples]
    return await _run(env, jobs, client, model, merge_sampling(sampling_args, loose), options)


async def evaluate(
    env: Environment,
    client: Any = None,
    model: Any = None,
    sampling_args: SamplingArgs | None = None,
    *,
    num_examples: int = -1,
    rollouts_per_example: int = 1,
    **kwargs: Any,
) -> Results:
    """Roll out the evaluation rows."""
    options, loose = split_options("evaluate", kwargs)
    _check_counts(rollouts_per_example, num_examples=num_examples)
    _warn_of_unused_overrides(env, "generate")
    with long_lived:
        jobs = jobs_of(env.get_eval_dataset(num_examples), rollouts_per_example)
    if jobs and env.score_rollouts and options.score is not False and env.scores_nothing:
        env.logger.warning("the rubric is empty, so nothing scores a rollout: every reward will be 0")
    return await _run(env, jobs, client, model, merge_sampling(sampling_args, loose), options)


def _warn_of_unused_overrides(env: Environment, *names: str) -> None:
    """Warn of overrides of methods that 0.1.9 called in a run and this library does not call."""
    for name in names:
        if env._hook(name) is not None:
            env.logger.warning("%s.%s is not called here: override rollout, or a hook", type(env).__name__, name)


def _check_counts(rollouts_per_example: int, **counts: Any) -> None:
    for name, value in {"rollouts_per_example": rollouts_per_example, **counts}.items():
        if not isinstance(value, SupportsIndex) and not (value is None and name == "n_samples"):
            all_of_them = "; -1 means all" if name == "num_examples" else ""
            raise TypeError(f"{name}={value!r} must be an int{all_of_them}")
    if rollouts_per_example < 1:
        raise ValueError(f"rollouts_per_example must be at least 1, got {rollouts_per_example}")


def _reformatted(rows: Rows, row_format: RowFormat) -> Rows:
    return rows if rows._format == row_format else Rows(rows._given, row_format, picks=rows._picks)


# --- the run ------------------------------------------------------------------------------------------------------


async def _run(
    env: Environment, jobs: list[Job], client: Any, model: Any, sampling_args: SamplingArgs, options: Options
) -> Results:
    began = time.perf_counter()
    _warn_of_unused_overrides(env, "run_group", "run_rollout")
    sampling = merge_sampling(env.sampling_args, sampling_args)
    if not jobs:
        warnings.warn("the dataset is empty: there is nothing to roll out", stacklevel=2)
        return Results([], {"env_id": env.env_id, "num_examples": 0, "avg_reward": None, "avg_metrics": {}})
    answerer = find_answerer(client if client is not None else env.client, model if model is not None else env.model)
    metadata = _metadata(env, jobs, answerer, sampling, options)
    is_scored = env.score_rollouts if options.score is None else options.score
    scores_groups = is_scored and env.has_group_rewards and not options.independent_scoring
    with ExitStack() as locked:
        run_dir, kept = open_store(env, jobs, answerer, metadata, options, locked, is_scored=is_scored)
        restored, missed = dict[tuple[Any, int], State](), set[str]()
        if run_dir is not None and scores_groups:
            restored, missed = partial_groups(run_dir, jobs, kept)
        todo = [job for job in jobs if job.key not in kept or job.key in restored]
        stop = _early_stop(env, jobs, run_dir, kept - restored.keys(), options)
        if stop is not None:
            todo = stop.arranged(stop.without_more(jobs, kept - restored.keys(), failed_before(run_dir)))
        async with AsyncExitStack() as stack:
            player = await stack.enter_async_context(open_player(env, answerer, sampling, options, is_scored=is_scored))
            appender = stack.enter_context(run_dir.appender()) if run_dir is not None else None
            progress = make_progress(options.use_tqdm)
            terms = (env, player, answerer, sampling, options)
            steps = _steps(*terms, appender, restored, is_scored=is_scored, scores_groups=scores_groups)
            run = _make_run(todo, steps, options, progress, stop)
            activity = Activity()
            count_here(activity)
            if isinstance(progress, Tally):
                progress.activity = activity
                _count_kept(progress, run_dir, kept - restored.keys())
            progress.start(len(jobs), len(jobs) - len(todo))
            stack.callback(progress.stop)
            given = {"reward_s": options.reward_timeout_s, "hook_s": options.hook_timeout_s}
            stack.enter_context(time_limits(**given, for_all=True))
            stack.enter_context(env._time_limits())
            done = await run.finish()
        if run_dir is not None and restored:
            run_dir.compact(keep_failed=True)
            if missed:
                warnings.warn(f"saved groups were scored again, and {in_words(missed)}", stacklevel=2)
        if run.ended_by is not None:
            where = f"; resume it with resume={str(run_dir.path)!r}" if run_dir is not None else ""
            metadata["ended_early"] = f"{run.ended_by}{where}"
        metadata["until"] = None if stop is None else stop.outcome()
        interrupted = Interrupted(signum=run.signum).cause if run.is_interrupted else None
        metadata |= {"interrupted": interrupted, "finished": interrupted is None and run.ended_by is None}
        with long_lived:  # creates hundreds of thousands of objects, nearly all of which are kept
            results = _assemble(env, jobs, done, run_dir, kept, metadata, began)
    if run.is_interrupted:
        where = f"; resume it with resume={str(run_dir.path)!r}" if run_dir is not None else ""
        message = f"stopped after {len(results.rollouts)} of {len(jobs)} rollouts{where}"
        raise RunInterruptedError(message, results, run.signum)
    return results


def _make_run(
    jobs: Sequence[Job], steps: RunSteps, options: Options, progress: Progress, stop: EarlyStop | None
) -> Run:
    is_elsewhere = hasattr(steps.player, "withdraw")  # other processes run the jobs in chunks, with their own limits
    limits = Limits(
        max_concurrent=stop.at_once if stop is not None else -1 if is_elsewhere else options.max_concurrent,
        generation=None if is_elsewhere else options.max_concurrent_generation,
        scoring=None if is_elsewhere else options.max_concurrent_scoring,
    )
    return Run(
        jobs,
        generate=steps.generate,
        score_alone=steps.score_alone if steps.is_scored else None,
        score_group=steps.score_group if steps.scores_groups else None,
        limits=limits,
        sink=steps.save if steps.appender is not None else None,
        progress=progress,
        deadline_s=options.deadline_s,
        fail=steps.fail,
        stop=stop,
        withdraw=getattr(steps.player, "withdraw", None),
    )


def _steps(
    env: Environment,
    player: Player,
    answerer: Answerer,
    sampling: SamplingArgs,
    options: Options,
    appender: Appender | None,
    restored: Mapping[tuple[Any, int], State],
    *,
    is_scored: bool,
    scores_groups: bool,
) -> RunSteps:
    return RunSteps(
        env=env,
        player=player,
        answerer=answerer,
        sampling=sampling,
        is_scored=is_scored,
        scores_groups=scores_groups,
        scores_each_as_a_group=options.independent_scoring,
        columns=(*(options.state_columns or ()), *(GROUP_COLUMNS if scores_groups else ())),
        appender=appender,
        restored=restored,
    )


def _early_stop(
    env: Environment, jobs: Sequence[Job], run_dir: RunDir | None, kept: set[tuple[Any, int]], options: Options
) -> EarlyStop | None:
    """The rule for early stopping, with the saved rollouts already counted; None without ``until``."""
    if options.until is None:
        return None
    bounds = options.reward_range or bounds_of(env.rubric)
    stop = EarlyStop(jobs, options.until, bounds, at_once=options.max_concurrent)
    for example, reward in rewards_of(run_dir, kept):
        stop.take(example, reward)
    return stop


def _count_kept(progress: Tally, run_dir: RunDir | None, kept: set[tuple[Any, int]]) -> None:
    """Count saved rollouts too, so that the displayed mean is that of all rollouts."""
    if type(progress) is Tally:  # silent
        return
    for example, reward in rewards_of(run_dir, kept):
        if reward is not None:
            progress.count(example, reward)


async def run_group(
    env: Environment,
    group_inputs: Sequence[Mapping[str, Any]],
    client: Any,
    model: Any,
    sampling_args: SamplingArgs | None,
    gen_sem: Any,
    score_sem: Any,
    score: bool,
) -> list[State]:
    """Run the rollouts of one group for a host with its own scheduling. The states are in the order of the inputs."""
    answerer = find_answerer(client if client is not None else env.client, model if model is not None else env.model)
    sampling = merge_sampling(env.sampling_args, sampling_args)

    async def generate_one(row: Mapping[str, Any]) -> State:
        async with gen_sem or nullcontext():
            return await env.run_row(env.formatted(row), answerer, sampling)

    with env._time_limits():
        states = list(await asyncio.gather(*map(generate_one, group_inputs)))
        if score and env.score_rollouts:
            async with score_sem or nullcontext():
                await score_states(env, states)
    return states


async def score_states(env: Environment, states: Sequence[State]) -> None:
    """Score the finished rollouts of one group, and write the scores into their states; failed ones are not changed."""
    began = time.perf_counter()
    live = [state for state in states if state.get("error") is None]
    with env._time_limits():
        scores = await asyncio.gather(*(score_alone(env, state) for state in live))
        await score_group(env, live, scores)
    for state, scored in zip(live, scores, strict=True):
        write_score(state, scored)
    note_scoring_time(live, (time.perf_counter() - began) * 1000)
    write_advantages(states)


# --- results ------------------------------------------------------------------------------------------------------


def _metadata(
    env: Environment, jobs: Sequence[Job], answerer: Answerer, sampling: SamplingArgs, options: Options
) -> dict[str, Any]:
    examples = {job.row["example_id"] for job in jobs}
    return {
        "env_id": env.env_id or type(env).__name__,
        "env_args": env.env_args,
        "model": answerer.model,
        "base_url": hide_in_url(str(getattr(answerer.given, "base_url", "") or "")),
        "num_examples": len(examples),
        "rollouts_per_example": max(job.repeat for job in jobs) + 1,
        "sampling_args": sampling,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "state_columns": list(options.state_columns or ()),
        "reward_weights": env.rubric.reward_shares(),
    }


def _assemble(
    env: Environment,
    jobs: Sequence[Job],
    done: Sequence[tuple[Job, State]],
    run_dir: RunDir | None,
    kept: set[tuple[Any, int]],
    metadata: dict[str, Any],
    began: float,
) -> Results:
    keys = [job.key for job in jobs]
    # A saved rollout stays as it was if scoring it again with its group failed.
    states = {job.key: state for job, state in done if state.get("error") is None or job.key not in kept}
    if run_dir is not None and kept:
        rows = {key: job.row for key, job in zip(keys, jobs, strict=True) if key in kept and key not in states}
        saved = SavedRollouts(run_dir.results_path)
        for key, found in saved.read(rows):
            row = rows[key]
            states[key] = SavedState(saved, found, row) if isinstance(found, int) else restored_state(found, row)
    ordered = [states[key] for key in keys if key in states]
    groups: dict[Any, list[State]] = {}
    for state in ordered:
        groups.setdefault(state.get("example_id"), []).append(state)
    for group in groups.values():
        write_advantages(group)
    results = Results(ordered, metadata).judged_by(env)
    ids = results["example_id"]
    figures: dict[str, Any] = {
        "time_ms": (time.perf_counter() - began) * 1000,
        "avg_reward": _mean(results["reward"], ids),
        "avg_metrics": {name: _mean(results[name], ids) for name in results.metric_names},
        "num_rollouts": len(ordered),
        "num_failed": len(results.failed),
        "retried_usage": None if run_dir is None else run_dir.metadata.get("retried_usage"),
        "path_to_save": run_dir.path if run_dir is not None else None,
    }
    results.metadata.update(figures)  # type: ignore[typeddict-item]
    if run_dir is not None:
        if results.aggregate_functions:
            found = {name: asdict(one) for name, one in results.aggregates.items()}
            results.metadata["aggregates"] = figures["aggregates"] = found
        run_dir.update_metadata({**metadata, **figures, "path_to_save": str(run_dir.path)})
    return results


def _mean(column: Sequence[float | None], example_ids: Sequence[Any]) -> float | None:
    """The mean over examples, as in reports, for the metadata."""
    known: dict[Any, list[float]] = {}
    for example, value in zip(example_ids, column, strict=True):
        if value is not None:
            known.setdefault(example, []).append(value)
    means = [math.fsum(values) / len(values) for values in known.values()]
    return math.fsum(means) / len(means) if means else None


def make_dataset(
    results: Results,
    *,
    push_to_hub: bool = False,
    hub_name: str | None = None,
    state_columns: Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Scored rollouts as a Hugging Face ``Dataset``; ``push_to_hub`` sends it to ``hub_name``."""
    if push_to_hub and not hub_name:
        raise ValueError("push_to_hub=True needs hub_name='user/name'")
    columns = tuple((state_columns if state_columns is not None else results.metadata.get("state_columns")) or ())
    seen: dict[Any, int] = {}
    records = []
    for state in results.scored:
        rollout = seen.get(state.get("example_id"), 0)
        seen[state.get("example_id")] = rollout + 1
        records.append(to_record(state, rollout=rollout, state_columns=columns))
    dataset = to_hf_dataset(records)
    if push_to_hub:
        with in_a_sentence(f"the data set {hub_name!r} was not pushed"):
            dataset.push_to_hub(hub_name, **kwargs)
    return dataset
