"""``vf import``: makes a run directory from traces recorded elsewhere."""

from __future__ import annotations

import click

from verifiers.cli.environments import complete_environments, env_dir_option, load
from verifiers.cli.tables import some
from verifiers.cli.telling import told


@click.command("import", short_help="Make a run from traces recorded elsewhere.")
@click.argument("kind", type=click.Choice(["otel"]))
@click.argument("files", type=click.Path(exists=True, dir_okay=False), nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--env",
    "env_id",
    metavar="ENV",
    shell_complete=complete_environments,
    help="The environment with the rows of the traces, for their answers.",
)
@env_dir_option
@click.option("-o", "--output", metavar="FOLDER", help="Where to save (default: a new folder in outputs/evals).")
def import_command(
    kind: str, files: tuple[str, ...], env_id: str | None, env_dir_path: str, output: str | None
) -> None:
    """Make a run directory from OpenTelemetry spans (OTLP/JSON, or the SDK's own JSON): a rollout for each trace.

    \b
    vf import otel traces.jsonl --env capitals
    vf rescore last                   score it with the environment's rubric
    vf view last                      read it

    Model calls are recognised by the GenAI conventions; they must have been recorded with their content.
    """
    from verifiers.reruns.traces import import_traces
    from verifiers.store import RunDir

    with told(verbose=False):
        env = None if env_id is None else load(env_id, env_dir_path, {})
        try:
            made = import_traces(files, env)
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from error
        if not made.records:
            raise click.ClickException(
                f"{', '.join(files)} has no model call: spans need gen_ai.* attributes with their messages"
            )
        config = {"imported_from": list(files), "state_columns": ["trajectory"], "env_args": {}}
        about = {"env_id": env_id or "otel", "model": made.model}
        try:
            run = (
                RunDir.create(**about, config=config)
                if output is None
                else RunDir.create_at(output, **about, config=config)
            )
        except FileExistsError as error:
            raise click.UsageError(f"-o {output}: {error}") from error
        with run.appender() as out:
            for record in made.records:
                out.append(record)
        run.update_metadata({"num_rollouts": len(made.records), "finished": True})
    failed = sum(record["error"] is not None for record in made.records)
    notes = [some(made.left_out, "trace") + " without a model call left out"] * bool(made.left_out)
    notes += [f"{failed} failed"] * bool(failed)
    notes += [f"{made.matched} matched to rows of {env_id}"] * (env_id is not None)
    click.echo(f"{some(len(made.records), 'rollout')} in {run.path}{''.join(f'; {note}' for note in notes)}")
    click.echo(f"score them with: vf rescore {run.path}{'' if env_id else ' --env ENV'}")
