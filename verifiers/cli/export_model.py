"""``vf export model``: a checkpoint, sharded or not → one folder that transformers can load."""

from __future__ import annotations

from pathlib import Path

import click

from verifiers.cli.telling import told


@click.command("model")
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write.")
def export_model(checkpoint: Path, output: Path) -> None:
    """Write the model (or the adapters) of a CHECKPOINT such as outputs/train/…/checkpoints/step-000100."""
    if output.exists():
        raise click.UsageError(f"{output} already exists; choose another folder")
    with told(verbose=False):
        try:
            from verifiers.trainers.distributed.shards import export_checkpoint

            export_checkpoint(checkpoint, output)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        except ImportError:
            raise click.ClickException("exporting a model needs: pip install 'verifiers[train]'") from None
    click.echo(f"model: {output}")
