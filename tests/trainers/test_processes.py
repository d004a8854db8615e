"""Several processes train one model: the same update as one alone, and figures of everybody's rollouts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from tests.trainers import several  # noqa: E402
from verifiers.trainers.distributed.processes import accelerator  # noqa: E402
from verifiers.trainers.row_stream import RowStream  # noqa: E402
from verifiers.trainers.watch.report import _rows_per_process  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # processes that each import torch

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("torch.distributed.run", "--nproc_per_node", "2", "--master_port")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
ACCELERATE += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port")


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def launch(
    folder: Path, launcher: tuple[str, ...], *names: str, processes: int = 2, python: str = sys.executable, **more: str
) -> list[dict[str, Any]]:
    """What each process found, of the trainings with these names."""
    folder.mkdir(parents=True, exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "FSDP"))}
    script = ("tests.trainers.several", str(folder), str(processes))
    words = [python, "-m", *launcher, free_port(), "-m", *script, *names]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [json.loads((folder / f"process-{i}.json").read_text()) for i in range(processes)]


def alone(folder: Path, what: str) -> dict[str, Any]:
    return several.outcome(what, folder, 1)


def check_same_update(one: dict[str, Any], two: dict[str, Any]) -> None:
    for wanted, found in zip(one["steps"], two["steps"], strict=True):
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
        assert found["samples"] == wanted["samples"]
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-5)


def check_same_figures(one: dict[str, Any], two: dict[str, Any]) -> None:
    for name in ("reward", "reward_low", "reward_high", "sampled", "zero_variance", "trained_tokens"):
        for wanted, found in zip(one["steps"], two["steps"], strict=True):
            assert found[name] == pytest.approx(wanted[name], abs=1e-9), name
    for name in ("completion_tokens", "completion_tokens_max", "entropy", "ratio_mean", "ratio_max", "truncated"):
        for wanted, found in zip(one["steps"], two["steps"], strict=True):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
    histograms = [[step["ratio_histogram"]["counts"] for step in run["steps"]] for run in (one, two)]
    assert histograms[0] == histograms[1]


def test_two_processes_of_torchrun_make_the_update_of_one_and_tell_of_all_rollouts(tmp_path):
    """Without any of Accelerate's variables; the processes' replies differ in length, and so their token counts."""
    first, second = launch(tmp_path / "two", TORCHRUN, "dapo", "online", "batch_wide", "prepared")
    assert first["prepared"].get("error") is None
    assert first["prepared"]["weights"] == second["prepared"]["weights"] == first["online"]["weights"]
    for what in ("dapo", "online", "batch_wide"):
        assert first[what]["processes"] == second[what]["processes"] == 2
        assert first[what]["weights"] == second[what]["weights"]
        check_same_update(alone(tmp_path / "one", what), first[what])
    check_same_figures(alone(tmp_path / "again", "online"), first["online"])
    told = [{key: value for key, value in step.items() if not key.endswith("_s")} for step in first["online"]["steps"]]
    same = [{key: value for key, value in step.items() if not key.endswith("_s")} for step in second["online"]["steps"]]
    assert told == same  # callbacks of both decide by the same figures
    lines = (tmp_path / "two" / "online" / "run" / "results.jsonl").read_text().splitlines()
    rows = {record["example_id"] for record in map(json.loads, lines) if record["step"] == 1}
    assert len(rows) == 4  # of both processes, not of one


def test_rows_with_the_same_prompt_in_two_processes_get_rollouts_of_their_own_as_in_one(tmp_path):
    first, _ = launch(tmp_path / "two", TORCHRUN, "same_prompts")
    check_same_update(alone(tmp_path / "one", "same_prompts"), first["same_prompts"])
    replies = []
    for run in ("one", "two"):
        lines = (tmp_path / run / "same_prompts" / "run" / "results.jsonl").read_text().splitlines()
        replies.append(sorted(record["completion"][-1]["content"] for record in map(json.loads, lines)))
    assert replies[0] == replies[1]
    assert len(set(replies[1])) == len(replies[1]) == 16


AT_EXIT = """
import atexit, sys
import torch.distributed as dist

