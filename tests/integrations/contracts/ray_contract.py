"""Run by pytest in an environment with Ray: runs and trainings on a real local cluster of two nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import verifiers as vf
from verifiers.integrations.ray import RayWorkers
from verifiers.integrations.ray.player import RayPlayer


def begin_cluster(attempts: int = 6) -> Cluster:
    """Ray gives its own processes seconds to start: on a loaded machine one try may not do."""
    for left in range(attempts - 1, -1, -1):
        try:
            return Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        except Exception:
            if not left:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = begin_cluster()
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.fixture
def workers(cluster: Cluster) -> Iterator[RayWorkers]:
    with RayWorkers(cluster.address, count=2) as made:
        yield made
    assert not ray.is_initialized()


class Twice(vf.MultiTurnEnv):
    """Asks a second time, and remembers which process it did that in."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["pid"] = os.getpid()
        state["seen"] = {len(messages)}
        await asyncio.sleep(state["info"].get("sleep_s", 0.0))
        return [{"role": "user", "content": "again"}]


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def twice(n: int = 40, sleep_s: float = 0.0, rewards: Any = (right,)) -> vf.Environment:
    rows = [{"question": f"q{i}", "answer": str(i % 10), "info": {"sleep_s": sleep_s}} for i in range(n)]
    return Twice(dataset=rows, rubric=vf.Rubric(list(rewards)), max_turns=2)


def digit(messages: Any) -> str:
    return str(messages[0]["content"][-1])


def lines(path: Path) -> list[dict[str, Any]]:
    timed = ("generation_ms", "scoring_ms", "total_ms", "line_crc32")
    found = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key not in timed} for line in found]
    return sorted(kept, key=lambda line: (line["example_id"], line["rollout"]))


def test_a_run_on_two_nodes_saves_and_gives_what_one_process_gives(workers: RayWorkers, tmp_path: Path) -> None:
    asked = {"client": vf.FakeClient(digit), "model": "m", "rollouts_per_example": 3, "use_tqdm": False}
    here = twice().evaluate(**asked, results_path=tmp_path / "here")
    there = twice().evaluate(**asked, results_path=tmp_path / "there", workers=workers, state_columns=["seen"])
    assert (there["rewards"], there["completion"]) == (here["rewards"], here["completion"])
    assert len(there["rewards"]) == 120
    for one, other in zip(lines(tmp_path / "there"), lines(tmp_path / "here"), strict=True):
        assert one.pop("seen") == [2]
        assert one == other
    assert all(state["seen"] == {2} and state["client"] is asked["client"] for state in there.rollouts)
    assert os.getpid() not in {state["pid"] for state in there.rollouts}
    tokens = there.rollouts[0]["usage"].completion_tokens
    assert tokens == here.rollouts[0]["usage"].completion_tokens


