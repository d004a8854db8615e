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


def test_the_first_line_of_a_training_names_the_backend_and_why_it_is_not_a_quicker_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tokenizer()
    model = random_model("Gemma", vocab_size=len(words), eos_token_id=words.eos_token_id)
    making.trainer(tmp_path, model=model, max_steps=1, show_progress=True).train()
    first = capsys.readouterr().err.splitlines()[0]
    assert "sampled batched, in PyTorch (not in C: another activation than SiLU), learns in " in first
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["backend"] in first


def test_the_first_line_says_what_of_a_model_in_4_bits_is_learned_by_its_own_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    making.trainer(tmp_path, load_in_4bit=True, peft_config=vf.lora_defaults(), max_steps=1, show_progress=True).train()
    first = capsys.readouterr().err.splitlines()[0]
    assert "by the model's own modules (its weights are quantised), learns in " in first
    assert " between the multiplications, which are the quantised modules' own" in first
