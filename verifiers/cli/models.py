"""``vf models``: downloads and lists the models that run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import click

from verifiers.cli.answering import check_local

BUNDLED = {"smollm2": "SmolLM2-135M-Instruct"}


@click.group("models", short_help="Download and list the model that runs in this process.")
def models() -> None:
    """Download and list the small model that runs in this process; -m also takes a folder, a GGUF file, a hub name."""


@models.command("pull")
@click.argument("name", type=click.Choice(list(BUNDLED)))
@click.option(
    "--from",
    "source",
    metavar="FILE",
    type=click.Path(exists=True),
    help="The file, if you have downloaded it yourself.",
)
def pull(name: str, source: str | None) -> None:
    """Download the model (93 MB), once."""
    check_local(name)
    from verifiers.engine.files import smollm2

    try:
        folder = smollm2.pull(source=source)
    except (OSError, ValueError, ImportError) as error:
        raise click.ClickException(f"{name!r} was not downloaded: {error}") from error
    click.echo(f"{name} is in {folder}; try: vf eval capitals -m smollm2")


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print them as one JSON object.")
def list_models(as_json: bool) -> None:
    """List the model and its folder."""
    from verifiers.engine.files import smollm2

    folder = smollm2.default_folder() if smollm2.is_pulled() else None
    if as_json:
        click.echo(json.dumps({"smollm2": {"path": None if folder is None else str(folder)}}))
        return
    where = "not downloaded yet: vf models pull smollm2" if folder is None else f"{folder} ({_size(folder)})"
    click.echo(f"smollm2  {BUNDLED['smollm2']}  {where}")
    click.echo("-m also takes a folder, a GGUF file, or org/name on the Hugging Face hub")


def _size(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:,.0f} MB"
