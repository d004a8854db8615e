"""The folder of one run: creates and opens it, reads and changes its metadata, appends and reads its rollouts."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from verifiers.files import read_regular
from verifiers.store.appender import SYNC_EVERY_S, Appender
from verifiers.store.config import differences, fingerprint, is_same_environment, normalise
from verifiers.store.disk import replace_file, sync_folder
from verifiers.store.lock import FolderLock, RunInUseError
from verifiers.store.mending import ATTEMPTS, DAMAGED, Compacted, compact
from verifiers.store.plain import sanitise_text, to_json
from verifiers.store.reading import METADATA, RESULTS, Rows, Status, load_index, read_records
from verifiers.store.record import Key, Record, is_failed, read_usage
from verifiers.types import Usage

DEFAULT_ROOT = Path("outputs/evals")
DEPTH = 3  # levels of folders below a root that are searched for runs
FORMAT = 1
MOST_METADATA = 64 << 20  # bytes
_MAX_NAME_BYTES = 200  # file systems allow 255
# Readers of 0.1.x expect these at the top level of the metadata, not inside "config".
_CLASSIC_KEYS = ("env_args", "base_url", "num_examples", "rollouts_per_example", "sampling_args", "state_columns")


class RunDir:
    """One run on disk: ``create`` makes a new one, ``open`` opens an existing one, ``appender`` writes rollouts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results_path = path / RESULTS
        self.metadata_path = path / METADATA
        self.attempts_path = path / ATTEMPTS
        self.damaged_path = path / DAMAGED
        self._lock = FolderLock(path)
        self._appender: Appender | None = None
        self._rows: Rows | None = None

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str] = DEFAULT_ROOT,
        *,
        env_id: str,
        model: str,
        config: Mapping[str, Any],
        run_id: str | None = None,
    ) -> RunDir:
        """Make ``root/{env}--{model}/{run_id}/`` and write its ``metadata.json``."""
        name = os.urandom(4).hex() if run_id is None else safe_name(run_id)
        path = Path(root) / safe_name(f"{env_id}--{model}") / name
        return cls.create_at(path, env_id=env_id, model=model, config=config)

    @classmethod
    def create_at(cls, path: str | os.PathLike[str], *, env_id: str, model: str, config: Mapping[str, Any]) -> RunDir:
        """Make a run directory at exactly this path, which must not exist or be empty (it may be a mount point)."""
        path = Path(path)
        run, is_new = cls(path), not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        run._check_empty()  # before the lock file is written: the folder may contain a user's own files
        try:
            with run.lock():  # two processes may both have found it empty
                run._check_empty()
                run._write_first(env_id, model, config)
            sync_folder(path.parent)
        except (OSError, MemoryError):
            if is_new:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return run

    def _check_empty(self) -> None:
        # These may be left by a process that was killed while it made this folder, or by a new file system.
        if not {item.name for item in self.path.iterdir()} <= {".lock", f"{METADATA}.tmp", "lost+found"}:
            raise FileExistsError(f"{self.path} exists; resume it with RunDir.open, or choose another run id")

    def _write_first(self, env_id: str, model: str, config: Mapping[str, Any]) -> None:
        stored = normalise(config)
        self.update_metadata(
            {
                "env_id": env_id,
                "model": model,
                **{key: stored[key] for key in _CLASSIC_KEYS if key in stored},
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "verifiers_version": _version(),
                "format": FORMAT,
                "finished": False,
                "config": stored,
                "config_fingerprint": fingerprint(stored),
            }
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDir:
        """Open an existing run directory, given its path or that of its ``results.jsonl``."""
        folder = Path(path)
        if folder.name == RESULTS:
            folder = folder.parent
        if not is_run_dir(folder):
            raise FileNotFoundError(f"{folder} is not a run directory: it has neither {METADATA} nor {RESULTS}")
        return cls(folder)

    # --- metadata -----------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> dict[str, Any]:
        """The current content of ``metadata.json``; empty if there is no such file."""
        try:
            text = read_regular(self.metadata_path, most=MOST_METADATA)
            metadata: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        except FileNotFoundError:
            return {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{self.metadata_path} is damaged: {error}") from error
        return metadata

    def update_metadata(self, changes: Mapping[str, Any]) -> None:
        """Set keys of ``metadata.json``, atomically and durably."""
        replace_file(self.metadata_path, [to_json({**self.metadata, **normalise(changes)}) + b"\n"])

    def check_same(self, config: Mapping[str, Any], *, unless_unknown: Collection[str] = ()) -> None:
        """Raise ValueError, naming each difference, unless the run was made with this configuration.

        Keys in ``unless_unknown`` are compared only if the run has recorded them.
        """
        made_with = self.metadata.get("config")
        if not isinstance(made_with, dict):
            raise ValueError(f"{self.metadata_path} does not contain the run's config; use a new run directory")
        config = {key: value for key, value in config.items() if key in made_with or key not in unless_unknown}
        if is_same_environment(made_with.get("env_id"), config.get("env_id")):
            made_with = {**made_with, "env_id": config.get("env_id")}
        if found := differences(made_with, config):
            raise ValueError(f"{'; '.join(found)}; use the same settings or a new run directory ({self.path})")

    # --- writing ------------------------------------------------------------------------------------------------

    def lock(self) -> FolderLock:
        """``with run.lock():`` excludes all other writers; it is reentrant, so the body may call methods that lock."""
        return self._lock

    def appender(self, *, sync_every_s: float = SYNC_EVERY_S) -> Appender:
        """Open the run for appending; it is locked until the appender is closed."""
        self._check_not_appending()
        self._appender = Appender(self.results_path, lock=self._lock, sync_every_s=sync_every_s)
        return self._appender

    def compact(self, *, keep_failed: bool = False) -> Compacted:
        """Prepare to resume: move failed, repeated and damaged lines to the side files; return the finished rollouts.

        At the end of a run, ``keep_failed=True`` leaves failed rollouts in the file, where reports look for them.
        """
        self._check_not_appending()
        with self._lock:
            return compact(self.results_path, keep_failed=keep_failed)

    def retried_usage(self) -> Usage:
        """The usage of failed rollouts that were rerun."""
        if not self.attempts_path.is_file():
            return Usage()
        attempts = read_records(self.attempts_path, ("error", "reward", "usage"))
        return sum((read_usage(one["usage"]) or Usage() for one in attempts if is_failed(one)), Usage())

    def _check_not_appending(self) -> None:
        if self._appender is not None and not self._appender.is_closed:
            raise RunInUseError(f"{self.path} has an open appender; close it first")

    # --- reading ------------------------------------------------------------------------------------------------

    def load_index(self) -> dict[Key, Status]:
        """``(example_id, rollout)`` → ``"ok"`` or ``"failed"``, for every rollout in the file."""
        return load_index(self.results_path)

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record]:
        """The records in the order in which they finished, one at a time."""
        return read_records(self.path, columns, without_superseded=self._may_have_superseded)

    def sorted_records(self) -> Iterator[Record]:
        """The records by example, then rollout, one at a time."""
        may_have = self._may_have_superseded  # before opening the file: a run that ends meanwhile replaces it
        rows = Rows(self.results_path)
        without = rows.superseded() if may_have else set[int]()
        return (rows[number] for number in rows.sorted_order() if number not in without)

    @property
    def _may_have_superseded(self) -> bool:
        """Whether there may be superseded lines. While an evaluation is resumed, the file may contain a saved rollout
        a second time, scored again with its group."""
        try:
            metadata = self.metadata
        except (ValueError, OSError):
            return False
        config = metadata.get("config")
        is_evaluation = isinstance(config, dict) and "rows" in config and metadata.get("kind") != "training"
        return is_evaluation and metadata.get("finished") is False and self.results_path.exists()

    def rows(self) -> Rows:
        """The rollouts by number: always the same object, refreshed."""
        if self._rows is None:
            self._rows = Rows(self.results_path)
        else:
            self._rows.refresh()
        return self._rows

    def page(self, start: int, n: int) -> list[Record]:
        """Up to ``n`` records from number ``start`` on, in file order, including those just appended."""
        return self.rows().page(start, n)


def is_run_dir(path: str | os.PathLike[str]) -> bool:
    """Whether a folder contains a run, or at least a part of one."""
    return (Path(path) / METADATA).is_file() or (Path(path) / RESULTS).is_file()


def list_runs(*roots: str | os.PathLike[str]) -> list[RunDir]:
    """The runs under some roots, newest first by date of creation, which tags and notes do not change."""
    found = [RunDir(path) for root in roots or (DEFAULT_ROOT,) for path in runs_under(Path(root))]
    return sorted(found, key=_age, reverse=True)


def runs_under(root: Path, depth: int = DEPTH) -> list[Path]:
    """The runs in a folder, up to ``depth`` levels down: ``vf eval`` makes ``env--model/id``, ``output_dir=`` any path.

    Run directories themselves are not searched.
    """
    if is_run_dir(root):
        return [root]
    if depth == 0:
        return []
    try:
        with os.scandir(root) as found:
            folders = [Path(item.path) for item in found if item.is_dir() and not item.name.startswith(".")]
    except OSError:  # not readable, or deleted meanwhile
        return []
    return [path for folder in folders for path in runs_under(folder, depth - 1)]


def _age(run: RunDir) -> tuple[float, float, str]:
    try:
        changed_at = run.path.stat().st_mtime
        made_at = date_of(run.metadata)
    except (OSError, ValueError):  # deleted meanwhile, or damaged
        changed_at, made_at = 0.0, None
    return changed_at if made_at is None else made_at, changed_at, str(run.path)


def date_of(metadata: Mapping[str, Any]) -> float | None:
    """When a run was created, according to its metadata, in seconds since the epoch.

    >>> date_of({"date": "1970-01-01T00:01:00+00:00"}), date_of({"date": 7})
    (60.0, None)
    """
    try:
        found = datetime.fromisoformat(str(metadata.get("date")))
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def find_run(
    root: str | os.PathLike[str] = DEFAULT_ROOT, *, env_id: str, model: str, config: Mapping[str, Any]
) -> RunDir | None:
    """The newest run that was made with this configuration, or None."""
    wanted, folder = fingerprint(config), safe_name(f"{env_id}--{model}")
    runs = (run for run in list_runs(root) if run.path.parent.name == folder)
    return next((run for run in runs if _fingerprint_of(run) == wanted), None)


def safe_name(text: str) -> str:
    """Turn any text into a single path component.

    >>> safe_name("gsm8k--org/model"), safe_name("../../etc")
    ('gsm8k--org--model', '_--..--etc')
    """
    name = re.sub(r"[/\\]", "--", sanitise_text(text))
    name = re.sub(r"[\x00-\x1f\x7f]", "_", name)
    name = re.sub(r"^\.+", "_", name) or "_"
    if len(encoded := name.encode()) <= _MAX_NAME_BYTES:
        return name
    digest = hashlib.blake2b(encoded, digest_size=4).hexdigest()
    return f"{encoded[: _MAX_NAME_BYTES - 9].decode(errors='ignore')}-{digest}"


def _fingerprint_of(run: RunDir) -> str | None:
    try:
        found = run.metadata.get("config_fingerprint")
    except (ValueError, OSError):  # damaged or unreadable: matches no configuration
        return None
    return found if isinstance(found, str) else None


def _version() -> str | None:
    import importlib.metadata  # imported here because it takes 16 ms

    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return None
