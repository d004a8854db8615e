"""Manages saved runs: tags, a note, their status, and deletion."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from verifiers.store.lock import RunInUseError
from verifiers.store.run_dir import RunDir, is_run_dir

_TAG = re.compile(r"[^\s,]{1,60}\Z")
MOST_NOTE = 10_000  # characters


def tag(run: RunDir, add: Iterable[str] = (), remove: Iterable[str] = ()) -> list[str]:
    """Add and remove tags; return the run's tags."""
    added = list(add)
    if wrong := [name for name in added if not _TAG.match(name)]:
        raise ValueError(f"{wrong[0]!r} is not a tag: a tag is one word without commas, of at most 60 characters")
    with run.lock():
        before = tags_of(run.metadata)
        tags = [name for name in dict.fromkeys([*before, *added]) if name not in set(remove)]
        run.update_metadata({"tags": tags})
    return tags


def note(run: RunDir, text: str) -> None:
    """Set the note of a run; an empty text removes it."""
    if len(text) > MOST_NOTE:
        raise ValueError(f"the note has {len(text):,} characters; the maximum is {MOST_NOTE:,}")
    with run.lock():
        run.update_metadata({"note": text})


def delete(run: RunDir) -> None:
    """Delete the folder of a run that no process is writing to, and its parent folder if that is then empty."""
    if not is_run_dir(run.path) or run.path.is_symlink():
        raise ValueError(f"{run.path} is not a run directory")
    with run.lock():
        shutil.rmtree(run.path)
    with suppress(OSError):  # it contains other runs
        run.path.parent.rmdir()


def tags_of(metadata: dict[str, Any]) -> list[str]:
    found = metadata.get("tags")
    return [str(name) for name in found] if isinstance(found, list) else []


def status_of(run: RunDir, metadata: dict[str, Any]) -> str:
    """``finished``, ``running``, or, if neither, ``interrupted``, ``ended early`` or ``not finished``."""
    if metadata.get("finished", metadata.get("num_rollouts") is not None):
        return "finished"
    if _is_being_written(run):
        return "running"
    if metadata.get("interrupted"):
        return "interrupted"
    return "ended early" if metadata.get("ended_early") else "not finished"


def _is_being_written(run: RunDir) -> bool:
    if not (run.path / ".lock").is_file():
        return False
    try:
        with run.lock():
            return False
    except RunInUseError:
        return True
    except OSError:  # without write permission the lock cannot be tested
        return False
