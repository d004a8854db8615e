"""What was saved stays saved: processes killed at any point, full disks, second writers, torn lines, other settings."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from tests.support.evaluation import Plan
from verifiers.store import ResultsGoneError, RunDir

Key = tuple[Any, int]


@pytest.fixture(scope="module")
def server() -> Iterator[vf.FakeServer]:
    """No two replies are the same, so that a rollout generated again would show."""
    numbers = itertools.count()
    with vf.FakeServer(lambda messages: f"<answer>{next(numbers)}</answer>", latency_s=0.01) as server:
        yield server


def lines_of(path: Path) -> list[bytes]:
    """The whole lines of a file."""
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def key_of(record: dict[str, Any]) -> Key:
    return record["example_id"], record["rollout"]


class Witness:
    """Remembers every whole line it has seen in a run directory, and insists on finding it again."""

    def __init__(self, path: Path, *, scores_change: bool) -> None:
        self.path = path
        self.scores_change = scores_change  # a rollout whose group was not complete is scored again with it
        self.good: dict[Key, bytes] = {}
        self.failed: set[bytes] = set()

    def look(self) -> None:
        lines = lines_of(self.path / "results.jsonl")
        records = [json.loads(line) for line in lines]
        for key, seen in self.good.items():
            assert self._has_kept(key, seen, lines, records), f"{key} had been saved and is gone"
        assert self.failed <= {*lines, *lines_of(self.path / "attempts.jsonl")}, "a failed rollout left no trace"
        for line, record in zip(lines, records, strict=True):
            if record["error"] is None:
                self.good[key_of(record)] = line
            else:
                self.failed.add(line)

    def _has_kept(self, key: Key, seen: bytes, lines: list[bytes], records: list[dict[str, Any]]) -> bool:
        if not self.scores_change:
            return seen in lines
        reply = json.loads(seen)["completion"]
        return any(record["completion"] == reply for record in records if key_of(record) == key)


# --- kill -9 ------------------------------------------------------------------------------------------------------

ROWS, REPEATS = 50, 3
FIRST_KILLS = ("while the folder is made", "before the first line", "in the middle", "near the end", "at any time")
LATER_KILLS = ("while it is compacted", "in the middle", "near the end", "at any time")


def kill(plan: Plan, when: str, draw: random.Random) -> None:
    """Start the process and kill it at that point, unless it has ended before."""
    if when in ("while the folder is made", "while it is compacted"):
        plan = replace(plan, die_at_step=draw.randint(1, 16))
    before = len(lines_of(Path(plan.path, "results.jsonl")))
    left = ROWS * REPEATS - before
    with plan.started(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        if when == "at any time":
            time.sleep(draw.uniform(0.0, 0.9))
        elif when == "before the first line":
            wait_until(process, lambda: Path(plan.path, "results.jsonl").exists())
        elif plan.die_at_step is None:
            share = draw.uniform(0.1, 0.7) if when == "in the middle" else draw.uniform(0.85, 1.0)
            target = before + share * left
            wait_until(process, lambda: len(lines_of(Path(plan.path, "results.jsonl"))) >= target)
        else:
            wait_until(process, lambda: False)


def wait_until(process: subprocess.Popen[str], has_come: Any) -> None:
    end = time.monotonic() + 30
    while process.poll() is None and not has_come():
        assert time.monotonic() < end, "neither the point to kill at nor the end has come"
        time.sleep(0.003)


@pytest.mark.parametrize("seed", range(50))
def test_a_run_killed_at_random_points_loses_and_repeats_nothing(
    seed: int, server: vf.FakeServer, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    path = tmp_path / "run"
    plan = Plan(
        url=server.url,
        path=str(path),
        rows=ROWS,
        repeats=REPEATS,
        rewards=draw.choice(["alone", "group"]),
        fail_share=draw.choice([0.0, 0.2]),
        is_async=draw.random() < 0.5,
    )
    witness = Witness(path, scores_change=plan.rewards == "group")
    for session in range(draw.randint(1, 3)):
        when = draw.choice(LATER_KILLS) if (path / "metadata.json").exists() else FIRST_KILLS[seed % len(FIRST_KILLS)]
        plan = replace(plan, session=session, resume=(path / "metadata.json").exists())
        kill(plan, when, draw)
        witness.look()

    last = replace(plan, session=99, fail_share=0.0, resume=(path / "metadata.json").exists())
    assert last.run() == {"rollouts": ROWS * REPEATS, "failed": 0}
    witness.look()
    records = [json.loads(line) for line in lines_of(path / "results.jsonl")]
    assert sorted(map(key_of, records)) == list(itertools.product(range(ROWS), range(REPEATS)))
    assert len({record["completion"][0]["content"] for record in records}) == ROWS * REPEATS
    assert not any(record["error"] for record in records)
    if plan.rewards == "group":
        assert {record["longest"] for record in records} == {float(REPEATS)}
    metadata = json.loads((path / "metadata.json").read_bytes())
    assert (metadata["num_rollouts"], metadata["num_failed"]) == (ROWS * REPEATS, 0)
    assert metadata["avg_reward"] == pytest.approx(1.0 + 0.5 * REPEATS * (plan.rewards == "group"))
    assert not list(path.glob("*.tmp"))


@pytest.mark.parametrize("step", range(1, 13))
def test_a_run_killed_at_each_step_of_its_making_can_be_started_or_resumed(
    step: int, server: vf.FakeServer, tmp_path: Path
) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=5)
    with replace(plan, die_at_step=step).started() as process:
        assert process.wait(30) == -signal.SIGKILL
    assert replace(plan, resume=(tmp_path / "run/metadata.json").exists()).run() == {"rollouts": 10, "failed": 0}


def test_the_workers_of_a_killed_run_die_with_it_and_hold_no_lock(server: vf.FakeServer, tmp_path: Path) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=100, repeats=1, rewards="cpu_bound")
    with plan.started(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(process, lambda: len(lines_of(tmp_path / "run/results.jsonl")) >= 5)
        workers = children_of(process.pid)
    assert replace(plan, resume=True).run() == {"rollouts": 100, "failed": 0}
    assert workers
    end = time.monotonic() + 10
    while any(map(is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in workers if is_alive(pid)]


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


# --- resuming -----------------------------------------------------------------------------------------------------


def make_env(n: int = 6, *, reward: Any = None, weight: float = 1.0, **kwargs: Any) -> vf.SingleTurnEnv:
    rows = [{"question": f"question {i}", "answer": "x"} for i in range(n)]
    rubric = vf.Rubric(funcs=[reward or always_right], weights=[weight])
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric, env_id="e", **kwargs)


def always_right(completion: Any) -> float:
    return 1.0


def evaluate(env: vf.Environment, path: Path, *, client: Any = None, **kwargs: Any) -> vf.Results:
    client = vf.FakeClient("x") if client is None else client
    results: vf.Results = env.evaluate(client=client, results_path=path, use_tqdm=False, **{"model": "m", **kwargs})
    return results


@pytest.mark.parametrize(
    ("env", "changes", "difference"),
    [
        (make_env(), {"temperature": 0.5}, r"sampling_args\.temperature=1\.0, you ask for 0\.5"),
        (make_env(), {"model": "other"}, "model='m', you ask for 'other'"),
        (make_env(), {"num_examples": 5}, "num_examples=6, you ask for 5"),
        (make_env(), {"rollouts_per_example": 3}, "rollouts_per_example=2, you ask for 3"),
        (make_env(env_args={"level": 2}), {}, r"env_args\.level=None, you ask for 2"),
        (
            make_env(system_prompt="Think."),
            {},
            "made with other rows: prompts, answers or info were changed, or the order",
        ),
        (make_env(message_type="completion"), {}, "message_type='chat', you ask for 'completion'"),
        (make_env(weight=0.5), {}, r"reward_weights\.always_right=1\.0, you ask for 0\.5"),
        (make_env(reward=lambda completion: 1.0), {}, r"reward_weights\.always_right=1\.0, you ask for None"),
        (make_env(), {"score": False}, "score=True, you ask for False"),
        (make_env(), {"independent_scoring": True}, "independent_scoring=False, you ask for True"),
    ],
)
def test_a_run_is_not_resumed_with_another_configuration(
    env: vf.Environment, changes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    settings = {"temperature": 1.0, "rollouts_per_example": 2}
    evaluate(make_env(), tmp_path / "run", **settings)
    before = (tmp_path / "run/results.jsonl").read_bytes()
    with pytest.raises(ValueError, match=difference):
        evaluate(env, tmp_path / "run", resume=True, **{**settings, **changes})
    assert (tmp_path / "run/results.jsonl").read_bytes() == before


ROWS_OF_ANYTHING = """
import sys, verifiers as vf
class Thing: pass
seen = []
def picky(completion, info):
    seen.append(info)
    if len(seen) == 1 and sys.argv[2] == "first":
        raise RuntimeError("not yet")
    return float(type(info["tags"]) is set and type(info["thing"]) is Thing)
