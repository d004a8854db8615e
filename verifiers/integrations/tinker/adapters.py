"""One base model and its LoRA adapters: which one is active, and snapshots of them.

Each training has its own adapter. Sampling uses snapshots: copies of adapters at the time of saving. To sample, a
snapshot is written into an adapter of the same shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from verifiers.errors import RequestRefusedError

ALPHA = 32  # Tinker's lora_alpha, for every rank
MOST_RANK = 512
FIRST = "first"
PROOF_SIZE = 0.02  # std with which an adapter's effect is about as large as its layer's


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraShape:
    """The rank of an adapter, and the layers that it has."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @classmethod
    def read(cls, given: Any) -> LoraShape:
        """The ``lora_config`` of a request."""
        if not isinstance(given, Mapping):
            raise RequestRefusedError("this server only trains LoRA adapters: pass a lora_config with a rank")
        rank, flags = given.get("rank"), {name: given.get(name, True) for name in FLAGS}
        if type(rank) is not int or not 1 <= rank <= MOST_RANK:
            raise RequestRefusedError(f"the rank of a LoRA must be from 1 to {MOST_RANK}, not {rank!r:.80}")
        if not any(flags.values()) or not all(isinstance(flag, bool) for flag in flags.values()):
            raise RequestRefusedError(f"at least one of {', '.join(FLAGS)} must be true, or nothing is trained")
        return cls(rank=rank, **flags)

    def as_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, **{name: getattr(self, name) for name in FLAGS}}


FLAGS = ("train_attn", "train_mlp", "train_unembed")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A copy of an adapter at one time; its tensors have the names that peft saves."""

    shape: LoraShape
    tensors: Mapping[str, torch.Tensor] = field(repr=False)


class Adapters:
    """A base model with LoRA layers. One adapter is active at a time; the current job selects it."""

    def __init__(self, base: Any) -> None:
        from peft import get_peft_model

        self._layers = _layers(base)
        # Every layer is wrapped from the start, so that adding an adapter does not change the model's modules.
        with _quiet():
            self.model = get_peft_model(
                base.eval(), self._config(LoraShape(rank=1)), adapter_name=FIRST, autocast_adapter_dtype=False
            ).eval()
        self._fill(FIRST)
        self._count = 0
        self._samplers: dict[LoraShape, str] = {}
        self._loaded: dict[str, Snapshot] = {}

    def _config(self, shape: LoraShape) -> Any:
        from peft import LoraConfig

        targets = [name for flag in FLAGS if getattr(shape, flag) for name in self._layers[flag]]
        if not targets:
            raise RequestRefusedError("this model has none of the layers to train")
        return LoraConfig(
            r=shape.rank, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        )

    def add(self, shape: LoraShape, seed: int | None = None) -> str:
        """Add an adapter, which has no effect yet; returns its name. ``seed`` sets its initial weights."""
        self._count += 1
        name = f"lora{self._count}"
        with _quiet(), torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed % (1 << 63))
            self.model.add_adapter(name, self._config(shape), autocast_adapter_dtype=False)
        self.model.eval()
        return name

    def _fill(self, name: str) -> None:
        """Give the first adapter an effect, so that the check of a backend fails if the backend ignores adapters.

        The first adapter is not used for training or sampling."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for key, one in self._state(name).items():
                if "lora_B" in key:
                    one.copy_(torch.randn(one.shape, generator=generator) * PROOF_SIZE)

    def remove(self, name: str) -> None:
        self.use(FIRST)
        self.model.delete_adapter(name)

    def use(self, name: str | None) -> None:
        """Activate an adapter; None: only the base model."""
        if name is None:
            self.model.base_model.disable_adapter_layers()
            return
        self.model.base_model.enable_adapter_layers()
        self.model.set_adapter(name)

    def use_snapshot(self, snapshot: Snapshot | None) -> None:
        """Activate a snapshot, in the sampling adapter of its shape."""
        if snapshot is None:
            self.use(None)
            return
        name = self._samplers.get(snapshot.shape)
        if name is None:
            name = self._samplers[snapshot.shape] = self.add(snapshot.shape)
        if self._loaded.get(name) is not snapshot:
            self.write(name, snapshot)
            self._loaded[name] = snapshot
        self.use(name)

    def read(self, name: str, shape: LoraShape) -> Snapshot:
        """Copy an adapter to the CPU."""
        return Snapshot(shape, {key: one.detach().to("cpu", copy=True) for key, one in self._state(name).items()})

    def write(self, name: str, snapshot: Snapshot) -> None:
        """Overwrite an adapter with a snapshot; raises ValueError if they do not match."""
        live = self._state(name)
        if odd := [
            key for key in live.keys() | snapshot.tensors.keys() if _size(live, key) != _size(snapshot.tensors, key)
        ]:
            raise ValueError(f"these weights belong to another model: {min(odd)} does not match")
        with torch.no_grad():
            for key, one in live.items():
                one.copy_(snapshot.tensors[key])

    def config_of(self, shape: LoraShape) -> Any:
        """The configuration that peft needs next to the weights to load them."""
        config = self._config(shape)
        config.base_model_name_or_path = getattr(self.model.config, "_name_or_path", "")
        config.inference_mode = True
        return config

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        """The live tensors of an adapter, by the names that peft saves."""
        mark = f".{name}."
        return {
            key.replace(mark, "."): one for key, one in self.model.named_parameters() if ".lora_" in key and mark in key
        }


def _size(tensors: Mapping[str, torch.Tensor], key: str) -> Any:
    return tuple(tensors[key].shape) if key in tensors else None


def _layers(base: Any) -> dict[str, list[str]]:
    """The linear layers of a model by the flag that trains them."""
    head = base.get_output_embeddings()
    found: dict[str, list[str]] = {flag: [] for flag in FLAGS}
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear):
            kind = (
                "train_unembed"
                if module is head
                else "train_attn"
                if "attn" in name or "attention" in name
                else "train_mlp"
            )
            found[kind].append(name)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress peft's warning that an adapter on a tied lm_head cannot be merged; nothing is merged here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
