"""Load safetensors into the parameters of a live module, in place. All are checked before the first one changes."""

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
    """The safetensors files of a path: the file itself, or those of a folder, found as transformers finds them."""
    path = Path(path)
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is neither a folder nor a .safetensors file")
    if (path / WHOLE).is_file():
        return [path / WHOLE]
    if (path / INDEX).is_file():
        files = _shards(path / INDEX)
    else:
        files = sorted(path.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{str(path)!r} lacks {missing[0]}, which is listed in its index")
    if not files:
        raise ValueError(f"{str(path)!r} holds no .safetensors file")
    return files


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [index.parent / Path(name).name for name in sorted(names)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(index)!r} is not an index of safetensors files: {error!r:.200}") from error


def check_numbers(own: dict[str, Any], path: str | Path) -> None:
    """Refuse a folder that stores floats of ``own`` as integers or in 8 bits: there is no rule to convert them."""
    with _opened(files_of(path)) as found:
        for name, file in found.items():
            kind = str(file.get_slice(name).get_dtype())
            if name in own and own[name].is_floating_point() and kind not in FLOATS:
                raise ValueError(f"{str(path)!r} has {name!r} as {kind}, without a rule to convert it to floats")


def load_into(model: Any, path: str | Path) -> int:
    """Copy every tensor into the parameter of the same name; returns the number of tensors.

    If a name or shape does not match the module, or a parameter is missing, raises ValueError and changes nothing.
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
    """A folder's weights as converted by transformers, for names that differ from the module's: experts, for example,
    are stored separately but merged in the module. None if they do not match the module exactly."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not Path(path).is_dir():
        return None
    how = {"config": copy.deepcopy(model.config), "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with quietly():
            loaded, told = type(model).from_pretrained(path, dtype=next(model.parameters()).dtype, **how)
    except (OSError, RuntimeError, TypeError, ValueError, LookupError):  # not a folder of such a model
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
        raise ValueError(f"the model has no {unknown[0]!r} ({len(unknown)} names do not exist in the model)")
    for name, shape in shapes.items():
        if shape != tuple(own[name].shape):
            raise ValueError(f"{name!r} has the shape {list(shape)}, but the model needs {list(own[name].shape)}")
    given = {own[name].data_ptr() for name in shapes}  # tied weights are stored once, under one of their names
    missing = [name for name, tensor in model.named_parameters() if tensor.data_ptr() not in given]
    if missing:
        raise ValueError(f"{missing[0]!r} is missing ({len(missing)} parameters are not in the folder)")
