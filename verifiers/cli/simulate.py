"""``vf simulate``: figures of one card, and how many there are → how well a run would use them."""

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
    "tokens_per_s_alone": "Measured: tokens a second of one sequence alone.",
    "tokens_per_s_full": "Measured: tokens a second of a full sampler, of all its sequences together.",
    "turns": "Turns of a rollout.",
    "tokens_a_turn": "Tokens that the model says in a turn, on average.",
    "tokens_sigma": "Their spread: sigma of a log-normal distribution.",
    "prompt_tokens": "Tokens of a rollout that the model did not say.",
    "env_s": "Seconds that the environment takes between two turns, on average.",
    "env_sigma": "Their spread; 1.0 is a long tail, as tools have.",
    "score_s": "Processor seconds that scoring takes for one rollout.",
    "env_workers": "Processors that score.",
    "trainer_gpus": "GPUs that learn.",
    "batch": "Rollouts of a step.",
    "peak_tflops": "Peak of one GPU, in TFLOPS.",
    "mfu": "Measured: share of the peak that learning reaches.",
    "max_staleness": "Updates that a rollout may be behind; 0: sampling and learning take turns.",
    "sync_gb_per_s": "Gigabytes a second at which new weights reach a sampler.",
    "sync_latency_s": "Seconds that an exchange of weights takes beside that.",
    "train_s": "Measured: seconds of an update, in place of parameters, peak and mfu.",
    "colocated": "The same GPUs sample and learn, in turn.",
    "steps": "Steps to simulate, after those that fill the pipeline.",
    "seed": "Of what is drawn.",
}


def setup_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for each field."""
    for one in reversed(fields(Setup)):
        name = f"--{one.name.replace('_', '-')}"
        if one.type == "bool":
            command = click.option(name, is_flag=True, help=HELP[one.name])(command)
            continue
        kind = int if one.type == "int" else float
        shown = f"{HELP[one.name]} (default {one.default})" if one.default is not None else HELP[one.name]
        command = click.option(name, type=kind, default=one.default, metavar="N", help=shown)(command)
    return command


@click.command("simulate", short_help="Predict how well a large run would use its GPUs.")
@setup_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(as_json: bool, **given: Any) -> None:
    """Predict steps an hour and how busy samplers and trainer are, from figures that were measured on one card.

    \b
    vf simulate                                     1,000 GPUs and a model of 8 billion parameters
    vf simulate --max-staleness 0                   the same, sampling and learning in turn
    vf simulate --sampler-gpus 1 --trainer-gpus 1 --colocated --batch 256 --max-staleness 0
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
    click.echo("what is assumed: docs/scale.md, or verifiers/trainers/distributed/simulation.py")


def _rows(setup: Setup, found: Prediction) -> list[tuple[str, str]]:
    cards = f"{setup.replicas} samplers of {setup.gpus_a_replica}, {setup.trainer_gpus} for learning"
    if setup.colocated:
        cards = "the same cards sample and learn, in turn"
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
