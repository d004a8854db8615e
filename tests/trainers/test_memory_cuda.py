"""On a card: plans hold, every optimizer trains and resumes, 4-bit weights give one policy, and memory comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.trainers.memory.plan import WillNotFitError  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")]

WITHIN = 0.25  # of what was planned: the allocator rounds, and libraries take workspaces
MB = 1 << 20


@pytest.fixture(autouse=True)
def whole_card() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def model_of(hidden: int = 512, layers: int = 8, vocabulary: int = 8192) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=vocabulary, max_position_embeddings=4096, tie_word_embeddings=False,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def words() -> Any:
    return tiny.tokenizer()


def imitating(folder: Path, model: Any, lora: bool = False, **settings: Any) -> Any:
    length = settings.setdefault("max_seq_length", 1024)
    rows = [{"prompt": "a", "completion": "b" * (length - 3)} for _ in range(8)]
    return vf.SFTTrainer(
        model=model,
        tokenizer=words(),
        dataset=rows,
        config={"batch_size": 8, "max_steps": 2, "show_progress": False, "output_dir": folder / "run", **settings},
        peft_config=vf.lora_defaults() if lora else None,
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_checkpointing": True}, {"micro_batch_tokens": 1024}, {"optim": "cpu_offload"}, {"lora": True}],
    ids=str,
)
def test_the_planned_peak_is_what_a_training_takes(tmp_path: Path, settings: dict[str, Any]) -> None:
    before = torch.cuda.memory_allocated()
    trainer = imitating(tmp_path, model_of(1024, 12), **settings)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    measured = torch.cuda.max_memory_allocated() - before
    assert abs(trainer.memory.peak - measured) <= WITHIN * measured, str(trainer.memory)


def test_what_does_not_fit_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    model = model_of(1024, 12).cpu()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((before + 500 * MB) / total)
    with pytest.raises(WillNotFitError, match=r"are free on cuda.*it fits with .*LoRA"):
        imitating(tmp_path, model)
    assert torch.cuda.memory_allocated() == before


def test_knobs_that_change_no_number_are_taken_and_told_where_memory_asks_for_them(tmp_path: Path) -> None:
    settings = {"max_new_tokens": 32, "max_prompt_length": 32, "max_seq_length": 2048, "batch_size": 64, "max_steps": 2}
    before = torch.cuda.memory_allocated()
    model = model_of(1024, 12, len(words()))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((before + 4500 * MB) / total)
    trainer = making.trainer(tmp_path, model=model, bf16=True, **settings)
    told = ", ".join(trainer.memory.told)
    assert "gradient checkpointing" in told or "KV cache is released" in told
    report = trainer.train()
    assert len(report.steps) == 2
    assert told in report.backend
    assert all(abs(step["ratio_mean"] - 1) < 0.02 for step in report.steps)
    trainer.client.close()


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged", "paged_8bit", "cpu_offload"])
def test_each_optimizer_trains_as_adamw_does_and_resumes(tmp_path: Path, optim: str) -> None:
    if optim != "cpu_offload":
        pytest.importorskip("bitsandbytes")
    settings = {"max_seq_length": 64, "learning_rate": 1e-3, "max_steps": 6}
    plain, other = (
        imitating(tmp_path / name, model_of(256, 2), optim=name, save_steps=3, **settings) for name in ("adamw", optim)
    )
    plain_losses, losses = ([step["loss"] for step in one.train().steps] for one in (plain, other))
    assert losses == pytest.approx(plain_losses, rel=0.02 if "8bit" in optim else 1e-3)
    resumed = imitating(tmp_path / "resumed", model_of(256, 2), optim=optim, **settings)
    steps = resumed.train(resume=tmp_path / optim / "run" / "checkpoints" / "step-000003").steps
    assert [step["loss"] for step in steps[-3:]] == pytest.approx(losses[-3:], rel=1e-3)


def test_sampler_and_trainer_agree_on_weights_in_4_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    trainer = making.trainer(
        tmp_path,
        model=model_of(256, 2, len(words())),
        peft_config=vf.lora_defaults(),
        load_in_4bit=True,
        learning_rate=0.0,
        max_steps=2,
    )
    report = trainer.train()
    assert trainer.client.backend.why == "its weights are quantised"
    assert all(abs(step["ratio_mean"] - 1) < 0.02 for step in report.steps)
    trainer.client.close()


def test_a_closed_model_gives_its_memory_back_and_a_second_of_default_size_fits(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    left = []
    for _ in range(3):
        before = torch.cuda.memory_reserved()
        with vf.LocalModel(str(tmp_path)) as model:
            model.engine.generate([[3, 4, 5]])
            assert torch.cuda.memory_reserved() - before > 1000 * MB
        del model  # and its weights
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved() - before)
    assert left[0] < 200 * MB  # workspaces that libraries keep from their first use on
    assert max(left[1:]) < 10 * MB
