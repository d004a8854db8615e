"""Load models and tokenizers: SmolLM2 by default, a folder, a GGUF file, a hub name, or a loaded model."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from verifiers.engine.files import smollm2
from verifiers.engine.files.gguf import GGUF
from verifiers.engine.files.gguf_model import config_of, model_of, quietly
from verifiers.engine.files.gguf_tokenizer import tokenizer_of
from verifiers.engine.files.weights import INDEX, WHOLE, check_numbers
from verifiers.errors import chain_of

logger = logging.getLogger("verifiers.engine")

BeforeWeights = Callable[[Any, torch.dtype, torch.device], object]

EMBEDDED = ("smollm2", "local")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_PULL = "run: vf models pull smollm2"


# --- the public functions -----------------------------------------------------------------------------------------


def load(
    name: Any,
    tokenizer: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    before_weights: BeforeWeights | None = None,
) -> tuple[Any, Any]:
    """A model to sample from, in eval mode, and its tokenizer.

    ``name`` is ``"smollm2"`` (or ``"local"``), a folder, a ``.gguf`` file, a hub name, or a model that is already
    loaded, which is returned unchanged. ``tokenizer`` is a tokenizer, or where to find one if it is not with the model.
    ``before_weights(config, dtype, device)`` is called before any weights are read, and may raise to refuse the model.
    """
    place = find(name)
    if not isinstance(place, str | Path):
        if device is not None or dtype is not None:
            raise ValueError("the model is already loaded, so device and dtype cannot be set; leave them out")
        return place, _tokenizer(place if tokenizer is None else tokenizer)
    target, wanted = _checked(place, device, dtype, before_weights, {})
    tokenizer = _tokenizer(place if tokenizer is None else tokenizer)
    return _model(place, target, wanted, {}), tokenizer


def get_model(
    name: Any,
    use_liger: bool | None = None,
    model_kwargs: dict[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    before_weights: BeforeWeights | None = None,
    **kwargs: Any,
) -> Any:
    """A model to train: all weights require gradients (with adapters: all of theirs), and ``save_pretrained`` works.
    float32, or bfloat16 on a GPU.

    ``before_weights`` is as in `load`.
    """
    if use_liger:
        warnings.warn("use_liger has no effect here: the model's own layers are used", stacklevel=2)
    options = {**(model_kwargs or {}), **kwargs}
    dtype = dtype if dtype is not None else options.pop("dtype", None)
    dtype = dtype if dtype is not None else options.pop("torch_dtype", None)
    place = find(name)
    if not isinstance(place, str | Path):
        return place
    target, wanted = _checked(place, device, dtype, before_weights, options)
    model = _model(place, target, wanted, options)
    if hasattr(model, "peft_config"):  # transformers freezes the adapters of a folder
        model.set_adapter(model.active_adapters())
    return model


def _checked(
    place: str | Path, device: Any, dtype: Any, also: BeforeWeights | None, options: dict[str, Any]
) -> tuple[torch.device, torch.dtype]:
    """The device and dtype to load a model with. Refuses non-causal models, and models that ``also`` refuses."""
    target = _device(device)
    wanted = _dtype(dtype) or default_dtype(target)
    config = _config(place, options)
    if config is not None:  # None: the folder of an adapter
        _check_decodes(place, config)
        if also is not None:
            also(config, wanted, target)
    return target, wanted


def get_config(name: str | Path) -> Any:
    """The configuration of a trainable model, without its weights, from a name, a folder or a config.json."""
    path = Path(name).expanduser()
    place = path if path.is_file() and path.suffix == ".json" else find(name)
    config = _config(place, {})
    if config is None:
        raise ValueError(f"{name} has no config.json")
    _check_decodes(place, config)
    return config


def get_tokenizer(name: Any) -> Any:
    """The tokenizer of a model. Accepts the same names as ``get_model``."""
    return _tokenizer(find(name))


def get_model_and_tokenizer(name: Any, use_liger: bool | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """A model to train and its tokenizer: ``model, tokenizer = vf.get_model_and_tokenizer("smollm2")``."""
    model = get_model(name, use_liger, **kwargs)
    return model, get_tokenizer(name)


# --- names --------------------------------------------------------------------------------------------------------


def find(name: Any) -> Any:
    """An existing folder or file (``Path``), a hub name (``str``), or the loaded model itself.

    Downloads SmolLM2 if it is missing.
    """
    if isinstance(name, torch.nn.Module):
        if not hasattr(name, "config"):
            raise ValueError(f"a {type(name).__name__} has no configuration: pass a transformers or peft model")
        return name
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise TypeError(f"a model must be a name, a path or a loaded transformers model, not {name!r}")
    if name in EMBEDDED:
        return _default_model()
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{path} is a file: pass a folder of safetensors or a .gguf file")
        return path
    if path.is_dir():
        if not any((path / config).is_file() for config in ("config.json", "adapter_config.json")):
            raise ValueError(
                f"the folder {path} has no config.json: it is not a transformers model, or saving one was interrupted. "
                "Save it again"
            )
        return path
    if isinstance(name, Path) or _looks_like_path(str(name)):
        raise FileNotFoundError(f"there is no model at {path}: no such file or folder")
    return str(name)


def _looks_like_path(name: str) -> bool:
    """Whether a name is meant as a path. Hub names are ``owner/name``, or a single word for old models.

    >>> _looks_like_path("./model"), _looks_like_path("a/b/c"), _looks_like_path("Qwen/Qwen3-0.6B")
    (True, True, False)
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith((".gguf", "/"))


