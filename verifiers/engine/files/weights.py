"""A folder of safetensors → the parameters of a live module, in place: checked whole before the first one changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verifiers.engine.files.gguf_model import quietly

FLOATS = ("F64", "F32", "F16", "BF16")
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def files_of(path: str | Path) -> list[Path]:
    """The safetensors files of a path: itself, or those of a folder, as transformers finds them where it does."""
    path = Path(path)
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is neither a folder nor a .safetensors file")
    if (path / WHOLE).is_file():
        return [path / WHOLE]
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


def check_numbers(own: dict[str, Any], path: str | Path) -> None:
    """Refuse a folder that holds floats of ``own`` as integers or in 8 bits: nothing says what these stand for."""
    with _opened(files_of(path)) as found:
        for name, file in found.items():
            kind = str(file.get_slice(name).get_dtype())
            if name in own and own[name].is_floating_point() and kind not in FLOATS:
                raise ValueError(f"{str(path)!r} holds {name!r} as {kind}, and nothing says how to read that as floats")


def load_into(model: Any, path: str | Path) -> int:
    """Copy every tensor into the parameter of its name; returns the number of tensors.

    Raises ValueError, and leaves the module unchanged, if a name or shape differs from the module's or one is missing.
    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    check_numbers(own, path)
    with _opened(files_of(path)) as found:
        read = {name: partial(file.get_tensor, name) for name, file in found.items()}
        try:
            _check(own, {name: tuple(file.get_slice(name).get_shape()) for name, file in found.items()}, model)
        except ValueError:
            if (converted := _converted(model, path)) is None:
                raise
            read = {name: partial(torch.Tensor.detach, tensor) for name, tensor in converted.items()}
        with torch.no_grad():
            for name, tensor in read.items():
                own[name].copy_(tensor())
        return len(found)


def _converted(model: Any, path: str | Path) -> dict[str, torch.Tensor] | None:
    """The weights that transformers makes of a folder with other names than the module's: those of experts, which are
    stored one by one and held together. None if they are not just this module's."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not Path(path).is_dir():
        return None
    how = {"config": copy.deepcopy(model.config), "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with quietly():
            loaded, told = type(model).from_pretrained(path, dtype=next(model.parameters()).dtype, **how)
    except (OSError, RuntimeError, TypeError, ValueError, LookupError):  # it is no folder of such a model
        return None
    return None if any(told.values()) else dict(loaded.state_dict())


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
