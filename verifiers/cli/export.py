"""``vf export``: writes a run as a file for other programs, or as training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.arguments import Integer, Number
from verifiers.cli.runs import RUN, note_damage
from verifiers.cli.tables import some
from verifiers.cli.telling import told

if TYPE_CHECKING:
    from verifiers.store import RunDir

FORMATS = ("jsonl", "parquet", "sft", "dpo")
OTHER_TABLES = (".csv", ".tsv", ".xlsx")


class Export(click.Command):
    """Exports runs, or with ``verl ENV`` the rows of an environment, or with ``model CHECKPOINT`` a model."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["verl"]:
            from verifiers.cli.export_rows import export_verl

            return export_verl.make_context(f"{info_name} verl", args[1:], parent, **extra)
        if args[:1] == ["model"]:
            from verifiers.cli.export_model import export_model

            return export_model.make_context(f"{info_name} model", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("export", cls=Export, short_help="Write a run as a table or as training data.")
@click.argument("runs", type=RUN, nargs=-1, required=True, metavar="RUN...")
@click.option("-f", "--format", "form", type=click.Choice(FORMATS), help="Default: by the suffix of the file.")
@click.option("-o", "--output", metavar="FILE", help="Default: the id of the run, in this folder; - for stdout.")
@click.option("--min-reward", type=float, metavar="R", help="sft: rollouts with at least this reward.")
@click.option("--top-k", type=Integer(min=1), metavar="K", help="sft: the best K of each example.")
@click.option("--min-margin", type=Number(min=0), default=0.0, metavar="R", help="dpo: better by this much.")
@click.option("--pairs", type=Integer(min=1), default=1, show_default=True, help="dpo: pairs of each example.")
@click.option("--include-failed", is_flag=True, help="jsonl, parquet: failed rollouts too, without a reward.")
def export(runs: tuple[RunDir, ...], form: str | None, output: str | None, **given: Any) -> None:
    """Write the rollouts of one or several runs.

    \b
    vf export last -o run.parquet                    a table
    vf export last -f sft --min-reward 1 --top-k 1   conversations for SFT
    vf export 1a2b 5e6f -f dpo --min-margin 0.5 -o pairs.jsonl

    Two commands of their own (see their --help) export something else:

    \b
    vf export model CHECKPOINT -o ./model     a model folder for transformers
    vf export verl ENV                        an environment's rows, for verl
    """
    if output and output.lower().endswith(OTHER_TABLES):
        raise click.UsageError(f"-o {output}: this format cannot be written; end the name in .jsonl or .parquet")
    form = form or _by_name(output)
    suffix = ".parquet" if form == "parquet" else ".jsonl"
    default = f"{runs[0].path.name}{suffix if form in ('jsonl', 'parquet') else f'-{form}{suffix}'}"
    target = Path(output or default)
    for run in runs:
        note_damage(run)
    try:
        with told(verbose=False):
            count = _write(runs, form, target, given)
    except BrokenPipeError:  # the reader has closed the pipe
        raise
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    noun = {"sft": "conversation", "dpo": "pair"}.get(form, "rollout")
    click.echo(f"{some(count, noun)} in {target}", err=output == "-")


def _by_name(output: str | None) -> str:
    return "parquet" if output and output.endswith(".parquet") else "jsonl"


def _write(runs: tuple[RunDir, ...], form: str, target: Path, given: dict[str, Any]) -> int:
    from verifiers import store

    records = (record for run in runs for record in run.records())
    if form == "parquet":
        if str(target) == "-":
            raise click.UsageError("parquet cannot be written to stdout; pass a file with -o")
        source = runs[0] if len(runs) == 1 else list(records)
        return store.export_parquet(source, target, include_failed=given["include_failed"])
    rows: Any
    if form == "sft":
        rows = store.to_sft(records, min_reward=given["min_reward"], top_k_per_example=given["top_k"])
    elif form == "dpo":
        rows = store.to_dpo(records, min_margin=given["min_margin"], max_pairs_per_example=given["pairs"])
    else:
        rows = (record for record in records if given["include_failed"] or not store.is_failed(record))
    if str(target) != "-":
        return store.write_jsonl(rows, target)
    count = 0
    for row in rows:
        click.echo(store.encode(row).decode(), nl=False)
        count += 1
    return count
