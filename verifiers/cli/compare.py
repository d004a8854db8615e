"""``vf compare A B``: two runs on the same examples → what changed, by how much, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.runs import RUN, metadata_of, note_damage
from verifiers.cli.tables import dim, heading, some, table
from verifiers.logs import printable

if TYPE_CHECKING:
    from verifiers.stats import Comparison
    from verifiers.store import RunDir

SHOWN_CHARS = 80
COLUMNS = ("example_id", "reward", "error", "metrics", "prompt")


@click.command("compare", short_help="Compare two runs on the same examples.")
@click.argument("a", type=RUN)
@click.argument("b", type=RUN)
@click.option("--metric", default="reward", show_default=True, metavar="NAME", help="What to compare first.")
@click.option("--level", type=click.FloatRange(0.5, 0.999), default=0.95, show_default=True, help="Of the intervals.")
@click.option("--show", type=click.IntRange(min=0), default=5, show_default=True, metavar="N", help="Examples to name.")
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
@click.pass_context
def compare(ctx: click.Context, a: RunDir, b: RunDir, metric: str, level: float, show: int, as_json: bool) -> None:
    """Compare run B with run A, example by example; every difference is B - A.

    \b
    vf compare outputs/evals/gsm8k--small/1a2b3c4d outputs/evals/gsm8k--large/5e6f7a8b
    vf compare 1a2b 5e6f --metric has_box --json

    A run is a folder, the start of its id, or last. Exit codes: 0 compared, 1 no example was scored in both.
    """
    sides = [Side(run) for run in (a, b)]
    names = ["reward", *dict.fromkeys(name for side in sides for name in side.metrics)]
    if metric not in names:
        raise click.UsageError(f"--metric {metric}: these runs have {', '.join(names)}")
    names = [metric, *(name for name in names if name != metric)]
    found = {name: _compare(sides[0], sides[1], name, level) for name in names}
    differing = _other_prompts(*sides)
    if as_json:
        click.echo(json.dumps(_as_data(sides, found, differing), ensure_ascii=False, default=str))
    else:
        click.echo("\n".join(_describe(sides, found, metric, differing, show)))
    if not found[metric].examples:
        ctx.exit(1)


class Side:
    """One of the two runs: its scores by metric and example, and what was asked."""

    def __init__(self, run: RunDir) -> None:
        from verifiers.store import is_failed

        note_damage(run)
        self.run = run
        self.metadata = metadata_of(run)
        self.prompts: dict[Any, Any] = {}
        self.scores: dict[str, dict[Any, list[float | None]]] = {"reward": {}}
        for record in run.records(COLUMNS):
            key = record["example_id"]
            self.prompts.setdefault(key, record["prompt"])
            values = {"reward": record["reward"], **(record["metrics"] or {})}
            for name, value in values.items():
                kept = None if is_failed(record) or not isinstance(value, int | float) else float(value)
                self.scores.setdefault(name, {}).setdefault(key, []).append(kept)

    @property
    def metrics(self) -> list[str]:
        return [name for name in self.scores if name != "reward"]


def _compare(a: Side, b: Side, name: str, level: float) -> Comparison:
    from verifiers import stats

    return stats.compare(a.scores.get(name, {}), b.scores.get(name, {}), level=level)


def _other_prompts(a: Side, b: Side) -> list[Any]:
    """Examples whose ids are the same and whose questions are not: comparing them means nothing."""
    return [key for key in a.prompts if key in b.prompts and a.prompts[key] != b.prompts[key]]


def _as_data(sides: Sequence[Side], found: Mapping[str, Comparison], differing: Sequence[Any]) -> dict[str, Any]:
    import dataclasses

    return {
        "a": str(sides[0].run.path),
        "b": str(sides[1].run.path),
        "other_prompts": list(differing),
        "metrics": {name: dataclasses.asdict(one) for name, one in found.items()},
    }


# --- in words -----------------------------------------------------------------------------------------------------


def _describe(
    sides: Sequence[Side], found: Mapping[str, Comparison], metric: str, differing: Sequence[Any], show: int
) -> list[str]:
    lines = [f"{letter}  {_named(side)}" for letter, side in zip("AB", sides, strict=True)]
    lines += _settings(*sides)
    if differing:
        lines.append(
            f"careful: {some(len(differing), 'shared example')} ask{'s' * (len(differing) == 1)} something else in B "
            f"(first: {differing[0]}); these are not the same examples"
        )
    lines += ["", heading(metric), *str(found[metric]).splitlines()]
    if len(found) > 1:
        lines += ["", *_metric_table(found)]
    if show and found[metric].examples:
        lines += ["", *_changed("won", found[metric].won, sides, metric, show)]
        lines += _changed("lost", found[metric].lost, sides, metric, show)
    return lines


def _named(side: Side) -> str:
    about = side.metadata
    name = f"{about.get('env_id', '?')} with {about.get('model', '?')}"
    return f"{printable(name)}  {dim(printable(str(side.run.path)))}"


def _settings(a: Side, b: Side) -> list[str]:
    keys = ("env_id", "env_args", "model", "sampling_args", "rollouts_per_example")
    changed = [
        printable(f"   {key}: {a.metadata.get(key)} → {b.metadata.get(key)}")
        for key in keys
        if a.metadata.get(key) != b.metadata.get(key)
    ]
    return changed or ["   made in the same way"]


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
                "–" if low is None or high is None else f"[{low:+.3f}, {high:+.3f}]",
                "–" if one.p_value is None else f"{one.p_value:.3g}",
            ]
        )
    return table(rows, header=["", "A", "B", "B - A", "interval", "p"], right=[1, 2, 3])


def _number(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.3f}"


def _changed(word: str, ids: Sequence[Any], sides: Sequence[Side], metric: str, show: int) -> list[str]:
    if not ids:
        return [f"B {word} no example"]
    rows = []
    for key in ids[:show]:
        a, b = (_mean(side.scores[metric][key]) for side in sides)
        rows.append([f"  example {key}", f"{a:.3f} → {b:.3f}", _asked(sides[0].prompts.get(key))])
    more = f" (the {show} largest changes)" if len(ids) > show else ""
    return [f"B {word} {some(len(ids), 'example')}{more}", *table(rows)]


def _mean(scores: Sequence[float | None]) -> float:
    known = [score for score in scores if score is not None]
    return sum(known) / len(known)


def _asked(prompt: Any) -> str:
    from verifiers.messages import text_of

    text = prompt if isinstance(prompt, str) else text_of(prompt[-1]) if prompt else ""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…"
