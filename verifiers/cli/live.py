"""The progress line of a run: counts, mean reward with its interval, speed, cost, and remaining time."""

from __future__ import annotations

import math
import sys
import time
from typing import IO, Any, cast

from verifiers.progress import Enduring, Tally, clock
from verifiers.types import State, Usage

Z95 = 1.96  # normal approximation during the run; the report has the exact interval
SMOOTH_S = 3.0  # before this, the remaining time cannot be estimated
BAR_FROM = 100  # columns from which there is room for a long bar


class Watched(Tally):
    """Counts and the mean reward with its interval, clustered by example, updated incrementally."""

    every_s = 10.0

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.stream = Enduring(sys.stderr)
        self.at_once = at_once
        self.next_at = time.monotonic() + self.every_s
        self.usage = Usage()
        self.first_done = 0

    def start(self, total: int, done: int) -> None:
        super().start(total, done)
        self.first_done = done

    def update(self, state: State) -> None:
        self.done += 1
        read = super(State, state).get  # these keys are in the state itself, not in its row
        reward = read("reward")
        if read("error") is not None:
            self.failed += 1
        elif reward is not None:
            self.count(state["example_id"], reward)
        usage = read("usage")
        if isinstance(usage, Usage):
            self.tokens += usage.completion_tokens
            self.usage += usage
        now = time.monotonic()
        if now >= self.next_at:
            self.next_at = now + self.every_s
            self.show()

    def show(self) -> None: ...

    @property
    def reach(self) -> float | None:
        """Half the width of the interval, from the variance of the means of examples."""
        examples = len(self._means)
        if examples < 2:
            return None
        squares = self._square - self._sum * self._sum / examples
        if squares <= 1e-9 * max(self._square, 1.0):  # all equal so far; an interval of width 0 would be wrong
            return None
        return Z95 * math.sqrt(squares / (examples - 1) / examples)

    @property
    def running(self) -> int:
        """The number of running rollouts: when one ends another starts, while any are left."""
        return min(self.at_once, self.total - self.done)

    def parts(self) -> list[tuple[int, str]]:
        """The parts of the line in order, each with a rank; if there is no room, the highest rank is dropped first."""
        found = [(0, f"{self.done:,}/{self.total:,}")]
        if self.failed:
            found.append((0, f"{self.failed:,} failed"))
        if self.activity is not None and self.activity.retries:
            refused = f", {self.activity.refusals:,} refused" if self.activity.refusals else ""
            found.append((1, f"{self.activity.retries:,} retried{refused}"))
        if self.mean is not None:
            reach = self.reach
            found.append((0, f"reward {self.mean:.3f}" + ("" if reach is None else f" ± {reach:.3f}")))
        took = max(time.monotonic() - self.began, 1e-9)
        if tokens := self.tokens_so_far:
            found.append((1, f"{short_count(tokens)} tokens"))
            found.append((3, f"{tokens / took:,.0f}/s"))
        if self.usage.cost_usd:
            found.append((2, f"${self.usage.cost_usd:.4f}"))
        if self.running:
            found.append((4, f"{self.running:,} running"))
        made = self.done - self.first_done
        if self.running and made and took > SMOOTH_S:
            found.append((2, f"{clock(took / made * (self.total - self.done))} left"))
        return found

    def line(self, width: int | None = None) -> str:
        """The parts in one line, as many as fit."""
        parts = self.parts()
        line = " · ".join(text for _, text in parts)
        while width is not None and len(line) > width and max(rank for rank, _ in parts):
            least = max(rank for rank, _ in parts)
            parts = [part for part in parts if part[0] != least]
            line = " · ".join(text for _, text in parts)
        return line


class WatchedBar(Watched):
    """A progress bar with the line beside it; rich refreshes it by timer, because token counts change continuously."""

    every_s = math.inf

    def start(self, total: int, done: int) -> None:
        from rich import progress
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        super().start(total, done)
        watched = self
        console = Console(file=cast(IO[str], self.stream))

        class Line(progress.ProgressColumn):
            max_refresh = None

            def render(self, task: progress.Task) -> Text:
                return Text(watched.line(console.width - bar_width(console.width) - 2), no_wrap=True)

        class Bar(progress.ProgressColumn):
            def render(self, task: progress.Task) -> Any:
                return ProgressBar(total=max(watched.total, 1), completed=watched.done, width=bar_width(console.width))

        self.bar = progress.Progress(Bar(), Line(), console=console, transient=True, refresh_per_second=4)
        self.task = self.bar.add_task("", total=total, completed=done)
        self.bar.start()

    def note(self, text: str) -> None:
        self.bar.console.print(text)

    def stop(self) -> None:
        self.bar.stop()
        self.at_once = 0  # nothing is running any more
        took = f" · in {clock(time.monotonic() - self.began)}"
        self.stream.write(f"{self.line(self.bar.console.width - len(took))}{took}\n")


def bar_width(columns: int) -> int:
    """The width of the bar: visible in a narrow terminal too, but leaving room for the numbers.

    >>> bar_width(120), bar_width(80), bar_width(40)
    (20, 10, 6)
    """
    return 20 if columns >= BAR_FROM else 10 if columns >= 70 else 6


def short_count(number: int) -> str:
    """A count in a few characters.

    >>> short_count(950), short_count(12_345), short_count(3_400_000)
    ('950', '12.3k', '3.4M')
    """
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


class WatchedLines(Watched):
    """Prints the line every few seconds, for logs and pipes."""

    def show(self) -> None:
        self.note(self.line())

    def note(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def stop(self) -> None:
        self.show()


def make_watched(at_once: int) -> Watched:
    """A bar if stderr is a terminal, otherwise lines."""
    return WatchedBar(at_once) if sys.stderr.isatty() else WatchedLines(at_once)
