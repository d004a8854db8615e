"""``vf power``: the number of examples to run for a wanted resolution, given how much scores vary."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.arguments import Number
from verifiers.cli.runs import RUN
from verifiers.cli.tables import some, table

if TYPE_CHECKING:
    from verifiers.store import RunDir

ROLLOUTS = (1, 2, 4, 8, 16)


@click.command("power", short_help="Compute how many examples to run.")
@click.argument("resolution", type=Number(min=0, min_open=True), metavar="±X")
@click.option("--run", "run", type=RUN, metavar="RUN", help="Measure how much scores vary on this run.")
@click.option("--against", type=RUN, metavar="RUN", help="A second run: measure their difference.")
@click.option("--mean", "mean", type=Number(0, 1), metavar="P", help="For right-or-wrong scores: the share right.")
@click.option("--sd", type=Number(min=0, min_open=True), metavar="S", help="The standard deviation of a score.")
@click.option("--metric", default="reward", show_default=True, metavar="NAME", help="The metric of the run.")
@click.option("--correlation", type=float, metavar="R", help="For a difference: the correlation of two runs' scores.")
@click.option("--power", "power_share", type=Number(0.5, 0.999), metavar="P", help="Chance to detect the difference.")
@click.option("--level", type=Number(0.5, 0.999), default=0.95, show_default=True, help="Confidence level.")
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
def power(resolution: float, as_json: bool, metric: str, **given: Any) -> None:
    """Compute how many examples are needed to know a mean to ±X, or to detect a difference of X between two runs.

    \b
    vf power 0.03 --mean 0.7          right-or-wrong scores, about 70% right
    vf power 0.03 --run last          scores that vary as in this run
    vf power 0.03 --mean 0.7 --correlation 0.6 --power 0.8
    vf power 0.02 --run 1a2b --against 5e6f --power 0.8
    """
    from verifiers import stats

    spread = _spread(metric, given)
    asked = {"level": given["level"], "power": given["power_share"]}
    is_measured_on_two = "a" in spread
    if not is_measured_on_two:
        is_blind = given["power_share"] is not None and given["correlation"] is None
        asked["correlation"] = 0.0 if is_blind else given["correlation"]
    needed = _needed(
        resolution, stats.examples_to_compare if is_measured_on_two else stats.examples_needed, spread | asked
    )
    if as_json:
        click.echo(json.dumps({"resolution": resolution, "examples": needed}))
        return
    what = f"know a mean to ±{resolution:g}"
    if given["power_share"] is not None:
        what = f"detect a difference of {resolution:g} with a chance of {given['power_share']:g}"
    elif is_measured_on_two or asked["correlation"] is not None:
        what = f"know a difference to ±{resolution:g}"
    if list(needed) == [1]:
        click.echo(f"{some(needed[1], 'example')} to {what}, with one rollout of each")
        return
    click.echo(f"to {what}:")
    rows = [[str(rollouts), f"{n:,}", f"{rollouts * n:,}"] for rollouts, n in needed.items()]
    click.echo("\n".join(table(rows, header=["rollouts of each", "examples", "rollouts in all"], right=[0, 1, 2])))


def _spread(metric: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that describe how much scores vary."""
    from verifiers import stats

    ways = [name for name in ("run", "mean", "sd") if given[name] is not None]
    if len(ways) != 1:
        raise click.UsageError("specify how much scores vary, with one of --run RUN, --mean P and --sd S")
    if given["against"] is not None:
        if given["run"] is None or given["correlation"] is not None:
            raise click.UsageError("--against needs --run, and replaces --correlation")
        return {name: stats.by_example(*_scores(given[run], metric)) for name, run in (("a", "run"), ("b", "against"))}
    if given["run"] is not None:
        values, clusters = _scores(given["run"], metric)
        if len({value for value in values if value is not None}) == 1:
            raise click.UsageError(
                f"all scores of {given['run'].path} are equal; specify how much scores vary with --sd S"
            )
        return {"values": values, "clusters": clusters}
    if given["sd"] is not None:
        return {"sd": given["sd"]}
    p = given["mean"]
    if p in (0.0, 1.0):
        raise click.UsageError(f"--mean {p:g}: equal scores do not vary; pass a mean between 0 and 1")
    return {"mean": p}


def _scores(run: RunDir, metric: str) -> tuple[list[float | None], list[Any]]:
    from verifiers.store import example_key
    from verifiers.store.comparing import scores_of

    values: list[float | None] = []
    ids = []
    known: set[str] = {"reward"}
    for record in run.records(("example_id", "reward", "error", "metrics")):
        row = scores_of(record)
        known |= row.keys()
        values.append(row.get(metric))
        ids.append(example_key(record["example_id"]))
    if metric not in known:
        raise click.UsageError(f"--metric {metric}: this run has {', '.join(sorted(known))}")
    return values, ids


def _needed(resolution: float, find: Callable[..., int], asked: dict[str, Any]) -> dict[int, int]:
    """The number of examples by rollouts of each; only for one rollout if the variance of repeats is unknown."""
    needed: dict[int, int] = {}
    for rollouts in ROLLOUTS:
        try:
            needed[rollouts] = find(resolution, rollouts_per_example=rollouts, **asked)
        except ValueError as error:
            if rollouts == 1:
                raise click.UsageError(str(error)) from error
            break
    return needed