info = {"tags": set("uvwxyz"), "thing": Thing()}
rows = [{"question": question, "answer": {"a", "b", "c"}, "info": info} for question in "ab"]
env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([picky]), env_args={"names": set("klmnop")})
results = env.evaluate(client=vf.FakeClient("x"), model="m", results_path=sys.argv[1], resume=sys.argv[2] != "first")
assert results.mean_reward == 1.0, results
"""


def test_rows_with_sets_and_objects_are_resumed_in_another_process(tmp_path: Path) -> None:
    for seed, which in enumerate(("first", "second")):
        command = [sys.executable, "-c", ROWS_OF_ANYTHING, str(tmp_path / "run"), which]
        ended = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
    assert len(lines_of(tmp_path / "run/results.jsonl")) == 2


@pytest.mark.parametrize(
    "ids",
    [[(1, 2), "[1,2]"], [1.5, "1.5"], [True, "true", 1, 1.0], [b"a", "YQ=="], ["\ud800", "\\ud800"], [[1], {"a": 1}]],
    ids=["tuple", "float", "bool", "bytes", "surrogate", "list"],
)
def test_inputs_whose_ids_are_stored_alike_are_resumed_each_with_its_own_rollout(
    ids: list[Any], tmp_path: Path
) -> None:
    rows = [{"question": f"q{n}", "answer": "", "example_id": given} for n, given in enumerate(ids)]

    def generate(**kwargs: Any) -> vf.Results:
        made: vf.Results = env.generate(
            rows, client=vf.FakeClient(lambda request: request.prompt[-1]["content"]), model="m", **kwargs
        )
        return made

    is_down = True

    def once(prompt: Any) -> float:
        if is_down and prompt[-1]["content"] == "q0":
            raise RuntimeError("not yet")
        return 1.0

    env = vf.SingleTurnEnv(dataset=[{"question": "", "answer": ""}], rubric=vf.Rubric([once]))
    assert len(generate(results_path=tmp_path).failed) == 1
    is_down = False
    results = generate(results_path=tmp_path, resume=True)
    for state, row in zip(results.states, rows, strict=True):
        assert [message["content"] for message in (*state["prompt"], *state["completion"])] == [row["question"]] * 2
    saved = map(json.loads, lines_of(tmp_path / "results.jsonl"))
    assert sorted(one["prompt"][-1]["content"] for one in saved) == [row["question"] for row in rows]


def test_a_run_of_inputs_is_not_resumed_if_a_later_row_with_the_same_id_was_changed(tmp_path: Path) -> None:
    env = make_env()
    rows = [{"question": question, "answer": "", "example_id": 7} for question in ("a", "b")]
    env.generate(rows, client=vf.FakeClient("x"), model="m", results_path=tmp_path / "run")
    rows[1]["question"] = "c"
    with pytest.raises(ValueError, match="made with other rows"):
        env.generate(rows, client=vf.FakeClient("x"), model="m", results_path=tmp_path / "run", resume=True)


@pytest.mark.parametrize("metrics", ["x", [1], None], ids=str)
def test_a_run_with_metrics_that_another_program_wrote_is_resumed(metrics: Any, tmp_path: Path) -> None:
    evaluate(make_env(), tmp_path / "run")
    first, *others = map(json.loads, lines_of(tmp_path / "run/results.jsonl"))
    del first["line_crc32"]
    lines = [json.dumps(one) + "\n" for one in ({**first, "metrics": metrics}, *others)]
    (tmp_path / "run/results.jsonl").write_text("".join(lines))
    assert evaluate(make_env(), tmp_path / "run", resume=True).mean_reward == 1.0


def test_a_group_of_environments_is_not_resumed_with_another_weight_of_a_member(tmp_path: Path) -> None:
    group = vf.EnvGroup([make_env(2), make_env(2)], ["a", "b"])
    evaluate(group, tmp_path / "run")
    other = vf.EnvGroup([make_env(2), make_env(2, weight=3.0)], ["a", "b"])
    with pytest.raises(ValueError, match=r"reward_weights\.b\.always_right=1\.0, you ask for 3\.0"):
        evaluate(other, tmp_path / "run", resume=True)


def test_a_run_that_does_not_say_how_it_was_scored_is_resumed(tmp_path: Path) -> None:
    evaluate(make_env(), tmp_path / "run")
    file = tmp_path / "run/metadata.json"
    metadata = json.loads(file.read_bytes())
    for name in ("score", "independent_scoring", "reward_weights"):
        del metadata["config"][name]  # as runs of earlier versions
    file.write_text(json.dumps(metadata))
    assert len(evaluate(make_env(), tmp_path / "run", resume=True).rewards) == 6


def test_resuming_a_finished_run_asks_for_nothing_and_changes_no_line(tmp_path: Path) -> None:
    first = evaluate(make_env(), tmp_path / "run", rollouts_per_example=2)
    before = (tmp_path / "run/results.jsonl").read_bytes()
    client = vf.FakeClient(RuntimeError("nobody may ask"))
    again = evaluate(make_env(), tmp_path / "run", resume=True, client=client, rollouts_per_example=2)
    assert client.requests == []
    assert again.rewards == first.rewards
    assert again["completions"] == first["completions"]
    assert (tmp_path / "run/results.jsonl").read_bytes() == before


def test_only_failed_rollouts_are_run_again(tmp_path: Path) -> None:
    def moody(state: vf.State) -> float:
        if is_down and state["example_id"] in (1, 4):
            raise ConnectionError("the judge is down")
        return 1.0

    is_down = True
    client = vf.FakeClient("x")
    first = evaluate(make_env(reward=moody), tmp_path / "run", client=client)
    assert [state["example_id"] for state in first.failed] == [1, 4]
    assert len(lines_of(tmp_path / "run/results.jsonl")) == 6
    is_down = False
    second = evaluate(make_env(reward=moody), tmp_path / "run", client=client, resume=True)
    assert not second.failed
    assert [state["example_id"] for state in second.rollouts] == list(range(6))
    assert [request.prompt[-1]["content"] for request in client.requests[6:]] == ["question 1", "question 4"]
    assert len(lines_of(tmp_path / "run/attempts.jsonl")) == 2


def test_failures_stay_in_the_file_when_a_resumed_group_fails_again(tmp_path: Path) -> None:
    def moody(state: vf.State) -> float:
        if state["example_id"] == 1 and state["completion"][0]["content"] in unlucky:
            raise ConnectionError("the judge is down")
        return 1.0

    def size(completions: Any) -> list[float]:
        return [float(len(completions))] * len(completions)

    env = make_env(2, reward=moody)
    env.rubric.add_reward_func(size, 0.0)
    unlucky = {"0"}
    client = vf.FakeClient([str(number) for number in range(100)])
    settings = {"client": client, "rollouts_per_example": 3, "max_concurrent": 1}
    unlucky = {"4"}
    assert len(evaluate(env, tmp_path / "run", **settings).failed) == 1
    unlucky = {"6"}  # the reply to the one that is asked for again
    second = evaluate(env, tmp_path / "run", resume=True, **settings)
    assert len(second.failed) == 1
    records = [json.loads(line) for line in lines_of(tmp_path / "run/results.jsonl")]
    assert sorted(map(key_of, records)) == list(itertools.product(range(2), range(3)))
    assert sum(record["error"] is not None for record in records) == 1
    unlucky = set()
    third = evaluate(env, tmp_path / "run", resume=True, **settings)
    assert third["size"] == [3.0] * 6
    assert len(client.requests) == 6 + 1 + 1


def test_what_was_said_of_a_rollout_alone_stays_when_its_group_is_scored_again(tmp_path: Path) -> None:
    """Its functions read from the state what is not saved."""

    class Guessing(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: vf.State) -> str:
            state["guesses"] = state.get("guesses", 0) + 1
            return "again"

    def patient(state: vf.State) -> float:
        return float(state.get("guesses", 0))

    def turns(states: Any) -> list[float]:
        return [float(len(state["trajectory"])) for state in states]

    def moody(state: vf.State) -> float:
        if is_down and state["example_id"] == 1 and state["trajectory_id"] == first_of(state):
            raise ConnectionError("the judge is down")
        return 1.0

    def first_of(state: vf.State) -> str:
        return seen.setdefault(state["example_id"], state["trajectory_id"])

    is_down, seen = True, dict[int, str]()
    rows = [{"question": f"question {i}"} for i in range(2)]
    env = Guessing(dataset=rows, rubric=vf.Rubric([patient, moody, turns], [1.0, 0.0, 0.1]), max_turns=3)
    assert len(evaluate(env, tmp_path / "run", rollouts_per_example=3).failed) == 1
    is_down = False
    client = vf.FakeClient("x")
    results = evaluate(env, tmp_path / "run", resume=True, client=client, rollouts_per_example=3)
    assert len(client.requests) == 3
    assert results["patient"] == [2.0] * 6
    assert results["num_turns"] == results["turns"] == [3.0] * 6
    assert results.rewards == [pytest.approx(2.3)] * 6
    assert {step["reward"] for state in results.rollouts for step in state["trajectory"]} <= {results.rewards[0]}
    saved = [json.loads(line) for line in lines_of(tmp_path / "run/results.jsonl")]
    assert [record["reward"] for record in saved] == [pytest.approx(2.3)] * 6


def test_a_rollout_that_is_saved_again_with_its_group_counts_once_before_the_run_has_ended(tmp_path: Path) -> None:
    def size(completions: Any) -> list[float]:
        return [float(len(completions))] * len(completions)

    env = make_env(2)
    env.rubric.add_reward_func(size, 1.0)
    path = tmp_path / "run"
    client = vf.FakeClient(["x", RuntimeError("down"), "x", "x", "x"])
    settings = {"client": client, "rollouts_per_example": 2, "max_concurrent": 1}
    evaluate(env, path, **settings)
    before = [line for line in lines_of(path / "results.jsonl") if json.loads(line)["error"] is None]
    evaluate(env, path, resume=True, **settings)
    after = lines_of(path / "results.jsonl")
    again = [line for line in after if line not in before]
    (path / "results.jsonl").write_bytes(b"".join([*before, *again]))  # as a process leaves it that is killed now
    run = RunDir.open(path)
    run.update_metadata({"finished": False})
    for records in (list(run.records()), list(run.sorted_records()), list(run.records(["example_id", "reward"]))):
        assert sorted(record["example_id"] for record in records) == [0, 0, 1, 1]
        assert {record["reward"] for record in records} == {3.0}
    assert len(vf.to_sft(run)) == 4
    reader = run.records(["example_id"])
    run.compact()  # by the run that is resumed, while another process reads
    assert sorted(record["example_id"] for record in reader) == [0, 0, 1, 1]


def test_records_in_order_are_each_there_once_whenever_the_run_compacts_its_file(tmp_path: Path) -> None:
    """The file is replaced as it is opened for the n-th time, and the run has ended then."""
    keys = [(i, k) for i in range(3) for k in range(2)]
    lines = [{"example_id": i, "rollout": k, "reward": float(n), "error": None} for n in range(2) for i, k in keys]
    opened, compact_at = 0, 0

    def replace(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal opened, compact_at
        if event == "open" and str(arguments[0]).endswith("results.jsonl"):
            opened += 1
            if opened == compact_at:
                compact_at = 0
                writer = RunDir.open(path)
                writer.compact()
                writer.update_metadata({"finished": True})

    sys.addaudithook(replace)
    for n in range(1, 4):
        path = tmp_path / f"{n}"
        run = RunDir.create_at(path, env_id="e", model="m", config={"rows": "a digest"})
        with run.appender() as out:
            for line in lines:
                out.append(line)
        opened, compact_at = 0, n
        found = list(run.sorted_records())
        compact_at = 0
        assert [key_of(one) for one in found] == keys
        assert {one["reward"] for one in found} == {1.0}


def test_it_is_told_what_a_group_that_is_scored_again_looks_for_and_does_not_find(tmp_path: Path) -> None:
    def noted(states: Any) -> list[float]:
        return [float(state.get("seen", 0)) for state in states]

    class Noting(vf.SingleTurnEnv):
        async def setup_state(self, state: vf.State) -> None:
            state["seen"] = 1

    env = Noting(dataset=[{"question": "?"}], rubric=vf.Rubric([noted]), env_id="e")
    client = vf.FakeClient(["x", RuntimeError("down"), "x"])
    settings = {"client": client, "rollouts_per_example": 2, "max_concurrent": 1}
    assert evaluate(env, tmp_path / "run", **settings).rewards == [1.0]
    with pytest.warns(
        UserWarning, match=r"'seen' in the saved states, which was not saved: .*state_columns=\['seen'\]"
    ):
        evaluate(env, tmp_path / "run", resume=True, **settings)


def test_a_group_whose_new_scores_were_saved_in_part_only_is_scored_again_and_not_generated_again(
    tmp_path: Path,
) -> None:
    def size(completions: Any) -> list[float]:
        return [float(len(completions))] * len(completions)

    env = make_env(2)
    env.rubric.add_reward_func(size, 0.0)
    file = tmp_path / "run/results.jsonl"
    evaluate(env, tmp_path / "run", rollouts_per_example=3)
    records = [json.loads(line) for line in lines_of(file)]
    for record in records:
        if record["example_id"] == 1 and record["rollout"] > 0:  # as scored before the first one was there
            record |= {"size": 2.0, "metrics": {**record["metrics"], "size": 2.0}, "group_size": 2}
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    client = vf.FakeClient(RuntimeError("nobody may ask"))
    results = evaluate(env, tmp_path / "run", client=client, resume=True, rollouts_per_example=3)
    assert client.requests == []
    assert results["size"] == [3.0] * 6
    again = [json.loads(line) for line in lines_of(file)]
    assert sorted(map(key_of, again)) == list(itertools.product(range(2), range(3)))
    assert {record["size"] for record in again} == {3.0}


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_last_line_costs_that_rollout_only(cut: int, tmp_path: Path) -> None:
    evaluate(make_env(), tmp_path / "run", max_concurrent=1)
    file = tmp_path / "run/results.jsonl"
    whole = lines_of(file)
    os.truncate(file, file.stat().st_size - cut)
    client = vf.FakeClient("x")
    results = evaluate(make_env(), tmp_path / "run", client=client, resume=True)
    assert len(results.rewards) == 6
    assert lines_of(file)[:5] == whole[:5]
    assert len(lines_of(file)) == 6
    assert len(client.requests) == (0 if cut == 1 else 1)  # without its newline the line is still whole


def test_ids_of_any_kind_are_found_again(tmp_path: Path) -> None:
    ids: list[Any] = ["a/b", "ü", 7, "7", True, 2.5, (1, 2), None]
    rows = [{"question": f"question {i}", "answer": "x", "example_id": name} for i, name in enumerate(ids)]
    client = vf.FakeClient("x")
    for is_resumed in (False, True):
        env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[always_right]))
        assert len(evaluate(env, tmp_path / "run", client=client, resume=is_resumed).rewards) == len(ids)
    assert len(client.requests) == len(ids)
    assert len(lines_of(tmp_path / "run/results.jsonl")) == len(ids)


# --- one writer at a time, and a disk that is full ----------------------------------------------------------------


def test_a_second_process_is_refused_while_the_first_one_writes(server: vf.FakeServer, tmp_path: Path) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=300, max_concurrent=4)
    with plan.started() as process:
        wait_until(process, lambda: len(lines_of(tmp_path / "run/results.jsonl")) >= 3)
        second = replace(plan, resume=True).run()
        assert second["error"] == "RunInUseError"
        assert f"is being written by process {process.pid}" in second["message"]
        said, _ = process.communicate(timeout=60)
    assert json.loads(said) == {"rollouts": 600, "failed": 0}
    assert len(lines_of(tmp_path / "run/results.jsonl")) == 600


@pytest.mark.parametrize("limit", [300, 2_000, 40_000])
def test_a_full_disk_ends_the_run_with_an_error_that_names_the_file(
    limit: int, server: vf.FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    plan = Plan(url=server.url, path=str(path), rows=100)
    began = time.monotonic()
    outcome = replace(plan, file_limit=limit).run()
    assert outcome["error"] == "OSError"
    assert str(path) in outcome["message"]
    assert time.monotonic() - began < 20
    saved = lines_of(path / "results.jsonl")
    assert b"".join(saved) == ((path / "results.jsonl").read_bytes() if saved else b"")
    assert replace(plan, resume=(path / "metadata.json").exists()).run() == {"rollouts": 200, "failed": 0}
    assert lines_of(path / "results.jsonl")[: len(saved)] == saved
    assert len(lines_of(path / "results.jsonl")) == 200


def test_a_run_whose_results_are_deleted_while_it_goes_on_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def reply(messages: Any) -> str:
        if messages[-1]["content"] == "question 5":
            (path / "results.jsonl").unlink()
        time.sleep(0.03)
        return "4"

    rows = [{"question": f"question {i}", "answer": "4"} for i in range(40)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
    with pytest.raises(ResultsGoneError, match="was deleted or replaced while the run wrote to it"):
        env.evaluate(client=vf.FakeClient(reply), model="m", results_path=path, max_concurrent=1, use_tqdm=False)
