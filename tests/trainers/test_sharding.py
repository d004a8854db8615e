"""Models of which each process holds a part: the losses of one process, its checkpoints, and one folder to export."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
yaml = pytest.importorskip("yaml")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.engine.support.exact import random_model  # noqa: E402
from tests.trainers import measuring  # noqa: E402
from tests.trainers.test_processes import ROOT, TORCHRUN, alone, check_same_update, free_port, launch  # noqa: E402
from verifiers.cli.launch import ENGINES  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.trainers import setup  # noqa: E402
from verifiers.trainers.distributed.sharding import first_layers, make_weights  # noqa: E402
from verifiers.trainers.distributed.shards import export_checkpoint, shapes_of  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.memory.job import Job  # noqa: E402

pytestmark = pytest.mark.timeout(900)  # processes that each import torch

FSDP2 = dict(ENGINES["fsdp2"])
TRAININGS = ("dapo", "online", "accumulating", "adapters", "imitation")


def four_decimals(run: dict[str, Any]) -> list[float]:
    return [round(step["loss"], 4) for step in run["steps"]]


def check_checkpoint(path: Path) -> None:
    """Each process wrote its part, and no file holds the whole."""
    assert len(list((path / "shards").glob("*.distcp"))) == 2
    assert not list(path.glob("*.safetensors"))
    assert (path / "config.json").is_file()
    assert (path / "trainer.json").is_file()


def check_export(checkpoint: Path, path: Path, wanted: float) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_checkpoint(checkpoint, path)
    assert [one.name for one in path.glob("*.safetensors")] == ["model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(path)
    assert sum(float(one.detach().double().abs().sum()) for one in model.parameters()) == pytest.approx(
        wanted, rel=1e-6
    )
    assert AutoTokenizer.from_pretrained(path).eos_token == "<|im_end|>"


def test_two_processes_of_fsdp2_give_the_losses_of_one_and_one_resumes_their_checkpoint(tmp_path):
    """All weights, adapters, and by imitation; the engine samples from what is gathered after each step."""
    trainings = ("adapters", "imitation", "saving")
    first, second = launch(tmp_path / "two", TORCHRUN, *trainings, **FSDP2)
    for what in trainings:
        one = alone(tmp_path / "one", what)
        assert first[what]["weights"] == second[what]["weights"]
        assert four_decimals(first[what]) == four_decimals(one)
        check_same_update(one, first[what])
        assert first[what]["held"] + second[what]["held"] == first[what]["trained"]
        assert first[what]["held"] < 0.6 * first[what]["trained"]
    run = tmp_path / "two" / "saving" / "run"
    check_checkpoint(run / "checkpoints" / "step-000004")
    check_export(run / "checkpoints" / "step-000004", tmp_path / "exported", first["saving"]["weights"])
    (run / "checkpoints" / "step-000004").rename(tmp_path / "gone")
    (tmp_path / "two" / "saving").rename(tmp_path / "two" / "resumed")
    resumed = alone(tmp_path / "two", "resumed")
    assert [round(step["loss"], 4) for step in resumed["steps"]] == four_decimals(first["saving"])
    assert resumed["weights"] == pytest.approx(first["saving"]["weights"], rel=1e-6)


def test_a_model_in_4_bits_is_not_sharded():
    pytest.importorskip("bitsandbytes")
    model, tokenizer = vf.tiny_model("ab", hidden_size=64)
    rows = [{"prompt": "a", "completion": "b"}]
    made = vf.SFTTrainer(model, rows, {"load_in_4bit": True}, tokenizer=tokenizer, peft_config=vf.lora_defaults())
    with pytest.raises(ValueError, match=r"weights in 4 bits .* cannot be sharded, so fsdp2 does not work"):
        make_weights(made.model, made.config, made.accelerator, "fsdp2", whole="saved")


# --- what a device holds ----------------------------------------------------------------------------------------------

EIGHT, LAYERS = 8, 24
HIDDEN = {"cpu": 64, "cuda": 1024}  # on a card a model that is larger than what its libraries take
LIBRARIES = 96 << 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def first_of_eight(request):
    """The first of eight processes, of which the others are not there: what they would send is not looked at."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=EIGHT)
    device = torch.device(request.param)
    yield SimpleNamespace(num_processes=EIGHT, process_index=0, is_main_process=True, device=device)
    torch.distributed.destroy_process_group()


