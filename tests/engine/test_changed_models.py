"""A model that its owner changes after an engine was made of it: sampled as it is now, or refused in a sentence."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import VOCABULARY, assert_exact, prompt_of, random_model  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.errors import InfraError  # noqa: E402

PROMPTS = [prompt_of(n, seed=n) for n in (3, 20, 41)]
WAY = Sampling(max_tokens=12, temperature=1.2, seed=3)


@pytest.fixture(params=["Llama", "Qwen3"])
def made(request: Any) -> Iterator[tuple[Any, Engine]]:
    torch.set_num_threads(1)
    model = random_model(request.param)
    engine = Engine(model, rows=4, length=128)
    assert_as_now(model, engine)  # its prompts are kept for reuse from here on
    yield model, engine
    engine.close()


def assert_as_now(model: Any, engine: Engine) -> None:
    for answer in engine.generate(PROMPTS, WAY):
        with engine.lock:
            assert_exact(model, answer, WAY)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_dtype_than_its_engine_was_made_for_is_refused_until_it_is_back(
    made: Any, dtype: Any
) -> None:
    model, engine = made
    with engine.lock:
        model.to(dtype)
    for _ in range(2):
        with pytest.raises(InfraError, match=rf"the model is {dtype} on cpu .*, not torch.float32 .*create a new"):
            engine.generate(PROMPTS, WAY)
    with engine.lock:
        model.float()
    assert_as_now(model, engine)  # its rotary angles are rounded now, those in C too


def test_a_model_with_another_vocabulary_than_its_engine_was_made_for_is_refused(made: Any) -> None:
    model, engine = made
    with engine.lock:
        model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    with pytest.raises(InfraError, match=f"{VOCABULARY + 8} tokens .*, not .*{VOCABULARY} tokens"):
        engine.generate(PROMPTS, WAY)


def test_a_window_that_is_changed_in_the_configuration_or_in_a_layer_is_refused_until_it_is_back() -> None:
    model = random_model("Gemma2")
    engine = Engine(model, rows=4, length=128)
    try:
        for holder, said in ((model.config, "sliding_window=4, not"), (model.model.layers[0].self_attn, "windows")):
            before, holder.sliding_window = holder.sliding_window, 4
            with pytest.raises(InfraError, match=f"{said}.*create a new"):
                engine.generate(PROMPTS, WAY)
            holder.sliding_window = before
            assert_as_now(model, engine)
    finally:
        engine.close()


def test_a_layer_that_takes_the_place_of_another_is_the_one_that_is_run(made: Any) -> None:
    model, engine = made
    with engine.lock:
        other = copy.deepcopy(model.model.layers[0])
        other.self_attn.layer_idx, other.self_attn.config = 2, model.config
        model.model.layers[2] = other
    assert_as_now(model, engine)


def test_a_layer_that_attends_by_another_configuration_is_refused_for_as_long_as_it_is_there(made: Any) -> None:
    model, engine = made
    before = model.model.layers[2]
    model.model.layers[2] = copy.deepcopy(before)  # its configuration is a copy, too
    for _ in range(2):
        with pytest.raises(InfraError, match="layers of the model were replaced"):
            engine.generate(PROMPTS, WAY)
    model.model.layers[2] = before
    assert_as_now(model, engine)


def test_a_hook_that_comes_or_goes_makes_what_was_kept_void(made: Any) -> None:
    model, engine = made
    for part in (model.model.layers[0].self_attn.q_proj, model.model.layers[0]):
        hook = part.register_forward_hook(lambda module, given, out: out * 1.5)
        assert_as_now(model, engine)
        hook.remove()
        assert_as_now(model, engine)


def _scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def _epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 5.0


def _rotary_scale(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.7


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def _own_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 2


def _subclass(module: Any) -> None:
    class Doubled(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 2

    module.__class__ = Doubled


def _class_of_a_layer(model: Any) -> None:
    _subclass(model.model.layers[1])


def _class_of_a_norm(model: Any) -> None:
    _subclass(model.model.layers[1].input_layernorm)


CHANGES = [_scale, _epsilon, _rotary_scale, _activation, _own_forward, _class_of_a_layer, _class_of_a_norm]


@pytest.mark.parametrize("change", CHANGES)
def test_settings_and_classes_of_modules_that_are_changed_are_those_that_are_sampled_with(
    made: Any, change: Any
) -> None:
    model, engine = made
    with engine.lock:
        change(model)
    assert_as_now(model, engine)


def test_a_forward_that_a_class_gets_later_is_the_one_that_is_run(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = made
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward
    with engine.lock:
        monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) * 2)
    assert_as_now(model, engine)
    with engine.lock:
        monkeypatch.undo()
    assert_as_now(model, engine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_another_dtype_in_one_layer_are_not_read_as_numbers_of_the_old_one(made: Any, dtype: Any) -> None:
    model, engine = made
    with engine.lock:
        model.model.layers[1].mlp.to(dtype)
    with pytest.raises(Exception, match=r"a linear layer have become torch\.\w+ \[48, 32\]"):
        engine.generate(PROMPTS, WAY)
    with engine.lock:
        model.model.layers[1].mlp.float()
    assert_as_now(model, engine)


def _write_to_a_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _replace_a_buffer(model: Any) -> None:
    rotary = model.model.rotary_emb
    for _ in range(2):  # the second may lie where the first one was
        rotary.inv_freq = rotary.inv_freq * 0.7


def _replace_the_storage_of_a_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data = model.model.rotary_emb.inv_freq * 0.7


@pytest.mark.parametrize("change", [_write_to_a_buffer, _replace_a_buffer, _replace_the_storage_of_a_buffer])
def test_rotary_frequencies_that_are_changed_are_those_that_are_sampled_with(made: Any, change: Any) -> None:
    model, engine = made
    for _ in range(3):
        runs = engine.runner.cpu.runs
        with engine.lock:
            change(model)
        assert_as_now(model, engine)
        assert engine.runner.cpu.runs > runs  # by the same backend


def test_a_model_that_counts_its_tokens_in_a_buffer_or_an_attribute_keeps_its_weights_as_it_runs() -> None:
    class Counting(type(random_model("GPT2").transformer)):  # type: ignore[misc]
        def forward(self, input_ids: Any, **kwargs: Any) -> Any:
            self.seen.add_(input_ids.numel())
            self.forwards += 1
            self.lengths.append(input_ids.numel())
            return super().forward(input_ids, **kwargs)

    model = random_model("GPT2")
    model.transformer.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    model.transformer.__class__, model.transformer.lengths, model.transformer.forwards = Counting, [], 0
    engine = Engine(model, rows=4, length=128)
    try:
        for _ in range(3):
            model.transformer.lengths.clear()
            (answer,) = engine.generate([PROMPTS[-1]], WAY)
            assert [version for version, *_ in answer.weight_versions] == ["0"]
        assert max(model.transformer.lengths) < len(PROMPTS[-1])  # the rest of the prompt was kept
    finally:
        engine.close()


def _assign(model: Any) -> None:
    model.load_state_dict({name: -one for name, one in model.state_dict().items()}, assign=True)


def _replace_a_weight(model: Any) -> None:
    projection = model.model.layers[0].mlp.down_proj
    projection.weight = torch.nn.Parameter(-3 * projection.weight.detach())


def _hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, out: out * 1.5)


@pytest.mark.parametrize("change", [_assign, _replace_a_weight, _hook])
def test_what_is_replaced_while_others_are_sampled_makes_their_keys_void_at_once(made: Any, change: Any) -> None:
    model, engine = made
    has_begun = threading.Event()

    def slowly(token: int, logprob: float) -> bool:
        has_begun.set()
        time.sleep(0.002)
        return False

    running = engine.submit(PROMPTS[2], replace(WAY, max_tokens=80), on_token=slowly)[0]
    assert has_begun.wait(30)
    with engine.lock:
        change(model)
    answer = engine.submit([*PROMPTS[2], 5, 6, 7], WAY)[0].result(30)
    versions = [span.version for span in running.result(30).weight_versions]
    assert answer.reused == 0
    assert len(versions) == 2
    assert_exact(model, answer, WAY)


@pytest.mark.parametrize("floor_scale", [64, 4096])
def test_a_model_that_counts_places_in_a_row_is_not_run_beside_others_past_where_they_matter(floor_scale: int) -> None:
    """Llama 4 scales queries by their place in the row, whatever positions it is given."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, max_position_embeddings=256,
        attention_chunk_size=8192, floor_scale=floor_scale, attn_scale=0.5, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    engine = Engine(model, rows=8, length=60)  # no prompt is as long as that, and several together are
    way = Sampling(max_tokens=4, temperature=0.0)
    try:
        assert (engine.backend.name == "sequential") == (floor_scale < engine.prefill_tokens)
        for answer in engine.generate([prompt_of(40, seed=n) for n in range(8)], way):
            with engine.lock:
                assert_exact(model, answer, way)
    finally:
        engine.close()


