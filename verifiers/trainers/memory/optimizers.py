"""The name of an optimizer → AdamW with its state in float32, in 8 bit, on the host, or paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.trainers.base_config import TrainingConfig

INSTALL = "pip install 'verifiers[quantized]'"


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Where the state of an optimizer is kept, and its size."""

    state_bytes: float  # for each trained parameter
    on_host: bool = False  # so are float32 master copies and gradients: the step is computed on the host
    is_paged: bool = False  # moved to the host when the GPU's memory is full
    bitsandbytes_class: str = ""  # empty: PyTorch's AdamW

    @property
    def state_format(self) -> str:
        """The format of its state in a checkpoint; optimizers with the same format can resume from each other's."""
        return self.bitsandbytes_class or "AdamW"


_IN_8_BIT = 2 * (1 + 4 / 256)  # two moments, each with a float32 scale for a block of 256

OPTIMIZERS = {
    "adamw": OptimizerSpec(8),
    "adamw_8bit": OptimizerSpec(_IN_8_BIT, bitsandbytes_class="AdamW8bit"),
    "paged": OptimizerSpec(8, is_paged=True, bitsandbytes_class="PagedAdamW32bit"),
    "paged_8bit": OptimizerSpec(_IN_8_BIT, is_paged=True, bitsandbytes_class="PagedAdamW8bit"),
    "cpu_offload": OptimizerSpec(8, on_host=True),
}
# The names in TrainingArguments of transformers.
ALIASES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged",
    "paged_adamw_32bit": "paged",
    "paged_adamw_8bit": "paged_8bit",
}


def check_optimizer(name: str, device_type: str, processes: int = 1) -> None:
    """Refuse an optimizer that cannot run here, before a model is loaded."""
    kind = OPTIMIZERS[name]
    if kind.on_host and processes > 1 and device_type == "cuda":
        raise ValueError(
            f"optim={name!r} works with one process only, not with {processes}, which cannot sum gradients on the "
            "host: shard the optimizer over the processes instead, or use optim='adamw_8bit'"
        )
    if kind.is_paged and device_type != "cuda":
        raise ValueError(
            f"optim={name!r} pages optimizer states between a CUDA GPU and the host, but this training runs on "
            f"{device_type}: use optim='adamw_8bit', or leave optim out"
        )
    if kind.bitsandbytes_class:
        bitsandbytes(f"optim={name!r}")


def bitsandbytes(what: str) -> Any:
    """The package, or an error that says how to install it."""
    try:
        import bitsandbytes
    except ImportError:
        raise ImportError(f"{what} needs bitsandbytes: {INSTALL}") from None
    return bitsandbytes


def make_optimizer(masters: Sequence[Any], config: TrainingConfig) -> Any:
    """AdamW over these float32 parameters."""
    import torch

    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }
    kind = OPTIMIZERS[config.optim]
    if kind.bitsandbytes_class:
        return getattr(bitsandbytes(f"optim={config.optim!r}").optim, kind.bitsandbytes_class)(masters, **settings)
    return torch.optim.AdamW(masters, **settings, fused=masters[0].device.type in ("cuda", "cpu"))
