"""A model run in C: its own numbers, from its own parameters, and only while it has no hooks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, assert_exact, prompt_of, random_model  # noqa: E402
from verifiers.engine import model_runner  # noqa: E402
from verifiers.engine.model_runner import ModelRunner  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.kernels.cpu import model as cpu_model  # noqa: E402
from verifiers.kernels.cpu import threads  # noqa: E402
from verifiers.kernels.cpu.build import find_compiler  # noqa: E402
from verifiers.kernels.cpu.model import CpuModel  # noqa: E402

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler here")
WAY = Sampling(max_tokens=12, seed=1)
IN_C = {"Llama", "Llama-tied", "Qwen2", "Qwen2-window", "Qwen3", "SmolLM3", "Mistral"}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each step and prompt that is run in C: how many tokens it took."""
    seen: list[int] = []
    own_run, own_decode = CpuModel.run, CpuModel.decode

    def run(self: CpuModel, ids_T: Any, *args: Any) -> Any:
        seen.append(ids_T.numel())
        return own_run(self, ids_T, *args)

    def decode(self: CpuModel, token_B: Any, *args: Any) -> Any:
        drawn = own_decode(self, token_B, *args)
        seen.extend([len(token_B)] * len(drawn.token_KB))
        return drawn

    monkeypatch.setattr(CpuModel, "run", run)
    monkeypatch.setattr(CpuModel, "decode", decode)
    return seen


def make_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is small."""
    monkeypatch.setattr(threads, "PARAMETERS_PER_THREAD", 1)


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([prompt_of(20)])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_are_run_so(family: str) -> None:
    assert (ModelRunner(random_model(family)).cpu is not None) == (family in IN_C)


@pytest.mark.parametrize("family", sorted(IN_C))
@pytest.mark.parametrize("epsilon", [1e-6, 0.5], ids=str)
def test_prompts_and_steps_are_exact(start: Any, runs: list[int], family: str, epsilon: float) -> None:
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


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("Gemma", {}, "an activation other than SiLU"),
        ("GPT2", {}, "its layers have another architecture"),
        ("Phi3", {}, "its layers have another architecture"),
        ("Qwen3-MoE", {"decoder_sparse_step": 2}, "it has more parts than its 2 layers of the common architecture"),
        ("Llama", {"dtype": torch.bfloat16}, "weights that are not float32"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary angles"),
    ],
)
def test_it_says_why_a_model_is_not_run_in_c(family: str, more: dict[str, Any], reason: str) -> None:
    runner = ModelRunner(random_model(family, **more))
    assert runner.cpu is None
    assert reason in str(runner.not_in_c)


@pytest.mark.parametrize(
    ("switch", "path", "reason"),
    [("1", "", "no C compiler"), ("1", None, "the C compiler failed"), ("0", None, "VERIFIERS_COMPILE=0")],
)
def test_a_machine_without_a_compiler_that_works_runs_pytorch_and_says_so(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, switch: str, path: str | None,
    reason: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("VERIFIERS_COMPILE", switch)
    if path is not None:
        monkeypatch.setenv("PATH", path)
        monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(cpu_model, "decode_functions", lambda: None)
    model = random_model()
    engine = start(model)
    assert str(engine.backend) == f"batched, in PyTorch (not in C: {reason})"
    assert ("exact and slower" in caplog.text) == (switch == "1")  # whoever switched it off knows
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)


def test_hooks_and_adapters_are_reasons_too() -> None:
    model = random_model()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert ModelRunner(model).not_in_c == "hooks on its modules"
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(random_model(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert ModelRunner(adapted).not_in_c == "adapters"


@pytest.mark.parametrize("family", ["Llama-tied", "Qwen2", "Qwen2-window"])
def test_a_larger_model_is_laid_out_after_a_few_steps(
    start: Any, runs: list[int], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    make_larger(monkeypatch)
    model = random_model(family)
    engine = start(model)
    assert engine.backend.name == "cpu"
    runs.clear()
    answers = [engine.generate([prompt_of(9)], WAY)[0]]
    assert 0 < len(runs) < 12
    train(model)
    answers.append(engine.generate([prompt_of(9)], WAY)[0])
    answers += engine.generate([prompt_of(9), prompt_of(30, seed=1)], WAY, n=2)
    for answer in answers[1:]:
        assert_exact(model, answer, WAY)
    assert max(runs) > 4  # prompts too, once it is laid out


def test_a_model_whose_copy_does_not_fit_is_run_in_pytorch_and_says_so(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_larger(monkeypatch)
    monkeypatch.setattr(model_runner, "free_memory", lambda device: 1000)
    model = random_model()
    engine = start(model)
    assert engine.backend.name == "torch"
    assert "too little memory" in str(engine.backend)
    monkeypatch.undo()  # memory that is free later changes nothing: C was not proven
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)
    assert engine.runner.cpu.runs == 0


def test_c_that_is_wrong_is_found_by_the_proof_and_not_used(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof runs the C code itself: a wrong angle in it shows."""
    own = CpuModel.run

    def run(self: CpuModel, ids_T: Any, slot_T: Any, position_T: Any, *more: Any) -> Any:
        return own(self, ids_T, slot_T, position_T, *more) * 1.01

    monkeypatch.setattr(CpuModel, "run", run)
    model = random_model()
    engine = start(model)
    assert engine.backend.name == "torch"
    assert "in C, its logprobs are off" in str(engine.backend)
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY)


def test_an_update_of_the_weights_is_sampled_from_at_once(start: Any, runs: list[int]) -> None:
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
def test_a_part_that_was_exchanged_is_called(start: Any, runs: list[int], name: str) -> None:
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