atexit.register(lambda: print(f"at the end: {dist.is_initialized()}", flush=True))
from verifiers.trainers.distributed.processes import accelerator

print(f"in the training: {accelerator().num_processes > 1 and dist.is_initialized()}", flush=True)
"""


def test_processes_leave_their_group_before_python_shuts_down(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT)
    words = [sys.executable, "-m", *TORCHRUN, free_port(), str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("in the training: True") == done.stdout.count("at the end: False") == 2


@pytest.mark.slow
def test_accelerate_launch_makes_the_same_update(tmp_path):
    first, second = launch(tmp_path / "two", ACCELERATE, "grpo", "imitation")
    for what in ("grpo", "imitation"):
        assert first[what]["processes"] == 2
        assert first[what]["weights"] == second[what]["weights"]
        check_same_update(alone(tmp_path / "one", what), first[what])


@pytest.mark.slow
def test_adapters_failures_and_stopping_in_two_processes(tmp_path):
    first, second = launch(tmp_path, TORCHRUN, "adapters", "half_down", "stopped", "all_down")
    assert first["adapters"]["weights"] == second["adapters"]["weights"]  # drawn by one, given to the other
    assert first["adapters"]["steps"][0]["kl"] == pytest.approx(0.0, abs=1e-6)
    for step in first["half_down"]["steps"]:
        assert (step["samples"], step["failed"]) == (8, 8)
    assert first["half_down"]["weights"] == second["half_down"]["weights"]
    assert len(first["stopped"]["steps"]) == len(second["stopped"]["steps"]) == 1
    for one in (first, second):
        assert "all 16 rollouts of a step failed" in one["all_down"]["error"]
        assert "the judge is down" in one["all_down"]["error"]


@pytest.mark.slow
def test_a_process_without_a_scored_rollout_is_not_waited_for_where_estimators_gather(tmp_path):
    first, second = launch(tmp_path, TORCHRUN, "half_down_batch_wide")
    found, other = first["half_down_batch_wide"], second["half_down_batch_wide"]
    assert [step["samples"] for step in found["steps"]] == [8, 8]
    assert found["weights"] == other["weights"]


@pytest.mark.slow
def test_processes_whose_rollouts_cannot_be_learned_from_go_on_with_the_others_or_stop_together(tmp_path):
    first, second = launch(tmp_path, TORCHRUN, "half_refused", "all_refused")
    assert first["half_refused"]["weights"] == second["half_refused"]["weights"]
    for one in (first, second):
        assert [step["refused"] for step in one["half_refused"]["steps"]] == [8, 8]
        assert "none of 16 rollouts can be trained on" in one["all_refused"]["error"]
    assert first["all_refused"]["error"] == second["all_refused"]["error"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_any_number_of_processes_goes_on_after_just_the_rows_that_were_taken(turns):
    """Each turn: so many processes, rows that each takes in a step, and steps until the next checkpoint."""
    wanted, taken, state = RowStream(range(1000), seed=3), [], {"cursor": 0, "processes": 1, "learned": []}
    for processes, rows, steps in turns:
        state |= _rows_per_process(state, processes)
        streams = [RowStream(range(1000), seed=3, shard=(i, processes)) for i in range(processes)]
        for stream in streams:
            stream.resume(state["cursor"], state["learned"])
        for _ in range(steps):
            step = [row for stream in streams for row in stream.take(rows)]
            assert sorted(step) == sorted(wanted.take(len(step)))
            taken += step
        for stream in streams:
            stream.note_learned(range(stream.first_unlearned, stream.cursor))
        cursor = min(stream.first_unlearned for stream in streams)
        learned = sorted(place for stream in streams for place in stream.learned(cursor))
        state = {"cursor": cursor, "processes": processes, "learned": learned}
    assert len(set(taken)) == len(taken)


@pytest.mark.slow
def test_imitation_that_goes_on_in_another_number_of_processes_takes_no_row_twice_and_leaves_none_out(tmp_path):
    """Two processes, four, three, and one."""
    seen = []
    for processes in (2, 4, 3):
        torchrun = ("torch.distributed.run", "--nproc_per_node", str(processes), "--master_port")
        ranks = launch(tmp_path, torchrun, "imitation_in_turns", processes=processes)
        seen += [row for found in ranks for row in found["imitation_in_turns"]["taken"]]
    seen += several.outcome("imitation_in_turns", tmp_path, 1)["taken"]
    order = RowStream(range(40), seed=0).take(2 * (2 + 4 + 3) + 6)
    assert sorted(seen) == sorted(f"say {i}" for i in order)


@pytest.mark.slow
def test_processes_that_stopped_within_a_generation_go_on_as_if_they_had_not(tmp_path):
    whole, _ = launch(tmp_path, TORCHRUN, "shared")
    shutil.copytree(tmp_path / "shared", tmp_path / "resumed_shared")
    for step in (2, 3, 4):
        shutil.rmtree(tmp_path / "resumed_shared" / "run" / "checkpoints" / f"step-00000{step}")
    first, second = launch(tmp_path, TORCHRUN, "resumed_shared")
    for found in (first, second):
        assert [step["loss"] for step in found["resumed_shared"]["steps"]][-3:] == [
            step["loss"] for step in whole["shared"]["steps"][1:]
        ]
    shutil.rmtree(tmp_path / "resumed_shared" / "run" / "checkpoints" / "step-000004")
    again = alone(tmp_path, "resumed_shared")  # in another number of processes the rest is sampled anew
    assert len(again["steps"]) == 4


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism configuration"),
    ],
)
def test_ways_to_shard_that_are_not_ours_are_refused_in_one_sentence(tmp_path, monkeypatch, variable, name):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=f"{name} .* is not supported, only DDP, FSDP2 and DeepSpeed"):
        several.online(tmp_path, 1)
    with pytest.raises(ValueError, match=f"{name} .* is not supported"):
        several.imitation(tmp_path, 1)


def test_processes_that_do_not_find_one_another_are_refused(monkeypatch):
    """This one has been set up alone already; then a launcher's variables say that it is one of two."""
    accelerator()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started .* Accelerate sees 1"):
        accelerator()


