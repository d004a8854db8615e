"""What several processes, samplers and workers cannot begin with: one sentence, before a model is loaded."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

import verifiers as vf  # noqa: E402
from tests.trainers.serving import Vllm  # noqa: E402
from verifiers.trainers.distributed.processes import accelerator  # noqa: E402
from verifiers.trainers.distributed.sharding import check_sharding  # noqa: E402
from verifiers.trainers.distributed.zero import check_settings  # noqa: E402

SMALL = ("--batch-size", "8", "--group-size", "4", "--output-dir", "out")
MARK = "VERIFIERS_TEST_REFUSAL"
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.fixture
def broken(folder: Path) -> str:
    """A folder with a model whose weights cannot be read: whoever tries says so."""
    made, tokenizer = vf.tiny_model("ab", hidden_size=16, heads=2, layers=1)
    made.save_pretrained(folder / "broken")
    tokenizer.save_pretrained(folder / "broken")
    (folder / "broken" / "model.safetensors").write_bytes(b"no weights")
    return "./broken"


@pytest.fixture
def port() -> Iterator[str]:
    """One that is in use."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield str(one.getsockname()[1])


def check_refused(said: str, wanted: str, folder: Path) -> None:
    told = said.strip().splitlines()
    assert wanted in told[-1], said
    assert "Traceback" not in said
    assert "could not be loaded" not in said  # nobody has looked at the weights
    assert not (folder / "out").exists()


TABLE = [
    ("a batch that is not divided", ("--launch", "ddp", "--processes", "3"), {}, "cannot be divided among 3"),
    (
        "a group that is split",
        ("--launch", "ddp", "--processes", "4"),
        {},
        "each with whole groups of group_size = 4: use 16",
    ),
    (
        "FSDP 1",
        (),
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
        "for FSDP 1 (fsdp_version), but only FSDP 2 is supported",
    ),
    (
        "Megatron",
        (),
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
        "Megatron-LM (ACCELERATE_USE_MEGATRON_LM) is not supported",
    ),
    ("a plan of parallelism", (), {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "a parallelism configuration ("),
    (
        "one of several",
        (),
        {"RANK": "0", "WORLD_SIZE": "2"},
        "2 processes were started (WORLD_SIZE), but Accelerate",
    ),
    (
        "no number of processes",
        (),
        {"RANK": "0", "WORLD_SIZE": "banana"},
        "WORLD_SIZE=banana in the environment is not a",
    ),
    ("a number that nobody asks for", (), {"WORLD_SIZE": "1.5"}, "WORLD_SIZE=1.5 in the environment is not a whole"),
    ("no rank", (), {"RANK": "first"}, "RANK=first in the environment is not a whole number"),
    ("no rank on this machine", (), {"LOCAL_RANK": "x"}, "LOCAL_RANK=x in the environment is not a whole number"),
    ("no port", (), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT=http in the environment is"),
    ("one too many", (), {"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2 (RANK, WORLD_SIZE)"),
    ("none at all", (), {"RANK": "0", "WORLD_SIZE": "0"}, "0 processes were started (WORLD_SIZE), but Accelerate"),
    (
        "one for several",
        (),
        {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "::1"},
        "started only one of several processes",
    ),
    pytest.param(
        "no DeepSpeed here",
        (),
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        "pip install 'verifiers[deepspeed]'",
        marks=pytest.mark.skipif(HAS_DEEPSPEED, reason="DeepSpeed is here"),
    ),
    pytest.param(
        "no DeepSpeed to launch",
        ("--launch", "zero3", "--processes", "2"),
        {},
        "--launch zero3 needs DeepSpeed: pip install 'verifiers[deepspeed]'",
        marks=pytest.mark.skipif(HAS_DEEPSPEED, reason="DeepSpeed is here"),
    ),
    (
        "a precision",
        (),
        {"ACCELERATE_MIXED_PRECISION": "fp8"},
        "mixed_precision=fp8 of Accelerate is not supported",
    ),
    pytest.param(
        "no Ray",
        ("--workers", "ray"),
        {},
        "workers='ray' needs Ray: pip install 'verifiers[ray]'",
        marks=pytest.mark.skipif(HAS_RAY, reason="Ray is here"),
    ),
    ("half precision on a CPU", ("--fp16",), {}, "fp16=True needs a GPU"),
    ("other workers", ("--workers", "dask"), {}, "workers='dask' must be 'ray'"),
    ("no sampler", ("--sampler", "http://127.0.0.1:9/v1"), {}, "http://127.0.0.1:9 cannot be trained with"),
    ("no list of samplers", ("--sampler", "nowhere.txt"), {}, "the list of samplers cannot be read"),
]


@pytest.mark.parametrize(("name", "words", "env", "wanted"), TABLE, ids=lambda one: one if isinstance(one, str) else "")
def test_it_is_one_sentence_before_the_model_is_loaded(run, broken, folder, monkeypatch, name, words, env, wanted):
    accelerator()  # this process has been set up, alone
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    said = run("train", "reverse-text", "-m", broken, *SMALL, *words, code=None)
    assert said.exit_code in (1, 2)
    check_refused(said.stderr, wanted, folder)


def test_a_model_that_cannot_be_read_is_heard_of_where_nothing_else_is_wrong(run, broken):
    """Else the table would say nothing."""
    assert "could not be loaded" in run("train", "reverse-text", "-m", broken, *SMALL, code=None).stderr


@pytest.mark.parametrize(
    ("version", "config", "wanted"),
    [
        ({"version": "0.11.2"}, {"backend": "gloo"}, "is vLLM 0.11.2, which cannot be sent weights"),
        ({"version": "0.32.0"}, {"backend": "ipc"}, "does not receive weights with gloo or NCCL"),
        (None, None, "is an endpoint that takes no weights"),
    ],
)
def test_a_sampler_that_does_not_fit_is_one_sentence_before_the_model_is_loaded(
    run, broken, folder, version, config, wanted
):
    with Vllm(version=version, config=config) as server:
        said = run("train", "reverse-text", "-m", broken, *SMALL, "--sampler", server.url, code=None)
    assert said.exit_code in (1, 2)
    check_refused(said.stderr, wanted, folder)


def test_a_ray_that_is_too_old_is_one_sentence_before_the_model_is_loaded(run, broken, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="1.13.0"))
    said = run("train", "reverse-text", "-m", broken, *SMALL, "--workers", "ray", code=None)
    assert said.exit_code in (1, 2)
    check_refused(said.stderr, "Ray 1.13.0 is too old", folder)


@pytest.mark.parametrize("kind", ["fsdp2", "zero"])
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"optim": "adamw_8bit"}, "optim='adamw_8bit' does not work with"),
        ({"load_in_4bit": True}, "weights in 4 bits"),
        ({"fp16": True}, "fp16=True does not work with a sharded model"),
    ],
)
def test_what_cannot_be_sharded_is_known_from_the_configuration(kind, asked, wanted):
    with pytest.raises(ValueError, match=wanted):
        check_sharding(vf.SFTConfig(**asked), None, kind)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero_stage: 0 shards nothing: use 2 or 3"),
        (
            {"zero_optimization": {"stage": 2}, "train_batch_size": 30},
            "is 30, but batch_size = 8 in each of 2 processes",
        ),
    ],
)
def test_a_configuration_of_deepspeeds_that_does_not_fit_is_known_before_the_model(settings, wanted):
    plugin = SimpleNamespace(deepspeed_config=settings)
    processes: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), num_processes=2)
    with pytest.raises(ValueError, match=wanted):
        check_settings(vf.SFTConfig(batch_size=8), processes)


