"""``vf rescore``: scores the rollouts of a saved run again, and saves them in a new run directory."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.arguments import read_json
from verifiers.cli.environments import env_dir_option, explained, load
from verifiers.cli.runs import RUN, metadata_of, note_damage
from verifiers.cli.tables import some
from verifiers.cli.telling import told
from verifiers.signatures import signature_of

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.reruns import Rescored
    from verifiers.results import Results
    from verifiers.store import RunDir


@click.command("rescore", short_help="Score a saved run again, without a model.")
@click.argument("run", type=RUN)
@click.option("--env", "env_id", metavar="ENV", help="The environment that scores (default: that of the run).")
@click.option("-a", "--env-args", metavar="JSON", callback=read_json, help="Its arguments (default: those of the run).")
@env_dir_option
@click.option("--rubric", metavar="FILE:NAME", help="A rubric, a function that makes one, or a reward function.")
@click.option(
    "--dataset-answers", is_flag=True, help="Use the data set's current answers and info (default: those saved)."
)
@click.option("-o", "--output", metavar="FOLDER", help="Where to save (default: a new folder beside the run).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("-v", "--verbose", is_flag=True, help="Show the log and tracebacks.")
@click.pass_context
def rescore(
    ctx: click.Context,
    run: RunDir,
    env_id: str | None,
    env_args: dict[str, Any] | None,
    env_dir_path: str,
    rubric: str | None,
    dataset_answers: bool,
    output: str | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Score the rollouts of RUN with the environment as it is now, or with another rubric; nothing is sampled.

    \b
    vf rescore last
    vf rescore 1a2b3c4d --rubric strict.py:make_rubric
    vf rescore 1a2b3c4d -a '{"use_think": true}' -o outputs/strict

    Reward functions see what was saved, including the answer; further state keys must be saved with vf eval -C.
    Exit codes: 0 scored, 1 a rollout could not be scored, 2 wrong usage.
    """
    from verifiers import calls, reruns
    from verifiers.results import Results

    with told(verbose):
        note_damage(run)
        metadata = metadata_of(run)
        env = environment_of(metadata, env_id, env_args, env_dir_path, verbose)
        if rubric is not None:
            env.rubric = read_rubric(rubric, verbose)
        try:
            found = calls.run(lambda: reruns.rescore(env, run, dataset_answers=dataset_answers))
        except Exception as error:  # foreign code: the environment makes its rows now
            raise explained(error, f"{run.path} cannot be scored", verbose) from error
        if not found.states:
            raise click.ClickException(f"{run.path} has nothing to score ({some(found.left_out, 'failed rollout')})")
        results = Results(found.states).judged_by(env)
        how = {"rubric": rubric, "dataset_answers": dataset_answers}
        path = _save(env, run, metadata, found, results, output, how)
        results.metadata["path_to_save"] = path
        ctx.exit(_report(run, results, found, as_json, dataset_answers=dataset_answers))


def environment_of(
    metadata: dict[str, Any], env_id: str | None, env_args: dict[str, Any] | None, folder: str, verbose: bool
) -> Environment:
    """The environment of a run, or the one given with ``--env``."""
    name = env_id or metadata.get("env_id")
    if not name:
        raise click.UsageError("the run does not say which environment it was made with; pass it with --env")
    args = env_args if env_args is not None else (metadata.get("env_args") or {}) if env_id is None else {}
    return load(str(name), folder, args, verbose=verbose)


