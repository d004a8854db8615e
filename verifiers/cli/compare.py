"""``vf compare A B``: the differences between two runs, with confidence intervals."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.arguments import Integer, Number
from verifiers.cli.runs import RUN, metadata_of, note_damage
from verifiers.cli.tables import dim, heading, some, table, terminal_width
from verifiers.logs import printable

if TYPE_CHECKING:
    from verifiers.stats import Aggregate, Comparison
    from verifiers.store import RunDir
    from verifiers.store.comparing import RunComparison, Side

SHOWN_CHARS = 80
REFUSED = 1


@click.command("compare", short_help="Compare two runs on the same examples.")
@click.argument("a", type=RUN)
@click.argument("b", type=RUN)
@click.option("--metric", metavar="NAME", help="The only metric to test, if chosen beforehand (default: all).")
@click.option("--margin", type=Number(min=0), metavar="X", help="Test whether B is worse by less than X.")
@click.option("--unpaired", is_flag=True, help="Compare as two samples, for runs with different questions.")
@click.option("--level", type=Number(0.5, 0.999), default=0.95, show_default=True, help="Confidence level.")
@click.option("--show", type=Integer(min=0), default=5, show_default=True, metavar="N", help="Examples to list.")
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
@click.pass_context
def compare(
    ctx: click.Context,
    a: RunDir,
    b: RunDir,
    metric: str | None,
    margin: float | None,
    unpaired: bool,
    level: float,
    show: int,
    as_json: bool,
) -> None:
    """Compare run B with run A, example by example; every difference is B - A.

    \b
    vf compare 1a2b3c4d 5e6f7a8b
    vf compare outputs/evals/gsm8k--small outputs/evals/gsm8k--large
    vf compare 1a2b 5e6f --metric has_box --json
    vf compare 1a2b 5e6f --margin 0.02        is B worse by less than 0.02?
    vf compare 1a2b 9c8d --unpaired           different questions: two samples

    A run is a folder, the start of its id, or last. Exit codes: 0 compared, 1 the runs cannot be compared (no example
    was scored in both, or their questions differ).
    """
    from verifiers.store.comparing import compare_sides

    runs = (a, b)
    about = [metadata_of(run) for run in runs]
    sides = [_side(run, one.get("env_id")) for run, one in zip(runs, about, strict=True)]
    names = ["reward", *dict.fromkeys(name for side in sides for name in side.metrics)]
    if metric is not None and metric not in names:
        raise click.UsageError(f"--metric {metric}: these runs have {', '.join(names)}")
    found = compare_sides(*sides, only=metric, level=level, margin=margin, paired=not unpaired)
    first = metric or "reward"
    shown = {name: found.metrics[name] for name in (first, *(name for name in names if name != first))}
    if as_json:
        click.echo(json.dumps(_as_data(runs, about, found, shown), ensure_ascii=False, default=str))
    else:
        click.echo("\n".join(_describe(runs, about, sides, found, shown, show)))
    if found.refusal is not None or shown[first].difference is None:
        ctx.exit(REFUSED)


def _side(run: RunDir, env_id: str | None) -> Side:
    from verifiers.store.comparing import COLUMNS, Side

    note_damage(run)
    return Side.of(run.records(COLUMNS), env_id=env_id)


def _as_data(
    runs: Sequence[RunDir], about: Sequence[dict[str, Any]], found: RunComparison, shown: Mapping[str, Comparison]
) -> dict[str, Any]:
    import dataclasses

    return {
        "a": str(runs[0].path),
        "b": str(runs[1].path),
        "refusal": found.refusal,
        "other_prompts": found.other_questions,
        "metrics": {name: dataclasses.asdict(one) for name, one in shown.items()},
        "aggregates": {
            name: {key: dataclasses.asdict(one) for key, one in zip(("a", "b", "difference"), three, strict=True)}
            for name, three in compare_aggregates(runs, about).items()
        },
    }


# --- as text ------------------------------------------------------------------------------------------------------


def _describe(
    runs: Sequence[RunDir],
    about: Sequence[dict[str, Any]],
    sides: Sequence[Side],
    found: RunComparison,
    shown: Mapping[str, Comparison],
    show: int,
) -> list[str]:
    from verifiers.store.config import is_same_environment

    lines = [f"{letter}  {_named(one, run)}" for letter, one, run in zip("AB", about, runs, strict=True)]
    is_one = runs[0].path.resolve() == runs[1].path.resolve()
    lines += ["   A and B are the same run"] if is_one else _settings(*about)
    metric, first = next(iter(shown.items()))
    if found.refusal is not None:
        are_of_one = is_same_environment(sides[0].env_id, sides[1].env_id)
        lines.append(f"no verdict: {found.refusal}" + "; --unpaired compares them as two samples" * are_of_one)
    lines += ["", heading(metric), *str(first).splitlines()]
    if len(shown) > 1:
        lines += ["", *_metric_table(shown)]
    lines += _aggregate_lines(runs, about)
    if show and first.examples and first.is_paired and found.refusal is None:
        lines += ["", *_changed("won", first.won, sides, metric, show)]
        lines += _changed("lost", first.lost, sides, metric, show)
    return lines


def _aggregate_lines(runs: Sequence[RunDir], about: Sequence[dict[str, Any]]) -> list[str]:
    """The aggregate metrics of both runs, with the interval of their paired difference."""
    found = compare_aggregates(runs, about)
    rows = []
    for name, (a, b, difference) in found.items():
        interval = "" if difference.low is None else f"[{difference.low:+.3f}, {difference.high:+.3f}]"
        rows.append([name, _number(a.value), _number(b.value), _number(difference.value, "+"), interval])
    if not rows:
        return []
    return ["", *table(rows, header=["all rows", "A", "B", "B - A", "95% (bootstrap by example)"], right=[1, 2, 3])]


def compare_aggregates(
    runs: Sequence[RunDir], about: Sequence[dict[str, Any]]
) -> dict[str, tuple[Aggregate, Aggregate, Aggregate]]:
    """Each aggregate metric of A, of B, and its difference, computed with the environment's own code."""
    from verifiers import stats
    from verifiers.cli.environments import FOLDER
    from verifiers.cli.rescore import environment_of
    from verifiers.results import row_of
    from verifiers.stats.aggregates import failure
    from verifiers.store import is_failed

    if not all(one.get("aggregates") for one in about):
        return {}
    try:
        env = environment_of(about[1], None, None, FOLDER, verbose=False)
    except click.ClickException as error:
        click.echo(f"notice: aggregate metrics are left out: {error.message}", err=True)
        return {}
    try:
        a, b = ([row_of(one, env.parsers) for one in run.records() if not is_failed(one)] for run in runs)
    except BaseException as error:  # foreign code: a parser
        click.echo(f"notice: aggregate metrics are left out: {failure(error)}", err=True)
        return {}
    return {
        name: (stats.aggregate(a, one), stats.aggregate(b, one), stats.aggregate_difference(a, b, one))
        for name, one in env.aggregates.items()
    }


