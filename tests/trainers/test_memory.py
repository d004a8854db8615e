"""What a training takes is known before it begins: what fits is made to fit, what does not is refused in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.trainers.memory import job  # noqa: E402
from verifiers.trainers.memory.optimizers import OPTIMIZERS  # noqa: E402
from verifiers.trainers.memory.plan import Device, ModelSize, Training, WillNotFitError, plan_memory  # noqa: E402
from verifiers.trainers.memory.ways import _remedies, check_fits  # noqa: E402
from verifiers.trainers.setup import with_adapters  # noqa: E402

WITHIN = 0.15  # of what was measured: docs/hardware.md promises it
SEVEN_B = transformers.LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
    max_position_embeddings=4096,
)  # fmt: skip
SIZE = ModelSize.of(SEVEN_B)
H200 = Device(kind="cuda", capacity=149.5e9, host=130e9)
CONSUMER = Device(kind="cuda", capacity=24e9, host=64e9)


def asked(**settings: Any) -> Training:
    usual = {"size": SIZE, "trained": SIZE.parameters, "length": 1024, "slots": 32, "step_tokens": 32 * 1024}
    return Training(**{**usual, **settings})


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_sizes_are_read_off_a_configuration_as_off_the_model_itself_with_or_without_adapters() -> None:
    words = tiny.tokenizer()
    model = tiny.model(words)
    size = ModelSize.of(model.config)
    assert size.parameters == sum(one.numel() for one in model.parameters())
    assert ModelSize.of(model) == size
    adapted = with_adapters(model, vf.lora_defaults(r=4))
    assert ModelSize.of(adapted) == size
    assert size.adapters(4) == sum(one.numel() for one in adapted.parameters() if one.requires_grad)


def test_a_7b_with_all_weights_fits_an_h200_by_knobs_that_change_no_number() -> None:
    plan = plan_memory(asked(), H200)
    assert SIZE.parameters == 6_738_415_616
    assert plan.fits
    assert plan.parts["optimizer"] == 12 * SIZE.parameters  # two averages and a float32 copy
    assert 18 * SIZE.parameters < plan.peak < H200.usable


def test_a_7b_fits_24_gb_with_lora_and_with_4_bits_with_room_to_spare() -> None:
    adapters = SIZE.adapters(8)
    lora, qlora = (plan_memory(asked(trained=adapters, in_4_bit=four), CONSUMER) for four in (False, True))
    assert lora.fits
    assert qlora.fits
    assert lora.parts["weights"] == pytest.approx(2 * (SIZE.parameters + adapters))
    assert qlora.parts["weights"] < 0.3 * lora.parts["weights"]
    assert qlora.micro_batch_tokens > lora.micro_batch_tokens


def test_what_does_not_fit_is_said_with_its_parts_and_only_with_knobs_that_make_it_fit() -> None:
    plan = plan_memory(asked(), CONSUMER)
    with pytest.raises(WillNotFitError) as caught:
        check_fits(plan, "cuda:0")
    said = str(caught.value)
    assert "\n" not in said
    assert "24.0 GB are free on cuda:0" in said
    for word in ("weights", "gradients", "optimizer", "activations", "logits", "LoRA", "load_in_4bit"):
        assert word in said
    assert "optim='adamw_8bit'" not in said  # 7B in 8 bit is far more than 24 GB
    for knob, found in _remedies(plan):
        assert (f"{knob} (" in said) == found.fits


@pytest.mark.parametrize(
    ("sharding", "refused"),
    [("ddp", ("cpu_offload",)), ("zero2", ("optim=", "4bit")), ("fsdp2", ("optim=", "4bit"))],
)
def test_several_processes_are_not_advised_what_they_would_be_refused(sharding: str, refused: tuple[str, ...]) -> None:
    large = asked(sharding=sharding, processes=2, size=replace(SIZE, parameters=40 * 10**9), trained=40 * 10**9)
    advised = [name for name, _ in _remedies(plan_memory(large, CONSUMER))]
    assert any("LoRA" in name for name in advised)
    assert not [name for name in advised if any(word in name for word in refused)]


def test_host_memory_is_counted_where_the_optimizer_is_there() -> None:
    offloaded = plan_memory(asked(optim="cpu_offload"), CONSUMER)
    assert offloaded.host == 16 * SIZE.parameters
    assert not offloaded.fits
    assert plan_memory(asked(optim="cpu_offload"), replace(CONSUMER, host=200e9)).fits
    with pytest.raises(WillNotFitError, match=r"on the host, which has 64\.0 GB free"):
        check_fits(offloaded, "cuda:0")


def test_nothing_that_fits_is_advised_where_nothing_does() -> None:
    with pytest.raises(WillNotFitError, match="no setting of one process makes it fit: use a smaller model"):
        check_fits(plan_memory(asked(), replace(CONSUMER, capacity=2e9)), "cuda:0")


@settings(max_examples=60, deadline=None)
@given(
    optim=st.sampled_from(sorted(OPTIMIZERS)),
    trained=st.sampled_from([SIZE.parameters, SIZE.adapters(8)]),
    length=st.integers(16, 4096),
    slots=st.integers(0, 256),
    capacity=st.floats(5e9, 400e9),
    width=st.sampled_from([2, 4]),
)
def test_each_knob_takes_less_and_a_plan_that_fits_is_within_its_device(
    optim: str, trained: int, length: int, slots: int, capacity: float, width: int
) -> None:
    device = Device(kind="cuda", capacity=capacity, host=1e12)
    wanted = asked(optim=optim, trained=trained, length=length, slots=slots, weight_bytes=width, micro_batch_tokens=256)
    plain, less = (
        plan_memory(replace(wanted, gradient_checkpointing=checkpointing), device) for checkpointing in (False, True)
    )
    assert less.peak <= plain.peak or plain.fits
    assert plan_memory(replace(wanted, length=max(1, length // 2)), device).peak <= plan_memory(wanted, device).peak * 2
    for plan in (plain, less):
        if plan.fits:
            assert plan.peak <= 0.9 * capacity
            assert plan.cache_room <= capacity
        assert plan.slots <= slots


def test_shards_take_a_part_of_what_is_sharded() -> None:
    whole = plan_memory(asked(), H200)
    zero2, fsdp2 = (plan_memory(asked(sharding=one, processes=8), H200) for one in ("zero2", "fsdp2"))
    assert zero2.parts["weights"] == whole.parts["weights"]
    assert zero2.parts["optimizer"] == whole.parts["optimizer"] / 8
    assert fsdp2.parts["weights"] == whole.parts["weights"] / 8
    assert fsdp2.peak < zero2.peak < whole.peak


# --- trainings --------------------------------------------------------------------------------------------------------


def losses(trainer: Any) -> list[float]:
    return [step["loss"] for step in trainer.train().steps]


def least_free(trainer: Any) -> float:
    """Memory beside the weights in which such a training just fits."""
    asked, low, high = trainer.memory.asked, 0.0, trainer.memory.peak * 2
    while high - low > 1000:
        middle = (low + high) / 2
        fits = plan_memory(asked, replace(trainer.memory.device, capacity=middle)).fits
        low, high = (low, middle) if fits else (middle, high)
    return high * 1.01 - sum(one.numel() * one.element_size() for one in trainer.model.parameters())


def test_knobs_that_change_no_number_are_taken_and_told_and_losses_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"max_seq_length": 256, "learning_rate": 1e-2}
    plain = making.trainer(tmp_path / "plain", **sizes)
    assert not plain.memory.told
    free = least_free(plain)
    monkeypatch.setattr(job, "free_memory", lambda device: free)
    tight = making.trainer(tmp_path / "tight", show_progress=True, **sizes)
    told = ", ".join(tight.memory.told)
    assert "gradient checkpointing" in told
    assert "the KV cache is released during updates" in told
    assert losses(tight) == pytest.approx(losses(plain), abs=1e-6)
    assert told in capsys.readouterr().err.splitlines()[0]


def test_a_model_that_will_not_fit_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SEVEN_B.save_pretrained(tmp_path)  # and no weights: reading them would fail in another way
    tiny.tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(job, "free_memory", lambda device: 20e9)
    with pytest.raises(WillNotFitError, match=r"training all weights needs .* GB at its peak"):
        vf.GRPOTrainer(model=str(tmp_path), env=making.environment(), config=making.config(tmp_path))


def test_lengths_that_nobody_gave_are_no_reason_to_refuse_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = making.trainer(tmp_path / "plain")
    plan, free = plain.memory, least_free(plain) * 0.9
    monkeypatch.setattr(job, "free_memory", lambda device: free)
    made = making.trainer(tmp_path / "tight")
    assert made.memory.asked.length < plan.asked.length
    assert "sequences of at most" in made.memory.told[0]
    assert len(made.train().steps) == made.total_steps
    with pytest.raises(WillNotFitError, match=r"it fits with .*max_seq_length="):
        making.trainer(tmp_path / "said", max_seq_length=plan.asked.length)


def test_checkpointing_that_was_switched_off_stays_off_and_is_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_seq_length": 256}
    free = least_free(making.trainer(tmp_path / "plain", **sizes))
    monkeypatch.setattr(job, "free_memory", lambda device: free)
    with pytest.raises(WillNotFitError, match="it fits with gradient_checkpointing=True"):
        making.trainer(tmp_path / "tight", gradient_checkpointing=False, **sizes)


def test_the_kv_cache_is_given_back_while_learning_and_taken_again_for_sampling(tmp_path: Path) -> None:
    held = []

    class Watching(vf.GRPOTrainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            before = self.client.engine._has_cache
            figures = super().train_step(batch)
            held.append((before, self.client.engine._has_cache))
            return figures

    trainer = making.trainer(tmp_path, Watching)
    trainer.memory = replace(trainer.memory, releases_cache=True)
    report = trainer.train()
    assert held == [(True, False)] * 3
    assert all(step["ratio_mean"] == pytest.approx(1, abs=1e-4) for step in report.steps)


MEASURED = {"hidden": 384, "layers": 6, "vocabulary": 2048, "batch_size": 4, "max_seq_length": 384}


@pytest.mark.parametrize(
    "case",
    [
        {},
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"micro_batch_tokens": 384}, marks=pytest.mark.slow),
        pytest.param({"optim": "cpu_offload"}, marks=pytest.mark.slow),
        pytest.param({"lora": True}, marks=pytest.mark.slow),
        pytest.param({"grpo": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is not known here")
def test_the_planned_peak_is_what_a_process_takes(tmp_path: Path, case: dict[str, Any]) -> None:
    words = {**MEASURED, "micro_batch_tokens": 1536, **case}
    command = [sys.executable, "-m", "tests.trainers.measuring", str(tmp_path), json.dumps(words)]
    # Small blocks are given back too, so that what is held is what is used.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env={**_environment(), **env}, timeout=550)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert abs(found["planned"] - found["measured"]) <= WITHIN * found["measured"], found


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