def read_rubric(given: str, verbose: bool) -> Any:
    """``file.py:name`` → the rubric of this name, or what the function of this name returns."""
    from verifiers.rubrics import Rubric

    file, colon, name = given.rpartition(":")
    if not colon or not name.isidentifier() or not Path(file).is_file():
        raise click.UsageError(
            f"--rubric {given}: it must be FILE:NAME with an existing file, such as strict.py:make_rubric"
        )
    try:
        spec = importlib.util.spec_from_file_location(f"rubric_of_{Path(file).stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # worker processes import reward functions by their module
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
        rubric = found
        if callable(found) and not isinstance(found, Rubric):
            rubric = found() if _needs_nothing(found) else Rubric([found])
    except Exception as error:  # foreign code
        raise explained(error, f"{file} cannot be loaded", verbose) from error
    if not isinstance(rubric, Rubric):
        raise click.UsageError(f"--rubric {given}: {name!r} must be or return a Rubric, not {type(rubric).__name__}")
    return rubric


def _needs_nothing(function: Any) -> bool:
    """Whether a callable needs no arguments, so that it makes a rubric; else it is a reward function."""
    try:
        signature_of(function).bind()
    except TypeError:
        return False
    return True


def _save(
    env: Environment,
    run: RunDir,
    metadata: dict[str, Any],
    found: Rescored,
    results: Results,
    output: str | None,
    how: dict[str, Any],
) -> Path:
    from verifiers.store import RunDir
    from verifiers.store.keeping import status_of

    of_run, columns = metadata.get("config"), metadata.get("state_columns")
    config = {
        **(of_run if isinstance(of_run, dict) else {}),
        "rescored_from": str(run.path),
        "env_args": env.env_args,
        **how,
        "reward_weights": env.rubric.weights_by_name(),
    }
    about = {"env_id": env.env_id or type(env).__name__, "model": str(metadata.get("model", "unknown"))}
    try:
        made = (
            RunDir.create(run.path.parent.parent, **about, config=config)
            if output is None
            else RunDir.create_at(output, **about, config=config)
        )
    except FileExistsError as error:
        raise click.UsageError(f"-o {output}: {error}") from error
    with made.appender() as out:
        for record in found.records(columns if isinstance(columns, list) else ()):
            out.append(record)
    made.update_metadata(
        {
            # If the run was not finished, neither is its rescored copy.
            "finished": status_of(run, metadata) == "finished",
            **{key: metadata[key] for key in ("interrupted", "ended_early") if metadata.get(key)},
            "reward_weights": env.rubric.reward_shares(),
            "num_rollouts": len(found.states),
            "num_failed": len(results.failed),
            "avg_reward": results.mean_reward,
            "aggregates": {name: asdict(one) for name, one in results.aggregates.items()},
        }
    )
    return made.path


def _report(run: RunDir, results: Results, found: Rescored, as_json: bool, *, dataset_answers: bool) -> int:
    from verifiers import stats
    from verifiers.cli.report import summary
    from verifiers.envs.states import in_words
    from verifiers.logs import printable
    from verifiers.store import example_key
    from verifiers.store.comparing import COLUMNS, scores_of

    old = [(scores_of(one)["reward"], example_key(one["example_id"])) for one in run.records(COLUMNS)]
    before = stats.mean_interval([reward for reward, _ in old], [example for _, example in old]).mean
    if as_json:
        figures = {
            **summary(results),
            "reward_before": before,
            "left_out": found.left_out,
            "not_saved": sorted(found.missed),
            "examples_with_other_answers": len(found.differing),
            "examples_not_in_data_set": len(found.unknown),
            "rescored_from": str(run.path),
        }
        click.echo(json.dumps(figures, ensure_ascii=False, default=str))
    else:
        click.echo("\n".join(printable(line) for line in str(results).splitlines()))
        click.echo(f"the reward was {'–' if before is None else f'{before:.3f}'}; nothing was sampled again")
        if found.missed:
            click.echo(f"notice: {printable(in_words(found.missed))}", err=True)
        for notice in _about_answers(found, dataset_answers):
            click.echo(f"notice: {notice}", err=True)
        if found.left_out:
            click.echo(f"left out: {some(found.left_out, 'rollout')} that failed before there was anything to score")
        click.echo(f"compare with: vf compare {run.path} {results.metadata['path_to_save']}")
    return 1 if results.failed else 0


def _about_answers(found: Rescored, dataset_answers: bool) -> Iterator[str]:
    """Notices on examples that differ between the run and the data set: which of the two was used for scoring."""
    if found.differing and not dataset_answers:
        yield (
            f"the data set now has another answer or info for {some(len(found.differing), 'example')}, which "
            "were scored by those of the run; to use those of the data set: --dataset-answers"
        )
    if found.unknown:
        yield (
            f"{some(len(found.unknown), 'example')} of the run were scored by the saved answers: the data set "
            "does not contain them, or has another prompt, so its answers cannot be used"
        )
