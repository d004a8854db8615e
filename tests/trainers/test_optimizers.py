"""Optimizers in 8 bit, on the host and paged, and base weights in 4 bits: each trains, resumes and says no clearly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.engine.local_model import LocalModel  # noqa: E402
from verifiers.kernels.modules import is_quantised  # noqa: E402
from verifiers.trainers.memory.optimizers import OPTIMIZERS, check_optimizer  # noqa: E402
from verifiers.trainers.weights import Weights  # noqa: E402


def losses(trainer: Any) -> list[float]:
    return [step["loss"] for step in trainer.train().steps]


def imitating(folder: Path, **settings: Any) -> Any:
    words = tiny.tokenizer()
    rows = [{"prompt": "say", "completion": text} for text in ("hello world", "the answer is four", "2 + 2 = 4")]
    given = settings.pop("model", None)
    peft_config = settings.pop("peft_config", None)
    usual = {"batch_size": 3, "max_steps": 6, "learning_rate": 1e-2, "show_progress": False, "output_dir": folder}
    return vf.SFTTrainer(
        model=tiny.model(words) if given is None else given,
        tokenizer=words,
        dataset=rows,
        config={**usual, **settings},
        peft_config=peft_config,
    )


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2, "micro_batch_tokens": 16}], ids=str
)
def test_an_optimizer_on_the_host_gives_the_losses_of_adamw(tmp_path: Path, more: dict[str, Any]) -> None:
    here, there = (imitating(tmp_path / name, optim=name, **more) for name in ("adamw", "cpu_offload"))
    assert all(live is not master for live, master in zip(there.weights.live, there.weights.masters, strict=True))
    assert losses(there) == pytest.approx(losses(here), rel=1e-6)


def test_gradients_in_half_precision_are_added_up_in_float32() -> None:
    words = tiny.tokenizer()
    model = tiny.model(words).to(torch.bfloat16)
    weights = Weights(model, vf.SFTConfig())
    expected = [torch.zeros_like(one) for one in weights.masters]
    for ids in ([[1, 2, 3]], [[4, 5, 6]]):
        loss = model(torch.tensor(ids)).logits.float().square().mean()
        for total, part in zip(expected, torch.autograd.grad(loss, weights.live, retain_graph=True), strict=True):
            total += part.float()
        weights.backward(loss)
    assert all(live.grad is None for live in weights.live)
    assert all(torch.equal(one, other) for one, other in zip(weights.gradients(), expected, strict=True))


def test_states_in_8_bit_take_a_quarter_and_train_nearly_as_adamw_does(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain, small = (imitating(tmp_path / name, optim=name) for name in ("adamw", "adamw_8bit"))
    assert losses(small) == pytest.approx(losses(plain), rel=0.05)
    kept = [one for state in small.optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    assert any(one.dtype is torch.uint8 for one in kept)


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "cpu_offload"])
def test_a_training_goes_on_from_its_checkpoint_with_each_optimizer(tmp_path: Path, optim: str) -> None:
    if OPTIMIZERS[optim].bitsandbytes_class:
        pytest.importorskip("bitsandbytes")
    whole = losses(imitating(tmp_path / "whole", optim=optim, save_steps=3))
    again = imitating(tmp_path / "again", optim=optim).train(resume=tmp_path / "whole" / "checkpoints" / "step-000003")
    assert [step["loss"] for step in again.steps][-3:] == pytest.approx(whole[-3:], rel=1e-5)


def test_states_of_another_optimizer_are_refused_by_name_and_those_on_the_host_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    imitating(tmp_path / "run", optim="adamw", save_steps=3, max_steps=3).train()
    with pytest.raises(ValueError, match=r"was not written with optim='adamw_8bit', .*: resume with optim='adamw' or"):
        imitating(tmp_path / "run", optim="adamw_8bit").train(resume=True)
    assert len(imitating(tmp_path / "run", optim="cpu_offload").train(resume=True).steps) == 6


def test_names_are_checked_and_those_of_transformers_are_known(tmp_path: Path) -> None:
    config = vf.GRPOConfig(optim="adamw_bnb_8bit")
    config.check()
    assert config.optim == "adamw_8bit"
    with pytest.raises(ValueError, match="optim must be one of adamw, adamw_8bit, paged"):
        making.trainer(tmp_path, optim="sgd")


def test_what_cannot_run_here_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"optim='paged' pages .* but this training runs on cpu: use optim='adamw_8bit'"
    ):
        check_optimizer("paged", "cpu")
    with pytest.raises(ValueError, match="works with one process only, not with 4"):
        check_optimizer("cpu_offload", "cuda", 4)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ImportError, match=r"optim='adamw_8bit' needs bitsandbytes: pip install 'verifiers\[quantized\]'"
    ):
        check_optimizer("adamw_8bit", "cpu")


# --- weights in 4 bits ------------------------------------------------------------------------------------------------


def test_sampler_and_trainer_have_one_policy_on_weights_in_4_bits(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    trainer = making.trainer(tmp_path, peft_config=vf.lora_defaults(), load_in_4bit=True, learning_rate=0.0)
    layers = [one for one in trainer.model.modules() if isinstance(one, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 2 * 7
    report = trainer.train()
    assert [step["ratio_mean"] for step in report.steps] == pytest.approx([1.0] * 3, abs=1e-4)
    assert str(trainer.client.backend) == "batched, by the model's own modules (its weights are quantised)"
    with (
        pytest.raises(TypeError, match="adapters on quantised weights are not merged"),
        trainer.client.merge_adapters(),
    ):
        pass


def test_adapters_on_weights_in_4_bits_learn_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = {"load_in_4bit": True, "peft_config": vf.lora_defaults()}
    whole = losses(imitating(tmp_path / "whole", save_steps=3, **settings))
    assert whole[-1] < whole[0]
    again = imitating(tmp_path / "again", **settings).train(resume=tmp_path / "whole" / "checkpoints" / "step-000003")
    assert [step["loss"] for step in again.steps][-3:] == pytest.approx(whole[-3:], rel=1e-5)


def test_a_named_model_is_put_into_4_bits_too(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = tiny.tokenizer()
    tiny.model(words).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    trainer = imitating(
        tmp_path / "run", model=str(tmp_path / "model"), load_in_4bit=True, peft_config=vf.lora_defaults(), max_steps=1
    )
    assert is_quantised(trainer.model)
    assert {one.dtype for one in trainer.weights.live} == {torch.float32}
    trainer.train()


def test_weights_in_4_bits_need_adapters_and_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"only adapters can be trained: pass peft_config=vf.lora_defaults"):
        making.trainer(tmp_path, load_in_4bit=True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ImportError, match=r"load_in_4bit=True needs bitsandbytes: pip install 'verifiers\[quantized\]'"
    ):
        making.trainer(tmp_path, load_in_4bit=True, peft_config=vf.lora_defaults())


def test_a_quantised_module_is_sampled_from_by_its_modules(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from verifiers.trainers.memory.quantized import in_4_bit

    words = tiny.tokenizer()
    model = in_4_bit(tiny.model(words), torch.device("cpu"), torch.float32)
    with LocalModel(model, words, rows=2, length=64) as local:
        assert local.backend.name == "modules"
        assert len(local.engine.generate([[5, 6, 7]])[0].ids) > 0
