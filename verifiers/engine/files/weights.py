"""A folder of safetensors → the parameters of a live module, in place: checked whole before the first one changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"


def files_of(path: str | Path) -> list[Path]:
    """The safetensors files of a path: itself, or those of a folder (by its index, where it has one)."""
    path = Path(path)
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is neither a folder nor a .safetensors file")
    if (path / INDEX).is_file():
        listed = json.loads((path / INDEX).read_text())["weight_map"].values()
        files = [path / Path(name).name for name in sorted(set(listed))]
    else:
        files = sorted(path.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{str(path)!r} lacks {missing[0]}, which its index names")
    if not files:
        raise ValueError(f"{str(path)!r} holds no .safetensors file")
    return files


def load_into(model: Any, path: str | Path) -> int:
    """Copy every tensor into the parameter of its name; returns the number of tensors.

    Raises ValueError, and leaves the module unchanged, if a name or shape differs from the module's or one is missing.
    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    with _opened(files_of(path)) as found:
        _check(own, {name: tuple(file.get_slice(name).get_shape()) for name, file in found.items()}, model)
        with torch.no_grad():
            for name, file in found.items():
                own[name].copy_(file.get_tensor(name))
    return len(found)


@contextmanager
def _opened(files: list[Path]) -> Iterator[dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in files:
            try:
                handle: Any = stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file.name} cannot be read as safetensors: {error}") from error
            found |= dict.fromkeys(handle.keys(), handle)
        yield found


def _check(own: dict[str, Any], shapes: dict[str, tuple[int, ...]], model: Any) -> None:
    if unknown := sorted(set(shapes) - set(own)):
        raise ValueError(f"the model has no {unknown[0]!r} ({len(unknown)} names are not its own)")
    for name, shape in shapes.items():
        if shape != tuple(own[name].shape):
            raise ValueError(f"{name!r} has the shape {list(shape)}, and the model's {list(own[name].shape)}")
    given = {own[name].data_ptr() for name in shapes}  # tied weights are stored once, under one of their names
    missing = [name for name, tensor in model.named_parameters() if tensor.data_ptr() not in given]
    if missing:
        raise ValueError(f"{missing[0]!r} is missing ({len(missing)} parameters have no weights there)")
