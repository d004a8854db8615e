"""``vf install``: installs an environment from a folder, a wheel, a git URL, a package index or a hub."""

from __future__ import annotations

from pathlib import Path
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
    "--index", metavar="URL", help="The package index for the environment; dependencies come from the usual index."
)
@click.option("--hub", metavar="URL", help="The hub of org/name (default: the variable VF_HUB_URL).")
@click.option("--with", "program", type=click.Choice(["pip", "uv"]), help="Default: pip, or uv if there is no pip.")
@click.option("--target", metavar="DIR", help="Install into this folder instead of the current Python.")
@click.option("--no-deps", is_flag=True, help="Do not install dependencies.")
@click.option("-e", "--editable", is_flag=True, help="For a folder: changes to its source take effect at once.")
@click.option("-r", "--from-repo", is_flag=True, help="Install from the repository that this library runs from.")
@click.option("-b", "--branch", metavar="NAME", help="Accepted for 0.1.x; the checked-out branch is installed.")
def install(
    what: str, path: str, no_deps: bool, editable: bool, from_repo: bool, branch: str | None, **given: Any
) -> None:
    """Install WHAT: a folder, a .whl file, a git+ URL, name, name@version, or org/name@version of a hub.

    \b
    vf install ./environments/my_env
    vf install my_env-0.1.0-py3-none-any.whl
    vf install git+https://example.com/envs.git#subdirectory=my_env
    vf install my-env@0.1.0 --index https://example.com/simple
    vf install org/my-env@0.1.0 --hub https://hub.example.com

    A bare name is looked up in ./environments first. A package that is not an environment is refused before anything
    is changed. Exit codes: 0 installed, 1 not installed, 2 wrong usage.
    """
    from verifiers import packages
    from verifiers.packages.publish import in_words

    if from_repo:
        path = what = str(_in_repository(what))
    if branch is not None:
        click.echo(f"note: -b {branch} has no effect; the checked-out branch is installed", err=True)
    try:
        done = packages.install(what, environments_dir=path, has_deps=not no_deps, is_editable=editable, **given)
    except packages.BundledError as error:
        click.echo(f"{error}; try: vf eval {what.partition('@')[0]} -m fake")
        return
    except packages.InstallError as error:
        raise click.ClickException("\n".join(map(printable, str(error).splitlines()))) from error
    package = done.package
    click.echo(
        f"installed {package.name} {package.version or ''}".rstrip() + f" from {done.source} with {done.program}"
    )
    if what.endswith(".whl") and (verdict := packages.read_verdict(what)) is not None:
        click.echo(printable(in_words(verdict)))
    if given["target"] is None:
        click.echo(f"next: vf check {package.name}, then vf eval {package.name} -m fake")


def _in_repository(name: str) -> Path:
    """The folder of an environment in the repository that this library runs from."""
    from verifiers.packages.install import local_folder

    folder = Path(__file__).resolve().parents[2] / "environments"
    if not folder.is_dir():
        raise click.UsageError(
            "--from-repo: this library does not run from a repository; "
            "pass a folder, a wheel, a name in an index, or org/name on a hub"
        )
    home = local_folder(name, folder)
    if home is None:
        names = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise click.UsageError(f"--from-repo: the repository has no environment {name!r}; it has {names}")
    return home
