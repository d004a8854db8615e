"""``vf install``: a folder, a wheel, a name of an index or of a hub → an installed environment."""

from __future__ import annotations

from typing import Any

import click

from verifiers.cli.environments import complete_environments
from verifiers.logs import printable


@click.command("install", short_help="Install an environment.")
@click.argument("what", metavar="WHAT", shell_complete=complete_environments)
@click.option(
    "-p", "--path", default="./environments", show_default=True, metavar="PATH", help="Where names are looked up first."
)
@click.option(
    "--index", metavar="URL", help="The package index to take it from; what it needs comes from the usual one."
)
@click.option("--hub", metavar="URL", help="The hub of org/name (default: the variable VF_HUB_URL).")
@click.option("--with", "program", type=click.Choice(["pip", "uv"]), help="Default: pip, or uv where there is no pip.")
@click.option("--target", metavar="DIR", help="Install into this folder instead of the current Python.")
@click.option("--no-deps", is_flag=True, help="Leave out what it depends on.")
@click.option("-e", "--editable", is_flag=True, help="Of a folder: changes to its source take effect at once.")
def install(what: str, path: str, no_deps: bool, editable: bool, **given: Any) -> None:
    """Install WHAT: a folder, a .whl file, name, name@version, or org/name@version of a hub.

    \b
    vf install ./environments/my_env
    vf install my_env-0.1.0-py3-none-any.whl
    vf install my-env@0.1.0 --index https://example.com/simple
    vf install org/my-env@0.1.0 --hub https://hub.example.com

    A bare name is looked up in ./environments first. What turns out to be no environment is refused before anything is
    changed. Exit codes: 0 installed, 1 not installed, 2 wrong usage.
    """
    from verifiers import packages

    try:
        done = packages.install(what, environments_dir=path, has_deps=not no_deps, is_editable=editable, **given)
    except packages.InstallError as error:
        raise click.ClickException("\n".join(map(printable, str(error).splitlines()))) from error
    package = done.package
    click.echo(
        f"installed {package.name} {package.version or ''}".rstrip() + f" from {done.source} with {done.program}"
    )
    if given["target"] is None:
        click.echo(f"next: vf check {package.name}, then vf eval {package.name} -m fake")
