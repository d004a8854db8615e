"""Saved adapters ↔ folders, which persist across restarts and which peft can load.

``FOLDER/RUN/run.json`` describes the training; ``FOLDER/RUN/weights/NAME`` is a training's state, and
``FOLDER/RUN/sampler_weights/NAME`` an adapter to sample from. Their paths for clients are ``tinker://RUN/weights/NAME``
and ``tinker://RUN/sampler_weights/NAME``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from verifiers.errors import RequestRefusedError
from verifiers.files import open_regular, read_regular
from verifiers.integrations.tinker.adapters import LoraShape, Snapshot

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
RUN, CHECKPOINT, ADAPTER, STATE = "run.json", "checkpoint.json", "adapter_model.safetensors", "optimizer.pt"
SHORTEST_S, LONGEST_S = 3600, 10 * 366 * 86400  # bounds on the ttl of a checkpoint
MOST_JSON = 1 << 20  # bytes
MOST_METADATA = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The location of a checkpoint."""

    run: str
    kind: str  # one of KINDS
    name: str

    @classmethod
    def read(cls, path: Any) -> Place:
        """Parse a client's path.

        >>> Place.read("tinker://run-1/weights/final").name
        'final'
        """
        parts = path.removeprefix(SCHEME).split("/") if isinstance(path, str) and path.startswith(SCHEME) else []
        if len(parts) != 3 or parts[1] not in KINDS or not all(map(_NAME.fullmatch, (parts[0], parts[2]))):
            raise RequestRefusedError(
                f"{path!r:.200} is not a path of saved weights: tinker://RUN/weights/NAME or …/sampler_weights/NAME"
            )
        return cls(run=parts[0], kind=parts[1], name=parts[2])

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