def test_400_rollouts_cost_a_tenth_as_many_launches_and_both_workers_play(
    workers: RayWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    players: list[RayPlayer] = []
    make = RayWorkers.player
    monkeypatch.setattr(RayWorkers, "player", lambda *given: players.append(make(*given)) or players[-1])
    ray.get([handle.version.remote() for handle in workers.handles])  # both are there
    results = twice(400, 0.01).evaluate(
        client=vf.FakeClient(digit), model="m", workers=workers, max_concurrent=16, use_tqdm=False
    )
    assert len(results["rewards"]) == 400
    assert players[0].launches <= 40, players[0].launches
    shares = Counter(state["pid"] for state in results.rollouts)
    assert len(shares) == 2
    assert min(shares.values()) >= 40, shares


def slow_group(completions: Any) -> list[float]:
    words = Counter(completion[-1]["content"] for completion in completions)
    return [float(words[completion[-1]["content"]]) for completion in completions]


def test_group_rewards_see_the_whole_group(workers: RayWorkers) -> None:
    env = twice(6, rewards=(right, vf.group_reward(slow_group)))
    asked = {"client": vf.FakeClient(digit), "model": "m", "rollouts_per_example": 4, "use_tqdm": False}
    here, there = env.evaluate(**asked), env.evaluate(**asked, workers=workers, max_concurrent=5)
    assert there["rewards"] == here["rewards"] == [5.0] * 24
    assert there["slow_group"] == [4.0] * 24


def test_a_worker_that_is_killed_loses_nothing_and_nothing_is_counted_twice(
    workers: RayWorkers, tmp_path: Path
) -> None:
    killed: list[int] = []

    env = twice(60, 0.2)

    async def main() -> Any:
        async def kill() -> None:
            while not killed:
                await asyncio.sleep(0.2)
                saved = tmp_path / "run" / "results.jsonl"
                done = [json.loads(line) for line in saved.read_text().splitlines()] if saved.exists() else []
                if len(done) >= 5:
                    assert len(done) < 60, "the run was over before a worker was killed"
                    killed.append(done[-1]["pid"])
                    os.kill(killed[0], signal.SIGKILL)

        killer = asyncio.create_task(kill())
        results = await env.evaluate(
            client=vf.FakeClient(digit),
            model="m",
            workers=workers,
            max_concurrent=8,
            results_path=tmp_path / "run",
            state_columns=["pid"],
            use_tqdm=False,
        )
        await killer
        return results

    results = asyncio.run(main())
    assert not results.failed
    assert results["rewards"] == [1.0] * 60
    saved = lines(tmp_path / "run")
    assert Counter(line["example_id"] for line in saved) == Counter(range(60))
    assert killed


def test_a_node_that_is_killed_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)

    async def main() -> Any:
        async def kill() -> None:
            saved = tmp_path / "run" / "results.jsonl"
            while not saved.exists() or saved.read_bytes().count(b"\n") < 5:
                await asyncio.sleep(0.2)
            assert saved.read_bytes().count(b"\n") < 90, "the run was over before the node was killed"
            await asyncio.to_thread(cluster.remove_node, node, False)

        killer = asyncio.create_task(kill())
        results = await twice(90, 0.3).evaluate(
            client=vf.FakeClient(digit),
            model="m",
            workers=RayWorkers(cluster.address, count=3),
            max_concurrent=6,
            results_path=tmp_path / "run",
            use_tqdm=False,
        )
        await killer
        return results

    results = asyncio.run(main())
    assert not results.failed
    assert results["rewards"] == [1.0] * 90
    assert len(lines(tmp_path / "run")) == 90
    assert not ray.is_initialized()


