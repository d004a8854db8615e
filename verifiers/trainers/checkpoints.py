"""Checkpoints: folders with everything that a training needs to resume, written atomically."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch

from verifiers.engine.files.gguf_model import quietly
from verifiers.files import open_regular, read_regular
from verifiers.store.disk import sync_folder
from verifiers.store.plain import to_json
from verifiers.trainers.distributed import shards
from verifiers.trainers.distributed.processes import all_gather, raise_everywhere
from verifiers.trainers.distributed.sharding import ShardedWeights
from verifiers.trainers.memory.optimizers import OPTIMIZERS
from verifiers.trainers.reference import Reference
from verifiers.trainers.weights import Weights

STATE, TENSORS, REFERENCE = "trainer.json", "trainer.pt", "reference.pt"
CARD = "README.md"
UNLEARNED = "unlearned.json"  # the untrained batches of a generation that several updates share, by process
OWN_FILES = (STATE, TENSORS, REFERENCE, UNLEARNED)  # of a checkpoint, beside those of the model
MOST_STATE, MOST_UNLEARNED = 64 << 20, 4 << 30  # bytes
ROOM_TO_WRITE = 1 << 20  # bytes; a disk with less free space counts as full
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2 of Linux
ABANDONED = "abandoned-"  # prefix of checkpoints that are later than the one a training resumed from
_NAME = re.compile(r"step-\d+")
_MODEL = re.compile(r"(pytorch_|adapter_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|adapter_config\.json")


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [one for one in root.glob("step-*") if _NAME.fullmatch(one.name) and (one / STATE).is_file()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def set_aside(root: Path, step: int) -> None:
    """Rename the checkpoints after the step that a training resumes from: they belong to an abandoned run, and would be
    mistaken for the newest."""
    for one in checkpoints(root):
        if step_of(one) > step:
            names = (f"{ABANDONED}{n}-{one.name}" if n > 1 else f"{ABANDONED}{one.name}" for n in count(1))
            one.rename(next(free for name in names if not (free := one.with_name(name)).exists()))


def save_model(model: Any, tokenizer: Any, path: str | Path) -> None:
    """Write a model, or its adapters, and its tokenizer; nothing is replaced before all files have been written.

    If the folder exists, the files of a model in it are replaced, and other files (a README, for example) are kept.
    Adapters that are saved beside the model that they adapt replace only adapters.
    """
    path = Path(path).resolve()
    # Stage inside the folder if it is a mount point (files cannot be moved into it) or its parent is not writable.
    is_alone = path.is_dir() and (path.is_mount() or not os.access(path.parent, os.W_OK))
    staging = (path if is_alone else path.parent) / f".{path.name}.{os.getpid()}"
    with _atomic(staging, path, "model"):
        staging.mkdir(parents=True)
        _write_model(model, tokenizer, staging)
        if path.is_dir():
            _move_into(path, staging)
        else:
            staging.rename(path)


def _move_into(path: Path, staging: Path) -> None:
    """Replace the files of a model in a folder: all at once by exchanging the folder where that is possible.

    Otherwise file by file: the folder is a working directory or a mount point, or holds other folders. Meanwhile it has
    no configuration, so that files of two models cannot be loaded as one if the process is killed.
    """
    files = [file.relative_to(staging) for file in staging.rglob("*") if file.is_file()]
    if (path / CARD).exists():  # peft writes one with adapters
        files = [file for file in files if file != Path(CARD)]
    earlier = [one for one in path.iterdir() if _MODEL.fullmatch(one.name)]
    has_weights = any(not one.name.startswith("adapter_") for one in earlier)
    if has_weights or Path("config.json") in files:  # otherwise an existing config.json is not that of a model
        earlier.append(path / "config.json")
    if _adapts(staging, path):
        earlier = [one for one in earlier if one.name.startswith("adapter_")]
    if _exchange_with(path, staging, files, {one.name for one in earlier}):
        return
    for one in sorted(earlier, key=_is_configuration, reverse=True):
        one.unlink(missing_ok=True)
    sync_folder(path)
    for file in sorted(files, key=_is_configuration):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (staging / file).replace(path / file)
    shutil.rmtree(staging)


def _exchange_with(path: Path, staging: Path, files: Sequence[Path], earlier: Set[str]) -> bool:
    """Exchange a folder with the staging folder, which gets links to all files of the folder that are to be kept."""
    new = {file.parts[0] for file in files}
    kept = [one for one in path.iterdir() if one.name not in earlier | new]
    if staging.parent != path.parent or path == Path.cwd() or not all(one.is_file() for one in kept):
        return False
    try:
        shutil.copymode(path, staging)
        for one in kept:
            (staging / one.name).unlink(missing_ok=True)
            os.link(one, staging / one.name, follow_symlinks=False)
    except OSError:  # the file system has no hard links
        return False
    _sync_files(staging)
    if not _exchange(staging, path):
        return False
    sync_folder(path.parent)
    for one in staging.iterdir():  # what another program has created meanwhile is kept as well
        if one.name not in earlier and not (path / one.name).exists():
            one.rename(path / one.name)
    shutil.rmtree(staging)
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False if the system or the file system has no such step."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


def _adapts(adapters: Path, path: Path) -> bool:
    """Whether ``adapters`` is a folder of adapters for the model in ``path``."""
    if not (adapters / "adapter_config.json").is_file():
        return False
    base = json.loads((adapters / "adapter_config.json").read_text()).get("base_model_name_or_path")
    return base is not None and Path(base).expanduser().resolve() == path


def _is_configuration(file: Path) -> bool:
    """Whether this is a file without which the folder cannot be loaded as a model or an adapter."""
    return file.name in ("config.json", "adapter_config.json")


def _write_model(model: Any, tokenizer: Any, path: Path) -> None:
    with quietly():
        model.save_pretrained(path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)


def save(
    root: Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    weights: Weights,
    state: Mapping[str, Any],
    keep: int | None,
    reference: Reference | None = None,
    unlearned: Any = None,
) -> Path:
    """Write a checkpoint of this step; with ``keep``, all but that many of the newest are deleted.

    With sharded weights, every process writes its part, so all processes must call this together.
    """
    processes = weights.processes if isinstance(weights, ShardedWeights) else None
    is_main = processes is None or processes.is_main_process
    name = f"step-{step:06d}"
    root, staging = (Path(one) for one in all_gather(processes, (str(root), str(root / f".{name}.{os.getpid()}")))[0])
    path = root / name
    with _atomic(staging, path, "checkpoint") if is_main else nullcontext():
        with raise_everywhere(processes):
            if is_main:
                for unfinished in root.glob(".step-*"):  # of a process that was killed: only one at a time writes here
                    shutil.rmtree(unfinished, ignore_errors=True)
                staging.mkdir(parents=True)
        if isinstance(weights, ShardedWeights):
            shards.write(weights, staging)
            if hasattr(model, "peft_config"):
                weights.publish_now()
        with raise_everywhere(processes):
            if is_main:
                (_write_without_weights if weights.is_sharded else _write_model)(model, tokenizer, staging)
                torch.save(_tensors(weights), staging / TENSORS)
                if reference is not None:
                    _save_reference(reference, staging / REFERENCE)
                if unlearned is not None:
                    (staging / UNLEARNED).write_bytes(to_json(unlearned))
                whole = {**state, "step": step, "python_rng": random.getstate()}
                (staging / STATE).write_text(json.dumps(whole, indent=1))
                _sync_and_rename(staging, path)
    if is_main:
        sync_folder(root)
        if reference is not None:
            reference.saved = (reference.version, path / REFERENCE)
        for old in checkpoints(root)[: -keep if keep else 0]:
            shutil.rmtree(old)
    if processes is not None:
        processes.wait_for_everyone()
    return path


def _write_without_weights(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write configuration and tokenizer only, as the weights are in shards; adapters are small and written whole."""
    if hasattr(model, "peft_config"):
        _write_model(model, tokenizer, folder)
        return
    model.config.dtype = next(model.parameters()).dtype
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sync_and_rename(staging: Path, path: Path) -> None:
    """Replace a folder by the staging folder; the old one is deleted only afterwards."""
    _sync_files(staging)
    if path.exists() and _exchange(staging, path):
        shutil.rmtree(staging, ignore_errors=True)
        return
    old = path.with_name(f"{staging.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    staging.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def _save_reference(reference: Reference, path: Path) -> None:
    """Write the reference, as a hard link to the last checkpoint's file if it has not changed since."""
    if reference.saved is not None and reference.saved[0] == reference.version:
        try:
            os.link(reference.saved[1], path)
            return
        except OSError:  # the file was deleted, or the file system has no hard links
            path.unlink(missing_ok=True)
    torch.save(reference.weights(), path)


def load_reference(path: Path, reference: Reference) -> None:
    """Restore the reference from a checkpoint."""
    if not (path / REFERENCE).is_file():
        raise ValueError(
            f"{path} holds no reference model for kl_coef: it was written without one, and the model before training "
            "is not known; resume with kl_coef=0, or start a new run from its weights"
        )
    saved = torch.load(path / REFERENCE, map_location="cpu", weights_only=True)
    reference.restore(saved)
    reference.saved = (reference.version, path / REFERENCE)


class CheckpointError(OSError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


@contextmanager
def _atomic(staging: Path, path: Path, what: str) -> Iterator[None]:
    """On an error, remove the staging folder; raise CheckpointError if disk space or memory ran out."""
    shutil.rmtree(staging, ignore_errors=True)
    try:
        yield
    except BaseException as error:
        missing = _missing_resource(error, staging)
        shutil.rmtree(staging, ignore_errors=True)
        if missing is None:
            raise
        reason = "there is too little memory" if missing == errno.ENOMEM else os.strerror(missing)
        said = f"this {what} was not saved: {reason}; earlier ones are unchanged, and training can be resumed"
        raise CheckpointError(missing, said, str(path)) from error


def _missing_resource(error: BaseException, staging: Path) -> int | None:
    """The errno of an error that was caused by a lack of resources, also if a library wrapped it; None for others."""
    said = str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in said or "out of memory" in said:
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", said):  # safetensors
        return int(found[1])
    if not isinstance(error, RuntimeError):
        return None
    try:  # errors of torch do not include why writing failed
        free = shutil.disk_usage(staging if staging.exists() else staging.parent).free
    except OSError:
        return None
    return errno.ENOSPC if free < ROOM_TO_WRITE else errno.EIO if "writ" in said else None


def _tensors(weights: Weights) -> dict[str, Any]:
    """Loss scale and random states; master weights and optimizer state too, unless these are in shards."""
    found: dict[str, Any] = {
        "scale": weights.scale,
        "good_steps": weights.good_steps,
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    if not weights.is_sharded:
        found |= {
            "names": weights.names,
            "masters": [one.detach() for one in weights.masters],
            "optimizer": weights.optimizer.state_dict(),
            "states": OPTIMIZERS[weights.config.optim].state_format,
        }
    return found


def load(path: Path, weights: Weights) -> dict[str, Any]:
    """Restore weights, optimizer state and random states; returns the rest of the trainer's state."""
    try:
        with shards.readable(path):
            state: dict[str, Any] = json.loads(read_regular(path / STATE, most=MOST_STATE))
            version, internal, gauss = state.pop("python_rng")
            state |= {name: int(state[name]) for name in ("step", "cursor")}
            if (path / UNLEARNED).is_file():
                state["unlearned"] = json.loads(read_regular(path / UNLEARNED, most=MOST_UNLEARNED))
            with open_regular(path / TENSORS) as file:
                tensors = torch.load(file, map_location="cpu", weights_only=True)
            saved = _shapes(path, tensors)
    except FileNotFoundError:
        raise ValueError(f"{path} is not a checkpoint: it has no {STATE} and {TENSORS}") from None
    shapes = weights.shapes
    if shapes != saved:
        odd = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
        raise ValueError(
            f"{path} is a checkpoint of another model: {odd[0]} is {_shape(saved.get(odd[0]))} there and "
            f"{_shape(shapes.get(odd[0]))} here ({len(odd)} parameters differ)"
        )
    states, mine = tensors.get("states", "AdamW"), OPTIMIZERS[weights.config.optim].state_format
    if states != mine:
        wanted = [name for name, kind in OPTIMIZERS.items() if kind.state_format == states]
        raise ValueError(
            f"{path} was not written with optim={weights.config.optim!r}, and its optimizer state does not fit: resume "
            f"with optim={' or '.join(map(repr, wanted))}, or start a new run from its weights"
        )
    if "masters" not in tensors:
        with shards.readable(path):
            shards.read(weights, path)
    elif isinstance(weights, ShardedWeights):
        shards.read_whole(weights, tensors)
    else:
        with torch.no_grad():
            for master, value in zip(weights.masters, tensors["masters"], strict=True):
                master.copy_(value)
        weights.publish()
        weights.optimizer.load_state_dict(tensors["optimizer"])
    if 1.0 not in (weights.scale, tensors["scale"]):  # a scale of 1 means that the training is not in float16
        weights.scale, weights.good_steps = tensors["scale"], tensors.get("good_steps", 0)
    torch.set_rng_state(tensors["torch_rng"])
    for i, one in zip(range(torch.cuda.device_count()), tensors["cuda_rng"], strict=False):  # fewer GPUs are fine
        torch.cuda.set_rng_state(one, i)
    random.setstate((version, tuple(internal), gauss))
    return state


def _shapes(path: Path, tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the saved weights, by name."""
    if "masters" in tensors:
        return dict(zip(tensors["names"], (tuple(one.shape) for one in tensors["masters"]), strict=True))
    found = shards.shapes_of(path).items()
    return {name.removeprefix("weights."): shape for name, shape in found if name.startswith("weights.")}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape)) or "a number"