def _default_model() -> Path:
    if smollm2.is_pulled():
        return smollm2.default_folder()
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise smollm2.PullError(f"SmolLM2 is not in {smollm2.default_folder()}, and HF_HUB_OFFLINE is set; {_PULL}")
    return smollm2.pull()


# --- devices and types --------------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """The GPU of this process (by ``LOCAL_RANK`` if several processes train together), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = os.environ.get("LOCAL_RANK", "")
    if rank.isdigit() and int(rank) < torch.cuda.device_count():
        return torch.device("cuda", int(rank))
    return torch.device("cuda", torch.cuda.current_device())


def default_dtype(device: str | torch.device) -> torch.dtype:
    """bfloat16 on CUDA, to save memory; otherwise float32, which the C kernels need and which keeps small updates."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def _device(device: str | torch.device | None) -> torch.device:
    if device is None or device == "auto":
        return default_device()
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ValueError(f"there is no device {device!r}: use cpu, cuda or cuda:1") from None
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the device {device!s} was requested, but torch finds no GPU")
    return wanted


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype if isinstance(dtype, torch.dtype) else None
    found = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(dtype)
    found = found or getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"there is no dtype {dtype!r} for weights: use float32, bfloat16 or float16")
    return found


# --- loading ------------------------------------------------------------------------------------------------------


def _model(place: str | Path, device: torch.device, dtype: torch.dtype, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    if _is_gguf(place):
        with GGUF(place) as file:
            return model_of(file, dtype=dtype, **kwargs).to(device)
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True, **kwargs}
    with quietly(), _plain_errors(place):
        model, info = AutoModelForCausalLM.from_pretrained(place, **_hub_options(place), **options)
    if (wrong := sorted(info["mismatched_keys"])) and not kwargs.get("ignore_mismatched_sizes"):
        name, stored, own = wrong[0]
        raise ValueError(f"{place} has {name!r} with shape {list(stored)}, but its config.json requires {list(own)}")
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{place} is incomplete: it lacks {len(missing)} weights of its model, such as {missing[0]!r}")
    if unused := sorted(info["unexpected_keys"]):
        logger.warning("%s has %d weights that its model does not use, such as %r", place, len(unused), unused[0])
    _check_numbers(place, model, kwargs)
    return model.eval().to(device)


def _check_numbers(place: str | Path, model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse weights that are stored in few bits and that transformers cannot convert to floats."""
    how = getattr(_config(place, kwargs), "quantization_config", None)
    if how is not None and hasattr(model.config, "quantization_config") and not hasattr(model, "hf_quantizer"):
        kind = how.get("quant_method") if isinstance(how, dict) else type(how).__name__
        raise ValueError(f"{place} is quantised by {kind!r}, which this release of transformers does not support")
    if how is None and isinstance(place, Path) and any((place / name).is_file() for name in (WHOLE, INDEX)):
        check_numbers(dict(model.named_parameters()), place)


