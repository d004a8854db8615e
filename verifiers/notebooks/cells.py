"""A cell of a notebook → a place in its output that is drawn again and again."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

DRAW_EVERY_S = 0.25


def is_notebook() -> bool:
    """Does this process serve the cells of a notebook? IPython in a terminal does not: that is drawn in as such."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    return getattr(ipython.get_ipython(), "kernel", None) is not None


def show_in_cell(shown: Any, **options: Any) -> Any:
    """IPython's ``display``, which is only there where there is a notebook."""
    return importlib.import_module("IPython.display").display(shown, **options)


class Shown:
    """What IPython is handed: HTML, and the same in plain words for whoever has no HTML."""

    def __init__(self, html: str, words: str) -> None:
        self.html, self.words = html, words

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.words


class Picture:
    """One place in the output of the cell that runs; ``draw`` replaces what is there, a few times a second at most."""

    def __init__(self, html: Callable[[], str], words: Callable[[], str]) -> None:
        self._html, self._words = html, words
        self._handle: Any = None
        self._drawn_at = 0.0

    def draw(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if self._handle is not None and not force and now - self._drawn_at < DRAW_EVERY_S:
            return
        self._drawn_at = now
        shown = Shown(self._html(), self._words())
        if self._handle is None:
            self._handle = show_in_cell(shown, display_id=True)
        else:
            self._handle.update(shown)
