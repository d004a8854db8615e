"""Finds the runs in folders and gives each an id; clients of the viewer address runs only by id, never by path."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from verifiers.files import read_regular
from verifiers.store import DEFAULT_ROOT, is_run_dir
from verifiers.store.run_dir import MOST_METADATA, runs_under
from verifiers.viewer.index import RolloutIndex
from verifiers.viewer.training import MetricsLog

DEFAULT_ROOTS = (DEFAULT_ROOT, Path("outputs/train"))
MAX_OPEN = 8  # runs whose index is kept in memory
RECENT_S = 60.0  # if the lock cannot tell, a file changed within this time counts as being written


class Kept:
    """An LRU cache."""

    def __init__(self, most: int = 12) -> None:
        self.most = most
        self._made: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
                while len(self._made) > self.most:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            return self._made[key]


class Run:
    """One run directory, read on demand and never written to."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.id = run_id
        self.path = path
        self.results_path = path / "results.jsonl"
        self.metrics_path = path / "metrics.jsonl"
        self.index = RolloutIndex(self.results_path)
        self.metrics = MetricsLog(self.metrics_path)
        self.kept = Kept()  # figures, orders and searches
        self._metadata: tuple[tuple[int, int] | None, dict[str, Any], str | None] = (None, {}, None)

    def read_metadata(self) -> tuple[dict[str, Any], str | None]:
        """The content of ``metadata.json``, and a description of any problem with it."""
        path = self.path / "metadata.json"
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            if self._metadata[0] != stamp:
                self._metadata = (stamp, *_parse_metadata(read_regular(path, most=MOST_METADATA)))
        except FileNotFoundError:
            return {}, "metadata.json is missing: the run's properties are guessed from its folder name"
        except OSError as error:
            return {}, f"metadata.json cannot be read: {error.strerror}"
        return self._metadata[1], self._metadata[2]

    @property
    def metadata(self) -> dict[str, Any]:
        return self.read_metadata()[0]

    @property
    def is_training(self) -> bool:
        return self.metadata.get("kind") == "training" or self.metrics_path.is_file()

    @property
    def is_finished(self) -> bool:
        metadata = self.metadata
        if metadata.get("interrupted") or metadata.get("ended_early"):
            return False
        return bool(metadata.get("finished")) or metadata.get("num_rollouts") is not None  # older runs do not say

    @property
    def is_live(self) -> bool:
        """Whether the run is being written. The lock names a process; on another machine, recent changes decide."""
        if self.is_finished and _mtime(self.results_path) <= _mtime(self.path / "metadata.json"):
            return False  # finished, and not resumed since
        try:
            words = read_regular(self.path / ".lock", most=4096).decode("utf-8", "replace").split()
            if not words:
                return False  # the lock was released
        except OSError:
            words = []
        if len(words) == 4 and words[0] == "process" and words[3] == socket.gethostname() and words[1].isdigit():
            return _is_alive(int(words[1]))
        return time.time() - self.changed_at() < RECENT_S

    def made_at(self) -> float:
        return max(_mtime(path) for path in (self.path / "metadata.json", self.results_path))

    def changed_at(self) -> float:
        return max((_mtime(path) for path in (self.results_path, self.metrics_path)), default=0.0)

    def stamp(self) -> str:
        """A digest that changes whenever a file of the run does; cheap enough to be polled every second."""
        parts = []
        for path in (self.results_path, self.metrics_path, self.path / "metadata.json"):
            try:
                found = path.stat()
                parts.append(f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}")
            except OSError:
                parts.append("-")
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()


class Library:
    """The runs under some roots and at some paths, newest first.

    >>> Library(roots=["no/such/folder"]).runs()
    []
    """

    def __init__(
        self,
        roots: Iterable[str | os.PathLike[str]] = DEFAULT_ROOTS,
        paths: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        self.roots = [Path(root) for root in roots]
        self.paths = [Path(path) for path in paths]
        self._runs: dict[str, Run] = {}
        self._open: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def runs(self) -> list[Run]:
        """All current runs."""
        found: dict[str, Path] = {}
        for path in self.paths:
            found.setdefault(run_id_of(path), path)
        for root in self.roots:
            for path in runs_under(root):
                found.setdefault(run_id_of(path), path)
        with self._lock:
            self._runs = {run_id: self._runs.get(run_id) or Run(run_id, path) for run_id, path in found.items()}
            return sorted(self._runs.values(), key=lambda run: (run.made_at(), str(run.path)), reverse=True)

    def get(self, run_id: str) -> Run | None:
        """The run with this id; the indexes of the last few requested runs stay in memory."""
        if run_id not in self._runs:
            self.runs()
        with self._lock:
            run = self._runs.get(run_id)
            if run is None or not is_run_dir(run.path):
                return None
            self._open[run_id] = None
            self._open.move_to_end(run_id)
            if len(self._open) > MAX_OPEN:
                closed, _ = self._open.popitem(last=False)
                if closed in self._runs:  # a new object frees what was read of the run
                    self._runs[closed] = Run(closed, self._runs[closed].path)
            return run


def run_id_of(path: Path) -> str:
    """The id of a run in URLs: 12 hex digits that do not reveal its path."""
    return hashlib.blake2b(os.fsencode(path.resolve()), digest_size=6).hexdigest()


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _parse_metadata(text: bytes) -> tuple[dict[str, Any], str | None]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any]), None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {}, f"metadata.json is damaged: {error}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