def test_an_adapter_that_is_switched_off_in_one_layer_makes_what_was_kept_void() -> None:
    peft = pytest.importorskip("peft")
    torch.set_num_threads(1)
    settings = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(random_model("Llama"), settings).eval()
    engine = Engine(model, rows=4, length=128)
    try:
        assert_as_now(model, engine)
        with engine.lock:
            model.base_model.model.model.layers[1].self_attn.v_proj.enable_adapters(False)
        assert_as_now(model, engine)
    finally:
        engine.close()


INVOCATION = [50, 51]


def _adapted(**more: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.set_num_threads(1)
    settings = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **more
    )
    return peft.get_peft_model(random_model("Llama"), settings).eval()


def test_an_adapter_that_applies_from_certain_tokens_on_applies_after_them_only() -> None:
    model = _adapted(alora_invocation_tokens=INVOCATION)
    engine = Engine(model, rows=4, length=128)
    prompts = [*PROMPTS, [*PROMPTS[1], *INVOCATION, 7], [*PROMPTS[2][:20], *INVOCATION, *PROMPTS[2]]]
    try:
        assert "aLoRA" in engine.backend.why
        for answer in engine.generate(prompts, WAY):
            with engine.lock:
                assert_exact(model, answer, WAY)
    finally:
        engine.close()


