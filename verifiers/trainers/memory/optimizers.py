"""The name of an optimizer → AdamW with its states in float32, in 8 bit, on the host, or paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.trainers.base_config import TrainingConfig

INSTALL = "pip install 'verifiers[quantized]'"


@dataclass(frozen=True, slots=True)
class Kind:
    """Where the states of an optimizer are, and what they take of each trained parameter."""

    state_bytes: float
    on_host: bool = False  # the float32 copies and the gradients too: the step is made there
    is_paged: bool = False  # moves to the host when the card is full
    of_bitsandbytes: str = ""  # its class, where it is one of theirs

    @property
    def states(self) -> str:
        """What a checkpoint of it holds: those of the same kind can be exchanged."""
        return self.of_bitsandbytes or "AdamW"


_IN_8_BIT = 2 * (1 + 4 / 256)  # two averages, and the float32 scale of each block of 256

OPTIMIZERS = {
    "adamw": Kind(8),
    "adamw_8bit": Kind(_IN_8_BIT, of_bitsandbytes="AdamW8bit"),
    "paged": Kind(8, is_paged=True, of_bitsandbytes="PagedAdamW32bit"),
    "paged_8bit": Kind(_IN_8_BIT, is_paged=True, of_bitsandbytes="PagedAdamW8bit"),
    "cpu_offload": Kind(8, on_host=True),
}
# As transformers' TrainingArguments spell them.
ALIASES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged",
    "paged_adamw_32bit": "paged",
    "paged_adamw_8bit": "paged_8bit",
}


def check_optimizer(name: str, device_type: str, processes: int = 1) -> None:
    """Refuse what cannot run here, before a model is loaded."""
    kind = OPTIMIZERS[name]
    if kind.on_host and processes > 1 and device_type == "cuda":
        raise ValueError(
            f"optim={name!r} is for one process, and there are {processes}, whose cards cannot add up gradients on "
            "the host: shard the optimizer over them instead, or take optim='adamw_8bit'"
        )
    if kind.is_paged and device_type != "cuda":
        raise ValueError(
            f"optim={name!r} pages states between a CUDA card and the host, and this trains on {device_type}: take "
            "optim='adamw_8bit', or leave it out"
        )
    if kind.of_bitsandbytes:
        bitsandbytes(f"optim={name!r}")


def bitsandbytes(what: str) -> Any:
    """The package, or one sentence that says how to have it."""
    try:
        import bitsandbytes
    except ImportError:
        raise ImportError(f"{what} needs bitsandbytes: {INSTALL}") from None
    return bitsandbytes


def make_optimizer(masters: Sequence[Any], config: TrainingConfig) -> Any:
    """AdamW over these parameters, which are float32."""
    import torch

    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }
    kind = OPTIMIZERS[config.optim]
    if kind.of_bitsandbytes:
        return getattr(bitsandbytes(f"optim={config.optim!r}").optim, kind.of_bitsandbytes)(masters, **settings)
    return torch.optim.AdamW(masters, **settings, fused=masters[0].device.type in ("cuda", "cpu"))
