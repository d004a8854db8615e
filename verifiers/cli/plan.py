"""``vf plan``: a model's configuration and some cards → what training it takes there, and the line that begins it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from verifiers.cli.answering import check_extra
from verifiers.cli.tables import table

if TYPE_CHECKING:
    from verifiers.trainers.memory.plan import ModelSize
    from verifiers.trainers.memory.ways import Way

PARTS = ("weights", "gradients", "optimizer", "KV cache", "activations", "logits")
LENGTH = 4096  # tokens of a sequence, unless something else is said
WIDTHS = {"bfloat16": 2, "float32": 4}


@click.command("plan", short_help="Say which training of a model fits where.")
@click.argument("model", metavar="MODEL")
@click.option("--gpus", metavar="NxSIZE", help="As in 4x24GB or 80GiB (default: what this machine has).")
@click.option(
    "--length",
    type=click.IntRange(min=1),
    help=f"Tokens of a sequence (default: {LENGTH}, or as many as MODEL knows positions).",
)
@click.option(
    "--rollouts",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Of one step; each GPU has whole groups of 8.",
)
@click.option("--host", metavar="SIZE", help="Memory of the host, as in 128GB (default: not checked).")
@click.option("--lora-r", type=click.IntRange(min=1), default=8, show_default=True, help="Rank of the adapters.")
@click.option("--dtype", type=click.Choice(list(WIDTHS)), default="bfloat16", show_default=True, help="Of weights.")
def plan(
    model: str, gpus: str | None, length: int | None, rollouts: int, host: str | None, lora_r: int, dtype: str
) -> None:
    """Say what training MODEL takes on some GPUs, each way, and print the line that begins the best one that fits.

    \b
    vf plan Qwen/Qwen3-8B --gpus 4x24GB --length 4096
    vf plan ./folder --gpus 1x80GB                     a folder with a config.json, or the file itself

    Only the configuration is read, never the weights. Peaks are those of one GPU at its worst moment, not sums: there
    are no gradients while the model is sampled from. A tenth of each GPU is left alone.
    """
    check_extra()
    from verifiers.trainers.memory.ways import best, ways_to_train

    size = _size_of(model)
    length = min(LENGTH, size.longest or LENGTH) if length is None else length
    if size.longest is not None and length > size.longest:
        raise click.UsageError(f"--length {length} is more than the {size.longest:,} positions that {model} knows")
    cards, card_bytes, kind = _cards(gpus)
    host_bytes = _size("--host", host)[1] if host else float("inf")
    ways = ways_to_train(
        size, length=length, cards=cards, card_bytes=card_bytes, kind=kind, host_bytes=host_bytes, rollouts=rollouts,
        lora_r=lora_r, weight_bytes=WIDTHS[dtype],
    )  # fmt: skip
    named = {"cuda": "GPU", "cpu": "CPU"}.get(kind, kind)
    click.echo(
        f"{model}: {size.parameters / 1e9:.2f}B parameters in {dtype}; {cards} × {card_bytes / 1e9:.1f} GB ({named}); "
        f"sequences of {length:,} tokens, {ways[0].rollouts} rollouts a step; GB on each GPU"
    )
    header = ["trained", "optim", "sharding", *PARTS, "peak", "host", "fits"]
    click.echo("\n".join(table([_row(way) for way in ways], header=header, right=range(3, len(header) - 1))))
    chosen = best(ways)
    if chosen is None:
        click.echo("nothing fits: take more or larger GPUs, shorter sequences (--length), or a smaller model")
        raise click.exceptions.Exit(1)
    place = str(Path(model).parent) if Path(model).is_file() and model.endswith(".json") else model
    if chosen.plan.host and host is None:
        click.echo(
            f"\nthe best that fits needs {_gb(chosen.plan.host)} GB of the host for each GPU; --host says what it has"
        )
    click.echo(f"\nlaunch: {shlex.join(['vf', 'train', 'ENV', '-m', place, *chosen.flags])}")


def _row(way: Way) -> list[str]:
    found = way.plan
    told = f" ({', '.join(found.told)})" if found.fits and found.told else ""
    sizes = [_gb(found.parts[name]) for name in PARTS]
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
        raise click.ClickException(f"the configuration of {model} cannot be had: {error}") from error
    try:
        return ModelSize.of(config)
    except Exception as error:  # transformers lays the model out, and fails in ways of its own
        said = " ".join(str(error).split())[:300]
        raise click.ClickException(f"no model can be made by the configuration of {model}: {said}") from error


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
