"""Loads the environment for ENV on the command line, or explains in one sentence what is wrong; completes names."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment

FOLDER = "./environments"


def complete_environments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions for an environment: local ones and installed ones, by their name."""
    from verifiers.packages import list_environments

    found = list_environments(ctx.params.get("env_dir_path") or FOLDER)
    items = [
        CompletionItem(listed.package.name, help=listed.package.summary)
        for listed in found
        if listed.package.name.startswith(incomplete)
    ]
    return items or [CompletionItem(incomplete, type="file")]


def env_dir_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-p", "--env-dir-path", metavar="PATH", default=FOLDER, help=f"Folder of environments (default {FOLDER})."
    )(command)


def split_path(env_id: str, folder: str) -> tuple[str, str]:
    """(id, parent folder) for the path of an environment's folder; anything else is an id in ``folder``."""
    path = Path(env_id)
    if _is_folder(env_id, path):
        return path.resolve().name, str(path.resolve().parent)
    if env_id.startswith(("/", "./", "../", "~")) or env_id.endswith(".py"):
        from verifiers.logs import printable

        raise click.UsageError(printable(f"{env_id:.200} is not a folder; pass an environment's name or its folder"))
    return env_id, folder


def _is_folder(env_id: str, path: Path) -> bool:
    try:
        return ("/" in env_id or env_id == ".") and path.is_dir()
    except (OSError, ValueError):  # too long for a path, or with a null character
        return False


def load(env_id: str, folder: str, env_args: Mapping[str, Any], *, verbose: bool = False) -> Environment:
    """Load an environment for a command; any failure is an error of one sentence."""
    from verifiers.envs import loading

    name, home = split_path(env_id, folder)
    try:
        return loading.load_environment(name, environments_dir=home, **env_args)
    except Exception as error:  # foreign code
        raise explained(error, f"the environment {env_id!r} cannot be loaded", verbose) from error


def explained(error: Exception, what: str, verbose: bool) -> click.ClickException:
    """An error as one sentence: the message if the library raised it, with file and line if foreign code did."""
    from verifiers.cli.ending import is_out_of_memory, out_of_memory
    from verifiers.errors import Error
    from verifiers.logs import printable

    if verbose:
        traceback.print_exception(error)
    if is_out_of_memory(error):
        return click.ClickException(f"{what}: {out_of_memory(error)}")
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        reason = "; ".join([f"{error.filename}: {error.strerror}", *getattr(error, "__notes__", ())])
        return click.ClickException(printable(f"{what}: {reason}"))
    place = traceback.extract_tb(error.__traceback__)[-1]
    library = Path(__file__).resolve().parents[1]
    if Path(place.filename).resolve().is_relative_to(library):
        if isinstance(error, ValueError | TypeError):
            return click.UsageError(printable(str(error)))
        if isinstance(error, Error) or (isinstance(error, OSError) and error.errno is None):
            return click.ClickException(printable(f"{what}: {error}"))
        if type(error) is ImportError:  # a missing extra: the message contains the command to install it
            return click.ClickException(printable(f"{what}: {error}"))
    hint = "" if verbose else "; -v shows the traceback"
    message = printable(f"{what}: {type(error).__name__}: {error}")
    return click.ClickException(f"{message} ({place.filename}:{place.lineno}{hint})")
