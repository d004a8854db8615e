"""Shows a running training as a live learning curve in the output of a notebook cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verifiers.notebooks import Picture, bar_html, image_html, page_html, text_html

if TYPE_CHECKING:
    from verifiers.trainers.watch.display import TrainingDisplay

SHOWN_NOTICES = 4


class NotebookPanel:
    """The part of `rich.live.Live` that the display uses, drawn as HTML: start, refresh, console.print, stop."""

    def __init__(self, display: TrainingDisplay) -> None:
        self.display = display
        self.notices: list[str] = []
        self.is_running = True
        self.picture = Picture(self.html, display.line)

    @property
    def console(self) -> NotebookPanel:
        return self

    def start(self) -> None:
        self.picture.draw(force=True)

    def refresh(self) -> None:
        self.picture.draw()

    def print(self, text: Any) -> None:
        self.notices.append(str(text))
        self.picture.draw(force=True)

    def stop(self) -> None:
        self.is_running = False
        self.picture.draw(force=True)

    def html(self) -> str:
        from verifiers.trainers.watch.plot import plot_svg

        display = self.display
        step = int(display.metrics.get("step") or 0)
        words = display.line() if display.steps else f"{display.title}: {display.total_steps} steps"
        curve = plot_svg(display.steps, display.evals, display.title) if display.steps or display.evals else ""
        return page_html(
            bar_html(step, display.total_steps, words),
            text_html(display.phase_text()) if self.is_running else "",
            image_html(curve, "the learning curve so far") if curve else "",
            *(text_html(notice, "vf-bad") for notice in self.notices[-SHOWN_NOTICES:]),
        )
