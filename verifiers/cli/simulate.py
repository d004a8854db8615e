"""``vf simulate``: predicts how well a run would use many GPUs, from measurements on one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import click

from verifiers.cli.tables import table
from verifiers.trainers.distributed.simulation import Prediction, Setup
from verifiers.trainers.distributed.simulation import simulate as play

HELP = {
    "parameters": "Parameters of the model, as 8e9.",
    "sampler_gpus": "GPUs that sample.",
    "gpus_a_replica": "GPUs of one sampler (tensor parallel).",
    "slots": "Sequences that a sampler decodes at once.",
    "tokens_per_s_alone": "Measured: tokens per second of a single sequence.",
    "tokens_per_s_full": "Measured: tokens per second of a full sampler, summed over its sequences.",
    "turns": "Turns per rollout.",
    "tokens_a_turn": "Mean tokens that the model generates per turn.",
    "tokens_sigma": "Their spread: sigma of a log-normal distribution.",
    "prompt_tokens": "Tokens of a rollout that the model did not generate.",
    "env_s": "Mean seconds of the environment between two turns.",
    "env_sigma": "Their spread, as above; 1.0 is a long tail, as tools have.",
    "score_s": "CPU seconds to score one rollout.",
    "env_workers": "CPUs that score.",
    "trainer_gpus": "GPUs that train.",
    "batch": "Rollouts per step.",
    "peak_tflops": "Peak of one GPU, in TFLOPS.",
    "mfu": "Measured: share of the peak that training reaches.",
    "max_staleness": "Maximum updates that a rollout may be behind; 0: sampling and training alternate.",
    "sync_gb_per_s": "Gigabytes per second of a weight transfer to a sampler.",
    "sync_latency_s": "Further seconds of a weight transfer.",
    "train_s": "Measured: seconds per update, instead of parameters, peak and mfu.",
    "colocated": "The same GPUs sample and train, in turn.",
    "steps": "Steps to simulate, after those that fill the pipeline.",
    "seed": "Random seed.",
}


def setup_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option for each field of `Setup`."""
    for one in reversed(fields(Setup)):
        name = f"--{one.name.replace('_', '-')}"
        if one.type == "bool":
            command = click.option(name, is_flag=True, help=HELP[one.name])(command)
            continue
        kind = int if one.type == "int" else float
        shown = f"{HELP[one.name]} (default {one.default})" if one.default is not None else HELP[one.name]
        command = click.option(name, type=kind, default=one.default, metavar="N", help=shown)(command)
    return command


@click.command("simulate", short_help="Predict how well a large run will use its GPUs.")
@setup_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(as_json: bool, **given: Any) -> None:
    """Predict steps per hour and the utilisation of samplers and trainer, from measurements on one GPU.

    \b
    vf simulate                       1,000 GPUs, a model of 8 billion parameters
    vf simulate --max-staleness 0     the same, sampling and training in turn
    vf simulate --sampler-gpus 1 --trainer-gpus 1 --colocated --max-staleness 0
    """
    try:
        setup = Setup(**given)
        found = play(setup)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"setup": asdict(setup), "prediction": asdict(found)}))
        return
    click.echo("\n".join(table([list(row) for row in _rows(setup, found)])))
    click.echo("assumptions: see docs/scale.md, or verifiers/trainers/distributed/simulation.py")


def _rows(setup: Setup, found: Prediction) -> list[tuple[str, str]]:
    cards = f"{setup.replicas} samplers of {setup.gpus_a_replica}, {setup.trainer_gpus} that train"
    if setup.colocated:
        cards = "the same GPUs sample and train, in turn"
    return [
        ("GPUs", f"{found.gpus:,}: {cards}"),
        ("a step", f"{found.step_s:.1f} s, {found.steps_an_hour:.1f} an hour, {setup.batch:,} rollouts"),
        ("sampled", f"{found.tokens_per_s:,.0f} tokens a second"),
        ("samplers busy", f"{found.sampler_use:.0%} of what full ones would sample"),
        ("trainer busy", f"{found.trainer_use:.0%} of the time"),
        ("weights", f"{found.sync_share:.1%} of the time, all samplers stopped for {setup.sync_s:.1f} s a step"),
        ("staleness", f"{found.mean_staleness:.2f} updates on average, at most {found.worst_staleness}"),
        ("held up by", found.bottleneck),
    ]
