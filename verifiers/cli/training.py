"""The common parts of ``vf train`` and ``vf sft``: options, running a trainer, Ctrl-C, and the final report."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.arguments import Integer, command_line, given_values, read_json
from verifiers.cli.ending import told_by_signals
from verifiers.cli.environments import env_dir_option, explained, load
from verifiers.cli.knobs import Settings, read_settings
from verifiers.cli.launch import ENGINES, divide_batch
from verifiers.cli.tables import some
from verifiers.errors import Interrupted

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.trainers.base_config import TrainingConfig
    from verifiers.trainers.watch.report import Report

ENDS = 5  # the first and last steps whose means are reported
FAILED = 1


def training_options(command: Any) -> Any:
    """Add the options of both commands that are not fields of a configuration."""
    options: list[Callable[[Any], Any]] = [
        click.option("-m", "--model", metavar="MODEL", help="smollm2, a folder, a hub name."),
        click.option(
            "-a",
            "--env-args",
            metavar="JSON",
            callback=read_json,
            default="{}",
            help="Arguments of load_environment().",
        ),
        env_dir_option,
        click.option(
            "--config", metavar="FILE", help="A TOML file, also written @ FILE; the command line overrides it."
        ),
        click.option("--lora", is_flag=True, help="Train adapters instead of all weights."),
        click.option("--lora-r", type=Integer(min=1), metavar="N", help="Their rank (default 8)."),
        click.option("--lora-alpha", type=Integer(min=1), metavar="N", help="Their scale (default 16)."),
        click.option(
            "--resume",
            metavar="[PATH]",
            is_flag=False,
            flag_value="",
            help="Continue from the last checkpoint: of a run, or of --output-dir or --run-name.",
        ),
        click.option("--save-model", metavar="PATH", help="Where to save the trained model (default RUN/model)."),
        click.option(
            "--launch",
            type=click.Choice(ENGINES),
            help="Train in several processes, sharded by FSDP2 or DeepSpeed, or each with the whole model.",
        ),
        click.option(
            "--processes",
            type=Integer(min=1),
            metavar="N",
            help="Number of processes (default: one per GPU); --batch-size is that of all together.",
        ),
        click.option("--dry-run", is_flag=True, help="Load everything, show the plan, and exit."),
        click.option("-v", "--verbose", is_flag=True, help="Show the log and tracebacks."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training with the settings of the command line and of a file."""

    ctx: click.Context
    given: Mapping[str, Any]
    settings: Settings
    kind: type[TrainingConfig]

    @classmethod
    def of(cls, ctx: click.Context, kind: type[TrainingConfig], given: Mapping[str, Any]) -> Job:
        settings = read_settings(given["config"], kind, ctx.info_name or "train")
        job = cls(ctx=ctx, given=given, settings=settings, kind=kind)
        job._check_resume()
        return job

    def config(self) -> TrainingConfig:
        config = self.kind(**self._knobs())
        divide_batch(config)
        return config

    def _knobs(self) -> dict[str, Any]:
        """The fields of the configuration that were set, in the file or on the command line."""
        values = {one.name: self.given.get(one.name) for one in fields(self.kind)}
        values = {name: value for name, value in values.items() if name in given_values(self.ctx)}
        return {**self.settings.knobs, **values}

    def model(self) -> str:
        model = self.given["model"] or self.settings.model
        if model is None:
            raise click.UsageError("no model to train; pass -m smollm2, -m ./folder or -m with a name on the hub")
        return str(model)

    def environment(self) -> Environment | None:
        env_id = self.given["env_id"] or self.settings.env_id
        if env_id is None:
            return None
        args = {**self.settings.env_args, **self.given["env_args"]}
        return load(env_id, self.given["env_dir_path"], args, verbose=self.given["verbose"])

    def lora(self) -> Any:
        values = {name: self.given[f"lora_{name}"] for name in ("r", "alpha") if self.given[f"lora_{name}"] is not None}
        if not (self.given["lora"] or values or self.settings.lora is not None):
            return None
        from verifiers.trainers import lora_defaults

        return lora_defaults(**{**(self.settings.lora or {}), **values})

    def resume(self) -> bool | str:
        path = self.given["resume"]
        return False if path is None else path or True

    def _check_resume(self) -> None:
        """Check that there is a folder to resume from, before anything is loaded."""
        if self.given["resume"] is None:
            return
        knobs = self._knobs()
        path = self.given["resume"] or knobs.get("output_dir")
        if path is None and knobs.get("run_name") is None:
            raise click.UsageError("--resume needs the path of a run, or --output-dir or --run-name to find it")
        if path is not None and not Path(path).is_dir():
            raise click.UsageError(f"--resume {path}: there is no training to resume there")

    # --- running --------------------------------------------------------------------------------------------------

    def build(self, make: Callable[[], Any]) -> Any:
        """Make the trainer; any failure is an error of one sentence."""
        try:
            click.echo(f"loading {self.model()}", err=True)
            return make()
        except (click.ClickException, KeyboardInterrupt):
            raise
        except Exception as error:  # foreign code: a model or a data set
            raise explained(error, "the training cannot start", self.given["verbose"]) from error

    def run(self, trainer: Any) -> tuple[Report, Interrupted | None]:
        """Train; return the report and, if Ctrl-C or a signal stopped it early, that interruption."""
        from verifiers.runner import RunInterruptedError

        with Stopping(trainer) as stopping:
            trainer.callbacks.append(stopping)
            try:
                report: Report = trainer.train(resume=self.resume())
            except RunInterruptedError as stop:  # stopped during rollouts; a checkpoint has been written
                return trainer.report, stop
            except Exception as error:  # foreign code: an environment, a model, a disk
                raise explained(error, "the training ended", self.given["verbose"]) from error
        if stopping.asked is not None and report.is_main:
            report.run_dir.update_metadata({"finished": False})
        return report, stopping.asked

    def end(self, trainer: Any, report: Report, *, stop: Interrupted | None, more: Sequence[str] = ()) -> None:
        """Save the model unless stopped early, print a summary, and exit with the code of the signal if stopped."""
        lines = [_course(report, is_stopped=stop is not None), *more]
        if stop is None:
            path = self.given["save_model"] or report.path / "model"
            trainer.save_model(path)
            lines.append(f"model: {path}")
        lines.append(f"run: {report.path} (vf view {report.path})")
        click.echo("\n".join(lines))
        if stop is not None:
            again = command_line(self.ctx, given_values(self.ctx), without=("resume",), resume=str(report.path))
            click.echo(f"stopped by {stop.cause} after step {trainer.step}; continue with: {again}")
            self.ctx.exit(stop.exit_code)

    def show_plan(self, trainer: Any, plan: Mapping[str, Any]) -> None:
        """Print the plan of a dry run."""
        model = trainer.model
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
        first = next(model.parameters())
        shown = {
            **plan,
            "steps": f"{trainer.total_steps} ({trainer.num_steps_per_epoch} an epoch)",
            "model": f"{self.model()}, {str(first.dtype).removeprefix('torch.')} on {first.device}",
            "trained": f"{trained:,} of {sum(one.numel() for one in model.parameters()):,} parameters",
            "memory": trainer.memory,
            "configuration": trainer.config,
        }
        width = max(map(len, shown))
        click.echo("\n".join(f"{name:<{width}}  {value}" for name, value in shown.items()))
        click.echo("a dry run: nothing was trained or written")