def _named(about: Mapping[str, Any], run: RunDir) -> str:
    from verifiers.store.keeping import status_of

    name = f"{about.get('env_id', '?')} with {about.get('model', '?')}"
    status = status_of(run, dict(about))
    more = "" if status == "finished" else f" ({status})"
    return f"{printable(name)}{more}  {dim(printable(str(run.path)))}"


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    from verifiers.store.config import is_same_environment

    is_one = is_same_environment(a.get("env_id"), b.get("env_id"))
    keys = [*([] if is_one else ["env_id"]), "env_args", "model", "sampling_args", "rollouts_per_example"]
    changed = [printable(f"   {key}: {a.get(key)} → {b.get(key)}") for key in keys if a.get(key) != b.get(key)]
    if (before := _scored(a)) != (after := _scored(b)):
        changed.append(printable(f"   scored: {before} → {after}"))
    return changed or ["   with the same settings"]


def _scored(about: Mapping[str, Any]) -> str:
    config = about.get("config")
    if not isinstance(config, dict) or not config.get("rescored_from"):
        return "when it was run"
    by = f", by {config['rubric']}" if config.get("rubric") else ""
    return f"again{by}{', with answers of the data set' if config.get('dataset_answers') else ''}"


def _metric_table(found: Mapping[str, Comparison]) -> list[str]:
    rows = []
    for name, one in found.items():
        low, high = one.low, one.high
        rows.append(
            [
                name,
                _number(one.mean_a),
                _number(one.mean_b),
                _number(one.difference, "+"),
                "–" if low is None or high is None else f"[{low:+.3f}, {high:+.3f}] {100 * one.level:.4g}%",
                "–" if one.adjusted_p is None else f"{one.adjusted_p:.3g}",
                one.verdict or "–",
            ]
        )
    header = ["", "A", "B", "B - A", "interval", "p (Holm)", "verdict"]
    lines = table(rows, header=header, right=[1, 2, 3])
    if not sys.stdout.isatty() or max(map(len, lines)) <= terminal_width():
        return lines
    first, *others = table([row[1:] for row in rows], header=header[1:], right=[0, 1, 2])
    named = zip(found, others, strict=True)
    return ["  " + first, *(line for name, figures in named for line in (printable(name), "  " + figures))]


def _number(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.3f}"


def _changed(word: str, ids: Sequence[Any], sides: Sequence[Side], metric: str, show: int) -> list[str]:
    if not ids:
        return [f"B {word} no example"]
    rows = []
    for key in ids[:show]:
        a, b = (_mean(side.scores[metric][key]) for side in sides)
        rows.append([f"  example {key}", f"{a:.3f} → {b:.3f}", _asked(sides[0].questions.get(key))])
    more = f" (the {show} largest changes)" if len(ids) > show else ""
    return [f"B {word} {some(len(ids), 'example')}{more}", *table(rows)]


def _mean(scores: Sequence[float | None]) -> float:
    known = [score for score in scores if score is not None]
    return sum(known) / len(known)


def _asked(question: Any) -> str:
    from verifiers.messages import text_of

    if isinstance(question, list) and question:
        role, content = question[-1]
        question = text_of({"role": role, "content": content})
    line = " ".join(question.split()) if isinstance(question, str) else ""
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…"