@pytest.mark.parametrize(
    "words", [("serve", "./broken"), ("tinker-serve", "./broken"), ("env-serve", "no-such-environment")]
)
def test_a_port_in_use_is_heard_of_before_anything_is_loaded(run, broken, folder, port, words):
    said = run(*words, "--port", port, code=1).stderr
    check_refused(said, f"cannot listen on 127.0.0.1:{port}: Address already in use", folder)


# --- real processes ---------------------------------------------------------------------------------------------------


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that the test in this folder started and that are there still."""
    found = []
    for one in psutil.process_iter():
        try:
            if one.environ().get(MARK) == str(folder) and one.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(one.cmdline()))
        except psutil.Error:
            continue
    return found


def ended(repo: Path, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "FSDP"))}
    clean |= {"PYTHONPATH": str(repo), "OMP_NUM_THREADS": "1", MARK: str(folder), **env}
    command = [sys.executable, "-m", "verifiers", "train", "reverse-text", "-m", "./broken", *SMALL, *words]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_port_in_use_among_processes_is_one_sentence_and_none_is_left(repo, broken, folder, port):
    """Two machines, say, whose launcher was given a port that another training has."""
    meets = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = ended(repo, folder, **meets)
    assert done.returncode in (1, 2)
    check_refused(done.stderr, f"the processes cannot connect at 127.0.0.1:{port}", folder)
    assert left_behind(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--optim", "adamw_8bit"), "optim='adamw_8bit' does not work with"),
        (("--sampler", "http://127.0.0.1:9/v1"), "http://127.0.0.1:9 cannot be trained with"),
    ],
)
def test_what_two_launched_processes_refuse_is_one_sentence_and_none_is_left(repo, broken, folder, words, wanted):
    done = ended(repo, folder, "--launch", "fsdp2", "--processes", "2", *words)
    assert done.returncode in (1, 2)
    check_refused(done.stderr, wanted, folder)
    assert done.stderr.count(wanted) == 1
    assert left_behind(folder) == []