def _is_gguf(place: Any) -> TypeGuard[Path]:
    return isinstance(place, Path) and place.suffix.lower() == ".gguf" and place.is_file()


def _hub_options(place: Any) -> dict[str, Any]:
    """Use only the hub's cache if there is no network, because the hub's client would retry for most of a minute."""
    return {"local_files_only": True} if isinstance(place, str) and not _is_hub_reachable() else {}


def _is_hub_reachable() -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if "https" in getproxies():  # the proxy resolves host names
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _config(place: Any, kwargs: dict[str, Any]) -> Any:
    """A model's configuration, without its weights; None for the folder of an adapter."""
    from transformers import AutoConfig

    if _is_gguf(place):
        with GGUF(place) as file:
            return config_of(file)
    is_here = isinstance(place, Path) and (place.is_file() or (place / "config.json").is_file())
    if not isinstance(place, str) and not is_here:
        return None
    passed = {key: kwargs[key] for key in ("revision", "trust_remote_code", "cache_dir", "token") if key in kwargs}
    with _plain_errors(place):
        return AutoConfig.from_pretrained(place, **_hub_options(place), **passed)


def _check_decodes(place: Any, config: Any) -> None:
    """Refuse a model that is not a causal decoder."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    kind = config.model_type
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or is_encoder or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{place} is a {kind} model, which does not generate text: use a causal decoder")


def _tokenizer(place: Any) -> Any:
    from transformers import AutoTokenizer

    if isinstance(place, torch.nn.Module):
        place = _home_of(place)
    elif not isinstance(place, str | Path):
        return place
    else:
        place = find(place)
    if _is_gguf(place):
        with GGUF(place) as file:
            return tokenizer_of(file)
    if isinstance(place, Path) and not any((place / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"the folder {place} has no tokenizer: save it there (tokenizer.save_pretrained({str(place)!r}))"
        )
    with _plain_errors(place, "tokenizer"):
        return AutoTokenizer.from_pretrained(place, **_hub_options(place))


def _home_of(model: Any) -> Any:
    """Where a loaded model came from, which is where its tokenizer is."""
    home = getattr(model.config, "_name_or_path", "")
    if not home:
        raise ValueError(f"the configuration of this {type(model).__name__} has no path: pass its tokenizer too")
    return find(home)


@contextmanager
def _plain_errors(place: str | Path, what: str = "model") -> Iterator[None]:
    """Convert errors of transformers to one sentence that names the model."""
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:  # the files are foreign, and transformers checks few of them
        of_hub: dict[Any, str] = {  # GatedRepoError is a subclass of RepositoryNotFoundError, so it comes first
            hub.GatedRepoError: f"the {what} {place!r} is gated: request access on its page, then run `hf auth login`",
            hub.RepositoryNotFoundError: f"there is no {what} {place!r}: neither a local folder nor on Hugging Face",
            (
                hub.LocalEntryNotFoundError,
                ConnectionError,
            ): f"the {what} {place!r} is neither a local folder nor in the cache, "
            "and Hugging Face cannot be reached: check the name, or use -m smollm2",
        }
        causes = list(chain_of(error)) if isinstance(place, str) else []
        found = (said for kind, said in of_hub.items() if any(isinstance(cause, kind) for cause in causes))
        is_said = isinstance(error, (OSError, ValueError, SafetensorError, hub.StrictDataclassError))
        reason = " ".join((str(error) if is_said else f"{type(error).__name__}: {error}").split())
        raise ValueError(next(found, f"the {what} {str(place)!r} could not be loaded: {reason[:300]}")) from error
