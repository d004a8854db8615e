"""Shows metrics of a training: a live panel in a terminal or notebook, elsewhere a line every ``logging_steps``."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verifiers.notebooks import is_notebook
from verifiers.progress import Enduring, Tally, clock
from verifiers.trainers.watch.notebook_panel import NotebookPanel
from verifiers.trainers.watch.wording import SPARK_CHARS, clean, is_filtered, labelled, number, sparkline, with_interval

BAR_CHARS = 24
RECENT_STEPS = 20  # steps from which the remaining time is estimated
DRAW_EVERY_S = 0.2
ECHO_CHARS = 5  # columns left free beside the panel: see `_Narrower`
_PHASES = (
    ("generation", "generation_s", "cyan"),
    ("scoring", "scoring_s", "magenta"),
    ("training", "training_s", "green"),
)
# Label, key and format of metrics: those drawn as sparklines, and counts.
_CURVES = (
    ("loss", "loss", ".4f"),
    ("kl", "kl", ".4f"),
    ("entropy", "entropy", ".2f"),
    ("length", "completion_tokens", ".0f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
)
_COUNTS = (
    ("cut off", "truncated", ".0%"),
    ("groups without variance", "zero_variance", ".0%"),
    ("failed", "failed", ".0f"),
    ("not learned from", "refused", ".0f"),
)


class TrainingDisplay:
    """Shows the progress of a training on stderr: a live panel in a terminal, lines in a file or pipe.

    >>> display = TrainingDisplay(stream=sys.stdout)
    >>> display.start(200, "reverse-text")
    reverse-text: 200 steps
    >>> display.update({"step": 10, "reward": 0.25, "reward_low": 0.2, "reward_high": 0.3, "entropy": 1.5})
    step 10/200  reward 0.250 ± 0.050  entropy 1.50
    >>> display.stop()
    """

    def __init__(self, *, logging_steps: int = 1, show: bool = True, stream: IO[str] | None = None) -> None:
        self.logging_steps = max(1, logging_steps)
        self.show = show
        self.stream = stream
        self.total_steps = 0
        self.title = ""
        self.metrics: Mapping[str, Any] = {}
        self.last_notice = ""
        self.phase = "starting"
        self.sampling: Tally | None = None  # counts the rollouts in progress
        self._phase_began = 0.0
        self.steps: list[Mapping[str, Any]] = []  # shown so far; a notebook plots them
        self.evals: list[Mapping[str, Any]] = []
        self._history: dict[str, list[float]] = {}
        self._step_ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        self._began = self._drawn_at = 0.0
        self._live: Any = None

    # --- what the trainer calls ---------------------------------------------------------------------------------

    def start(self, total_steps: int, title: str) -> None:
        """Show a training from now on."""
        self.total_steps, self.title = total_steps, clean(title)
        self._began = self._phase_began = time.monotonic()
        self._step_ends.append(self._began)
        if not self.show:
            return
        stream = Enduring(self.stream or sys.stderr)  # a closed pipe does not stop the training
        if self.stream is None and is_notebook():
            self._live = NotebookPanel(self)
        elif stream.isatty():
            self._live = _make_live(cast(IO[str], stream), self.panel)
        if self._live is not None:
            self._live.start()
        else:
            self.say(f"{self.title}: {total_steps} steps")

    def recall(self, steps: Iterable[Mapping[str, Any]], evals: Iterable[Mapping[str, Any]] = ()) -> None:
        """Restore the curves of the steps before a resume, and the evaluations."""
        for metrics in steps:
            self._remember(metrics)
        self.evals = list(evals)

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a finished step."""
        self._remember(metrics)
        self._step_ends.append(time.monotonic())
        step = metrics.get("step")
        is_due = not isinstance(step, int) or step % self.logging_steps == 0 or step == self.total_steps
        self._show(self.line() if is_due else "")

    def enter(self, phase: str) -> None:
        """Show what the trainer is doing; without a panel, only until the first step has metrics to show."""
        self.phase, self._phase_began = phase, time.monotonic()
        self._show("" if self.metrics else phase)

    def counted(self) -> Tally:
        """A counter of the rollouts in progress, whose notes are shown here."""
        self.sampling = _SamplingTally(self)
        return self.sampling

    def say(self, text: str, style: str = "") -> None:
        """Print a line, above the panel if there is one."""
        if self._live is not None:
            self._live.console.print(Text(text, style=style))
        elif self.show:
            print(text, file=cast(IO[str], Enduring(self.stream or sys.stderr)), flush=True)

    def notice(self, text: str) -> None:
        """Show a notice of the `Watch`; the last one stays in the panel."""
        step = number(self.metrics.get("step"))
        self.last_notice = f"! {'' if step is None else f'step {step:.0f}: '}{clean(text)}"
        self.say(self.last_notice, "yellow")

    def eval(self, figures: Mapping[str, Any]) -> None:
        """Show the metrics of an evaluation: ``reward``, ``low``, ``high``, ``n``, ``failed``."""
        self.evals.append({**figures, "step": self.metrics.get("step")})
        self._show(self._eval_text(), force=True)

    def stop(self) -> None:
        """Stop, leaving the last metrics on the screen; a second call does nothing."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    # --- what is drawn ------------------------------------------------------------------------------------------

    def line(self) -> str:
        """The last step on one line, without the metrics that it does not have."""
        metrics = self.metrics
        parts = [
            f"step {metrics.get('step', '–')}/{self.total_steps}",
            self._interval("reward", "reward"),
            self._sampled_text("of all sampled"),
        ]
        parts += [labelled(name, metrics.get(key), form) for name, key, form in _CURVES[:-1]]
        parts += [labelled(name, metrics.get(key) or None, form) for name, key, form in _COUNTS]  # zeros are left out
        parts += [
            labelled("", metrics.get("tokens_per_s"), ",.0f", " tokens/s"),
            labelled("", metrics.get("step_s"), ".2f", " s"),
        ]
        if self._time_left_s() is not None and len(self._step_ends) > 2:
            parts.append(f"{clock(self._time_left_s())} left")
        return "  ".join(part for part in parts if part)

    def panel(self) -> RenderableType:
        """The live panel."""
        curves = Table.grid(padding=(0, 2))
        for name, value, history in self._curves():
            curves.add_row(Text(name, style="bold" if name == "reward" else ""), Text(value), _Curve(history))
        rows: list[RenderableType] = [self._progress_row(), Text(self.phase_text(), style="cyan")]
        rows += [curves] if curves.row_count else []
        if counts := self._counts_text():
            rows.append(Text(counts))
        if parts := self._time_parts():
            rows.append(_time_bar(parts))
        if self.evals:
            rows.append(Text(self._eval_text(), style="bold"))
        if self.last_notice:
            rows.append(Text(self.last_notice, style="yellow"))
        return Panel(Group(*rows), title=Text(self.title), title_align="left", border_style="dim")

    def _progress_row(self) -> RenderableType:
        step = number(self.metrics.get("step")) or 0
        epoch = labelled("epoch", self.metrics.get("epoch"), ".2f")
        gone = f"{clock(time.monotonic() - self._began)} gone, {clock(self._time_left_s())} left"
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(f"step {step:.0f}/{self.total_steps}"),
            ProgressBar(total=max(self.total_steps, 1), completed=step, width=BAR_CHARS),
            Text("  ".join(part for part in (epoch, gone) if part)),
        )
        return row

    def _curves(self) -> list[tuple[str, str, list[float]]]:
        """Label, current value and history of each metric that is drawn as a sparkline."""
        shown = [("reward", self._interval("", "reward"), self._history.get("reward", []))]
        if sampled := self._sampled_text(""):
            shown.append(("of all sampled", sampled, self._history.get("reward_sampled", [])))
        beside = {
            "completion_tokens": labelled(", longest", self.metrics.get("completion_tokens_max"), ".0f"),
            "tokens_per_s": labelled(",", self.metrics.get("step_s"), ".2f", " s a step"),
        }
        for name, key, form in _CURVES:
            value = labelled("", self.metrics.get(key), form) or "–"
            shown.append((name, value + beside.get(key, ""), self._history.get(key, [])))
        return [row for row in shown if row[2]]

    def _counts_text(self) -> str:
        shown = (*_COUNTS, ("clipped", "clip_fraction", ".1%"), ("updates behind", "staleness", ".1f"))
        parts = [labelled(name, self.metrics.get(key), form) for name, key, form in shown]
        return "  ".join(part for part in parts if part)

    def _time_parts(self) -> list[tuple[str, float, str]]:
        """Label, seconds and colour of each phase of the last step, and of the rest of its time."""
        found = [(name, number(self.metrics.get(key)) or 0.0, color) for name, key, color in _PHASES]
        known = sum(seconds for _, seconds, _ in found)
        rest = (number(self.metrics.get("step_s")) or known) - known
        if rest > 0.01 * known:  # there is no rest if phases overlap
            found.append(("other", rest, "dim"))
        return [part for part in found if part[1] > 0]

    # --- text ---------------------------------------------------------------------------------------------------

    def phase_text(self) -> str:
        """What the trainer is doing, and for how long."""
        took = f", {clock(time.monotonic() - self._phase_began)}"
        tally = self.sampling
        if not self.phase.startswith("sampling"):
            return f"{self.phase}{took}"
        if tally is None or not tally.total:  # the engine is timing its backends or compiling
            return f"preparing the sampler, then {self.phase}{took}"
        tokens = tally.activity.tokens_so_far if tally.activity is not None else tally.tokens
        return f"{self.phase}: {tally.done:,} of {tally.total:,} done, {tokens:,} tokens{took}"

    def _sampled_text(self, label: str) -> str:
        """The reward of all sampled rollouts, if not all of them are trained on."""
        return self._interval(label, "reward_sampled") if is_filtered(self.metrics) else ""

    def _interval(self, label: str, name: str) -> str:
        return with_interval(label, *(self.metrics.get(key) for key in (name, f"{name}_low", f"{name}_high")))

    def _eval_text(self) -> str:
        found = self.evals[-1]
        reward = with_interval("reward", found.get("reward"), found.get("low"), found.get("high"))
        loss = labelled("loss", found.get("loss"), ".4f")  # of supervised training
        counts = labelled(" of", found.get("n"), ".0f", " rollouts" if reward else " examples")
        counts += labelled(",", found.get("failed") or None, ".0f", " failed")
        step = number(found.get("step"))
        return f"evaluation{'' if step is None else f' after step {step:.0f}'}: {reward or loss or 'no reward'}{counts}"

    def _time_left_s(self) -> float | None:
        """The remaining time, estimated from the last steps, including evaluations and checkpoints between them."""
        step, ends = number(self.metrics.get("step")), self._step_ends
        if step is None or len(ends) < 2:
            return None
        return (ends[-1] - ends[0]) / (len(ends) - 1) * max(self.total_steps - step, 0)

    # --- state --------------------------------------------------------------------------------------------------

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = metrics
        self.steps.append(metrics)
        for key, value in metrics.items():
            if (found := number(value)) is not None:
                self._history.setdefault(key, []).append(found)

    def _show(self, text: str, force: bool = False) -> None:
        """Redraw the panel, at most every DRAW_EVERY_S; without a panel, print the text, if any."""
        now = time.monotonic()
        if self._live is None:
            if text:
                self.say(text)
        elif force or now - self._drawn_at >= DRAW_EVERY_S:
            self._drawn_at = now
            self._live.refresh()


def _time_bar(parts: Sequence[tuple[str, float, str]]) -> Text:
    """A bar of coloured parts with their labels and shares."""
    total = sum(seconds for _, seconds, _ in parts)
    bar = Text()
    for _, seconds, color in parts:
        bar.append("█" * round(seconds / total * BAR_CHARS), style=color)
    for name, seconds, color in parts:
        bar.append(f"  {name} {seconds / total:.0%}", style=color)
    return bar


class _Curve:
    """A sparkline of the whole history, as wide as space allows."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, len(sparkline(self._values))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self._values, min(options.max_width, SPARK_CHARS)))


class _SamplingTally(Tally):
    """Counts rollouts for the panel; its notes are printed above it."""

    def __init__(self, display: TrainingDisplay) -> None:
        super().__init__()
        self._display = display

    def note(self, text: str) -> None:
        self._display.say(text)


class _Narrower:
    """The panel, slightly narrower than the terminal.

    A terminal echoes ^C at the cursor. On a full line, this would wrap and move the panel down by one line.
    """

    def __init__(self, panel: RenderableType) -> None:
        self._panel = panel

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self._panel, options.update(width=max(options.max_width - ECHO_CHARS, 20)))


def _make_live(stream: IO[str], picture: Callable[[], RenderableType]) -> Live:
    # Results that a program writes to a piped stdout must not be redirected to the panel.
    return Live(
        get_renderable=lambda: _Narrower(picture()),
        console=Console(file=stream),
        refresh_per_second=1,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
