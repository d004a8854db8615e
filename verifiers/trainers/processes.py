"""Processes that were started together become one trainer: the same weights, summed gradients, everybody's rollouts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_RANKS = {
    "RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
}
_SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism configuration",
}
_WITHOUT_EFFECT = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", ("no",), "say bf16=True or fp16=True in the configuration"),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", ("no",), "models are not compiled in training"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        ("1",),
        "say gradient_accumulation_steps in the configuration",
    ),
}


def accelerator() -> Any:
    """Accelerate's view of the processes: all that ``torchrun`` or ``accelerate launch`` started, or one sentence."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise ImportError("training needs: pip install 'verifiers[train]'") from None
    _check_settings()
    started = _started()
    # On a CPU no launcher but its own tells Accelerate that processes belong together.
    made = Accelerator(cpu=True) if started > 1 and not torch.accelerator.is_available() else Accelerator()
    if made.num_processes != started:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE), and Accelerate sees {made.num_processes}: each would "
            "train a model of its own; start them with torchrun or accelerate launch, or one process alone"
        )
    return made


def _started() -> int:
    """How many processes were started together, by the variables of torchrun, Accelerate or MPI."""
    for rank, size in _RANKS.items():
        if rank in os.environ:
            return int(os.environ.get(size) or 1)
    if "MASTER_ADDR" in os.environ and os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true"):
        raise ValueError(
            "accelerate launch --cpu was asked for several processes and started one; start them with "
            "torchrun --nproc_per_node N, or one process alone with --num_processes 1"
        )
    return 1


def _check_settings() -> None:
    for variable, name in _SHARDING.items():
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            raise ValueError(
                f"{name} is asked for ({variable}), and this trainer does not shard: each process holds the whole "
                "model; start it with torchrun or accelerate launch --multi_gpu, or train adapters "
                "(peft_config=vf.lora_defaults())"
            )
    for variable, (name, neutral, instead) in _WITHOUT_EFFECT.items():
        value = os.environ.get(variable, "").lower()
        if value and value not in neutral:
            warnings.warn(f"{name}={value} of Accelerate has no effect here: {instead}", stacklevel=4)


def gathered(processes: Any, value: T) -> list[T]:
    """What each process has, in their order; it must be plain data."""
    if processes is None or processes.num_processes == 1:
        return [value]
    from accelerate.utils import gather_object

    found: list[T] = gather_object([value])
    return found


def sum_gradients(processes: Any, masters: Sequence[Tensor]) -> None:
    """Give every process the sum of all gradients; each has divided by the counts of all."""
    if processes is None or processes.num_processes == 1:
        return
    for master in masters:
        if master.requires_grad:
            gradient = master.grad if master.grad is not None else torch.zeros_like(master)
            master.grad = processes.reduce(gradient, "sum")


def same_weights(processes: Any, model: Any) -> None:
    """Give every process the weights of the first: adapters and new models are drawn at random in each."""
    if processes.num_processes == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().contiguous()
            torch.distributed.broadcast(whole, 0)
            tensor.copy_(whole)
