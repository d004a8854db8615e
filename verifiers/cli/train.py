"""``vf train``: trains a model on an environment, and writes the model and a run directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.environments import complete_environments
from verifiers.cli.knobs import FileCommand, knob_options
from verifiers.cli.launch import launched
from verifiers.cli.telling import told
from verifiers.cli.training import Job, training_options
from verifiers.trainers.config import GRPOConfig

if TYPE_CHECKING:
    from verifiers.results import Results


@click.command("train", cls=FileCommand, short_help="Train a model on an environment.")
@click.argument("env_id", metavar="[ENV]", required=False, shell_complete=complete_environments)
@training_options
@click.option("--eval-before-after", is_flag=True, help="Evaluate before the first and after the last step.")
@click.option(
    "--backend",
    type=click.Choice(["local", "tinker"]),
    default="local",
    show_default=True,
    help="Where the model is: in this process, or at Tinker (key in TINKER_API_KEY), which trains a LoRA.",
)
@click.option("--base-url", metavar="URL", help="URL of Tinker; vf tinker-serve runs your own server.")
@click.option(
    "--sampler",
    multiple=True,
    metavar="URL",
    help="Server to sample from: vf serve, vf-vllm; or a file of URLs (repeat).",
)
@click.option("--sampler-key-var", metavar="NAME", help="Environment variable with the key of the samplers.")
@knob_options(GRPOConfig)
@click.pass_context
def train(ctx: click.Context, /, **given: Any) -> None:
    """Train MODEL on ENV with GRPO, which compares rollouts of the same prompt with one another.

    \b
    vf train reverse-text -m smollm2 --max-steps 100 --learning-rate 1e-5
    vf train gsm8k -m Qwen/Qwen3-0.6B --lora --batch-size 64 --group-size 16
    vf train gsm8k -m Qwen/Qwen3-8B --backend tinker --lora-r 32 --max-steps 50
    vf train @ config.toml --eval-before-after   everything from a file
    vf train … --sampler http://gpu2:8000/v1     another process samples
    vf train … --launch fsdp2 --processes 8      on 8 GPUs, the model sharded
    vf train … --dry-run                         show the plan
    vf train … --resume outputs/train/…          continue a run that was stopped

    The options from --learning-rate on are fields of vf.GRPOConfig; docs/training.md says what each does. The file
    may contain any of them, at the top or under [train], and env, model, [env] (with id and the arguments of
    load_environment) and [lora]. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    with told(given["verbose"]):
        job = Job.of(ctx, GRPOConfig, given)
        if (code := launched(job)) is not None:
            ctx.exit(code)
        model = job.model()
        env = job.environment()
        if env is None:
            raise click.UsageError("no environment to train on; pass ENV, or set env in the file")
        is_remote = given["backend"] == "tinker"
        if given["base_url"] and not is_remote:
            raise click.UsageError("--base-url is the URL of Tinker; it needs --backend tinker")
        trainer = job.build(lambda: (_tinker_trainer if is_remote else _trainer)(job, model, env))
        if given["dry_run"]:
            _show_remote_plan(trainer) if is_remote else job.show_plan(trainer, _plan(trainer))
            return
        measured = BeforeAfter()
        if given["eval_before_after"]:
            trainer.callbacks.append(measured)
        report, stop = job.run(trainer)
        job.end(trainer, report, stop=stop, more=measured.lines())


def _trainer(job: Job, model: str, env: Any) -> Any:
    from verifiers.trainers import GRPOTrainer, Samplers

    servers, variable = job.given["sampler"], job.given["sampler_key_var"]
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not (key and servers):
        lacks = "there is no --sampler" if key else "this environment variable is not set"
        raise click.UsageError(f"--sampler-key-var {variable}: {lacks}")
    client = Samplers(*servers, api_key=key) if servers else None
    if client is not None:
        client.check()
    return GRPOTrainer(model=model, env=env, config=job.config(), peft_config=job.lora(), client=client)


def _tinker_trainer(job: Job, model: str, env: Any) -> Any:
    from verifiers.integrations.tinker import TinkerTrainer

    rank = job.given["lora_r"] or (job.settings.lora or {}).get("r")
    if job.given["lora_alpha"] or "alpha" in (job.settings.lora or {}):
        raise click.UsageError("--lora-alpha cannot be set with Tinker; leave it out")
    where = job.given["base_url"]
    return TinkerTrainer(model, env, job.config(), base_url=where, **({} if rank is None else {"rank": rank}))


def _plan(trainer: Any) -> Mapping[str, Any]:
    config, env = trainer.config, trainer.env
    dropped = f", {trainer.dropped_prompts} too long" if trainer.dropped_prompts else ""
    size = f"{trainer.rows_per_step} prompts × {config.group_size} rollouts"
    rollouts = trainer.total_steps * trainer.rows_per_step * config.group_size
    return {
        "environment": env.env_id or type(env).__name__,
        "rows": f"{len(trainer.rows)} to train on{dropped}, {len(trainer.eval_rows)} to evaluate on",
        "a step": f"{size} of at most {config.max_new_tokens} tokens",
        "rollouts": f"{rollouts:,} in all",
    }


def _show_remote_plan(trainer: Any) -> None:
    """Print the plan of a dry run for a remote model."""
    shown = {
        **_plan(trainer),
        "steps": f"{trainer.total_steps} ({trainer.num_steps_per_epoch} an epoch)",
        "model": f"{trainer.model.name_or_path}, {trainer.backend}",
        "configuration": trainer.config,
    }
    width = max(map(len, shown))
    click.echo("\n".join(f"{name:<{width}}  {value}" for name, value in shown.items()))
    click.echo("a dry run: nothing was trained or written")


class BeforeAfter:
    """A callback that evaluates before and after training."""

    def __init__(self) -> None:
        self.found: list[Results] = []

    def on_train_begin(self, trainer: Any) -> None:
        self._evaluate(trainer)

    def on_train_end(self, trainer: Any) -> None:
        self._evaluate(trainer)

    def _evaluate(self, trainer: Any) -> None:
        results = trainer.evaluate()
        self.found.append(results)
        trainer.report.evaluated(trainer.step, results)

    def lines(self) -> list[str]:
        """The two evaluations with their intervals."""
        if len(self.found) < 2:
            return []
        before, after = (_with_interval(results) for results in (self.found[0], self.found[-1]))
        failed = sum(len(results.failed) for results in self.found)
        more = f", {failed} failed" if failed else ""
        return [f"evaluation before {before}, after {after}; {len(self.found[-1].rollouts)} rollouts each{more}"]


def _with_interval(results: Results) -> str:
    found = results.interval()
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def main() -> None:
    """The entry point of ``vf-train``."""
    from verifiers.cli.main import vf

    vf(args=["train", *sys.argv[1:]], prog_name="vf")