class Store:
    """The folder of a server. One thread writes while another reads; replacing a checkpoint is atomic for readers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = threading.RLock()
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            for parts in self.folder.glob(f"*/{kind}/.*"):
                _recover(parts)

    # --- runs -----------------------------------------------------------------------------------------------------

    def add_run(self, run: str, *, base_model: str, shape: LoraShape, metadata: Any) -> None:
        check_metadata(metadata)
        told = {"base_model": base_model, "lora": shape.as_dict(), "user_metadata": metadata, "began": time.time()}
        (self.folder / run).mkdir(exist_ok=True)
        _write_json(self.folder / run / RUN, told)

    def run(self, run: str) -> dict[str, Any]:
        if not _NAME.fullmatch(run) or not (self.folder / run / RUN).is_file():
            raise RequestRefusedError(f"there is no training run {run!r:.200} here")
        return _read_json(self.folder / run / RUN)

    def runs(self) -> list[str]:
        """All runs, newest first."""
        found = [one.parent for one in self.folder.glob(f"*/{RUN}")]
        return [one.name for one in sorted(found, key=lambda one: one.stat().st_mtime, reverse=True)]

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save(
        self,
        place: Place,
        snapshot: Snapshot,
        peft_config: Any,
        *,
        state: Mapping[str, Any] | None = None,
        ttl_s: int | None = None,
        overwrite: bool = False,
        metadata: Any = None,
    ) -> None:
        """Write a checkpoint, completely or not at all."""
        from safetensors.torch import save_file

        check_metadata(metadata)
        path = self._path(place)
        if path.exists() and not overwrite and not self._is_expired(path):
            raise RequestRefusedError(f"{place} already exists; use another name, or overwrite=True")
        parts = path.with_name(f".{place.name}.{os.getpid()}")
        shutil.rmtree(parts, ignore_errors=True)
        try:
            parts.mkdir(parents=True)
            save_file({name: one.contiguous().cpu() for name, one in snapshot.tensors.items()}, parts / ADAPTER)
            peft_config.save_pretrained(parts)
            if state is not None:
                torch.save(dict(state), parts / STATE)
            now = time.time()
            expires = None if ttl_s is None else now + ttl_s
            _write_json(
                parts / CHECKPOINT,
                {"lora": snapshot.shape.as_dict(), "time": now, "expires": expires, "user_metadata": metadata},
            )
            with self._lock:
                shutil.rmtree(path, ignore_errors=True)  # if the process dies here, `_recover` restores the new one
                parts.rename(path)
        except BaseException:
            shutil.rmtree(parts, ignore_errors=True)
            raise

    def load(self, place: Place) -> Snapshot:
        from safetensors.torch import load_file

        try:
            with self._lock:
                path = self.find(place)
                told = _read_json(path / CHECKPOINT)
                return Snapshot(LoraShape(**told["lora"]), load_file(path / ADAPTER))
        except RequestRefusedError:
            raise
        except Exception as error:  # safetensors has its own error class
            raise RequestRefusedError(f"{place} is damaged: {type(error).__name__}: {error}") from error

    def load_state(self, place: Place) -> dict[str, Any]:
        try:
            with self._lock:
                path = self.find(place)
                if not (path / STATE).is_file():
                    raise RequestRefusedError(f"{place} was saved for sampling, without an optimizer state")
                with open_regular(path / STATE) as file:
                    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except RequestRefusedError:
            raise
        except Exception as error:
            raise RequestRefusedError(
                f"the optimizer of {place} is damaged: {type(error).__name__}: {error}"
            ) from error
        return state

    def stamp(self, place: Place) -> int:
        """The modification time of a checkpoint, in nanoseconds."""
        with self._lock:
            return (self.find(place) / CHECKPOINT).stat().st_mtime_ns

    def find(self, place: Place) -> Path:
        """The folder of a checkpoint that exists and has not expired; raises if there is none."""
        path = self._path(place)
        with self._lock:
            if path.exists() and self._is_expired(path):
                shutil.rmtree(path, ignore_errors=True)
            if not (path / CHECKPOINT).is_file():
                raise RequestRefusedError(f"there are no saved weights {place} here")
        return path

    def delete(self, place: Place) -> None:
        with self._lock:
            shutil.rmtree(self.find(place))

    def keep_for(self, place: Place, ttl_s: int | None) -> None:
        with self._lock:
            path = self.find(place) / CHECKPOINT
            _write_json(path, {**_read_json(path), "expires": None if ttl_s is None else time.time() + ttl_s})

    def checkpoints(self, run: str) -> list[dict[str, Any]]:
        """The checkpoints of a run in the clients' format, newest first."""
        with self._lock:
            return sorted(self._described(run), key=lambda one: str(one["time"]), reverse=True)

    def _described(self, run: str) -> Iterator[dict[str, Any]]:
        for kind, named in KINDS.items():
            for path in (self.folder / run / kind).glob(f"[!.]*/{CHECKPOINT}"):
                told, folder = _read_json(path), path.parent
                if told["expires"] is not None and told["expires"] < time.time():
                    shutil.rmtree(folder, ignore_errors=True)
                    continue
                yield {
                    "checkpoint_id": f"{kind}/{folder.name}",
                    "checkpoint_type": named,
                    "time": as_time(told["time"]),
                    "tinker_path": str(Place(run=run, kind=kind, name=folder.name)),
                    "size_bytes": sum(one.stat().st_size for one in folder.iterdir()),
                    "public": False,
                    "user_metadata": told["user_metadata"],
                    "expires_at": None if told["expires"] is None else as_time(told["expires"]),
                }

    def _path(self, place: Place) -> Path:
        return self.folder / place.run / place.kind / place.name

    def _is_expired(self, path: Path) -> bool:
        if not (path / CHECKPOINT).is_file():
            return False
        expires = _read_json(path / CHECKPOINT)["expires"]
        return expires is not None and expires < time.time()


def read_ttl(value: Any) -> int | None:
    """The seconds that a checkpoint is kept; None: for ever."""
    if value is None:
        return None
    if type(value) is not int or not SHORTEST_S <= value <= LONGEST_S:
        raise RequestRefusedError(f"ttl_seconds must be from {SHORTEST_S} to {LONGEST_S}, not {value!r:.80}")
    return value


def check_metadata(given: Any) -> None:
    if len(json.dumps(given)) > MOST_METADATA:
        raise RequestRefusedError(f"user_metadata has more than {MOST_METADATA} bytes, the maximum")


def as_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestRefusedError(f"a checkpoint's name may have letters, digits, '.', '_', ':' and '-': {name!r:.80}")
    return name


def _recover(parts: Path) -> None:
    """Recover a checkpoint that a dead server was writing: rename it if complete and not in place, else delete it."""
    name, _, pid = parts.name[1:].rpartition(".")
    if not name or not pid.isdecimal() or (int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()):
        return
    path = parts.with_name(name)
    if (parts / CHECKPOINT).is_file() and not path.exists():
        parts.rename(path)
    else:
        shutil.rmtree(parts, ignore_errors=True)


def _write_json(path: Path, told: Mapping[str, Any]) -> None:
    parts = path.with_name(f".{path.name}.{os.getpid()}")
    parts.write_text(json.dumps(told, indent=1))
    parts.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(read_regular(path, most=MOST_JSON))
    return told
