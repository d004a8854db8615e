"""``vf eval``: evaluates models on environments, from options or a TOML file, and prints reports."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.answering import Found, find_model
from verifiers.cli.arguments import command_line, given_values
from verifiers.cli.defaults import Defaults, read_defaults
from verifiers.cli.environments import complete_environments, explained, load, split_path
from verifiers.cli.eval_file import read_evals
from verifiers.cli.flags import Flags, eval_options
from verifiers.cli.runs import find_run
from verifiers.cli.tables import fitted, some, table
from verifiers.cli.telling import told

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.envs.rows import Rows
    from verifiers.results import Results

FAILED = 1
ENDED_EARLY = 3


@click.command("eval", short_help="Evaluate models on environments.")
@click.argument("env_id", metavar="ENV...", nargs=-1, required=True, shell_complete=complete_environments)
@eval_options
@click.pass_context
def eval_command(ctx: click.Context, /, **given: Any) -> None:
    """Evaluate a model on ENV: an installed environment, one in ./environments, or a TOML file of several [[eval]].

    \b
    vf eval arithmetic -m fake                      a trial run, without a model
    vf eval capitals -m smollm2                     a real model in this process
    vf eval gsm8k -m gpt-5-mini -n 50 -r 4          an endpoint
    vf eval gsm8k -m Qwen/Qwen3-4B -b http://localhost:8000/v1
    vf eval gsm8k -m gpt-5-mini -m gpt-5-nano       two models, compared
    vf eval gsm8k -m gpt-5-mini --until ±0.02       until the mean is that certain
    vf eval nightly.toml -m gpt-5-mini              every [[eval]] of a file

    Each rollout is saved as soon as it is done; --resume continues a run that stopped.
    Defaults for -n, -r, -c, -t and -T come from [tool.verifiers.eval] in the environment's pyproject.toml.
    Exit codes: 0 done, 1 failures (see --max-failure-rate), 2 wrong usage, 3 ended early (--deadline, an endpoint that
    is down or refuses the key or the model), 130 stopped by Ctrl-C (143 by SIGTERM).
    """
    with told(given["verbose"]):
        if given["no_interleave_scoring"]:
            warnings.warn("-N has no effect: each rollout is scored as soon as it is generated", stacklevel=2)
        evaluations = _evaluations(ctx, given)
        if given["resume"] is not None:
            if len(evaluations) > 1:
                raise click.UsageError("--resume continues one run; pass only its environment and its model")
            evaluations[0]["resume"] = str(find_run(given["resume"]).path)
        prepared = [
            _prepare(Flags(**{**given, "model": None, **values}), values) for values in evaluations
        ]  # prepare all before any of them costs money
        if len(prepared) == 1:
            ctx.exit(_finish(ctx, prepared[0]).code)
        ctx.exit(_several(ctx, prepared))


def _evaluations(ctx: click.Context, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of each evaluation: every environment, or [[eval]] of a file, with every model; options override."""
    options = {name: value for name, value in given_values(ctx).items() if name != "env_id"}
    found: list[dict[str, Any]] = []
    for env_id in given["env_id"]:
        ones = read_evals(env_id, ctx) if env_id.endswith(".toml") else [{"env_id": env_id}]
        found += [{**one, **options} for one in ones]
    return [
        {**one, **({} if model is None else {"model": model})}
        for one in found
        for model in dict.fromkeys(one.pop("model", None) or [None])
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One evaluation that is ready to run: its environment is loaded and its model found, but not yet called."""

    flags: Flags
    given: Mapping[str, Any]
    found: Found
    env: Environment
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one evaluation ended: its exit code, and its results if it has any."""

    code: int
    results: Results | None = None
    figures: dict[str, Any] | None = None
    stopped_by: str | None = None


def _several(ctx: click.Context, prepared: list[Prepared]) -> int:
    """Run the evaluations one after another, then print one table of all."""
    from verifiers.cli.overview import overview, overview_data

    flags = prepared[0].flags
    models = {one.found.model for one in prepared}
    outcomes: list[Outcome] = []
    for number, one in enumerate(prepared, 1):
        place = f"[{number}/{len(prepared)}] "
        if flags.dry_run:
            click.echo(place, err=True)
        outcomes.append(_finish(ctx, one, place=place))
        if outcomes[-1].stopped_by is not None or (outcomes[-1].code == ENDED_EARLY and len(models) == 1):
            break
    found = [outcome.results for outcome in outcomes if outcome.results is not None]
    if flags.as_json:
        figures = [one.figures for one in outcomes]
        data = {"evaluations": figures, **overview_data(found)} if len(models) > 1 and found else figures
        click.echo(json.dumps(data, ensure_ascii=False, allow_nan=False, default=str))
    elif not flags.dry_run:
        click.echo("\n".join(["", *overview(found), *map(_not_begun, prepared[len(outcomes) :])]))
    return max(outcome.code for outcome in outcomes)


def _not_begun(one: Prepared) -> str:
    return f"not started: {one.flags.env_id} with {one.found.model}"


def _prepare(flags: Flags, given: Mapping[str, Any]) -> Prepared:
    found = find_model(flags.wanted())
    env, defaults = _load(flags)
    _check_saving(flags)
    return Prepared(flags=flags, given=given, found=found, env=env, options=flags.run_options(defaults))


def _finish(ctx: click.Context, prepared: Prepared, *, place: str = "") -> Outcome:
    """Run an evaluation, or show the plan of a dry run; ``place`` is its number among several."""
    if prepared.flags.dry_run:
        return _show_plan(prepared, is_alone=not place)
    return _evaluate(ctx, prepared, place)


# --- the environment ----------------------------------------------------------------------------------------------


def _load(flags: Flags) -> tuple[Environment, Defaults]:
    from verifiers.envs import loading

    env = load(flags.env_id, flags.env_dir_path, flags.env_args, verbose=flags.verbose)
    try:
        env.set_kwargs(**flags.extra_env_kwargs)
        if flags.timeout is not None:
            env.timeout = flags.timeout
        if loading.is_url(flags.env_id):
            return env, Defaults()
        module = loading.find_module(*split_path(flags.env_id, flags.env_dir_path))
        return env, read_defaults(module.__name__)
    except Exception as error:  # foreign code
        raise explained(error, f"the environment {flags.env_id!r} cannot be loaded", flags.verbose) from error


def _check_saving(flags: Flags) -> None:
    from verifiers.envs.loading import is_url

    if flags.record and (flags.workers is not None or is_url(flags.env_id)):
        raise click.UsageError(
            "--record saves the replies of judges in this process; with --workers or a URL they run elsewhere"
        )
    if flags.save_results or flags.resume is not None:
        return
    if flags.record:
        raise click.UsageError("--record saves the replies of judges in the run directory; leave out --no-save")
    if flags.save_to_hf_hub:
        raise click.UsageError("-H: a failed push would lose unsaved rollouts; leave out --no-save")


def _rows(env: Environment, options: Mapping[str, Any], flags: Flags) -> Rows:
    """The rows to evaluate; many environments load them only now."""
    try:
        rows = env.get_eval_dataset(options["num_examples"], flags.seed if flags.shuffle else None)
        len(rows)
    except Exception as error:  # foreign code
        raise explained(error, f"the rows of {flags.env_id!r} cannot be read", flags.verbose) from error
    return rows


# --- the run ------------------------------------------------------------------------------------------------------


def _evaluate(ctx: click.Context, prepared: Prepared, place: str) -> Outcome:
    from verifiers.runner import RunInterruptedError

    env, found, options, flags = prepared.env, prepared.found, prepared.options, prepared.flags
    rows = _rows(env, options, flags)
    size = f"{some(len(rows), 'example')} × {options['rollouts_per_example']}"
    head = f"{place}{env.env_id or type(env).__name__}: {size} with {found.model} ({found.where})"
    click.echo("\n".join(fitted([head], stream=sys.stderr)), err=True)
    client = found.open()
    stop: RunInterruptedError | None = None
    try:
        with _recording(env, found, options, flags):
            results = _run(env, rows, client, found.model, options, flags)
    except RunInterruptedError as error:
        results, stop = error.results, error
    except Exception as error:  # foreign code of the environment
        raise explained(error, "the run ended", flags.verbose) from error
    finally:
        found.close(client)
    stopped_by = None if stop is None else stop.cause
    figures = _show(ctx, results, prepared, stopped_by=stopped_by, is_alone=not place)
    if stop is not None:
        return Outcome(stop.exit_code, results, figures, stopped_by)
    if results.metadata.get("ended_early"):
        return Outcome(ENDED_EARLY, results, figures)
    is_pushed = _push(ctx, results, prepared) if flags.save_to_hf_hub else True
    fault = (results.metadata.get("until") or {}).get("fault")  # the report shows it
    code = FAILED if fault or not is_pushed else _verdict(results, flags.max_failure_rate)
    return Outcome(code, results, figures)


def _run(env: Environment, rows: Rows, client: Any, model: str, options: Mapping[str, Any], flags: Flags) -> Results:
    from verifiers.cli.live import make_watched
    from verifiers.runner import Limits

    limits = Limits(
        max_concurrent=options["max_concurrent"],
        generation=options["max_concurrent_generation"],
        scoring=options["max_concurrent_scoring"],
    )
    progress = make_watched(limits.workers(len(rows) * options["rollouts_per_example"]))
    results: Results
    if flags.shuffle:
        others = {name: value for name, value in options.items() if name != "num_examples"}
        results = env.generate_sync(inputs=rows, client=client, model=model, use_tqdm=progress, **others)
    else:
        results = env.evaluate_sync(client=client, model=model, use_tqdm=progress, **options)
    return results


def _recording(env: Environment, found: Found, options: dict[str, Any], flags: Flags) -> AbstractContextManager[None]:
    """Record judge replies in the run directory, whose path must be chosen before the run starts."""
    if not flags.record:
        return nullcontext()
    from verifiers.reruns.judges import judges_recorded
    from verifiers.reruns.replay import CASSETTE
    from verifiers.store import DEFAULT_ROOT, safe_name

    name = safe_name(f"{env.env_id or type(env).__name__}--{found.model}")
    path = Path(flags.resume) if flags.resume else DEFAULT_ROOT / name / os.urandom(4).hex()
    if flags.resume is None:
        options["results_path"] = path
    return judges_recorded(env, path / CASSETTE)


def _show(
    ctx: click.Context, results: Results, prepared: Prepared, *, stopped_by: str | None, is_alone: bool
) -> dict[str, Any] | None:
    from verifiers.cli.report import brief, report, summary

    path, is_stopped = results.metadata.get("path_to_save"), stopped_by is not None
    can_resume = path is not None and (results.failed or is_stopped)
    resume = command_line(ctx, prepared.given, without=("save_results",), resume=str(path)) if can_resume else None
    if prepared.flags.as_json:
        figures = {**summary(results), "interrupted": is_stopped, "resume": resume}
        if is_alone:
            click.echo(json.dumps(figures, ensure_ascii=False, allow_nan=False, default=str))
        return figures
    click.echo("\n".join(report(results) if is_alone else brief(results)))
    if path is None:
        click.echo("not saved (--no-save)")
    if path is not None and is_alone and resume is None:
        click.echo(f"view it with: vf view {Path(path).name}")
    if resume is not None:
        is_whole = not is_stopped and not results.metadata.get("ended_early")
        click.echo(f"{'run the failed ones again' if is_whole else 'continue'} with: {resume}")
    return None


def _push(ctx: click.Context, results: Results, prepared: Prepared) -> bool:
    """Push to the hub. If that fails, the rollouts are on disk, and the same command with --resume pushes again."""
    from verifiers.envs.evaluation import make_dataset
    from verifiers.errors import InfraError

    flags, metadata = prepared.flags, results.metadata
    size = f"n{metadata['num_examples']}_r{metadata['rollouts_per_example']}"
    name = flags.hf_hub_dataset_name or f"{metadata['env_id']}_{metadata['model'].replace('/', '_')}_{size}"
    try:
        make_dataset(results, push_to_hub=True, hub_name=name)
    except Exception as error:  # foreign code
        shown = explained(error, f"the data set {name!r} was not pushed", flags.verbose)
        path = metadata["path_to_save"]
        again = command_line(ctx, prepared.given, without=("save_results",), resume=str(path))
        click.echo(f"Error: {error if isinstance(error, InfraError) else shown.message}", err=True)
        click.echo(f"nothing is lost: the rollouts are in {path}; push them again with: {again}", err=True)
        return False
    click.echo(f"pushed to the hub as {name}", err=flags.as_json)
    return True


def _verdict(results: Results, max_failure_rate: float) -> int:
    share = len(results.failed) / len(results.rollouts) if results.rollouts else 0.0
    if share <= max_failure_rate:
        return 0
    click.echo(f"{share:.1%} of the rollouts failed, more than --max-failure-rate {max_failure_rate:g}", err=True)
    return FAILED


# --- a dry run ----------------------------------------------------------------------------------------------------


def _show_plan(prepared: Prepared, *, is_alone: bool) -> Outcome:
    from verifiers.cli.report import conversation

    env, found, options, flags = prepared.env, prepared.found, prepared.options, prepared.flags
    rows = _rows(env, options, flags)
    plan = {
        "env_id": env.env_id or type(env).__name__,
        "env_args": env.env_args,
        "model": found.model,
        "where": found.where,
        "num_examples": len(rows),
        **{key: options[key] for key in ("rollouts_per_example", "max_concurrent", "sampling_args")},
        "rollouts": len(rows) * options["rollouts_per_example"],
    }
    if flags.as_json:
        if is_alone:
            click.echo(json.dumps(plan, ensure_ascii=False, default=str))
        return Outcome(0, figures=plan)
    click.echo("\n".join(table([[key, str(value)] for key, value in plan.items()])))
    if len(rows):
        click.echo("\n".join(["the first prompt:", *conversation(rows[0]["prompt"])]))
    click.echo("a dry run: no model was called")
    return Outcome(0, figures=plan)