def test_one_process_where_accelerate_was_asked_for_several_on_a_cpu_is_refused(monkeypatch):
    """``accelerate launch --cpu --num_processes 2`` starts one, without a word."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="started only one of several processes"):
        accelerator()


def test_settings_of_accelerate_without_effect_are_said_so(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with pytest.warns(UserWarning, match="dynamo_backend=inductor of Accelerate has no effect here: models are not"):
        accelerator()


def test_the_precision_of_a_launcher_is_that_of_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert next(several.offline(tmp_path, 1, "grpo").model.parameters()).dtype == torch.bfloat16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match="mixed_precision=fp8 of Accelerate is not supported"):
        several.offline(tmp_path, 1, "grpo")


def test_a_configuration_of_fsdp_1_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match=r"for FSDP 1 .* set fsdp_version: 2"):
        accelerator()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is here")
def test_deepspeed_that_is_not_installed_is_one_sentence(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ImportError, match=r"pip install 'verifiers\[deepspeed\]'"):
        accelerator()


def test_groups_are_never_split_over_processes():
    import verifiers as vf

    with pytest.raises(ValueError, match="in each of 2 processes must be a multiple of group_size = 8"):
        vf.GRPOConfig(batch_size=4, group_size=8).check(processes=2)


def test_rows_are_known_to_be_of_one_process_alone():
    streams = [RowStream(range(10), seed=3, shard=(i, 2)) for i in (0, 1)]
    first, second = (stream.take(4) for stream in streams)
    assert not set(first) & set(second)
    assert all(stream.is_disjoint for stream in streams)
    for stream in streams:
        stream.take(2)  # across the end of an epoch: a row may be in both
        assert not stream.is_disjoint