class Deadly(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        if state["answer"] == "3":
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return state


def test_a_rollout_that_kills_its_workers_fails_alone_with_that_as_its_cause(workers: RayWorkers) -> None:
    env = Deadly(dataset=[{"question": f"q{i}", "answer": str(i)} for i in range(8)], rubric=vf.Rubric([right]))
    results = env.evaluate(client=vf.FakeClient(digit), model="m", workers=workers, use_tqdm=False)
    assert [state["example_id"] for state in results.failed] == [3]
    assert isinstance(results.failed[0]["error"], vf.WorkerError)
    assert "3 Ray workers died" in str(results.failed[0]["error"])
    assert sum(reward == 1.0 for reward in results["rewards"]) == 7


def broken(completion: Any) -> float:
    raise KeyError("no such grade")


class OwnError(vf.Error):
    blame = "environment"

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Failing(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        if state["answer"] == "1":
            raise OwnError("one", "two")
        return state


def test_a_failure_there_is_a_failure_here_with_its_cause_and_traceback(workers: RayWorkers) -> None:
    asked = {"client": vf.FakeClient(digit), "model": "m", "workers": workers, "use_tqdm": False}
    results = twice(2, rewards=(broken,)).evaluate(**asked)
    (error, _) = [state["error"] for state in results.failed]
    assert isinstance(error, vf.GraderError)
    assert "no such grade" in str(error)
    record = results.failed[0]["error"].described
    assert 'raise KeyError("no such grade")' in record["traceback"]
    assert len(results.failed) == 2
    assert results["rewards"] == []
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(2)]
    (failed,) = Failing(dataset=rows, rubric=vf.Rubric([right])).evaluate(**asked).failed
    assert (type(failed["error"]), str(failed["error"])) == (OwnError, "one and two")


def test_a_model_that_fails_is_told_to_the_rollout_as_in_one_process(workers: RayWorkers) -> None:
    def down(messages: Any) -> str:
        raise vf.EndpointDownError("the endpoint is down")

    asked = {"client": vf.FakeClient(down), "model": "m", "use_tqdm": False}
    results = twice(30).evaluate(**asked, workers=workers, max_concurrent=2)
    assert len(results.failed) == 30
    assert "the endpoint is down" in results.metadata["ended_early"]


def test_workers_ask_an_endpoint_themselves_that_is_not_on_this_machine_only(workers: RayWorkers) -> None:
    with vf.FakeServer(digit) as server:
        url = server.url.replace("127.0.0.1", "0.0.0.0")  # this machine too, by an address that is not loopback's
        results = twice(10).evaluate(client=url, model="m", workers=workers, use_tqdm=False)
    assert results["rewards"] == [1.0] * 10


ENVIRONMENT = """
from pathlib import Path

import verifiers as vf
from far_away_helper import GREETING

WORDS = (Path(__file__).parent / "words.txt").read_text().split()


def greets(completion):
    return float(completion[-1]["content"] == GREETING and WORDS == ["a", "b"])


class Far(vf.SingleTurnEnv):
    async def setup_state(self, state):
        import far_away

        state["home"] = far_away.__file__
        return state


def load_environment(n=4):
    return Far(dataset=[{"question": "Greet!", "answer": ""} for _ in range(n)], rubric=vf.Rubric([greets]))
"""


def write_environment(folder: Path) -> None:
    home = folder / "environments" / "far_away"
    home.mkdir(parents=True)
    (home / "far_away.py").write_text(ENVIRONMENT)
    (home / "far_away_helper.py").write_text("GREETING = 'hello'\n")
    (home / "words.txt").write_text("a b")
    (home / "pyproject.toml").write_text('[project]\nname = "far-away"\nversion = "0.1"\n')


def test_an_environment_that_only_this_machine_has_is_shipped_with_its_package(
    workers: RayWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_environment(tmp_path)
    home = tmp_path / "environments" / "far_away"
    monkeypatch.syspath_prepend(str(home))
    env = vf.load_environment("far_away", environments_dir=tmp_path / "environments")
    asked = {"client": vf.FakeClient(lambda messages: "hello"), "model": "m", "use_tqdm": False}
    here = env.evaluate(**asked, workers=workers)
    assert {state["home"] for state in here.rollouts} == {str(home / "far_away.py")}, "it is there: nothing is copied"

    def away(*given: Any) -> RayPlayer:
        player = make(*given)
        home.rename(tmp_path / "moved")  # what was packed is all that workers can have
        return player

    make = RayWorkers.player
    monkeypatch.setattr(RayWorkers, "player", away)
    env.far = True  # another environment than the one that the workers have
    results = env.evaluate(**asked, workers=workers)
    assert results["rewards"] == [1.0] * 4, [state["error"] for state in results.failed]
    assert not any(state["home"].startswith(str(tmp_path)) for state in results.rollouts)


def test_ctrl_c_finishes_what_has_begun_and_resume_does_the_rest(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio, sys\n"
        "import verifiers as vf\n"
        "class Slow(vf.SingleTurnEnv):\n"
        "    async def setup_state(self, state):\n"
        "        await asyncio.sleep(0.5)\n"
        "        return state\n"
        "def right(completion, answer): return float(completion[-1]['content'] == answer)\n"
        "rows = [{'question': f'q{i}', 'answer': str(i % 10)} for i in range(60)]\n"
        "env = Slow(dataset=rows, rubric=vf.Rubric([right]))\n"
        "results = env.evaluate(client=vf.FakeClient(lambda m: m[0]['content'][-1]), model='m', max_concurrent=4,\n"
        f"    workers='ray:{cluster.address}', results_path='run', resume='--resume' in sys.argv, use_tqdm=False)\n"
        "print(len(results.rollouts), len(results.failed), sum(results['rewards']))\n"
    )
    command = [sys.executable, str(script)]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    saved = tmp_path / "run" / "results.jsonl"
    while first.poll() is None and (not saved.exists() or saved.read_bytes().count(b"\n") < 4):
        time.sleep(0.1)
    began = time.monotonic()
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=120)
    assert "stopped after" in said, said
    done = saved.read_bytes().count(b"\n")
    assert 4 <= done < 40, f"{done} rollouts were finished in {time.monotonic() - began:.0f} s"
    second = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert second.stdout.split() == ["60", "0", "60.0"], second.stderr
    assert Counter(line["example_id"] for line in lines(tmp_path / "run")) == Counter(range(60))


def test_vf_eval_takes_workers(cluster: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verifiers", "eval", "arithmetic", "-m", "fake", "-n", "4", "-r", "2", "--json"]
    done = subprocess.run(
        [*command, "--workers", f"ray:{cluster.address}"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rollouts"] == 8


def test_a_trainers_rollouts_are_played_by_workers_and_trained_on_token_for_token(
    cluster: Cluster, tmp_path: Path
) -> None:
    env = twice(8, rewards=(right,))
    model, tokenizer = vf.tiny_model(characters="qagin0123456789", hidden_size=32)
    config = vf.GRPOConfig(
        batch_size=8,
        group_size=4,
        max_new_tokens=4,
        max_steps=2,
        output_dir=str(tmp_path),
        workers=f"ray:{cluster.address}",
    )
    trainer = vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config)
    seen: list[Any] = []
    learn = trainer.train_step
    trainer.train_step = lambda batch: (seen.append(batch), learn(batch))[1]
    report = trainer.train()
    assert trainer.step == 2
    assert len(seen) == 2
    for batch in seen:
        pids = {completion.state["pid"] for completion in batch["completions"]}
        assert pids
        assert os.getpid() not in pids
        trained = trainer.sequences(batch)
        assert len(trained) >= 8, batch.refused
    assert report.path.is_dir()
    assert not ray.is_initialized(), "the connection ends with the training"


# --- what is wrong is one sentence --------------------------------------------------------------------------------


def refused(given: Any, env: vf.Environment | None = None) -> str:
    with pytest.raises((ValueError, TypeError)) as raised:
        (env or twice(2)).evaluate(client=vf.FakeClient(digit), model="m", workers=given, use_tqdm=False)
    assert not ray.is_initialized()
    return str(raised.value)


def test_an_address_where_no_cluster_answers_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        assert f"no Ray cluster answers at 127.0.0.1:{port}" in refused(f"ray:127.0.0.1:{port}")
        command = [sys.executable, "-m", "verifiers", "eval", "arithmetic", "-m", "fake", "-n", "1"]
        done = subprocess.run(
            [*command, "--workers", f"ray:127.0.0.1:{port}"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 2
    assert "no Ray cluster answers" in done.stderr
    assert "Traceback" not in done.stderr
    assert "is not an address of a Ray cluster" in refused("ray:nonsense")
    assert "Ray client" in refused("ray:ray://127.0.0.1:10001")


def test_more_workers_than_fit_and_an_environment_that_cannot_be_sent_are_refused(cluster: Cluster) -> None:
    assert "do not fit on the Ray cluster" in refused(RayWorkers(cluster.address, count=99))
    env = twice(2)
    env.lock = __import__("threading").Lock()
    assert "its 'lock', a lock, cannot be pickled" in refused(RayWorkers(cluster.address), env)


def test_another_cluster_than_the_one_this_process_is_connected_to_is_refused(cluster: Cluster) -> None:
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    try:
        port = cluster.address.rpartition(":")[2]
        with pytest.raises(ValueError, match="is already connected to the Ray cluster"):
            twice(2).evaluate(client=vf.FakeClient(digit), model="m", workers=f"ray:localhost:{port}", use_tqdm=False)
        assert ray.is_initialized(), "what was connected before stays so"
    finally:
        ray.shutdown()
