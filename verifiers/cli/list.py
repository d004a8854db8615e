"""``vf list``: lists the available environments, where they are, and their arguments."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from verifiers.cli.environments import env_dir_option
from verifiers.cli.tables import dim, fitted, hang, heading, some
from verifiers.logs import printable

if TYPE_CHECKING:
    from verifiers.packages import Listed


@click.command("list", short_help="List environments, with their arguments.")
@click.argument("words", metavar="[WORD]...", nargs=-1)
@env_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def list_command(words: tuple[str, ...], env_dir_path: str, as_json: bool) -> None:
    """List the environments in ./environments, the installed ones and those that come with verifiers.

    With WORDs, only those that mention all of them. No environment is imported.
    """
    from verifiers.packages import list_environments

    found = [listed for listed in list_environments(env_dir_path) if _matches(listed, words)]
    if as_json:
        click.echo(json.dumps([_as_data(listed) for listed in found], ensure_ascii=False))
        return
    if not found:
        what = (
            f"no environment mentions {' '.join(words)}" if words else f"no environment in {env_dir_path} or installed"
        )
        click.echo(f"{what}; vf init NAME makes one, vf install WHAT installs one")
        return
    for listed in found:
        click.echo("\n".join(describe(listed)))
    click.echo(dim("\n".join(fitted([f"{some(len(found), 'environment')}; vf eval NAME -m fake tries one out"]))))


def _matches(listed: Listed, words: tuple[str, ...]) -> bool:
    text = f"{listed.package.name} {listed.package.summary}".lower()
    return all(word.lower() in text for word in words)


def describe(listed: Listed) -> list[str]:
    """The name, place, summary and arguments of an environment."""
    package = listed.package
    place = {"local": listed.where, "installed": "installed", "bundled": "comes with verifiers"}[listed.kind]
    lines = [f"{heading(printable(package.name))} {printable(package.version or '')}".rstrip() + f"  {dim(place)}"]
    if package.summary:
        lines.append(f"  {hang(package.summary.replace('``', '`'), 2)}")
    if package.arguments:
        lines.append(f"  {hang(', '.join(map(str, package.arguments)), 2)}")
    return lines


def _as_data(listed: Listed) -> dict[str, object]:
    return {
        **dataclasses.asdict(listed.package),
        "where": listed.where,
        "kind": listed.kind,
        "is_local": listed.is_local,
    }
