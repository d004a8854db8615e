"""``vf runs``: lists saved runs, edits their tags and notes, and deletes them."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.runs import ROOTS, RUN_OF_ANY_KIND, metadata_of
from verifiers.cli.tables import dim, hang, some, table, terminal_width
from verifiers.logs import printable

if TYPE_CHECKING:
    from verifiers.store import RunDir

SHOWN_RUNS = 30
NAME_CHARS = (20, 14, 10, 8)  # of environments and models
COLUMNS = ("id", "environment", "model", "rollouts", "reward", "status", "when")
DISPENSABLE = ("when", "rollouts", "model", "status")  # in a narrow terminal, the first of them are left out


@click.group("runs", short_help="List, tag, annotate and delete saved runs.", invoke_without_command=True)
@click.pass_context
def runs(ctx: click.Context) -> None:
    """List, tag, annotate and delete saved runs; without a subcommand, list them.

    \b
    vf runs                              newest first
    vf runs list capitals baseline       runs that mention both words
    vf runs tag last baseline
    vf runs note 1a2b "before the new prompt"
    vf runs delete 1a2b 5e6f
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command, words=(), root=(), as_json=False, show_all=False)


@runs.command("list", short_help="List saved runs, newest first.")
@click.argument("words", metavar="[WORD]...", nargs=-1)
@click.option("--root", metavar="PATH", multiple=True, help="Where to look (default outputs/evals and outputs/train).")
@click.option("--all", "show_all", is_flag=True, help=f"List all, not only the newest {SHOWN_RUNS}.")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def list_command(words: tuple[str, ...], root: tuple[str, ...], show_all: bool, as_json: bool) -> None:
    """List saved runs, newest first; with WORDs, those that mention all of them in id, environment, model, tag, note
    or status."""
    from verifiers.store import list_runs

    described = [about(run) for run in list_runs(*(root or ROOTS))]
    wanted = [one for one in described if _mentions(one, words)]
    if as_json:
        click.echo(json.dumps(wanted, ensure_ascii=False, default=str))
        return
    if not wanted:
        what = f"no run mentions {' '.join(words)}" if words else f"no run in {' or '.join(root or ROOTS)}"
        click.echo(f"{what}; vf eval ENV -m MODEL makes one")
        return
    shown = wanted if show_all else wanted[:SHOWN_RUNS]
    head, *lines = _table(shown)
    click.echo(head)
    for one, line in zip(shown, lines, strict=True):
        click.echo(line)
        if notes := _tags_and_note(one):
            click.echo(f"  {hang(notes, 2)}")
    more = f"; --all shows {len(wanted) - len(shown)} more" if len(wanted) > len(shown) else ""
    click.echo(dim(f"{some(len(wanted), 'run')}{more}; vf view ID shows one"))


