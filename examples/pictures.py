"""Makes the images of the examples' pages: runs each example and draws its result as docs/images/<its name>.svg.

python -m examples.pictures [101 202 …]
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from verifiers.trainers.watch.plot import plot_svg

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LABEL, LINE = 760, 230, 30
REWARD = ("step", "reward", "reward_low", "reward_high")

# Colours for light and dark mode; the reader's setting decides.
STYLE = """
  .back { fill: #ffffff }
  .text { fill: #1f2933; font: 13px system-ui, sans-serif }
  .code { font: 12px ui-monospace, monospace }
  .title { font-size: 16px; font-weight: 600 }
  .small { font-size: 11px; fill: #66717d }
  .grid { stroke: #e3e7eb }
  .dot { fill: #2563c9 } .whisker { stroke: #2563c9; stroke-width: 2 }
  .box { fill: #f1f4f7 } .own { fill: #dfeafc }
  .ok { fill: #15803d } .fail { fill: #c2410c } .skip { fill: #66717d }
  @media (prefers-color-scheme: dark) {
    .back { fill: #14181d } .text { fill: #e6eaee } .small { fill: #98a3ae } .grid { stroke: #2b333b }
    .dot { fill: #6ea8fe } .whisker { stroke: #6ea8fe } .box { fill: #1f262d } .own { fill: #1d2f4d }
    .ok { fill: #4ade80 } .fail { fill: #fb923c } .skip { fill: #98a3ae }
  }
"""


def svg(title: str, height: float, parts: Sequence[str]) -> str:
    name = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}">\n'
        f'<style>{STYLE}</style>\n<rect class="back" width="100%" height="100%"/>\n{text(12, 26, title, "title")}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="text {kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'


def intervals(title: str, rows: Sequence[tuple[str, float | None, float | None, float | None]]) -> str:
    """A line for each row: its name, a point, and its 95% interval where it has one; None is failed."""
    bounds = [value for _, *values in rows for value in values if value is not None]
    low, high = min(0.0, *bounds), max(1.0 if max(bounds) > 0.5 else max(bounds), *bounds)
    left, right = LABEL, WIDTH - 80

    def across(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    bottom = 48 + LINE * len(rows)
    parts = [
        f'<line class="grid" x1="{across(at):.1f}" x2="{across(at):.1f}" y1="44" y2="{bottom}"/>' for at in (0, high)
    ]
    parts += [text(across(at), bottom + 15, f"{at:.3g}", "small", "middle") for at in (0, high)]
    for i, (name, value, below, above) in enumerate(rows):
        y = 64 + LINE * i
        parts.append(text(LABEL - 16, y + 4, name, anchor="end"))
        if value is None:
            parts.append(text(left + 8, y + 4, "failed: no reward, in no mean", "fail"))
            continue
        if below is not None and above is not None:
            parts.append(f'<line class="whisker" x1="{across(below):.1f}" x2="{across(above):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot" cx="{across(value):.1f}" cy="{y}" r="5"/>')
        parts.append(text(right + 14, y + 4, f"{value:+.2f}" if low < 0 else f"{value:.2f}", "small"))
    return svg(title, bottom + 26, parts)


def conversation(title: str, messages: Sequence[Any]) -> str:
    """Each message in a box of its own; those of the model are coloured."""
    parts, y = [], 44.0
    for message in messages:
        calls = [
            f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []
        ]
        lines = [line for part in [message.get("content") or "", *calls] for line in textwrap.wrap(part, 86)]
        height = 14 + 17 * len(lines)
        kind = "own" if message["role"] == "assistant" else "box"
        parts.append(f'<rect class="{kind}" x="110" y="{y}" width="{WIDTH - 122}" height="{height}" rx="6"/>')
        parts.append(text(98, y + 20, message["role"], "small", "end"))
        parts += [text(122, y + 20 + 17 * i, line, "code") for i, line in enumerate(lines)]
        y += height + 8
    return svg(title, y + 6, parts)


def verdicts(title: str, reports: dict[str, Any]) -> str:
    """The verdicts of a check, a column for each report."""
    names = [verdict.name for verdict in next(iter(reports.values())).verdicts]
    parts = [text(300 + 220 * i, 54, name, "code") for i, name in enumerate(reports)]
    for row, name in enumerate(names):
        y = 78 + 20 * row
        parts.append(text(12, y, name))
        for i, report in enumerate(reports.values()):
            status = next(verdict.status for verdict in report.verdicts if verdict.name == name)
            parts.append(text(300 + 220 * i, y, status, {"warn": "fail"}.get(status, status)))
    return svg(title, 90 + 20 * len(names), parts)


def of(interval: Any) -> tuple[float, float, float]:
    return interval.mean, interval.low, interval.high


def draw(number: str, found: Any) -> str:
    """The picture of one example, from what it returned."""
    match number:
        case "101":
            rows = [("all questions", *of(found.interval("correct")))]
            rows += [(f"{kind} letters", *of(part.interval("correct"))) for kind, part in found.by("kind").items()]
            return intervals("Right answers, with 95% intervals", rows)
        case "102":
            state = found.rollouts[0]
            return conversation(
                "One rollout: a call with a wrong argument is told, not fatal", [*state["prompt"], *state["completion"]]
            )
        case "103":
            rows = [(state["kind"], state["reward"], None, None) for state in found.rollouts]
            return intervals("The share of cases that each program passed", rows)
        case "104":
            rows = [(state["prompt"][-1]["content"], state["reward"], None, None) for state in found.rollouts]
            return intervals("The judge's reward, answer by answer", rows)
        case "201":
            return verdicts("The same rows, two rewards", found)
        case "202":
            ways = {"as two samples": found["separate"], "question by question": found["paired"]}
            rows = [(f"B - A, {way}", one.difference, one.low, one.high) for way, one in ways.items()]
            return intervals("The same two runs, compared in two ways", rows)
    report = found.report if number == "303" else found
    return (report.path / "plot.svg").read_text(encoding="utf-8")


def main(numbers: Sequence[str]) -> None:
    for path in sorted((ROOT / "examples").glob("[0-9]*.py")):
        number = path.name.partition("_")[0]
        if not numbers or number in numbers:
            module = importlib.import_module(f"examples.{path.stem}")
            found = module.main(Path(tempfile.mkdtemp())) if number.startswith("3") else module.main()
            images = ROOT / "docs" / "images"
            (images / f"{path.stem}.svg").write_text(draw(number, found), encoding="utf-8")
            if number == "303":  # its reward alone, for the README's first screen
                rewards = [{key: line.get(key) for key in REWARD} for line in found.report.steps]
                curve = plot_svg(rewards, title="reverse-text: a tiny transformer, from random weights")
                (images / "learning-curve.svg").write_text(curve, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
