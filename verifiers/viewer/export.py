"""Exports run directories as one HTML file with the viewer's pages, which needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import msgspec

from verifiers.viewer import assets
from verifiers.viewer.comparing import compare, compare_many, side_of
from verifiers.viewer.figures import run_figures, run_page, shares_page, step_counts
from verifiers.viewer.library import Library, Run
from verifiers.viewer.records import rollout_page
from verifiers.viewer.rows import row_of

DEFAULT_LIMIT = 1000  # rollouts per run in the file
MAX_COMPARED = 6  # runs of which all pairs are compared
MAX_TABLED = 4  # runs of which all subsets of three or more are compared
OTHER_METRICS = 100  # examples listed in comparisons of metrics other than the reward


def export_html(library: Library, path: str | os.PathLike[str], *, limit: int = DEFAULT_LIMIT) -> int:
    """Write the runs of a library to one file and return its size in bytes; metrics are over all rollouts."""
    runs = [found for run in library.runs() if (found := library.get(run.id)) is not None]
    if not runs:
        raise ValueError("there is no run to export; pass one: vf view PATH --export FILE.html")
    text = render(gather(runs, limit=limit)).encode()
    Path(path).write_bytes(text)
    return len(text)


def gather(runs: Sequence[Run], *, limit: int) -> dict[str, Any]:
    """All data that the pages of these runs would request from a server."""
    found: dict[str, Any] = {"runs": [], "figures": {}, "rollouts": {}, "training": {}, "shares": {}}
    for run in runs:
        run.index.refresh()
        run.metrics.refresh()
        about = run_page(run)
        total = len(run.index)
        if total > limit:
            about["notices"].append(f"this file has the first {limit:,} of {total:,} rollouts; metrics are over all")
            about["steps"] = step_counts(run.index.steps[:limit])  # only steps whose samples are in the file
        found["runs"].append({**about, "is_live": False})
        found["figures"][run.id] = run_figures(run.index, run.read_metadata()[0].get("until"))
        found["rollouts"][run.id] = [
            {**row_of(run.index, number), **rollout_page(run, number)} for number in range(min(total, limit))
        ]
        found["shares"][run.id] = shares_page(run)
        if run.is_training:
            found["training"][run.id] = run.metrics.page()
    found |= comparisons_of([run for run in runs if not run.is_training][:MAX_COMPARED], limit)
    return found


def comparisons_of(runs: Sequence[Run], limit: int) -> dict[str, Any]:
    """Comparisons of all pairs of runs in each metric, and of larger subsets: the first run, then the others by id."""
    pairs, tables = {}, {}
    for a, b in permutations(runs, 2):
        for metric in side_of(a).scores.keys() | side_of(b).scores.keys():
            compared = compare(a, b, metric)
            shown = limit if metric == "reward" else min(limit, OTHER_METRICS)
            pairs[f"{a.id}/{b.id}/{metric}"] = {**compared, "rows": compared["rows"][:shown]}
    ordered = sorted(runs[:MAX_TABLED], key=lambda run: run.id)
    for chosen in (some for n in range(3, len(ordered) + 1) for some in combinations(ordered, n)):
        for first in chosen:
            table = [first, *(run for run in chosen if run is not first)]
            for metric in {name for run in chosen for name in side_of(run).scores}:
                tables[f"{','.join(run.id for run in table)}/{metric}"] = compare_many(table, metric)
    return {"comparisons": pairs, "tables": tables}


def render(data: dict[str, Any]) -> str:
    """The page with all data; its content security policy allows only its own script and style, by their hashes."""
    script, style = assets.one_script(), assets.style()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    # Escape "<", the only character that can end a script element or start a comment in it.
    embedded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = (assets.FOLDER / "index.html").read_text(encoding="utf-8")
    parts = {
        '<meta charset="utf-8">': (
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="referrer" content="no-referrer">'
        ),
        '<link rel="stylesheet" href="static/viewer.css">': f"<style>{style}</style>",
        '<script type="module" src="static/app.js"></script>': (
            f'<script type="application/json" id="embedded">{embedded}</script>\n'
            f'<script type="module">{script}</script>'
        ),
    }
    for reference, content in parts.items():
        page = page.replace(reference, content)
    return page


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
