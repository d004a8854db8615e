"""A run's counts → a line to watch: how far, how good and how sure, how fast, at what cost, and how long still."""

from __future__ import annotations

import math
import sys
import time
from typing import IO, cast

from verifiers.progress import Enduring, Tally
from verifiers.types import State

Z95 = 1.96  # while a run goes on; the report has the exact interval
SMOOTH_S = 3.0  # before this the pace is anyone's guess
BAR_FROM = 100  # columns that hold a bar beside the line


class Watched(Tally):
    """Counts, and a mean reward with its interval clustered by example, kept up to date at the cost of a few sums."""

    every_s = 10.0

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.stream = Enduring(sys.stderr)
        self.at_once = at_once
        self.next_at = time.monotonic() + self.every_s
        self.cost_usd: float | None = None
        self.first_done = 0

    def start(self, total: int, done: int) -> None:
        super().start(total, done)
        self.first_done = done

    def update(self, state: State) -> None:
        self.done += 1
        read = super(State, state).get  # these keys are the state's own: no row has them
        reward = read("reward")
        if read("error") is not None:
            self.failed += 1
        elif reward is not None:
            self.count(state["example_id"], reward)
        usage = read("usage")
        if usage is not None:
            self.tokens += usage.completion_tokens
            if usage.cost_usd is not None:
                self.cost_usd = (self.cost_usd or 0.0) + usage.cost_usd
        now = time.monotonic()
        if now >= self.next_at:
            self.next_at = now + self.every_s
            self.show()

    def show(self) -> None: ...

    @property
    def reach(self) -> float | None:
        """Half the width of the interval, by how much the means of examples vary."""
        examples = len(self._means)
        if examples < 2:
            return None
        squares = self._square - self._sum * self._sum / examples
        return Z95 * math.sqrt(max(squares, 0.0) / (examples - 1) / examples)

    @property
    def running(self) -> int:
        """Whenever a rollout ends another starts, so that as many run as may and are left."""
        return min(self.at_once, self.total - self.done)

    def line(self) -> str:
        parts = [f"{self.done:,}/{self.total:,}", f"{self.failed:,} failed"]
        if self.running:
            parts.append(f"{self.running:,} running")
        if self.mean is not None:
            reach = self.reach
            interval = "" if reach is None else f" ± {reach:.3f}"
            parts.append(f"reward {self.mean:.3f}{interval}")
        took = max(time.monotonic() - self.began, 1e-9)
        if self.tokens:
            parts.append(f"{self.tokens / took:,.0f} tokens/s")
        if self.cost_usd:
            parts.append(f"${self.cost_usd:.4f}")
        made = self.done - self.first_done
        if self.running and made and took > SMOOTH_S:
            parts.append(f"{clock(took / made * (self.total - self.done))} left")
        return " · ".join(parts)


class WatchedBar(Watched):
    """A bar in a terminal, with the line beside it."""

    every_s = 0.1

    def start(self, total: int, done: int) -> None:
        from rich import progress
        from rich.console import Console

        super().start(total, done)
        console = Console(file=cast(IO[str], self.stream))
        bar = [progress.BarColumn(bar_width=20)] if console.width >= BAR_FROM else []  # the numbers come first
        text = progress.TextColumn("{task.description}")
        self.bar = progress.Progress(*bar, text, console=console, transient=True)
        self.task = self.bar.add_task(self.line(), total=total, completed=done)
        self.bar.start()

    def show(self) -> None:
        self.bar.update(self.task, completed=self.done, description=self.line())

    def note(self, text: str) -> None:
        self.bar.console.print(text)

    def stop(self) -> None:
        self.bar.stop()
        self.stream.write(f"{self.line()} · in {clock(time.monotonic() - self.began)}\n")


class WatchedLines(Watched):
    """The same line every few seconds, for logs and pipes."""

    def show(self) -> None:
        self.note(self.line())

    def note(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def stop(self) -> None:
        self.show()


def make_watched(at_once: int) -> Watched:
    """A bar where stderr is a terminal, lines elsewhere."""
    return WatchedBar(at_once) if sys.stderr.isatty() else WatchedLines(at_once)


def clock(seconds: float) -> str:
    """A span of time as a clock shows it.

    >>> clock(5), clock(75), clock(3700)
    ('0:05', '1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