def deep_model(folder: Path, device: str) -> int:
    """A model of many layers, and the bytes of one of them, or of what is beside them."""
    model = measuring.model_of(HIDDEN[device], LAYERS, len(tiny.tokenizer()))
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    inside = sum(one.numel() for one in model.model.layers[0].parameters())
    return 4 * max(inside, sum(one.numel() for one in model.parameters()) - LAYERS * inside)


@pytest.mark.parametrize("lora", [False, True])
def test_a_device_never_holds_more_than_its_part_and_one_layer(tmp_path, first_of_eight, lora):
    """The whole model is on the host, from where parts of it are taken."""
    device = first_of_eight.device
    layer = deep_model(tmp_path / "model", device.type)
    config = vf.SFTConfig(max_seq_length=64)
    adapters = vf.lora_defaults(r=2) if lora else None
    job = Job(config=config, device=device, adapters=adapters, processes=EIGHT, sharding="fsdp2", is_read=False)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model, *_ = setup.model_and_tokenizer(tmp_path / "model", None, job)
    assert {one.device.type for one in model.parameters()} == {"cpu"}
    whole = 4 * sum(one.numel() for one in model.parameters())
    with measuring.Allocated(device.type, model) as found:
        weights = make_weights(model, config, first_of_eight, "fsdp2", whole="saved")
        held = found.now
    assert held < 1.05 * whole / EIGHT + layer
    activations = 4 * HIDDEN[device.type] * 40 * 130  # of one layer, for the tokens that it is tried on
    most = held + 2 * layer + activations
    assert found.peak < most < whole / 2
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() - before < most + LIBRARIES
    with measuring.Allocated(device.type, model, weights.root) as gathering:
        weights.publish_now()
    assert gathering.peak < 2 * layer  # one parameter after the other
    assert not gathering.now


def test_a_model_that_is_sampled_from_is_on_the_device_once_and_gathered_one_parameter_at_a_time(
    tmp_path, first_of_eight
):
    device = first_of_eight.device
    layer = deep_model(tmp_path / "model", device.type)
    config = vf.GRPOConfig(max_seq_length=64)
    job = Job(config=config, device=device, samples=True, processes=EIGHT, sharding="fsdp2")
    model, *_ = setup.model_and_tokenizer(tmp_path / "model", None, job)
    assert {one.device.type for one in model.parameters()} == {device.type}
    size = sum(one.numel() for one in model.parameters())
    with measuring.Allocated(device.type, model) as found:
        weights = make_weights(model, config, first_of_eight, "fsdp2", whole="sampled")
        held = found.now
    assert held < 4.2 * size / EIGHT + layer
    weights.publish()
    with measuring.Allocated(device.type, model, weights.root) as gathering:
        weights.publish()
    assert gathering.peak < 2 * layer


@pytest.mark.gpu
@pytest.mark.parametrize("first_of_eight", ["cuda"], indirect=True)
def test_parameters_that_stay_on_the_host_are_read_back_into_what_is_trained(first_of_eight, monkeypatch):
    """``fsdp_offload_params``: neither a checkpoint nor a resumed training takes them to the card."""
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    model = measuring.model_of(64, 2, len(tiny.tokenizer()))
    config = vf.SFTConfig(max_seq_length=64)
    weights = make_weights(model, config, first_of_eight, "fsdp2", whole="saved")
    assert {one.device.type for one in weights.masters} == {"cpu"}
    weights.take(lambda wanted: [one.to_local().fill_(3.0) for one in wanted.values()])
    assert all(bool((one == 3.0).all()) for one in weights.masters)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Phi4-mini", "Mixtral", "Llama with adapters"])
