"""Sharded weights ↔ a checkpoint folder: each process writes its shards, and any number of processes can read them.

The format is `torch.distributed.checkpoint`, with the entries ``weights.NAME`` (trained, in float32),
``optimizer.NAME.STATE`` and, unless adapters are trained, ``frozen.NAME``.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

from verifiers.engine.plan import on_meta
from verifiers.trainers.distributed.sharding import ShardedWeights
from verifiers.trainers.weights import Weights

FOLDER = "shards"


def write(weights: ShardedWeights, path: Path) -> None:
    """Write the shards of this process; all processes must call this."""
    with _quietly():
        dcp.save({**weights.tensors(), **weights.frozen()}, checkpoint_id=path / FOLDER)


def read(weights: Weights, path: Path) -> None:
    """Load weights and optimizer from shards that any number of processes wrote."""
    shapes = shapes_of(path)
    weights.make_room({name: shape for name, shape in shapes.items() if name.startswith("optimizer.")})
    with _quietly():
        weights.take(lambda wanted: dcp.load(wanted, checkpoint_id=path / FOLDER, no_dist=True))


def read_whole(weights: ShardedWeights, saved: Mapping[str, Any]) -> None:
    """Load weights and optimizer from a checkpoint of a single process, which has full tensors."""
    whole = {f"weights.{name}": one for name, one in zip(saved["names"], saved["masters"], strict=True)}
    for i, state in saved["optimizer"]["state"].items():
        whole |= {f"optimizer.{saved['names'][i]}.{key}": value for key, value in state.items()}

    def fill(wanted: dict[str, Tensor]) -> None:
        for name, one in wanted.items():
            if isinstance(one, DTensor):
                value = whole[name].to(one.device)
                shard = distribute_tensor(value, one.device_mesh, one.placements, src_data_rank=None)
                one.to_local().copy_(shard.to_local())
            else:
                one.copy_(whole[name])

    weights.make_room({name: tuple(one.shape) for name, one in whole.items() if name.startswith("optimizer.")})
    weights.take(fill)


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's entries, by name."""
    found: Mapping[str, Any] = dcp.FileSystemReader(path / FOLDER).read_metadata().state_dict_metadata
    return {name: tuple(one.size) for name, one in found.items()}


def _full_weights(path: Path) -> dict[str, Tensor]:
    """The full parameters of a checkpoint, by name."""
    wanted = {
        name: torch.empty(shape) for name, shape in shapes_of(path).items() if name.startswith(("weights.", "frozen."))
    }
    with _quietly():
        dcp.load(wanted, checkpoint_id=path / FOLDER, no_dist=True)
    return {name.partition(".")[2]: one for name, one in wanted.items()}


def export_checkpoint(checkpoint: str | Path, path: str | Path) -> Path:
    """Convert a checkpoint, sharded or not, to a folder of safetensors that transformers (for adapters: peft) loads."""
    from transformers import AutoConfig, AutoTokenizer

    from verifiers.trainers.checkpoints import OWN_FILES, save_model

    checkpoint, path = Path(checkpoint), Path(path)
    is_sharded = (checkpoint / FOLDER / ".metadata").is_file()
    if not is_sharded and not any(checkpoint.glob("*.safetensors")):
        raise ValueError(f"{checkpoint} is not a checkpoint of a training: it has neither {FOLDER} nor safetensors")
    if not is_sharded or (checkpoint / "adapter_config.json").is_file():  # adapters are always saved in full
        shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns(FOLDER, *OWN_FILES))
        return path
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint)
    model = on_meta(config)
    with readable(checkpoint):
        weights = _full_weights(checkpoint)
    dtype = config.dtype or torch.float32
    model.load_state_dict({name: one.to(dtype) for name, one in weights.items()}, strict=False, assign=True)
    model.tie_weights()
    if missing := [name for name, one in model.named_parameters() if one.is_meta]:
        raise ValueError(f"{checkpoint} does not hold all weights of its model: {missing[0]} is missing")
    save_model(model, tokenizer, path)
    return path


@contextmanager
def readable(path: Path | None) -> Iterator[None]:
    """Turn errors about truncated or overwritten files of a checkpoint into a short ValueError."""
    try:
        yield
    except OSError:
        raise
    except (dcp.CheckpointException, Exception) as error:  # many types; CheckpointException is not an Exception
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        said = lines[-1] if isinstance(error, dcp.CheckpointException) else f"{type(error).__name__}: {lines[0]}"
        raise ValueError(
            f"{path} is damaged and cannot be read ({said:.200}); resume from an earlier checkpoint (--resume PATH)"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about its own functions
        yield
