"""``vf export verl``: writes an environment's rows as data files for the verl trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from verifiers.cli.arguments import Integer, read_json
from verifiers.cli.environments import complete_environments, env_dir_option, load
from verifiers.cli.telling import told


@click.command("verl", short_help="Write an environment's rows as verl's parquet files.")
@click.argument("env_id", metavar="ENV", shell_complete=complete_environments)
@click.option(
    "-a", "--env-args", metavar="JSON", callback=read_json, default="{}", help="Arguments of load_environment()."
)
@env_dir_option
@click.option("-n", "--num-examples", type=Integer(min=1), help="Rows of each split (default: all).")
@click.option("-o", "--output", metavar="FOLDER", help="Default: data/ENV.")
def export_verl(
    env_id: str, env_args: dict[str, Any], env_dir_path: str, num_examples: int | None, output: str | None
) -> None:
    """Write train.parquet and test.parquet, for verl's agent loop or its compute_score.

    \b
    vf export verl arithmetic
    vf export verl gsm8k -a '{"use_think": true}' -n 1000 -o data/gsm8k
    """
    from verifiers.integrations.verl.export import export_rows

    with told(verbose=False):
        env = load(env_id, env_dir_path, env_args)
        name = env_id.rstrip("/").rpartition("/")[2]
        folder = Path(output or Path("data") / name)
        try:
            written = export_rows(env, folder, env_id=name, env_args=env_args, n=num_examples or -1)
        except ImportError as error:
            raise click.ClickException(f"{error}; pip install 'verifiers[data]'") from error
    click.echo(" and ".join(map(str, written.values())))
