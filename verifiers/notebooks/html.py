"""Texts and numbers → HTML for a cell. All text is escaped, and styles only apply inside the cell."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

SHOWN_CHARS = 1500  # per message
# Colours come from the notebook's theme if it has one.
STYLE = """
<style>
.vf-cell { font: 13px/1.5 var(--jp-ui-font-family, system-ui, sans-serif); color: var(--jp-ui-font-color1, inherit); max-width: 860px; }
.vf-cell table { border-collapse: collapse; margin: 6px 0; font-variant-numeric: tabular-nums; }
.vf-cell th, .vf-cell td { text-align: left; padding: 3px 14px 3px 0; border: 0; background: none; vertical-align: middle; font-size: 13px; }
.vf-cell th { font-weight: 600; opacity: .65; font-size: 12px; }
.vf-cell td.vf-figure, .vf-cell th.vf-figure { text-align: right; }
.vf-cell .vf-muted { opacity: .65; }
.vf-cell .vf-bad { color: #c2414b; }
.vf-cell .vf-line { display: inline-block; position: relative; width: 160px; height: 12px; vertical-align: middle; font-size: 13px; }
.vf-cell .vf-line::before { content: ""; position: absolute; left: 0; right: 0; top: 5px; height: 2px; background: currentColor; opacity: .15; }
.vf-cell .vf-range { position: absolute; top: 3px; height: 6px; border-radius: 3px; background: #7d89e4; opacity: .6; }
.vf-cell .vf-mean { position: absolute; top: 2px; width: 8px; height: 8px; margin-left: -4px; border-radius: 50%; background: #4f5bd5; }
.vf-cell .vf-track { height: 8px; border-radius: 4px; background: rgba(128, 128, 128, .2); overflow: hidden; margin: 4px 0; }
.vf-cell .vf-done { height: 100%; background: #4f5bd5; }
.vf-cell details { margin: 4px 0; }
.vf-cell summary { cursor: pointer; }
.vf-cell pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0 8px; padding: 6px 10px; border-left: 3px solid #7d89e4; background: rgba(128, 128, 128, .08); font-size: 12px; }
.vf-cell img { max-width: 100%; }
</style>
"""  # noqa: E501

Row = tuple[str, float | None, float | None, float | None]  # name, mean, low, high


def page_html(*parts: str) -> str:
    """Parts as the output of one cell."""
    return f'{STYLE}<div class="vf-cell">{"".join(parts)}</div>'


def text_html(text: str, style: str = "") -> str:
    """A line of text.

    >>> text_html("<b>")
    '<div>&lt;b&gt;</div>'
    """
    return f'<div class="{style}">{escape(text)}</div>' if style else f"<div>{escape(text)}</div>"


def bar_html(done: int, total: int, words: str) -> str:
    """A progress bar with a line of text."""
    share = min(max(done / total, 0.0), 1.0) if total else 0.0
    return (
        f'<div class="vf-track"><div class="vf-done" style="width: {100 * share:.1f}%"></div></div>{text_html(words)}'
    )


def figures_html(rows: Sequence[Row], *, level: float = 0.95) -> str:
    """A table of means with their intervals, one row per metric."""
    known = [value for _, *values in rows for value in values if value is not None]
    low, high = min([0.0, *known]), max([1.0, *known])

    def place(value: float) -> float:
        return 100 * (value - low) / (high - low)

    def cells(name: str, mean: float | None, least: float | None, most: float | None) -> str:
        if mean is None:
            return f'<td>{escape(name)}</td><td class="vf-figure">–</td><td></td><td></td>'
        has_range = least is not None and most is not None
        words = f"{least:.3f} – {most:.3f}" if has_range else ""
        ends = (place(least), place(most)) if least is not None and most is not None else (0.0, 0.0)
        range_style = f"left: {ends[0]:.1f}%; width: {ends[1] - ends[0]:.1f}%"
        drawn = f'<span class="vf-range" style="{range_style}"></span>' if has_range else ""
        drawn += f'<span class="vf-mean" style="left: {place(mean):.1f}%"></span>'
        return (
            f'<td>{escape(name)}</td><td class="vf-figure"><b>{mean:.3f}</b></td>'
            f'<td><span class="vf-line">{drawn}</span></td><td class="vf-muted">{words}</td>'
        )

    head = f'<tr><th></th><th class="vf-figure">mean</th><th></th><th>{level:.0%} interval</th></tr>'
    return f"<table>{head}{''.join(f'<tr>{cells(*row)}</tr>' for row in rows)}</table>"


def samples_html(samples: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Rollouts as collapsible sections: a title, then the messages with their roles."""
    parts = []
    for title, messages in samples:
        said = "".join(
            f'<div class="vf-muted">{escape(role)}</div><pre>{escape(_cut(text))}</pre>' for role, text in messages
        )
        parts.append(f"<details><summary>{escape(title)}</summary>{said}</details>")
    return "".join(parts)


def image_html(svg: str, words: str) -> str:
    """An SVG as an image element, so that its styles and ids do not affect the page."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(words)}" src="data:image/svg+xml;base64,{data}">'


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text) - SHOWN_CHARS:,} more characters)"