def test_an_adapter_that_applies_from_certain_tokens_on_is_refused_where_its_engine_was_made_without_it() -> None:
    peft = pytest.importorskip("peft")
    model = _adapted()
    engine = Engine(model, rows=4, length=128)
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj"], alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM"
    )
    try:
        with engine.lock:
            model.add_adapter("later", settings)
            model.set_adapter("later")
        with pytest.raises(InfraError, match=r"applies from tokens \[50, 51\] on.*create a new"):
            engine.generate(PROMPTS, WAY)
        with engine.lock:
            model.set_adapter("default")
        assert_as_now(model, engine)
    finally:
        engine.close()


def test_a_hook_on_all_modules_of_the_process_is_heard_while_it_is_there(made: Any) -> None:
    model, engine = made
    gates = {layer.mlp.gate_proj for layer in model.model.layers}
    everywhere = torch.nn.modules.module.register_module_forward_hook
    hook = everywhere(lambda module, given, out: out * 1.5 if module in gates else None)
    try:
        assert_as_now(model, engine)
    finally:
        hook.remove()
    assert_as_now(model, engine)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_scales_that_are_changed_are_sampled_with_where_angles_depend_on_the_length(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 6.0]}
        rope |= {**factors, "original_max_position_embeddings": 128}
    model = random_model("Llama", rope_parameters=rope)
    engine = Engine(model, rows=4, length=128)
    rotary = model.model.rotary_emb
    try:
        assert_as_now(model, engine)
        with engine.lock:
            rotary.attention_scaling = 0.5
        assert_as_now(model, engine)
        with engine.lock, torch.no_grad():
            rotary.original_inv_freq.mul_(0.5)
            rotary.inv_freq.mul_(0.5)
        assert_as_now(model, engine)
    finally:
        engine.close()


def test_positions_of_images_in_the_owners_own_forward_do_not_shift_those_of_a_text() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
    images = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 7, "intermediate_size": 24
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=images, image_token_id=90, video_token_id=91)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    engine = Engine(model, rows=4, length=128)
    try:
        assert_as_now(model, engine)
        with engine.lock:
            model.model.rope_deltas = torch.tensor([[-7]])  # as its forward over an image leaves it
        assert_as_now(model, engine)
        assert model.model.rope_deltas.item() == -7
    finally:
        engine.close()
