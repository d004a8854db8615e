"""A block of the documentation that the usual tests cannot run → its code, to be run where what it needs is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def unrun_blocks(page: str, reason: str, put: Mapping[str, str]) -> list[str]:
    """The blocks of a page that are marked ``no-run: reason``, with other text put for some; each must be there."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```python no-run: {re.escape(reason)}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    whole = "\0".join(blocks)
    for old, new in put.items():
        if old not in whole:
            raise LookupError(f"docs/{page} has no block with {old!r} that is not run because it {reason!r}")
        whole = whole.replace(old, new)
    return whole.split("\0")
