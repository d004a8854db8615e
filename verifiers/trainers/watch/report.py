"""A running training → its run directory, live display, trackers and notices."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from verifiers.engine.files.smollm2 import public_name
from verifiers.engine.local_model import LocalModel
from verifiers.kernels import autograd
from verifiers.kernels.modules import is_quantised
from verifiers.notebooks import image_html, page_html, text_html
from verifiers.results import Results
from verifiers.rubrics.signature import name_of
from verifiers.store import RunDir, safe_name
from verifiers.store.plain import plain
from verifiers.trainers import checkpoints
from verifiers.trainers.advantages import mean_advantage
from verifiers.trainers.batch import Batch
from verifiers.trainers.distributed.processes import all_gather, raise_everywhere
from verifiers.trainers.reward_weights import reward_weights
from verifiers.trainers.stopping import NotFiniteError
from verifiers.trainers.watch.audit import audit
from verifiers.trainers.watch.display import TrainingDisplay
from verifiers.trainers.watch.doctor import Watch
from verifiers.trainers.watch.figures import batch_view, merge_views, rollout_figures, rollout_seconds
from verifiers.trainers.watch.journal import Journal, record_of
from verifiers.trainers.watch.plot import plot_svg, plot_text
from verifiers.trainers.watch.tracking import trackers
from verifiers.trainers.watch.wording import is_filtered

if TYPE_CHECKING:
    from verifiers.trainers.base_config import TrainingConfig
    from verifiers.trainers.grpo_trainer import GRPOTrainer
    from verifiers.trainers.trainer import Trainer

DEFAULT_ROOT = Path("outputs/train")
NO_EVAL_ROWS = (
    "evaluations use the training rows, because the environment has no others: they cannot distinguish learning from "
    "memorising; pass eval_dataset= to the trainer or to the environment"
)
_UNLEARNED = re.compile(r"output_dir|run_name|logging_steps|report_to|show_progress|log_rollouts|workers|(eval|save)_")


class Report:
    """A training's ``path`` (run directory), ``steps`` and ``evals`` (their metrics), ``notices`` and ``last`` step."""

    def __init__(self, trainer: Trainer, resume: bool | str | Path = False) -> None:
        self.config: TrainingConfig = trainer.config
        self._processes = trainer.accelerator
        self.is_main: bool = trainer.accelerator.is_main_process
        env = trainer.env
        self.env_id = "examples" if env is None else getattr(env, "env_id", "") or type(env).__name__
        model = trainer.unwrapped_model
        self.model = public_name(str(getattr(model, "name_or_path", "") or type(model).__name__))
        self.title = f"{self.env_id} · {self.model}"
        self.from_checkpoint, self.path = self._locate(resume)
        self._resumes = bool(resume)
        self.steps: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.notices: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self._total_steps = trainer.total_steps
        self._total_tokens = 0
        self.backend = _backend_of(trainer)
        self._resources = ExitStack()
        shows = self.is_main and self.config.show_progress
        self.display = TrainingDisplay(show=shows, logging_steps=self.config.logging_steps)
        # User functions are stored by name.
        functions = {name: getattr(trainer, f"_own_{name}", None) for name in ("advantage", "loss")}
        self._functions = {name: f"{name_of(one)} (a function)" for name, one in functions.items() if one is not None}
        self._watch = Watch(self.config, weights=reward_weights(env))
        self._weights = {} if env is None else env.rubric.reward_shares()
        self._evaluates_training_rows = getattr(trainer, "evaluates_training_rows", False)
        self._is_open = False

    def _locate(self, resume: bool | str | Path) -> tuple[Path | None, Path]:
        """The checkpoint to resume from, if any, and the run directory."""
        if isinstance(resume, (str, Path)):
            path = Path(resume)
            if (path / checkpoints.STATE).is_file():
                return path, path.parent.parent
            return _newest(path), path
        name = Path(safe_name(f"{self.env_id}--{self.model}"))
        if self.config.output_dir is not None:
            path = Path(self.config.output_dir)
        elif self.config.run_name is not None:
            path = DEFAULT_ROOT / name / safe_name(self.config.run_name)
        elif resume:
            raise ValueError(
                "resume=True needs output_dir or run_name to find the run; set one of them, or pass resume='its path'"
            )
        else:
            path = DEFAULT_ROOT / name / os.urandom(4).hex()
        return (_newest(path) if resume else None), path

    # --- lifetime -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Report:
        with raise_everywhere(self._processes):
            is_new = not self.path.exists()
            try:
                if self.is_main:
                    self._open()
            except BaseException:
                self._resources.close()
                if is_new:  # nothing was trained, and an empty run directory would block the next attempt
                    shutil.rmtree(self.path, ignore_errors=True)
                raise
        return self

    def _open(self) -> None:
        config = {**self.config.to_dict(), **self._functions}
        if (self.path / "metadata.json").is_file():
            if not self._resumes:
                raise FileExistsError(f"{self.path} holds a run; train(resume=True) resumes it, or use another folder")
            self.run_dir = RunDir.open(self.path)
            if self.run_dir.metadata.get("kind") != "training":
                raise ValueError(f"{self.path} is the run of an evaluation, not of a training; use another folder")
        else:
            stored = {"kind": "training", **config}
            self.run_dir = RunDir.create_at(self.path, env_id=self.env_id, model=self.model, config=stored)
        self.journal = self._resources.enter_context(Journal(self.run_dir))
        self.run_dir.update_metadata(
            {"kind": "training", "finished": False, "backend": self.backend, "reward_weights": self._weights}
        )
        self._trackers = trackers(
            self.config.report_to,
            run_name=self.config.run_name or self.path.name,
            config=config,
            folder=self.path,
        )
        for tracker in self._trackers:
            self._resources.callback(tracker.close)
        self._resources.callback(self.display.stop)
        self.display.start(self._total_steps, f"{self.title} · {self.backend}")
        self._is_open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, NotFiniteError):
            error.args = (f"{error}; {self._recovery_hint()}",)
            if self._is_open:
                self.journal.write_notice(int(self.last.get("step") or 0) + 1, str(error))
        self._is_open = False
        self._resources.close()

    def _recovery_hint(self) -> str:
        """What to do after the weights became NaN or infinite."""
        found = checkpoints.checkpoints(self.path / "checkpoints")
        rate = f"a learning_rate below {self.config.learning_rate:g}"
        if not found:
            return f"there is no checkpoint; start again with {rate}"
        return f"the last good checkpoint is {found[-1]}: resume from it with {rate}"

    def resume(self, trainer: Trainer) -> dict[str, Any]:
        """Load weights and reference from the checkpoint, and drop what the run logged after it."""
        state: dict[str, Any] = {"step": 0, "cursor": 0}
        if self.from_checkpoint is not None:
            state = checkpoints.load(self.from_checkpoint, trainer.weights)
            state |= _rows_per_process(state, self._processes.num_processes)
            if trainer.reference is not None:
                checkpoints.load_reference(self.from_checkpoint, trainer.reference)
        if self._is_open:
            self.journal.rewind(state["step"])
            checkpoints.set_aside(self.path / "checkpoints", state["step"])
            self.steps = list(self.journal.steps())
            self.evals = [{"step": line["step"], **line["eval"]} for line in self.journal.evals()]
            self.notices = [{name: line[name] for name in ("step", "notice")} for line in self.journal.notices()]
            self.last = dict(self.steps[-1]) if self.steps else {}
            self._watch.recall(self.steps)
            self.display.recall(self.steps, self.evals)
            self._total_tokens = int(self.last.get("total_tokens") or 0)
            if changed := _changes(state, self._settings(trainer)):
                self.notice(state["step"], f"resumed with changed settings: {', '.join(changed)}")
        return state

    # --- logging --------------------------------------------------------------------------------------------------

    def step(
        self, trainer: GRPOTrainer, batch: Batch, figures: dict[str, Any], *, waited_s: float, trained_s: float
    ) -> None:
        """Log a step of GRPO: the metrics of its rollouts and of its update."""
        view = merge_views(all_gather(trainer.accelerator, batch_view(batch)))
        seen = rollout_figures(view)
        times = {**rollout_seconds(view, batch.seconds.get("generation", waited_s)), "training_s": trained_s}
        weights = {"reward_weights": batch.reward_weights} if trainer.weight_schedule else {}
        metrics = {**seen, **figures, **times, **weights}
        self.keep_rollouts(trainer.step, batch)
        self.note(trainer, metrics, tokens=seen["sampled_tokens"], seconds=waited_s + trained_s, view=view)

    def note(
        self,
        trainer: Trainer,
        figures: Mapping[str, Any],
        *,
        tokens: int,
        seconds: float,
        view: Mapping[str, Any] | None = None,
    ) -> None:
        """Log the metrics of a step; ``view`` has the columns of its rollouts for `Watch`."""
        step = trainer.step
        self._total_tokens += tokens
        self.last = {
            "step": step,
            "epoch": round(step / trainer.num_steps_per_epoch, 4),
            **figures,
            "step_s": seconds,
            "tokens_per_s": tokens / seconds if tokens and seconds else None,
            "total_tokens": self._total_tokens,
        }
        self.steps.append(self.last)
        if not self._is_open:
            return
        self.journal.write_step(self.last)
        if step % self.config.logging_steps == 0 or step == self._total_steps:
            for tracker in self._trackers:
                tracker.log(step, self.last)
        self.display.update(self.last)
        for notice in self._watch.look(self.last, view or {}):
            self.notice(step, notice.text)

    def notice(self, step: int, text: str) -> None:
        """Log and show a notice."""
        self.notices.append({"step": step, "notice": text})
        if not self._is_open:
            return
        self.journal.write_notice(step, text)
        self.display.notice(text)

    def keep_rollouts(self, step: int, batch: Batch) -> None:
        """Write up to ``log_rollouts`` scored rollouts of all processes together, and as many failed ones."""
        n = self._processes.num_processes
        most = math.ceil(getattr(self.config, "log_rollouts", 0) / n)
        advantages = batch.get("advantages") or [None] * len(batch["completions"])
        played = (
            (reply.state, mean_advantage(advantage), batch.ratios.get(place))
            for place, (reply, advantage) in enumerate(zip(batch["completions"], advantages, strict=True))
            if getattr(reply, "state", None) is not None
        )
        kept: list[tuple[Any, ...]] = [*islice(played, most), *((state, None) for state in batch.failed[:most])]
        records = all_gather(self._processes, [record_of(step, *one) for one in kept] if n > 1 or self._is_open else [])
        if self._is_open:
            self.journal.write_records([record for part in records for record in part])

    def evaluated(self, step: int, outcome: Any) -> None:
        """Log an evaluation: `Results`, or whatever an overridden ``evaluate`` returned."""
        figures = _eval_figures(outcome)
        if self._evaluates_training_rows and not self.evals:
            self.notice(step, NO_EVAL_ROWS)
        self.evals.append({"step": step, **figures})
        if not self._is_open:
            return
        self.journal.write_eval(step, figures)
        for tracker in self._trackers:
            tracker.log(step, {"eval": figures})
        self.display.eval(figures)

    def checkpoint(self, trainer: Trainer) -> Path | None:
        """Write a checkpoint of the current state."""
        unlearned = trainer.unlearned()
        if not self._is_open and not trainer.weights.is_sharded:
            return None
        trainer.weights.check_finite("before saving")
        state = {
            "cursor": trainer.cursor,
            "learned": trainer.learned,
            "processes": trainer.accelerator.num_processes,
            "config": self._settings(trainer),
        }
        return checkpoints.save(
            self.path / "checkpoints",
            step=trainer.step,
            model=trainer.unwrapped_model,
            tokenizer=trainer.tokenizer,
            weights=trainer.weights,
            state=state,
            keep=self.config.save_total_limit,
            reference=trainer.reference,
            unlearned=unlearned,
        )

    def _settings(self, trainer: Trainer) -> dict[str, Any]:
        """The settings that may change when a training is resumed: configuration, functions, rows and adapters."""
        adapters = getattr(trainer.unwrapped_model, "peft_config", {}).values()
        scales = ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")
        own = {name: getattr(one, name) for one in adapters for name in scales if hasattr(one, name)}
        own |= {**trainer.config.to_dict(), **self._functions, "rows": len(trainer.rows)}
        return dict(plain(own))

    def finish(self) -> None:
        """Write the plot and the audit."""
        if not self._is_open:
            return
        self.display.stop()
        (self.path / "plot.svg").write_text(plot_svg(self.steps, self.evals, self.title), encoding="utf-8")
        (self.path / "audit.md").write_text(audit(self.journal.lines(), self.run_dir.records()), encoding="utf-8")
        self.run_dir.update_metadata({"finished": True, "num_steps": len(self.steps), "finished_at": time.time()})

    # --- reading --------------------------------------------------------------------------------------------------

    @property
    def rewards(self) -> list[float]:
        """The mean reward of the rollouts that each step trained on."""
        return [line["reward"] for line in self.steps if line.get("reward") is not None]

    @property
    def rewards_sampled(self) -> list[float]:
        """The mean reward of all rollouts of each step; empty if every step trained on all of them."""
        if not any(map(is_filtered, self.steps)):
            return []
        return [line["reward_sampled"] for line in self.steps if line.get("reward_sampled") is not None]

    def curve(self) -> tuple[str, list[float]]:
        """Name and values by step of the reward, or of the loss if there is no reward."""
        name = "reward" if self.rewards else "loss"
        return name, [line[name] for line in self.steps if line.get(name) is not None]

    def picture(self, width: int = 64, height: int = 12) -> str:
        """The reward (or, in supervised training, the loss) by step, as a text plot."""
        return plot_text(self.curve()[1], width, height)

    def _repr_html_(self) -> str:
        """Summary, curves and the last notices, for a notebook."""
        notices = [text_html(f"step {one['step']}: {one['notice']}", "vf-bad") for one in self.notices[-4:]]
        curves = image_html(plot_svg(self.steps, self.evals, self.title), "the learning curve") if self.steps else ""
        return page_html(text_html(repr(self)), curves, *notices)

    def __repr__(self) -> str:
        name, values = self.curve()
        summary = f", {name} {values[0]:.3f} → {values[-1]:.3f}" if values else ""
        if sampled := self.rewards_sampled:
            summary += f" (of all sampled {sampled[0]:.3f} → {sampled[-1]:.3f})"
        return f"Report({len(self.steps)} steps{summary}, {str(self.path)!r})"


