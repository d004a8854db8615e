"""The static files of the pages: as the server sends them, and as one script for an exported file."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Each module comes after those that it imports.
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
    """All files by name, with their content types."""
    return {path.name: (path.read_bytes(), KINDS[path.suffix]) for path in FOLDER.iterdir() if path.suffix in KINDS}


def one_script() -> str:
    """All modules as one script without imports and exports; they share a scope, so their names must be distinct."""
    parts = [f"// {name}\n{(FOLDER / name).read_text(encoding='utf-8')}" for name in MODULES]
    return _EXPORT.sub("", _IMPORT.sub("", "\n".join(parts)))


def style() -> str:
    return (FOLDER / "viewer.css").read_text(encoding="utf-8")
