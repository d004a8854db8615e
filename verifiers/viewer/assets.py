"""The files of the pages: what the server sends, and the same as one script for a file of its own."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# A module comes after those it imports from.
MODULES = (
    "dom.js",
    "format.js",
    "address.js",
    "embedded.js",
    "api.js",
    "keys.js",
    "charts.js",
    "lines.js",
    "chart_controls.js",
    "code.js",
    "markdown.js",
    "tokens.js",
    "conversation.js",
    "difference.js",
    "table.js",
    "page_runs.js",
    "run_cards.js",
    "page_run.js",
    "page_rollout.js",
    "page_group.js",
    "page_training.js",
    "page_overlay.js",
    "page_table.js",
    "page_compare.js",
    "page_shares.js",
    "app.js",
)
_IMPORT = re.compile(r"^import\s[^;]*;\n", flags=re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", flags=re.MULTILINE)


def load() -> dict[str, tuple[bytes, str]]:
    """Every file by name, with its content type."""
    return {path.name: (path.read_bytes(), KINDS[path.suffix]) for path in FOLDER.iterdir() if path.suffix in KINDS}


def one_script() -> str:
    """All modules as one: without imports and exports they share a scope, and their names are all different."""
    parts = [f"// {name}\n{(FOLDER / name).read_text(encoding='utf-8')}" for name in MODULES]
    return _EXPORT.sub("", _IMPORT.sub("", "\n".join(parts)))


def style() -> str:
    return (FOLDER / "viewer.css").read_text(encoding="utf-8")
