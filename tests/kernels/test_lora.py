"""Which layers count as a plain adapter over a plain call: what kernels may add by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verifiers.kernels.modules import lora_of

peft = pytest.importorskip("peft")


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 6)
        self.other = torch.nn.Linear(8, 6)


def adapted(**more: Any) -> Any:
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False, **more)
    return peft.get_peft_model(Two(), config).eval()


def test_an_adapter_is_its_two_matrices_and_its_scale() -> None:
    model = adapted()
    layer, x = model.base_model.model.q_proj, torch.randn(3, 8)
    found = lora_of(layer)
    assert found is not None
    assert found.scale == 3.0
    with torch.no_grad():
        by_hand = found.base(x) + found.scale * (x @ found.a_RK.t()) @ found.b_NR.t()
        assert torch.allclose(layer(x), by_hand, atol=1e-6)
    assert lora_of(model.base_model.model.other) is None


def test_an_adapter_that_is_switched_off_merged_or_of_another_kind_is_not_one() -> None:
    model = adapted()
    layer = model.base_model.model.q_proj
    with model.disable_adapter():
        assert lora_of(layer) is None
    layer.merge()
    assert lora_of(layer) is None
    layer.unmerge()
    assert lora_of(layer) is not None
    handle = layer.register_forward_hook(lambda *_: None)
    assert lora_of(layer) is None
    handle.remove()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    assert lora_of(layer) is None
    assert lora_of(adapted(use_dora=True).base_model.model.q_proj) is None
    assert lora_of(adapted(lora_bias=True).base_model.model.q_proj) is None


def test_an_adapter_with_dropout_is_one_only_while_it_has_none() -> None:
    model = adapted(lora_dropout=0.5)
    assert lora_of(model.base_model.model.q_proj) is not None
    assert lora_of(model.train().base_model.model.q_proj) is None