@runs.command("tag")
@click.argument("run", type=RUN_OF_ANY_KIND)
@click.argument("tags", metavar="TAG...", nargs=-1)
@click.option("-d", "--remove", metavar="TAG", multiple=True, help="Remove this tag.")
def tag_command(run: RunDir, tags: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Add TAGs to RUN, or remove some."""
    from verifiers.store import keeping

    if not tags and not remove:
        raise click.UsageError("no tag given; use vf runs tag RUN TAG, or -d TAG to remove one")
    has = _kept(lambda: keeping.tag(run, tags, remove))
    click.echo(f"{run.path.name}: {' '.join(map(printable, has)) or 'no tags'}")


@runs.command("note", short_help="Set or remove the note of a run.")
@click.argument("run", type=RUN_OF_ANY_KIND)
@click.argument("text")
def note_command(run: RunDir, text: str) -> None:
    """Set the note of RUN to TEXT, replacing an earlier one; "" removes it."""
    from verifiers.store import keeping

    _kept(lambda: keeping.note(run, text))
    click.echo(f"{run.path.name}: {printable(text) or 'no note'}")


@runs.command("delete")
@click.argument("chosen", type=RUN_OF_ANY_KIND, metavar="RUN...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def delete_command(chosen: tuple[RunDir, ...], yes: bool) -> None:
    """Delete RUNs permanently; a running one is refused."""
    from verifiers.store import keeping

    for run in chosen:
        one = about(run)
        size = sum(path.stat().st_size for path in Path(run.path).rglob("*") if path.is_file())
        what = f"{run.path} ({printable(_title(one))}, {size / 1e3:,.0f} kB)"
        if not yes and not click.confirm(f"delete {what}?", err=True):
            click.echo(f"kept {run.path}")
            continue
        _kept(lambda run=run: keeping.delete(run))
        click.echo(f"deleted {run.path}")


def about(run: RunDir) -> dict[str, Any]:
    """The properties of a run that a list shows."""
    from verifiers.store import keeping

    metadata = metadata_of(run)
    until = metadata.get("until") if isinstance(metadata.get("until"), dict) else None
    return {
        "id": run.path.name,
        "path": str(run.path),
        "kind": metadata.get("kind", "evaluation"),
        "env_id": metadata.get("env_id"),
        "model": metadata.get("model"),
        "date": metadata.get("date"),
        "rollouts": metadata.get("num_rollouts"),
        "failed": metadata.get("num_failed"),
        "reward": metadata.get("avg_reward") if until is None else until.get("mean", metadata.get("avg_reward")),
        "status": keeping.status_of(run, metadata),
        "tags": keeping.tags_of(metadata),
        "note": metadata.get("note") or "",
    }


def _kept(change: Any) -> Any:
    """Apply a change to a run; any failure is an error of one sentence."""
    from verifiers.store import RunInUseError

    try:
        return change()
    except (RunInUseError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _title(one: dict[str, Any]) -> str:
    return f"{one['env_id'] or '?'} with {one['model'] or '?'}, {some(one['rollouts'] or 0, 'rollout')}"


def _mentions(one: dict[str, Any], words: tuple[str, ...]) -> bool:
    keys = ("id", "kind", "env_id", "model", "status", "note")
    text = " ".join([*(str(one[key] or "") for key in keys), *one["tags"]]).lower()
    return all(word.lower() in text for word in words)


def _table(shown: list[dict[str, Any]]) -> list[str]:
    """One line per run. In a terminal, names are shortened and then columns left out, until the lines fit."""
    forms = [(most, 0) for most in NAME_CHARS]
    forms += [(NAME_CHARS[-1], number) for number in range(1, len(DISPENSABLE) + 1)]
    lines: list[str] = []
    for most, number in forms:
        columns = [name for name in COLUMNS if name not in DISPENSABLE[:number]]
        right = [at for at, name in enumerate(columns) if name in ("rollouts", "reward")]
        cells = [_cells(one, most) for one in shown]
        lines = table([[one[name] for name in columns] for one in cells], header=columns, right=right)
        if not sys.stdout.isatty() or max(map(len, lines)) <= terminal_width():
            break
    return lines


def _cells(one: dict[str, Any], most: int) -> dict[str, str]:
    reward = one["reward"]
    name = f"{one['env_id'] or '?'}{' (training)' if one['kind'] == 'training' else ''}"
    return {
        "id": one["id"],
        "environment": shortened(name, most),
        "model": shortened(str(one["model"] or "?"), most),
        "rollouts": "–" if one["rollouts"] is None else f"{one['rollouts']:,}",
        "reward": "–" if not isinstance(reward, int | float) else f"{reward:.3f}",
        "status": f"{one['failed']:,} failed" if one["failed"] and one["status"] == "finished" else one["status"],
        "when": ago(one["date"]),
    }


def _tags_and_note(one: dict[str, Any]) -> str:
    return " ".join([*(f"#{name}" for name in one["tags"]), *one["note"].split()])


def shortened(name: str, most: int) -> str:
    """A name shortened to its last ``most`` characters, because the end of a path is more informative.

    >>> shortened("capitals", 20), shortened("Qwen/Qwen3-30B-A3B-Instruct-2507", 20)
    ('capitals', '…0B-A3B-Instruct-2507')
    """
    return name if len(name) <= most else f"…{name[-most:]}"


def ago(date: Any, now: datetime | None = None) -> str:
    """The time since a date in ISO format, as text.

    >>> ago("2026-01-01T10:00:00+00:00", datetime(2026, 1, 1, 12, 30, tzinfo=UTC))
    '2 h ago'
    """
    try:
        then = datetime.fromisoformat(str(date))
    except ValueError:
        return "?"
    seconds = ((now or datetime.now(UTC)) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {word} ago"
    return "just now"
