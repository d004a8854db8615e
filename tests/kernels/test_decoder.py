"""Layers of the common kind: recognised only where that gives the layer's own numbers, run so only without hooks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, assert_exact, prompt_of, random_model  # noqa: E402
from verifiers.engine.model_runner import ModelRunner  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402

WAY = Sampling(max_tokens=12, seed=1)
COMMON = dict.fromkeys(("Llama", "Llama-tied", "Qwen2", "Qwen2-window", "Qwen3", "SmolLM3", "Gemma", "Mistral"), 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_the_common_kind_are_recognised_and_no_others(family: str, dtype: Any) -> None:
    assert len(ModelRunner(random_model(family, dtype=dtype)).decoder.layers) == COMMON.get(family, 0)


def test_recognising_changes_neither_the_module_nor_the_random_numbers() -> None:
    model = random_model().train()
    before = torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ModelRunner(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "eager"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_hook_that_is_there_before_does_not_hear_the_probe() -> None:
    model = random_model()
    heard: list[int] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: heard.append(1))
    assert not ModelRunner(model).decoder.layers
    assert not heard


@pytest.mark.parametrize("part", ["", ".model"])
def test_a_hook_on_the_whole_model_is_heard(start: Any, part: str) -> None:
    model = random_model()
    engine = start(model)
    heard: list[int] = []
    model.get_submodule(part[1:]).register_forward_hook(lambda *_: heard.append(1))
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)
    assert len(heard) >= 12


def test_a_model_that_does_more_to_its_logits_runs_its_own_forward(start: Any) -> None:
    model = random_model()

    class Capped(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = torch.tanh(output.logits)
            return output

    model.__class__ = Capped
    engine = start(model)
    assert len(engine.runner.decoder.layers) == 3
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)


def test_weights_of_zero_prove_nothing() -> None:
    model = random_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    assert len(ModelRunner(model).decoder.layers) == 2


def test_a_layer_that_does_one_thing_more_is_not_taken_for_the_common_kind() -> None:
    model = random_model()
    layer = model.model.layers[1]

    class Louder(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 1.1

    layer.__class__ = Louder
    assert len(ModelRunner(model).decoder.layers) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bound_that_small_numbers_never_reach_makes_a_layer_one_of_another_kind(dtype: Any) -> None:
    model = random_model("Llama", dtype=dtype, initializer_range=0.05)
    mlp = type(model.model.layers[0].mlp)

    class Bounded(mlp):  # type: ignore[misc,valid-type]
        def forward(self, x: Any) -> Any:
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=4) * self.up_proj(x).clamp(-4, 4))

    assert len(ModelRunner(model).decoder.layers) == 3
    for layer in model.model.layers:
        layer.mlp.__class__ = Bounded
    assert not ModelRunner(model).decoder.layers


@pytest.mark.parametrize("part", ["", ".self_attn", ".mlp", ".self_attn.q_proj", ".mlp.down_proj", ".input_layernorm"])
def test_a_hook_on_any_part_is_heard_and_may_change_what_it_hears(start: Any, part: str) -> None:
    model = random_model()
    engine = start(model)
    heard = []

    def hook(_module: Any, _given: Any, output: Any) -> Any:
        heard.append(1)
        return tuple(x if x is None else x * 1.5 for x in output) if isinstance(output, tuple) else output * 1.5

    plain = engine.generate([prompt_of(9)], WAY)[0]
    handle = model.get_submodule(f"model.layers.1{part}").register_forward_hook(hook)
    hooked = engine.generate([prompt_of(9, seed=1)], WAY)[0]
    assert len(heard) == 12
    assert_exact(model, hooked, WAY)
    handle.remove()
    assert_exact(model, plain, WAY)


def test_another_forward_on_a_layer_is_called_and_stays(start: Any) -> None:
    model = random_model()
    engine = start(model)
    layer = model.model.layers[0]
    own, calls = layer.forward, []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    layer.forward = wrapped
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)
    assert len(calls) >= 12
    assert vars(layer)["forward"] is wrapped
