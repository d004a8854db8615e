"""``vf uninstall``: uninstalls environments; other packages are refused."""

from __future__ import annotations

import click

from verifiers.cli.environments import complete_environments
from verifiers.logs import printable


@click.command("uninstall", short_help="Uninstall environments.")
@click.argument("names", metavar="ENV...", nargs=-1, required=True, shell_complete=complete_environments)
@click.option("--with", "program", type=click.Choice(["pip", "uv"]), help="Default: pip, or uv if there is no pip.")
def uninstall(names: tuple[str, ...], program: str | None) -> None:
    """Uninstall ENV, an installed environment, from this Python. Its dependencies stay.

    Exit codes: 0 uninstalled, 1 not uninstalled (it is not installed, or is not an environment).
    """
    from verifiers import packages

    for name in names:
        try:
            package = packages.uninstall(name, program=program)  # type: ignore[arg-type]
        except packages.InstallError as error:
            raise click.ClickException("\n".join(map(printable, str(error).splitlines()))) from error
        click.echo(f"uninstalled {package.name} {package.version or ''}".rstrip())
