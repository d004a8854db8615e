"""ZeRO-2 and ZeRO-3 by the real DeepSpeed, on a CPU: the losses of one process, checkpoints, ``accelerate launch``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

from tests.support.venvs import HOME, ROOT
from tests.trainers.test_processes import TORCHRUN, alone, check_same_update, free_port, launch
from tests.trainers.test_sharding import check_checkpoint, check_export, four_decimals
from verifiers.cli.launch import ENGINES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TRAININGS = ("online", "adapters", "imitation", "recomputing", "saving")
FOUR = ("torch.distributed.run", "--nproc_per_node", "4", "--master_port")


@pytest.fixture(scope="module")
def python() -> str:
    """This interpreter if it has DeepSpeed, else one of an environment with all packages of this one, and it."""
    if importlib.util.find_spec("deepspeed") is not None:
        return sys.executable
    folder = HOME / f"deepspeed-{sys.version_info.major}.{sys.version_info.minor}"
    made = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [str(made), "-m", "pip", "install", "--quiet"]
        env = {**os.environ, "DS_BUILD_OPS": "0"}
        for more in (["setuptools", "wheel"], ["--no-build-isolation", "deepspeed>=0.17"]):
            done = subprocess.run([*pip, *more], env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"DeepSpeed cannot be installed here: {done.stderr.strip()[-300:]}")
        (folder / "complete").touch()
    return str(made)


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_two_processes_of_zero_give_the_losses_of_one_and_one_resumes_their_checkpoint(tmp_path, python, engine):
    first, second = launch(tmp_path / "two", TORCHRUN, *TRAININGS, python=python, **ENGINES[engine])
    for what in TRAININGS:
        one = alone(tmp_path / "one", what)
        assert four_decimals(first[what]) == four_decimals(one)
        assert first[what]["weights"] == second[what]["weights"]
        check_same_update(one, first[what])
    run = tmp_path / "two" / "saving" / "run"
    check_checkpoint(run / "checkpoints" / "step-000004")
    check_export(run / "checkpoints" / "step-000004", tmp_path / "exported", first["saving"]["weights"])
    (run / "checkpoints" / "step-000004").rename(tmp_path / "gone")
    (tmp_path / "two" / "saving").rename(tmp_path / "two" / "resumed")
    resumed = alone(tmp_path / "two", "resumed")
    assert four_decimals(resumed) == four_decimals(first["saving"])
    assert resumed["weights"] == pytest.approx(first["saving"]["weights"], rel=1e-6)


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_four_processes_of_zero_give_the_losses_of_one(tmp_path, python, engine):
    """All weights, accumulated or not, adapters, and by imitation."""
    trainings = ("online", "accumulating", "adapters", "imitation")
    more = ("parts_of_zero3",) if engine == "zero3" else ()
    ranks = launch(tmp_path / "four", FOUR, *trainings, *more, processes=4, python=python, **ENGINES[engine])
    for what in trainings:
        one = alone(tmp_path / "one", what)
        for found in ranks:
            assert found[what]["processes"] == 4
            assert four_decimals(found[what]) == four_decimals(one)
            assert found[what]["weights"] == ranks[0][what]["weights"]
        check_same_update(one, ranks[0][what])
    for name in more:  # a device never held the whole model
        assert all(found[name]["peak"] < found[name]["whole"] / 2 for found in ranks)


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_four_processes_of_zero_go_on_from_the_checkpoint_of_two_of_fsdp2(tmp_path, python, engine):
    uninterrupted = alone(tmp_path / "one", "saving")
    launch(tmp_path / "two", TORCHRUN, "saving", **ENGINES["fsdp2"])
    (tmp_path / "two" / "saving" / "run" / "checkpoints" / "step-000004").rename(tmp_path / "gone")
    (tmp_path / "two" / "saving").rename(tmp_path / "two" / "resumed")
    found: Any = launch(tmp_path / "two", FOUR, "resumed", processes=4, python=python, **ENGINES[engine])[0]["resumed"]
    assert four_decimals(found) == four_decimals(uninterrupted)
    assert found["weights"] == pytest.approx(uninterrupted["weights"], rel=1e-6)


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_the_configuration_that_comes_along_shards_what_accelerate_launches(tmp_path, python, engine):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [python, "-m", "accelerate.commands.launch", "--config-file", f"configs/{engine}.yaml"]
    words += ["--num-processes", "2", "--mixed_precision", "no", "--main_process_port", free_port()]
    words += ["-m", "tests.trainers.several", str(tmp_path), "2", "online"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "process-0.json").read_text())["online"]
    assert found["processes"] == 2
    check_same_update(alone(tmp_path / "one", "online"), found)


def test_a_batch_of_deepspeeds_configuration_that_is_not_the_trainers_is_one_sentence(tmp_path, python):
    config = {"train_batch_size": 30, "zero_optimization": {"stage": 2}}
    Path(tmp_path / "ds.json").write_text(json.dumps(config))
    settings = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
    with pytest.raises(AssertionError, match="train_batch_size of DeepSpeed's configuration is 30, but batch_size = 8"):
        launch(tmp_path, TORCHRUN, "online", python=python, **ENGINES["zero2"], **settings)