def _rows_per_process(state: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """The row cursor of each process, if the checkpoint may be from another number of processes.

    >>> _rows_per_process({"cursor": 3, "processes": 2, "learned": [8]}, 4)
    {'cursor': 1, 'learned': [4, 5, 8]}
    """
    taken = state["cursor"] * state.get("processes", processes)
    each = taken // processes
    return {"cursor": each, "learned": [*range(each * processes, taken), *state.get("learned", ())]}


def _changes(state: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that changed when a training was resumed, except those without influence on what it learns.

    >>> _changes({"config": {"seed": 0, "run_name": "a", "beta": 0.1}}, {"seed": 1, "run_name": "b", "beta": 0.1})
    ['seed=1 (was 0)']
    """
    before = state.get("config") or {}
    known = {name: now[name] for name in before if name in now and not _UNLEARNED.match(name)}
    return [f"{name}={value!r} (was {before[name]!r})" for name, value in known.items() if value != before[name]]


def _backend_of(trainer: Trainer) -> str:
    """The backends of sampling and of training, with the reasons why faster ones are not used."""
    if (named := getattr(trainer, "backend", None)) is not None:  # a service trains the model
        return str(named)
    client, learns = getattr(trainer, "client", None), f"learns {autograd.describe(trainer.unwrapped_model)}"
    if is_quantised(trainer.unwrapped_model):
        learns += " between the multiplications, which are the quantised modules' own"
    if trainer.memory.told:
        learns += f"; to fit into memory: {', '.join(trainer.memory.told)}"
    return f"sampled {client.backend}, {learns}" if isinstance(client, LocalModel) else learns


def _newest(path: Path) -> Path | None:
    if not path.is_dir():
        raise FileNotFoundError(f"there is no training to resume in {path}")
    found = checkpoints.checkpoints(path / "checkpoints")
    return found[-1] if found else None


def _eval_figures(outcome: Any) -> dict[str, Any]:
    if not isinstance(outcome, Results):
        return {"reward": float(outcome)} if isinstance(outcome, (int, float)) else dict(outcome or {})
    interval = outcome.interval()
    return {
        "reward": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "n": len(outcome.scored),
        "failed": len(outcome.failed),
        "metrics": {name: outcome.interval(name).mean for name in outcome.metric_names},
    }
