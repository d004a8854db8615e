"""``vf init``: makes the folder of a new environment package, which passes ``vf check`` unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command("init", short_help="Make a new environment package.")
@click.argument("name")
@click.option(
    "-p", "--path", default="./environments", show_default=True, metavar="PATH", help="Where to put its folder."
)
@click.option("-m", "--multi-file", is_flag=True, help="A package of several files instead of one module.")
@click.option("--rewrite-readme", is_flag=True, help="Only rewrite the README.md of an existing package.")
def init(name: str, path: str, multi_file: bool, rewrite_readme: bool) -> None:
    """Make an environment package NAME: pyproject, module, README and a test, with a working task.

    \b
    vf init my-env
    vf init my-env -p ~/envs --multi-file
    """
    from verifiers.packages import new_package

    try:
        files = new_package(name, path, is_multi_file=multi_file, rewrites_readme=rewrite_readme)
    except (ValueError, FileExistsError) as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"the package was not written: {error}") from error
    home = Path(os.path.commonpath([str(file.parent) for file in files]))
    where = "" if path in ("./environments", "environments") else f" -p {path}"
    click.echo(f"wrote {home}")
    for file in files:
        click.echo(f"  {file.relative_to(home)}")
    click.echo(f"next\n  vf check {name}{where}\n  vf eval {name} -m fake{where}\n  vf install {home}")
