"""Finds the run directory for RUN on the command line: a folder, the start of an id, or ``last``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from verifiers.store import RunDir

LAST = "last"
EVALS = "outputs/evals"
ROOTS = (EVALS, "outputs/train")


class RunArgument(click.ParamType):  # type: ignore[type-arg]  # generic in some versions only
    """A run: its folder, the start of its id under ./outputs, or ``last`` for the newest run under ``last_of``."""

    name = "RUN"

    def __init__(self, last_of: Sequence[str]) -> None:
        self.last_of = last_of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from verifiers.store import RunDir

        return value if isinstance(value, RunDir) else find_run(str(value), self.last_of)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_runs(ctx, param, incomplete)


RUN = RunArgument([EVALS])
RUN_OF_ANY_KIND = RunArgument(ROOTS)


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions for a run, by folder and by id; file names if no run matches."""
    from verifiers.store import list_runs

    saved = list_runs(*ROOTS)
    names = [LAST, *(str(run.path) for run in saved), *(run.path.name for run in saved)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)] or [
        CompletionItem(incomplete, type="file")
    ]


def find_run(name: str, last_of: Sequence[str] = (EVALS,)) -> RunDir:
    """The run of this name; if there is none, an error that suggests others."""
    from verifiers.store import RunDir, is_run_dir, list_runs

    path = Path(name).expanduser()
    if path.name == "results.jsonl" and path.is_file():
        path = path.parent
    if is_run_dir(path):
        return RunDir(path)
    if path.is_dir() and (inside := list_runs(path)):
        return inside[0]
    if name == LAST and (newest := list_runs(*last_of)):
        return newest[0]
    saved = list_runs(*ROOTS)
    found = [run for run in saved if run.path.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    raise click.UsageError(_not_found(name, found, saved, is_folder=path.is_dir()))


def _not_found(name: str, found: list[RunDir], saved: list[RunDir], *, is_folder: bool) -> str:
    if found:
        ids = ", ".join(run.path.name for run in found[:5])
        return f"{name!r} begins the id of {len(found)} runs: {ids}; use more characters"
    if is_folder:
        return f"{name} contains no run: a run has a results.jsonl or a metadata.json"
    if not saved:
        return f"there is no run {name!r}, and none in {' or '.join(ROOTS)}; vf eval ENV saves one"
    names = {run.path.name: str(run.path) for run in saved}
    if close := difflib.get_close_matches(name, [*names, *names.values()], n=2):
        return f"there is no run {name!r}; did you mean {' or '.join(names.get(one, one) for one in close)}?"
    return f"there is no run {name!r}; the newest is {next(iter(names.values()))}, and vf runs lists all"


def metadata_of(run: RunDir) -> dict[str, Any]:
    """The metadata of a run; if its file is damaged, print a notice and return an empty dict."""
    try:
        return run.metadata
    except OSError as error:
        click.echo(f"notice: {error.filename}: {error.strerror}; continuing without it", err=True)
        return {}
    except ValueError as error:
        click.echo(f"notice: {error}; continuing without it", err=True)
        return {}


def note_damage(run: RunDir) -> None:
    """Print a notice if lines of a run cannot be read."""
    damaged = run.rows().damaged
    if damaged:
        click.echo(f"notice: {damaged} damaged line(s) of {run.results_path} are left out", err=True)
