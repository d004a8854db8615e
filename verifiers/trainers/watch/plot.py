"""Metrics of a training → plots: an SVG file, or a curve of braille characters for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from verifiers.trainers.watch.wording import bin_means, clean, is_filtered, number

WIDTH, TOP = 760, 44
LEFT, RIGHT, HEAD, FOOT = 52, 12, 26, 24  # margins of a panel in pixels
MAX_POINTS = 400  # longer curves are drawn as the means of this many bins
TICKS = 4

# Light and dark colours, selected by the reader's colour scheme.
STYLE = """
  .back { fill: #ffffff }
  .text { fill: #1f2933; font: 12px system-ui, sans-serif }
  .title { font-size: 16px; font-weight: 600 }
  .small { font-size: 10px; fill: #66717d }
  .grid { stroke: #e3e7eb }
  .line { fill: none; stroke: #2563c9; stroke-width: 1.6 }
  .sampled { fill: none; stroke: #66717d; stroke-width: 1.4; stroke-dasharray: 4 3 }
  .band { fill: #2563c9; opacity: .16 }
  .eval { fill: #c2410c }
  .whisker { stroke: #c2410c; stroke-width: 1.4 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #14181d } .text { fill: #e6eaee } .small { fill: #98a3ae } .grid { stroke: #2b333b }
    .sampled { stroke: #98a3ae }
    .line { stroke: #6ea8fe } .band { fill: #6ea8fe } .eval { fill: #fb923c } .whisker { stroke: #fb923c }
  }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One panel: values by step, optionally with a confidence band, evaluations and a second curve."""

    name: str
    points: list[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()  # step, low, high
    evals: Sequence[tuple[float, float, float | None, float | None]] = ()  # step, reward, low, high
    sampled: Sequence[tuple[float, float]] = ()  # step, value: before filtering (see `is_filtered`)

    def range(self) -> tuple[float, float]:
        """The lowest and the highest value that is drawn."""
        values = [value for _, value in [*self.points, *self.sampled]]
        values += [bound for _, *bounds in self.band for bound in bounds]
        values += [value for _, *found in self.evals for value in found if value is not None]
        return min(values), max(values)

    def steps(self) -> tuple[float, float]:
        """The first and the last step that is drawn."""
        steps = [step for step, _ in self.points] + [step for step, *_ in self.evals]
        return min(steps), max(steps)


def plot_svg(steps: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]] = (), title: str = "") -> str:
    """Panels of a training: reward with its interval and the evaluations, KL, entropy, length, throughput.

    ``steps`` and ``evals`` are lines of ``metrics.jsonl``; a metric that no line has gets no panel.

    >>> plot_svg([{"step": 1, "reward": 0.2}, {"step": 2, "reward": 0.4}], title="sums").count("<path")
    1
    """
    panels = list(_curves(steps, evals))
    reward, rest = (panels[:1], panels[1:]) if panels and panels[0].name == "reward" else ([], panels)
    parts: list[str] = []
    bottom = TOP
    for panel in reward:
        parts.append(_panel(panel, 0, bottom, WIDTH, 230))
        bottom += 230
    for i, panel in enumerate(rest):
        parts.append(_panel(panel, (i % 2) * WIDTH / 2, bottom + (i // 2) * 150, WIDTH / 2, 150))
    bottom += math.ceil(len(rest) / 2) * 150
    if not panels:
        parts.append(_text(LEFT, bottom + 14, "no step has been made yet"))
        bottom += 30
    name = escape(clean(title) or "training")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 8}" role="img" aria-label="{name}">\n'
        f"<title>{name}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="back" width="100%" height="100%"/>\n<text class="text title" x="{RIGHT}" y="26">{name}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _curves(steps: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> Iterator[Curve]:
    rewards, measured = _series(steps, "reward"), list(_eval_points(evals))
    if rewards or measured:
        sampled = _downsample(_series(steps, "reward_sampled")) if any(map(is_filtered, steps)) else []
        yield Curve(name="reward", points=_downsample(rewards), band=_band(steps), evals=measured, sampled=sampled)
    names = {
        "kl": "KL to the reference",
        "entropy": "entropy",
        "completion_tokens": "tokens of a completion",
        "tokens_per_s": "tokens per second",
        **({} if rewards else {"loss": "loss"}),  # supervised training has no reward
    }
    for key, name in names.items():
        if points := _series(steps, key):
            yield Curve(name=name, points=_downsample(points))


def _band(steps: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    low, high = dict(_series(steps, "reward_low")), dict(_series(steps, "reward_high"))
    both = sorted(low.keys() & high.keys())
    below, above = _downsample([(step, low[step]) for step in both]), _downsample([(step, high[step]) for step in both])
    return [(step, least, most) for (step, least), (_, most) in zip(below, above, strict=True)]


def _drawable(value: Any) -> float | None:
    """A finite number small enough for the arithmetic of coordinates."""
    found = number(value)
    return None if found is None or abs(found) > 1e100 else float(found)


def _series(steps: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    pairs = ((_drawable(line.get("step")), _drawable(line.get(key))) for line in steps)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _eval_points(evals: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float, float | None, float | None]]:
    for line in evals:
        found = line.get("eval", line)  # either a line of the file, or the metrics themselves with their step
        if isinstance(found, Mapping):
            step, reward = _drawable(line.get("step")), _drawable(found.get("reward"))
            if step is not None and reward is not None:
                yield step, reward, _drawable(found.get("low")), _drawable(found.get("high"))


def _downsample(points: list[tuple[float, float]], count: int = MAX_POINTS) -> list[tuple[float, float]]:
    if len(points) <= count:
        return points
    xs, ys = zip(*points, strict=True)
    return list(zip(bin_means(list(xs), count), bin_means(list(ys), count), strict=True))


# --- drawing ------------------------------------------------------------------------------------------------------


def _panel(curve: Curve, x: float, y: float, width: float, height: float) -> str:
    """One panel with its axes; ``x`` and ``y`` are its upper left corner."""
    first, last = curve.steps()
    ticks = nice_ticks(*curve.range())
    low, high = min(ticks[0], curve.range()[0]), max(ticks[-1], curve.range()[1])
    left, right, top, bottom = x + LEFT, x + width - RIGHT, y + HEAD, y + height - FOOT

    def x_of(step: float) -> float:
        return left if last == first else left + (step - first) / (last - first) * (right - left)

    def y_of(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    legend = ", with its interval" * bool(curve.band) + ", of all sampled (dashes)" * bool(curve.sampled)
    legend += ", and evaluations (dots)" * bool(curve.evals)
    parts = [_text(left, y + 16, curve.name + legend)]
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y_of(tick):.1f}" y2="{y_of(tick):.1f}"/>'
        )
        parts.append(_text(left - 6, y_of(tick) + 3.5, f"{tick:.4g}", "small", "end"))
    parts.append(_text(left, bottom + 15, f"step {first:.0f}", "small"))
    if last > first:
        parts.append(_text(right, bottom + 15, f"{last:.0f}", "small", "end"))
    if curve.band:
        edge = [(x_of(s), y_of(a)) for s, a, _ in curve.band] + [(x_of(s), y_of(b)) for s, _, b in reversed(curve.band)]
        parts.append(f'<polygon class="band" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in edge)}"/>')
    for kind, points in (("sampled", curve.sampled), ("line", curve.points)):
        placed = [(x_of(step), y_of(value)) for step, value in points]
        placed = [(placed[0][0] - 2, placed[0][1]), (placed[0][0] + 2, placed[0][1])] if len(placed) == 1 else placed
        if placed:
            parts.append(f'<path class="{kind}" d="M{" L".join(f"{a:.1f} {b:.1f}" for a, b in placed)}"/>')
    for step, value, below, above in curve.evals:
        if below is not None and above is not None:
            place = f'x1="{x_of(step):.1f}" x2="{x_of(step):.1f}" y1="{y_of(below):.1f}" y2="{y_of(above):.1f}"'
            parts.append(f'<line class="whisker" {place}/>')
        title = f"evaluation after step {step:.0f}: {value:.3f}"
        parts.append(
            f'<circle class="eval" cx="{x_of(step):.1f}" cy="{y_of(value):.1f}" r="3.2"><title>{title}</title></circle>'
        )
    return "\n".join(parts)


def _text(x: float, y: float, text: str, more: str = "", anchor: Literal["start", "end"] = "start") -> str:
    return f'<text class="text {more}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def nice_ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """A few round tick values that span a range.

    >>> nice_ticks(0.13, 0.87)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> nice_ticks(3, 3)
    [2.0, 3.0, 4.0]
    """
    if high - low <= max(1e-12 * max(abs(low), abs(high)), 1e-100):
        room = abs(low) if abs(low) > 1e-100 else 1.0
        step = 10.0 ** math.floor(math.log10(room))
        return [float(low - step), float(low), float(low + step)]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


# --- in a terminal ------------------------------------------------------------------------------------------------

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: by column, then row from the top


def plot_text(values: Sequence[float | None], width: int = 72, height: int = 12) -> str:
    """A curve of braille dots with its axes, for a terminal; missing values are skipped.

    >>> print(plot_text([0.0, 0.25, 0.5, 0.75, 1.0], width=16, height=3))
    1.00 ┤⠀⠀⠀⠀⠀⠀⢀⡠⠔⠊
    0.50 ┤⠀⠀⠀⢀⡠⠎⠁⠀⠀⠀
    0.00 ┤⡠⠔⠊⠁⠀⠀⠀⠀⠀⠀
         └──────────
          step 1   5
    """
    known = [(float(i), value) for i, one in enumerate(values, 1) if (value := _drawable(one)) is not None]
    if not known:
        return "(nothing to draw yet)"
    height = max(height, 2)
    known = _downsample(known, 2 * width)
    low, high = min(value for _, value in known), max(value for _, value in known)
    if high == low:
        low, high = low - 0.5, high + 0.5
    labels = _axis_labels(low, high, height)
    margin = max(map(len, labels))
    columns = max(width - margin - 2, 10)
    canvas = _draw(known, len(values), low, high, columns, height)
    lines = [f"{label:>{margin}} ┤{''.join(map(chr, row))}" for label, row in zip(labels, canvas, strict=True)]
    last = str(len(values)) if len(values) > 1 else ""
    axis = [f"{'':>{margin}} └{'─' * columns}", f"{'':>{margin}}  step 1{last:>{columns - 6}}".rstrip()]
    return "\n".join(lines + axis)


def _axis_labels(low: float, high: float, height: int) -> list[str]:
    """The labels of all rows; only the top, the bottom and, if there is one, the middle row have one."""
    digits = max(0, min(6, 2 - math.floor(math.log10(high - low))))
    shown = {0: high, height - 1: low} | ({height // 2: (low + high) / 2} if height % 2 else {})
    return [f"{shown[row]:.{digits}f}" if row in shown else "" for row in range(height)]


def _draw(
    points: Sequence[tuple[float, float]], count: int, low: float, high: float, columns: int, rows: int
) -> list[list[int]]:
    """The points joined by lines, as rows of braille code points; a character is 2 dots wide and 4 high."""
    canvas = [[0x2800] * columns for _ in range(rows)]
    right, bottom = 2 * columns - 1, 4 * rows - 1

    def dot(x: float, y: float) -> None:
        column, row = round(x), round(y)
        canvas[row // 4][column // 2] |= _DOTS[column % 2][row % 4]

    placed = [((x - 1) / max(count - 1, 1) * right, (high - y) / (high - low) * bottom) for x, y in points]
    dot(*placed[0])
    for (x0, y0), (x1, y1) in itertools.pairwise(placed):
        dots = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        for i in range(dots + 1):
            dot(x0 + (x1 - x0) * i / dots, y0 + (y1 - y0) * i / dots)
    return canvas
