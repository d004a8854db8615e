"""A notebook cell → a place in its output that can be redrawn."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

DRAW_EVERY_S = 0.25


def is_notebook() -> bool:
    """Does this process run notebook cells? IPython in a terminal does not."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    return getattr(ipython.get_ipython(), "kernel", None) is not None


def show_in_cell(shown: Any, **options: Any) -> Any:
    """Call IPython's ``display``; IPython is only installed where notebooks run."""
    return importlib.import_module("IPython.display").display(shown, **options)


class Shown:
    """An object for IPython to display: HTML, and plain text for front ends without HTML."""

    def __init__(self, html: str, words: str) -> None:
        self.html, self.words = html, words

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.words


class Picture:
    """One place in the output of the running cell; ``draw`` replaces its content, at most a few times a second."""

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