def _course(report: Report, *, is_stopped: bool) -> str:
    name, values = report.curve()
    if not values:
        return "no step was finished" if is_stopped else "no step was made: there is nothing left to do"
    line = f"{name} {_ends(values)} in {some(len(values), 'step')}"
    if (n := _num_ends(values)) > 1:
        line += f" (means of the first and the last {n})"
    if sampled := report.rewards_sampled:
        line += f"; of all sampled {_ends(sampled)}"
    return line


def _ends(values: Sequence[float]) -> str:
    """The means of the first and the last steps, which do not overlap; for a single step, its value."""
    n = _num_ends(values)
    first, last = sum(values[:n]) / n, sum(values[-n:]) / n
    return f"{first:.3f} → {last:.3f}" if len(values) > 1 else f"{first:.3f}"


def _num_ends(values: Sequence[float]) -> int:
    return max(1, min(ENDS, len(values) // 2))


class Stopping(AbstractContextManager["Stopping"]):
    """Within this context, Ctrl-C or a signal finishes the step and saves a checkpoint; a second one ends at once."""

    def __init__(self, trainer: Any = None) -> None:
        self.trainer = trainer
        self.asked: Interrupted | None = None
        self._held = ExitStack()

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._ask)
            self._held.callback(signal.signal, signal.SIGINT, before)
            self._held.enter_context(told_by_signals(self._ask))
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise Interrupted(signum=number)
        self.asked = Interrupted(signum=number)
        message = "finishing this step, then saving a checkpoint; Ctrl-C again ends at once"
        report = getattr(self.trainer, "report", None)
        if report is None:
            click.echo(message, err=True)
        else:
            report.display.say(message)

    def on_step_end(self, trainer: Any, figures: Mapping[str, Any]) -> None:
        from verifiers.trainers.distributed.processes import all_gather

        asked = [one for one in all_gather(trainer.accelerator, getattr(self.asked, "signum", None)) if one is not None]
        if asked:  # of any process, so that all stop after the same step
            self.asked = self.asked or Interrupted(signum=asked[0])
            trainer.report.checkpoint(trainer)
            trainer.should_stop = True
