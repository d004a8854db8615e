"""``vf plan``: the memory that training a model needs on some GPUs, and the command that starts the training."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from verifiers.cli.answering import check_extra
from verifiers.cli.arguments import Integer
from verifiers.cli.tables import fitted, table, terminal_width

if TYPE_CHECKING:
    from verifiers.trainers.memory.plan import ModelSize
    from verifiers.trainers.memory.ways import Way

PARTS = ("weights", "gradients", "optimizer", "KV cache", "activations", "logits")
LENGTH = 4096  # default tokens of a sequence
WIDTHS = {"bfloat16": 2, "float32": 4}


@click.command("plan", short_help="Show which training of a model fits into which GPUs.")
@click.argument("model", metavar="MODEL")
@click.option("--gpus", metavar="NxSIZE", help="Such as 4x24GB or 80GiB (default: those of this machine).")
@click.option(
    "--length",
    type=Integer(min=1),
    help=f"Tokens of a sequence (default: {LENGTH}, or the context length of MODEL if that is less).",
)
@click.option(
    "--rollouts",
    type=Integer(min=1),
    default=32,
    show_default=True,
    help="Rollouts per step; each GPU has whole groups of 8.",
)
@click.option("--host", metavar="SIZE", help="Memory of the host, such as 128GB (default: not checked).")
@click.option("--lora-r", type=Integer(min=1), default=8, show_default=True, help="Rank of the adapters.")
@click.option("--dtype", type=click.Choice(list(WIDTHS)), default="bfloat16", show_default=True, help="Of the weights.")
def plan(
    model: str, gpus: str | None, length: int | None, rollouts: int, host: str | None, lora_r: int, dtype: str
) -> None:
    """Show the memory that each way of training MODEL needs, and the command for the best one that fits the GPUs.

    \b
    vf plan Qwen/Qwen3-8B --gpus 4x24GB --length 4096
    vf plan ./folder --gpus 1x80GB       a folder with a config.json, or that file

    Only the configuration is read, not the weights. A peak is the maximum of one GPU over time, not the sum of the
    parts: there are no gradients while the model is sampled from. A tenth of each GPU is kept free.
    """
    check_extra()
    from verifiers.trainers.memory.ways import best, ways_to_train

    size = _size_of(model)
    length = min(LENGTH, size.longest or LENGTH) if length is None else length
    if size.longest is not None and length > size.longest:
        raise click.UsageError(f"--length {length} is more than the context length of {model}, {size.longest:,}")
    cards, card_bytes, kind = _cards(gpus)
    host_bytes = _size("--host", host)[1] if host else float("inf")
    ways = ways_to_train(
        size, length=length, cards=cards, card_bytes=card_bytes, kind=kind, host_bytes=host_bytes, rollouts=rollouts,
        lora_r=lora_r, weight_bytes=WIDTHS[dtype],
    )  # fmt: skip
    named = {"cuda": "GPU", "cpu": "CPU"}.get(kind, kind)
    asked = (
        f"{model}: {size.parameters / 1e9:.2f}B parameters in {dtype}; {cards} × {card_bytes / 1e9:.1f} GB ({named}); "
        f"sequences of {length:,} tokens, {ways[0].rollouts} rollouts a step; GB on each GPU"
    )
    click.echo("\n".join([*fitted([asked]), *_table(ways)]))
    chosen = best(ways)
    if chosen is None:
        click.echo("nothing fits: use more or larger GPUs, shorter sequences (--length), or a smaller model")
        raise click.exceptions.Exit(1)
    place = str(Path(model).parent) if Path(model).is_file() and model.endswith(".json") else model
    if chosen.plan.host and host is None:
        need = f"the best that fits needs {_gb(chosen.plan.host)} GB of host memory per GPU; check it with --host SIZE"
        click.echo("\n".join(["", *fitted([need])]))
    click.echo(f"\nlaunch: {shlex.join(['vf', 'train', 'ENV', '-m', place, *chosen.flags])}")


def _table(ways: Sequence[Way]) -> list[str]:
    """One line per way; without the parts of its peak in a terminal that is too narrow for them."""
    lines: list[str] = []
    for parts in (PARTS, ()):
        header = ["trained", "optim", "sharding", *parts, "peak", "host", "fits"]
        lines = table([_row(way, parts) for way in ways], header=header, right=range(3, len(header) - 1))
        if not sys.stdout.isatty() or len(lines[0]) <= terminal_width():
            break
    return fitted(lines, indent=2)


def _row(way: Way, parts: Sequence[str]) -> list[str]:
    found = way.plan
    told = f" ({', '.join(found.told)})" if found.fits and found.told else ""
    sizes = [_gb(found.parts[name]) for name in parts]
    host = _gb(found.host) if found.host else ""
    asked = found.asked
    return [
        way.name,
        asked.optim,
        asked.sharding,
        *sizes,
        _gb(found.peak),
        host,
        f"{'yes' if found.fits else 'no'}{told}",
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _size_of(model: str) -> ModelSize:
    from verifiers.engine.files.models import get_config
    from verifiers.trainers.memory.plan import ModelSize

    try:
        config = get_config(model)
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(f"the configuration of {model} cannot be loaded: {error}") from error
    try:
        return ModelSize.of(config)
    except Exception as error:  # foreign code: transformers builds the model
        reason = " ".join(str(error).split())[:300]
        raise click.ClickException(f"the configuration of {model} does not define a valid model: {reason}") from error


def _cards(gpus: str | None) -> tuple[int, float, str]:
    if gpus is not None:
        return *_size("--gpus", gpus), "cuda"
    from verifiers.trainers.memory.job import this_machine

    return this_machine()


def _size(option: str, text: str) -> tuple[int, float]:
    from verifiers.trainers.memory.ways import read_cards

    try:
        return read_cards(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error
