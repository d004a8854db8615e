"""``vf view``: shows run directories in the browser, or exports them as one HTML file."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any

import click

from verifiers.cli.arguments import Integer
from verifiers.cli.runs import ROOTS, complete_runs, find_run
from verifiers.logs import printable
from verifiers.notebooks import is_notebook, show_in_cell
from verifiers.store import is_run_dir
from verifiers.viewer.export import DEFAULT_LIMIT, export_html
from verifiers.viewer.inline import INLINE_LIMIT, InlineView
from verifiers.viewer.library import DEFAULT_ROOTS, Library, run_id_of
from verifiers.viewer.server import MAX_COMPARED, ViewerServer


@click.command("view", short_help="Look at runs and trainings in the browser.")
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=click.Path(path_type=Path), shell_complete=complete_runs)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=Integer(0, 65535), default=0, help="Port to listen on (default: any free port).")
@click.option(
    "-o",
    "--root",
    "--outputs-dir",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder of runs (default: outputs/evals and outputs/train; repeat).",
)
@click.option(
    "--export",
    "export_to",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the pages into one HTML file instead of serving them.",
)
@click.option(
    "--limit",
    type=Integer(min=0),
    default=None,
    help=f"Maximum rollouts per run for --export (default {DEFAULT_LIMIT}) and --inline (default {INLINE_LIMIT}).",
)
@click.option("--inline", is_flag=True, help="Show the pages in a notebook cell: %vf view --inline.")
@click.option("--open/--no-open", "opens", default=True, show_default=True, help="Open the browser.")
def view(
    runs: tuple[Path, ...],
    host: str,
    port: int,
    roots: tuple[Path, ...],
    export_to: Path | None,
    limit: int | None,
    inline: bool,
    opens: bool,
) -> None:
    """Show RUNs (folders, the start of an id, last) in the browser, until Ctrl-C; without RUNs, show all runs here.

    Nothing is written to a run, and a running one is updated live. Two runs are shown side by side.
    """
    library, paths = _library_of(runs, roots)
    if inline:
        _show_inline(library, _first_page(library, paths), limit)
        return
    if export_to is not None:
        _export(library, export_to, DEFAULT_LIMIT if limit is None else limit)
        return
    server = ViewerServer(library, host=host, port=port)
    try:
        server.start()
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        url = server.url + _first_page(library, paths)
        click.echo(f"the viewer is at {url}\npress Ctrl-C to stop", err=True)
        if not server.is_local:
            click.echo(f"note: --host {host} lets anyone who can reach this machine read these runs", err=True)
        if opens and _has_screen():
            webbrowser.open(url)
        threading.Event().wait()
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
    finally:
        server.stop()


def _has_screen() -> bool:
    """Whether there is a display; without one, a text browser would take over the terminal."""
    named = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    return named or sys.platform in ("darwin", "win32")


def _library_of(runs: tuple[Path, ...], roots: tuple[Path, ...]) -> tuple[Library, list[Path]]:
    """The library for the given runs and folders of runs (default: the usual roots), and the paths of the runs."""
    paths, folders = [], list(roots)
    for given in runs:
        run = given.parent if given.name == "results.jsonl" else given
        if is_run_dir(run):
            paths.append(run)
        elif run.is_dir() and Library([run]).runs():
            folders.append(run)
        elif not run.exists():
            paths.append(find_run(str(given), ROOTS).path)
        else:
            raise click.UsageError(
                f"{printable(str(given))} is not a run directory and contains none; vf eval makes one"
            )
    if not paths and not folders:
        folders = list(DEFAULT_ROOTS)
    return Library(folders, paths), paths


def _first_page(library: Library, paths: list[Path]) -> str:
    ids = [run_id_of(path) for path in paths]
    if len(ids) == 1:
        run = library.get(ids[0])
        return f"#/run/{ids[0]}/training" if run is not None and run.is_training else f"#/run/{ids[0]}"
    return f"#/compare/{'/'.join(ids)}" if 2 <= len(ids) <= MAX_COMPARED else ""


# --- in a notebook ------------------------------------------------------------------------------------------------


def _show_inline(library: Library, first_page: str, limit: int | None) -> None:
    if not is_notebook():
        raise click.UsageError(
            "--inline shows the pages inside a notebook, but `!vf` runs in another process: write "
            "%load_ext verifiers in a cell, and %vf view --inline in the next"
        )
    try:
        show_in_cell(InlineView(library, first_page=first_page, limit=INLINE_LIMIT if limit is None else limit))
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def load_magic(shell: Any) -> None:
    """Register ``%vf view --inline RUN``; called by ``%load_ext verifiers``."""

    def vf(line: str) -> None:
        """%vf view --inline [RUN]... shows runs in the output of this cell."""
        command, *arguments = shlex.split(line) or [""]
        if command != "view" or "--inline" not in arguments:
            print(f"%vf only shows runs in a cell: %vf view --inline [RUN]...; for other commands use !vf {line}")
            return
        try:
            view.main(arguments, prog_name="vf view", standalone_mode=False)
        except click.ClickException as error:
            print(f"error: {error.format_message()}")

    shell.register_magic_function(vf, "line", "vf")


def _export(library: Library, path: Path, limit: int) -> None:
    try:
        size = export_html(library, path, limit=limit)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{printable(str(path))} cannot be written: {error.strerror}") from error
    click.echo(f"{printable(str(path))} ({size / 1e6:.1f} MB) opens in any browser, without a server")
