"""A training says at once what samples from its model and what it learns with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import verifiers as vf
from tests.engine.support.exact import random_model
from tests.engine.tiny import tokenizer
from tests.trainers import making
from verifiers.kernels.cpu.build import find_compiler


def test_the_first_line_of_a_training_names_the_backend_and_why_it_is_not_a_quicker_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tokenizer()
    model = random_model("Gemma", vocab_size=len(words), eos_token_id=words.eos_token_id)
    making.trainer(tmp_path, model=model, max_steps=1, show_progress=True).train()
    first = capsys.readouterr().err.splitlines()[0]
    assert "sampled batched, in PyTorch (not in C: an activation other than SiLU), learns in " in first
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["backend"] in first


def test_the_first_line_says_what_of_a_model_in_4_bits_is_learned_by_its_own_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    making.trainer(tmp_path, load_in_4bit=True, peft_config=vf.lora_defaults(), max_steps=1, show_progress=True).train()
    first = capsys.readouterr().err.splitlines()[0]
    assert "by the model's own modules (its weights are quantised), learns in " in first
    assert " between the multiplications, which are the quantised modules' own" in first


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_recomputing_activations_leaves_sampling_in_c(tmp_path: Path) -> None:
    report = making.trainer(tmp_path, max_steps=1, gradient_checkpointing=True).train()
    assert report.backend.startswith("sampled batched, in C"), report.backend


def test_adapters_learn_the_same_whether_activations_are_recomputed_or_kept(tmp_path: Path) -> None:
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    adapters = []
    for recomputes in (False, True):
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
        torch.manual_seed(0)
        trainer = making.trainer(tmp_path / str(recomputes), gradient_checkpointing=recomputes, peft_config=lora)
        trainer.train()
        adapters.append({name: one.detach() for name, one in trainer.model.named_parameters() if "lora_B" in name})
    assert all(bool(one.any()) for one in adapters[1].values())
    torch.testing.assert_close(adapters[0], adapters[1], rtol=1e-3, atol=1e-6)
