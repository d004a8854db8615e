"""``vf replay``: replays a saved run from its record, and reports the differences."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.arguments import read_json
from verifiers.cli.environments import env_dir_option, explained
from verifiers.cli.rescore import environment_of
from verifiers.cli.runs import RUN, metadata_of, note_damage
from verifiers.cli.tables import some, table
from verifiers.cli.telling import told

if TYPE_CHECKING:
    from verifiers.reruns import Replayed
    from verifiers.store import RunDir

SHOWN = 10


@click.command("replay", short_help="Replay a saved run from its record.")
@click.argument("run", type=RUN)
@click.option("--env", "env_id", metavar="ENV", help="The environment (default: that of the run).")
@click.option("-a", "--env-args", metavar="JSON", callback=read_json, help="Its arguments (default: those of the run).")
@env_dir_option
@click.option("--allow-network", is_flag=True, help="Allow connections to other machines, for tools that need them.")
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
@click.option("-v", "--verbose", is_flag=True, help="Show the log and tracebacks.")
@click.pass_context
def replay(
    ctx: click.Context,
    run: RunDir,
    env_id: str | None,
    env_args: dict[str, Any] | None,
    env_dir_path: str,
    allow_network: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Replay RUN: every turn of the environment and every score, with the recorded replies of the model.

    \b
    vf replay last
    vf replay 1a2b3c4d --json

    No model is called and no network is used. Judges need replies that were saved with the rollouts or recorded by
    vf eval --record.
    Exit codes: 0 all rollouts are as recorded, 1 some differ, 2 wrong usage.
    """
    from verifiers import calls, reruns

    with told(verbose), nullcontext() if allow_network else reruns.no_network():
        note_damage(run)
        metadata = metadata_of(run)
        env = environment_of(metadata, env_id, env_args, env_dir_path, verbose)
        try:
            found = calls.run(lambda: reruns.replay(env, run, metadata=metadata))
        except Exception as error:  # foreign code: the environment makes its rows now
            raise explained(error, f"{run.path} cannot be replayed", verbose) from error
    if not found.states:
        raise click.ClickException(f"{run.path} contains no finished rollout to replay")
    if as_json:
        click.echo(json.dumps(_as_data(run, found), ensure_ascii=False, default=str))
    else:
        click.echo("\n".join(describe(run, found)))
    ctx.exit(1 if found.changes else 0)


def _as_data(run: RunDir, found: Replayed) -> dict[str, Any]:
    changes = [
        {"example_id": change.example_id, "rollout": change.rollout, "what": change.what} for change in found.changes
    ]
    return {
        "path": str(run.path),
        "rollouts": len(found.states),
        "same": found.same,
        "changes": changes,
        "left_out": found.left_out,
    }


def describe(run: RunDir, found: Replayed) -> list[str]:
    """The number of rollouts that are as recorded, and the differences of the others."""
    lines = [f"{some(len(found.states), 'rollout')} of {run.path} replayed: {found.same} as recorded"]
    if found.changes:
        lines[0] += f", {len(found.changes)} different"
        rows = [
            [f"  example {change.example_id}", f"rollout {change.rollout}", change.what] for change in found.changes
        ]
        lines += table(rows[:SHOWN])
        if len(rows) > SHOWN:
            lines.append(f"  … and {len(rows) - SHOWN} more")
    if found.left_out:
        lines.append(f"left out: {some(found.left_out, 'rollout')} that failed in the original run")
    return lines
