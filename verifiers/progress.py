"""The counts of a run → a live bar in a terminal or notebook, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Any, Protocol, cast

from verifiers.clients.activity import Activity
from verifiers.notebooks import Picture, bar_html, is_notebook, page_html, text_html
from verifiers.types import State


class Progress(Protocol):
    """Shows the progress of a run."""

    def start(self, total: int, done: int) -> None: ...
    def update(self, state: State) -> None: ...
    def note(self, text: str) -> None: ...
    def stop(self) -> None: ...


class Tally:
    """Counts without output: the silent progress, and the base class of the others."""

    def __init__(self) -> None:
        self.total = self.done = self.failed = 0
        self.tokens = 0
        self._means: dict[Any, tuple[float, int]] = {}  # by example: mean reward, number of scored rollouts
        self._sum = self._square = 0.0
        self.began = time.monotonic()
        self.activity: Activity | None = None  # of the run, if any: replies within unfinished rollouts

    def start(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self.began = time.monotonic()

    def update(self, state: State) -> None:
        self.done += 1
        if state.get("error") is not None:
            self.failed += 1
        elif (reward := state.get("reward")) is not None:
            self.count(state.get("example_id"), reward)
        usage = state.peek_usage()
        if usage is not None:
            self.tokens += usage.completion_tokens

    def count(self, example: Any, reward: float) -> None:
        before, n = self._means.get(example, (0.0, 0))
        after = before + (reward - before) / (n + 1)
        self._means[example] = after, n + 1
        self._sum += after - before
        self._square += after * after - before * before

    @property
    def mean(self) -> float | None:
        """The mean reward so far; every example has the same weight."""
        return self._sum / len(self._means) if self._means else None

    @property
    def tokens_so_far(self) -> int:
        """The tokens of all replies, including those of unfinished rollouts."""
        return max(self.tokens, self.activity.tokens_so_far if self.activity is not None else 0)

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...

    def line(self) -> str:
        """The counts in one line."""
        mean = "reward –" if self.mean is None else f"reward {self.mean:.3f}"
        speed = self.tokens_so_far / max(time.monotonic() - self.began, 1e-9)
        failed = f", {self.failed} failed" if self.failed else ""
        tokens = f", {speed:,.0f} tokens/s" if self.tokens_so_far else ""
        return f"{self.done}/{self.total} rollouts{failed}, {mean}{tokens}"


class Enduring:
    """A stream whose reader may go away: later writes are discarded instead of raising."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_gone = False

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, step: Callable[..., Any], *args: Any) -> None:
        if self._is_gone:
            return
        try:
            step(*args)
        except OSError as error:
            self._is_gone = True
            if error.errno in (errno.EPIPE, errno.EIO):  # no reader, or the terminal was closed
                _discard_rest(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _discard_rest(stream: IO[str]) -> None:
    """Discard buffered output. Otherwise Python tries to write it at exit, fails, and exits with status 120."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file descriptor
        descriptor, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


class Lines(Tally):
    """A line on stderr every few seconds, for logs and pipes."""

    def __init__(self, stream: IO[str] | None = None, every_s: float = 10.0) -> None:
        super().__init__()
        self.stream = Enduring(stream or sys.stderr)
        self.every_s = every_s
        self.said_at = time.monotonic()

    def update(self, state: State) -> None:
        super().update(state)
        if time.monotonic() - self.said_at >= self.every_s:
            self.said_at = time.monotonic()
            self.note(self.line())

    def note(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def stop(self) -> None:
        self.note(self.line())


class Bar(Tally):
    """A live bar in a terminal. It refreshes on a timer, because replies arrive between finished rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: Any = None
        self.task: Any = None
        self.drawn_at = 0.0

    def start(self, total: int, done: int) -> None:
        from rich import progress
        from rich.console import Console
        from rich.text import Text

        super().start(total, done)
        tally = self

        class Line(progress.ProgressColumn):
            def render(self, task: progress.Task) -> Text:
                return Text(tally.line(), no_wrap=True)

        columns = (progress.BarColumn(16), Line(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
        console = Console(file=cast(IO[str], Enduring(sys.stderr)))
        self.bar = progress.Progress(*columns, console=console, refresh_per_second=4)
        self.task = self.bar.add_task("", total=total, completed=done)
        self.bar.start()

    def update(self, state: State) -> None:
        super().update(state)
        now = time.monotonic()
        if now - self.drawn_at > 0.1:
            self.drawn_at = now
            self._draw()

    def _draw(self) -> None:
        self.bar.update(self.task, completed=self.done)

    def note(self, text: str) -> None:
        self.bar.console.print(text)

    def stop(self) -> None:
        if self.bar is not None:
            self._draw()
            self.bar.stop()


class NotebookBar(Tally):
    """A live bar in the output of a notebook's cell, with notes below it."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.picture = Picture(self.html, self.line)

    def start(self, total: int, done: int) -> None:
        super().start(total, done)
        self.picture.draw(force=True)

    def update(self, state: State) -> None:
        super().update(state)
        self.picture.draw()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.picture.draw(force=True)

    def stop(self) -> None:
        self.picture.draw(force=True)

    def html(self) -> str:
        notes = "".join(text_html(note, "vf-muted") for note in self.notes[-5:])
        return page_html(bar_html(self.done, self.total, self.line()), notes)


def make_progress(show: bool | Progress) -> Progress:
    """The progress display for ``show``: silent, live or plain lines, depending on where stderr goes."""
    if not isinstance(show, bool):
        return show
    if not show:
        return Tally()
    if is_notebook():
        return NotebookBar()
    return Bar() if sys.stderr.isatty() else Lines()


def clock(seconds: float | None) -> str:
    """A duration as minutes and seconds, or hours, minutes and seconds.

    >>> clock(5), clock(75), clock(7384), clock(None)
    ('0:05', '1:15', '2:03:04', '–')
    """
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
