"""Quantises the linear layers of a model to 4 bits (NF4, as in QLoRA), to train adapters on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verifiers.trainers.memory.optimizers import bitsandbytes


def in_4_bit(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Quantise every linear layer except the head, one by one, on the device; move the rest there in this dtype."""
    library = bitsandbytes("load_in_4bit=True")
    head = model.get_output_embeddings()
    found = [(name, one) for name, one in model.named_modules() if type(one) is nn.Linear and one is not head]
    if not found:
        raise ValueError(f"load_in_4bit=True cannot be used: {type(model).__name__} has no linear layer to quantise")
    while found:  # each layer is freed when it is replaced, so that memory never holds both models
        name, one = found.pop()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _linear(library, one, device, dtype))
    _to(model, device, dtype)
    model.is_loaded_in_4bit = True  # peft reads it
    return in_one_layout(model)


def _linear(library: Any, linear: nn.Linear, device: torch.device, dtype: torch.dtype) -> Any:
    made = library.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=dtype, quant_type="nf4",
        device="meta",
    )  # fmt: skip
    weight = linear.weight.detach().to(dtype)
    made.weight = library.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to(device)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach().to(device, dtype), requires_grad=False)
    made.train(linear.training)
    return made


def in_one_layout(model: Any) -> Any:
    """Keep the layout of 4-bit weights: on some CPUs bitsandbytes repacks them for inference, without a backward."""
    for one in model.modules():
        if hasattr(one, "support_avx512bf16_for_cpu"):
            one.support_avx512bf16_for_cpu = False
    return model


def _to(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Move the parameters that are not quantised; transformers refuses to move a quantised model as a whole."""
    for module in model.modules():
        for one in module.parameters(recurse=False):
            if one.is_floating_point():
                one.data = one.detach().to(device, dtype)
                one.requires_grad_(False)
        for name, one in module.named_buffers(recurse=False):
            module._buffers[name] = one.to(device)