def test_the_first_layers_of_a_model_prove_what_all_of_them_do(family):
    model = random_model(family.removesuffix(" with adapters"))
    if family.endswith("adapters"):
        model = setup.with_adapters(model, vf.lora_defaults(r=2))
    cut = first_layers(model)
    found, wanted = (TokenScorer(one, may_fuse=False).layouts for one in (cut, model))
    assert found == wanted
    assert found.longest_batched
    assert cut.config.num_hidden_layers <= model.config.num_hidden_layers
    if family.startswith("Llama"):
        assert cut.config.num_hidden_layers == 1 < model.config.num_hidden_layers


@pytest.mark.slow
def test_four_processes_go_on_from_the_checkpoint_of_one_and_of_two(tmp_path):
    four = ("torch.distributed.run", "--nproc_per_node", "4", "--master_port")
    uninterrupted = alone(tmp_path / "one", "saving")
    launch(tmp_path / "two", TORCHRUN, "saving", **FSDP2)
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "saving" / "run" / "checkpoints" / "step-000004").rename(tmp_path / f"gone-{name}")
        (folder / "saving").rename(folder / "resumed")
        found = launch(folder, four, "resumed", processes=4, **FSDP2)[0]["resumed"]
        assert four_decimals(found) == four_decimals(uninterrupted)
        assert found["weights"] == pytest.approx(uninterrupted["weights"], rel=1e-6)


@pytest.mark.slow
def test_four_processes_of_fsdp2_and_of_ddp_give_the_losses_of_one(tmp_path):
    four = ("torch.distributed.run", "--nproc_per_node", "4", "--master_port")
    for engine in ("fsdp2", "ddp"):
        found = launch(tmp_path / engine, four, *TRAININGS, processes=4, **ENGINES[engine])[0]
        for what in TRAININGS:
            one = alone(tmp_path / f"{engine}-one", what)
            assert four_decimals(found[what]) == four_decimals(one)
            check_same_update(one, found[what])


@pytest.mark.slow
def test_adapters_are_saved_beside_their_shards_and_peft_loads_what_is_exported(tmp_path):
    from peft import PeftModel

    from tests.engine import tiny

    first, _ = launch(tmp_path, TORCHRUN, "saved_adapters", **FSDP2)
    checkpoint = tmp_path / "saved_adapters" / "run" / "checkpoints" / "step-000004"
    assert all("lora" in name for name in shapes_of(checkpoint))
    export_checkpoint(checkpoint, tmp_path / "exported")
    model = PeftModel.from_pretrained(tiny.model(tiny.tokenizer()), tmp_path / "exported")
    found = sum(float(one.detach().double().abs().sum()) for one in model.parameters())
    assert found == pytest.approx(first["saved_adapters"]["weights"], rel=1e-6)


@pytest.mark.slow
def test_gradient_checkpointing_micro_batches_and_bfloat16_go_with_fsdp2(tmp_path):
    first, second = launch(tmp_path / "two", TORCHRUN, "recomputing", "half_precision", **FSDP2)
    check_same_update(alone(tmp_path / "one", "recomputing"), first["recomputing"])
    one, two = alone(tmp_path / "one", "half_precision"), first["half_precision"]
    assert two["weights"] == second["half_precision"]["weights"] == pytest.approx(one["weights"], rel=1e-3)
    for wanted, found in zip(one["steps"], two["steps"], strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], abs=2e-2)


