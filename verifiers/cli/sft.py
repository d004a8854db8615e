"""``vf sft``: supervised fine-tuning of a model on examples, as a warm-up for ``vf train``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from verifiers.cli.environments import complete_environments
from verifiers.cli.knobs import FileCommand, knob_options
from verifiers.cli.launch import launched
from verifiers.cli.telling import told
from verifiers.cli.training import Job, training_options
from verifiers.trainers.config import SFTConfig


@click.command("sft", cls=FileCommand, short_help="Train a model to imitate examples.")
@click.argument("env_id", metavar="[ENV]", required=False, shell_complete=complete_environments)
@training_options
@click.option(
    "-d", "--data", metavar="PATH", help="A saved run, or a file of rows (jsonl, json, parquet); default ENV's answers."
)
@click.option("--eval-data", metavar="PATH", help="Rows whose loss is computed every --eval-steps.")
@knob_options(SFTConfig)
@click.pass_context
def sft(ctx: click.Context, /, **given: Any) -> None:
    """Train MODEL to imitate examples: rows with prompt and completion or messages, saved rollouts, gold answers.

    \b
    vf sft arithmetic -m smollm2 --max-steps 100          ENV's gold answers
    vf sft -m smollm2 -d outputs/evals/… --min-reward 1   the right rollouts
    vf sft -m ./folder -d chats.jsonl --num-epochs 2      rows with messages

    The options from --learning-rate on are fields of vf.SFTConfig; docs/training.md says what each does. A file
    (@ config.toml) may contain any of them, at the top or under [sft], and env, model, data, [env] and [lora]. Exit
    codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    with told(given["verbose"]):
        job = Job.of(ctx, SFTConfig, given)
        if (code := launched(job)) is not None:
            ctx.exit(code)
        data = given["data"] or job.settings.data
        model = job.model()
        env = job.environment()
        if env is None and data is None:
            raise click.UsageError("no examples to train on; pass ENV for its answers, or -d PATH for a run or a file")
        trainer = job.build(lambda: _trainer(job, model, env, data))
        if given["dry_run"]:
            job.show_plan(trainer, _plan(trainer))
            return
        report, stop = job.run(trainer)
        job.end(trainer, report, stop=stop)


def _trainer(job: Job, model: str, env: Any, data: str | None) -> Any:
    from verifiers.trainers import SFTTrainer

    return SFTTrainer(
        model=model,
        dataset=data,
        env=env,
        eval_dataset=job.given["eval_data"],
        config=job.config(),
        peft_config=job.lora(),
    )


def _plan(trainer: Any) -> Mapping[str, Any]:
    found = trainer.examples
    tokens = sum(sum(sample.completion_mask) for sample in found.samples)
    left_out = {"failed": found.failed, "below min_reward": found.below, "too long": found.overlong}
    dropped = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
    more = f" (left out: {dropped})" if dropped else ""
    return {
        "examples": f"{len(found.samples)} with {tokens:,} tokens to train on{more}",
        "a step": f"{trainer.rows_per_step} examples",
    }
