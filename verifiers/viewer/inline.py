"""Shows the viewer's pages in the output of a notebook cell."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from verifiers.viewer.export import gather, render
from verifiers.viewer.library import DEFAULT_ROOTS, Library

INLINE_LIMIT = 200  # rollouts per run, because notebooks save their outputs
HEIGHT = 760


class InlineView:
    """A snapshot of the pages of some runs, in a sandboxed frame without access to the notebook or the network.

    A cell whose last expression is an InlineView shows it. It needs no server, so it also works if the browser is on
    another machine than the kernel; it does not update while a run continues.
    """

    def __init__(
        self, library: Library, *, first_page: str = "", limit: int = INLINE_LIMIT, height: int = HEIGHT
    ) -> None:
        runs = [found for run in library.runs() if (found := library.get(run.id)) is not None]
        if not runs:
            roots = ", ".join(map(str, library.roots)) or "these paths"
            raise ValueError(f"there is no run under {roots}; vf eval makes one")
        self.first_page, self.height, self.count = first_page, height, len(runs)
        self._page = render({**gather(runs, limit=limit), "first_page": first_page})

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="runs" sandbox="allow-scripts" referrerpolicy="no-referrer" '
            f'style="width: 100%; height: {self.height}px; border: 1px solid rgba(128, 128, 128, .3); '
            f'border-radius: 8px" srcdoc="{escape(self._page)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"InlineView({self.count} run{'s' * (self.count != 1)}, shown in a notebook)"


def show(*paths: str | Path, roots: Iterable[str | Path] = (), **options: Any) -> InlineView:
    """Show runs in a notebook: ``show("outputs/evals/sums--tiny/1a2b3c4d")``; by default, all under the usual roots."""
    folders = list(roots) or ([] if paths else list(DEFAULT_ROOTS))
    return InlineView(Library(folders, paths), **options)