@pytest.mark.slow
def test_a_server_elsewhere_gets_the_gathered_weights_of_the_first_process_after_each_step(tmp_path):
    first, second = launch(tmp_path / "two", TORCHRUN, "sent", **FSDP2)
    one = alone(tmp_path / "one", "sent")
    assert first["sent"]["given"] == pytest.approx(one["given"], rel=1e-6)
    assert (len(one["given"]), second["sent"]["given"]) == (3, [])


@pytest.mark.slow
def test_a_process_with_nothing_to_learn_from_takes_part_in_the_passes_of_the_others(tmp_path):
    names = ("half_down_batch_wide", "half_refused", "batch_wide")
    first, second = launch(tmp_path / "two", TORCHRUN, *names, **FSDP2)
    for what in names:
        assert first[what]["weights"] == second[what]["weights"]
    check_same_update(alone(tmp_path / "one", "batch_wide"), first["batch_wide"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a card for each process")
def test_two_cards_of_fsdp2_give_the_losses_of_one(tmp_path):
    """Nothing but the device changes: the same trainings, by NCCL."""
    first, second = launch(tmp_path / "two", TORCHRUN, *TRAININGS, "saving", "half_precision", **FSDP2)
    for what in (*TRAININGS, "saving"):
        one = alone(tmp_path / "one", what)
        assert first[what]["weights"] == second[what]["weights"]
        for wanted, found in zip(one["steps"], first[what]["steps"], strict=True):
            assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one card at most")
def test_the_engine_of_the_second_process_samples_on_its_own_card():
    """Which card is current is a thread's own, and the engine has a thread."""
    tokenizer, found = tiny.tokenizer(), []
    for device in ("cuda:0", "cuda:1"):
        with vf.LocalModel(tiny.model(tokenizer).to(device), tokenizer) as local:
            (one,) = local.engine.generate([[5, 6, 7]], Sampling(temperature=0.0, max_tokens=8))
            found.append(one.ids)
    assert found[0] == found[1]


# --- accelerate launch ------------------------------------------------------------------------------------------------


def launched_by_accelerate(config: Path, processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "accelerate.commands.launch", "--config-file", str(config), "--num-processes", str(processes)]
    launcher += ["--mixed_precision", "no", "--main_process_port", free_port()]
    return subprocess.run(
        [sys.executable, *launcher, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_configurations_that_come_along_start_two_processes_that_train_as_one(tmp_path, engine):
    import json

    words = ("-m", "tests.trainers.several", str(tmp_path), "2", "grpo", "imitation")
    done = launched_by_accelerate(ROOT / "configs" / f"{engine}.yaml", 2, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "process-0.json").read_text())
    for what in ("grpo", "imitation"):
        assert found[what]["processes"] == 2
        check_same_update(alone(tmp_path / "one", what), found[what])


@pytest.mark.slow
def test_a_section_for_deepspeed_that_accelerate_ignores_is_warned_of(tmp_path):
    """The documents' own zero3.yaml says MULTI_GPU."""
    said = yaml.safe_load((ROOT / "configs" / "zero3.yaml").read_text())
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump({**said, "distributed_type": "MULTI_GPU"}))
    script = tmp_path / "script.py"
    script.write_text("from verifiers.trainers.distributed.processes import accelerator\naccelerator()\n")
    done = launched_by_accelerate(tmp_path / "zero3.yaml", 2, str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("has a section deepspeed_config, but Accelerate ignores it") == 1
    assert "set distributed_type: DEEPSPEED" in done.stderr


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_each_way_to_launch_has_a_configuration_for_accelerate(engine):
    said = yaml.safe_load((ROOT / "configs" / f"{engine}.yaml").read_text())
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert said["distributed_type"] == kinds[engine]
    if engine == "fsdp2":
        assert str(said["fsdp_config"]["fsdp_version"]) == ENGINES[engine]["FSDP_VERSION"]
    if engine.startswith("zero"):
        assert str(said["deepspeed_config"]["zero_stage"]) == ENGINES[engine]["ACCELERATE_DEEPSPEED_ZERO_STAGE"]
