"""A small model as its matrices: its own numbers, from its own parameters, and only while nobody listens in."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, assert_exact, prompt_of, random_model  # noqa: E402
from verifiers.engine import bare, c_functions, compiled_model, packed, threads  # noqa: E402
from verifiers.engine import sampler as sampling  # noqa: E402
from verifiers.engine.bare import Bare  # noqa: E402
from verifiers.engine.model_runner import LiveModel  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402

WAY = Sampling(max_tokens=12, seed=1)
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
BARE = {"Llama", "Llama-tied", "Qwen2", "Qwen2-window", "Mistral"}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each step and prompt that goes by matrices alone: how many tokens it took."""
    seen: list[int] = []
    own_run, own_decode = Bare.run, Bare.decode

    def run(self: Bare, ids: Any, *args: Any) -> Any:
        seen.append(ids.numel())
        return own_run(self, ids, *args)

    def decode(self: Bare, rows: int, *args: Any) -> Any:
        drawn = own_decode(self, rows, *args)
        seen.extend([rows] * (0 if drawn is None else len(drawn.token_KB)))
        return drawn

    monkeypatch.setattr(Bare, "run", run)
    monkeypatch.setattr(Bare, "decode", decode)
    return seen


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a compiler, and without one."""
    if request.param == "numpy":
        for module in (compiled_model, sampling):
            monkeypatch.setattr(module, "functions", lambda: None)
    elif c_functions.functions() is None:
        pytest.skip("there is no C compiler here")
    return str(request.param)


def make_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger begins at nothing."""
    monkeypatch.setattr(packed, "WORTH_PACKING", 0)
    monkeypatch.setattr(threads, "ONE_THREAD_BELOW", 0)


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([prompt_of(20)])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_are_run_so(family: str) -> None:
    assert (LiveModel(random_model(family))._lean.bare is not None) == (family in BARE)


@pytest.mark.parametrize("family", sorted(BARE))
@pytest.mark.parametrize("epsilon", [1e-6, 0.5], ids=str)
def test_prompts_and_steps_are_exact(start: Any, runs: list[int], way: str, family: str, epsilon: float) -> None:
    model = random_model(family, rms_norm_eps=epsilon)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.uniform_(0.4, 1.9)
    engine = start(model)
    runs.clear()
    futures = [engine.submit(prompt_of(5 + 7 * i, seed=i), WAY)[0] for i in range(4)]
    for future in futures:
        assert_exact(model, future.result(), WAY)
    assert len(runs) >= 12


def test_long_histories_are_multiplied_by_pytorch(start: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    engine = start(model)
    monkeypatch.setattr(bare, "MOST_IN_NUMPY", 0)
    monkeypatch.setattr(bare, "MOST_SEEN_IN_C", 0)
    assert_exact(model, engine.generate([prompt_of(40)], WAY)[0], WAY)


def test_other_types_go_by_their_modules() -> None:
    assert LiveModel(random_model(dtype=torch.bfloat16))._lean.bare is None


@needs_onednn  # without a compiler
@pytest.mark.parametrize("family", ["Llama-tied", "Qwen2", "Qwen2-window"])
def test_a_larger_model_is_packed_after_a_few_steps(
    start: Any, runs: list[int], way: str, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    make_larger(monkeypatch)
    model = random_model(family)
    engine = start(model)
    runs.clear()
    answers = [engine.generate([prompt_of(9)], WAY)[0]]
    assert 0 < len(runs) < 12
    train(model)
    answers.append(engine.generate([prompt_of(9)], WAY)[0])
    answers += engine.generate([prompt_of(9), prompt_of(30, seed=1)], WAY, n=2)
    for answer in answers[1:]:
        assert_exact(model, answer, WAY)
    assert max(runs) > 4  # prompts go that way too, once it is packed


def test_without_packing_a_larger_model_goes_by_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    make_larger(monkeypatch)
    monkeypatch.setattr(compiled_model, "functions", lambda: None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert LiveModel(random_model())._lean.bare is None


def test_an_update_of_the_weights_is_sampled_from_at_once(start: Any, runs: list[int], way: str) -> None:
    model = random_model()
    engine = start(model)
    first = engine.generate([prompt_of(9)], WAY)[0]
    for name, parameter in model.named_parameters():
        runs.clear()
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
        assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)
        assert runs, name
    assert engine.generate([prompt_of(9)], WAY)[0].logprobs != first.logprobs


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj", "input_layernorm"])
def test_a_part_that_was_exchanged_is_called(start: Any, runs: list[int], way: str, name: str) -> None:
    model = random_model()
    engine = start(model)
    engine.generate([prompt_of(9)], WAY)
    layer = model.model.layers[1]
    parent, _, child = name.rpartition(".")
    holder = layer.get_submodule(parent)
    own = getattr(holder, child)

    class Louder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.own = own

        def forward(self, x: Any) -> Any:
            return self.own(x) * 1.3

    setattr(holder, child, Louder())
    runs.clear()
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)
    assert not runs
    setattr(holder, child, own)
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)
    assert runs


def test_adapters_that_are_added_later_count(start: Any, runs: list[int]) -> None:
    peft = pytest.importorskip("peft")
    model = random_model()
    engine = start(model)
    engine.generate([prompt_of(9)], WAY)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    runs.clear()
    assert_exact(adapted, engine.generate([prompt_of(9)], WAY)[0], WAY)
    assert not runs
