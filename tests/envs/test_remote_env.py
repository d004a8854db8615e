"""Environments as servers: `vf env-serve` and `vf.RemoteEnv`, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.remote.server import EnvServer, ServerLimits
from verifiers.rubrics.score import Score


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["seen"] = len(messages)
        await asyncio.sleep(state["info"].get("sleep_s", 0.0))
        return [{"role": "user", "content": "again"}]


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def popular(completions: Any) -> list[float]:
    said = [completion[-1]["content"] for completion in completions]
    return [float(said.count(one)) for one in said]


def digit(messages: Any) -> str:
    return str(messages[1]["content"][-1])


def twice(n: int = 8, sleep_s: float = 0.0, rewards: Any = (right,), **kwargs: Any) -> Twice:
    rows = [{"question": f"q{i}", "answer": str(i % 10), "info": {"sleep_s": sleep_s}} for i in range(n)]
    weights = [0.5, *[1.0] * (len(rewards) - 1)]
    return Twice(
        dataset=rows, system_prompt="Count.", rubric=vf.Rubric(list(rewards), weights=weights), max_turns=2, **kwargs
    )


@pytest.fixture
def server() -> Iterator[EnvServer]:
    with EnvServer(twice()) as made:
        yield made


def test_a_remote_environment_is_evaluated_as_the_one_it_stands_for(server: EnvServer, tmp_path: Path) -> None:
    asked = {"client": vf.FakeClient(digit), "model": "m", "rollouts_per_example": 2, "use_tqdm": False}
    here = twice().evaluate(**asked)
    there = vf.RemoteEnv(server.url).evaluate(**asked, results_path=tmp_path / "run", state_columns=["seen"])
    assert (there["rewards"], there["completion"], there["right"]) == (
        here["rewards"],
        here["completion"],
        here["right"],
    )
    assert there["rewards"] == [0.5] * 16
    assert [state["seen"] for state in there.rollouts] == [3] * 16
    assert there.rollouts[0]["client"] is asked["client"]
    assert there.rollouts[0]["usage"].completion_tokens == here.rollouts[0]["usage"].completion_tokens
    resumed = vf.RemoteEnv(server.url).evaluate(**asked, results_path=tmp_path / "run", resume=True)
    assert resumed["rewards"] == there["rewards"]


class Ranked(vf.Rubric):
    """How far from the mean of the group, in standard deviations: no number where all are alike."""

    has_group_rewards = True

    async def score_together(self, states: Any) -> list[Score]:
        return [Score(float("nan")) for _ in states]


def test_a_group_score_that_is_no_number_fails_there_as_it_does_here() -> None:
    asked = {"client": vf.FakeClient(digit), "model": "m", "rollouts_per_example": 2, "use_tqdm": False}
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], system_prompt="Count.", rubric=Ranked())
    with EnvServer(env) as server:
        for results in (env.evaluate(**asked), vf.RemoteEnv(server.url).evaluate(**asked)):
            assert (len(results.failed), results.mean_reward) == (2, None)


def test_rows_prompts_and_weights_are_the_servers(server: EnvServer) -> None:
    env, served = vf.load_environment(server.url), twice()
    assert isinstance(env, vf.RemoteEnv)
    assert list(env.get_dataset()) == list(served.get_dataset())
    assert env.formatted({"question": "new"}) == served.formatted({"question": "new"})
    assert env.rubric._get_reward_weights() == [0.5]
    env.rubric.weights[0] = 2.0
    with pytest.raises(ValueError, match="of a remote environment cannot be changed here"):
        env.evaluate(client=vf.FakeClient(digit), model="m", use_tqdm=False)


def test_group_rewards_see_the_whole_group() -> None:
    env = twice(3, rewards=(right, vf.group_reward(popular)))
    asked = {"client": vf.FakeClient(digit), "model": "m", "rollouts_per_example": 3, "use_tqdm": False}
    with EnvServer(env) as server:
        there = vf.RemoteEnv(server.url).evaluate(**asked)
    assert there["rewards"] == env.evaluate(**asked)["rewards"] == [3.5] * 9


def test_one_rollout_and_a_group_work_as_on_any_environment(server: EnvServer) -> None:
    env, client = vf.RemoteEnv(server.url), vf.FakeClient(digit)
    row = env.get_dataset()[3]
    state = env.rollout(input=row, client=client, model="m")
    assert state["completion"][-1]["content"] == "3"
    assert state["reward"] is None
    (one, two) = env.run_group([row, row], client, "m", {}, None, None)
    assert one["reward"] == two["reward"] == 0.5


def test_a_member_of_a_group_may_be_elsewhere(server: EnvServer) -> None:
    group = vf.EnvGroup([vf.RemoteEnv(server.url), twice(2)], env_names=["far", "near"])
    results = group.evaluate(client=vf.FakeClient(digit), model="m", use_tqdm=False)
    assert results["rewards"] == [0.5] * 10
    assert not results.failed


def test_what_only_the_server_can_change_is_refused_here(server: EnvServer) -> None:
    env = vf.RemoteEnv(server.url)
    with pytest.raises(ValueError, match="on its server"):
        env.set_kwargs(max_turns=9)
    with pytest.raises(ValueError, match="on its server"):
        env.set_max_seq_len(9)


def broken(completion: Any) -> float:
    raise KeyError("no such grade")


class Fragile(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        raise OSError("the game does not start")


def test_a_rollout_that_fails_on_the_server_is_failed_here_with_its_cause_and_never_a_zero() -> None:
    asked = {"client": vf.FakeClient(digit), "model": "m", "use_tqdm": False}
    with EnvServer(twice(2, rewards=(broken,))) as server:
        results = vf.RemoteEnv(server.url).evaluate(**asked)
    assert len(results.failed) == 2
    assert isinstance(results.failed[0]["error"], vf.GraderError)
    assert "no such grade" in str(results.failed[0]["error"])
    assert results.failed[0]["reward"] is None
    with EnvServer(Fragile(dataset=[{"question": "q"}])) as server:
        (failed,) = vf.RemoteEnv(server.url).evaluate(**asked).failed
    assert isinstance(failed["error"], vf.HookError)
    assert "the game does not start" in failed["error"].described["traceback"]


def test_a_model_that_fails_is_told_to_the_rollout_and_ends_the_run_as_in_one_process(server: EnvServer) -> None:
    def down(messages: Any) -> str:
        raise vf.EndpointDownError("the endpoint is down")

    results = vf.RemoteEnv(server.url).evaluate(client=vf.FakeClient(down), model="m", max_concurrent=1, use_tqdm=False)
    assert len(results.failed) == 8
    assert "the endpoint is down" in results.metadata["ended_early"]


def test_the_server_asks_an_endpoint_itself_where_that_is_said(server: EnvServer) -> None:
    env = vf.RemoteEnv(server.url, direct=True)
    with vf.FakeServer(digit) as model:
        results = env.evaluate(client=model.url, model="m", use_tqdm=False)
    assert results["rewards"] == [0.5] * 8
    (failed, *_) = env.evaluate(client=vf.FakeClient(digit), model="m", use_tqdm=False).failed
    assert "needs an HTTP endpoint" in str(failed["error"])


# --- limits -------------------------------------------------------------------------------------------------------


def request(url: str, body: Any = None, key: str | None = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as reply:
            return reply.status, json.loads(reply.read().splitlines()[-1]), dict(reply.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), dict(error.headers)


def test_more_rollouts_than_the_server_takes_wait_their_turn() -> None:
    env = twice(30, 0.05)
    most = 0
    with EnvServer(env, limits=ServerLimits(at_once=2, waiting=1)) as server:
        remote = vf.RemoteEnv(server.url)
        remote._at_once = 30  # as several callers would be together

        def watch() -> None:
            nonlocal most
            while not done.wait(0.01):
                most = max(most, server.served.playing)

        done = threading.Event()
        watching = threading.Thread(target=watch)
        watching.start()
        results = remote.evaluate(client=vf.FakeClient(digit), model="m", use_tqdm=False)
        done.set()
        watching.join()
    assert results["rewards"] == [0.5] * 30
    assert 1 <= most <= 2


def test_a_full_queue_is_429_with_retry_after_and_a_stopping_server_503() -> None:
    body = {"row": {"question": "q1"}, "terms": {"model": "m"}}
    with EnvServer(twice(), limits=ServerLimits(at_once=1, waiting=0)) as server:
        server.served.playing = 1
        status, said, headers = request(f"{server.url}/rollouts", body)
        assert (status, said["error"]["code"], headers["Retry-After"]) == (429, "queue_full", "1")
        server.served.playing, server.served.is_stopping = 0, True
        status, said, headers = request(f"{server.url}/rollouts", body)
        assert (status, said["error"]["code"], headers["Retry-After"]) == (503, "stopping", "1")
        assert request(f"{server.url}/health")[0] == 503


def test_a_body_that_is_too_large_and_one_that_is_nonsense_are_refused() -> None:
    with EnvServer(twice(), limits=ServerLimits(body_bytes=2000)) as server:
        rollouts = f"{server.url}/rollouts"
        assert request(rollouts, {"row": {"question": "q" * 3000}, "terms": {"model": "m"}})[0] == 413
        for body in ([], {}, {"row": {"question": "q"}}, {"row": {"question": "q"}, "terms": {"model": "m", "x": 1}}):
            status, said, _ = request(rollouts, body)
            assert status == 400, said
        assert request(f"{server.url}/rows?split=test")[0] == 400
        assert request(f"{server.url}/rows?start=-1")[0] == request(f"{server.url}/rows?count=many")[0] == 400
        assert request(f"{server.url}/answers/nobody", {"completion": {}})[0] == 404


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("rollouts", {"row": {}}, "'row' is not valid: row 0 of the dataset has no 'prompt'"),
        ("rollouts", {"row": {"prompt": 5}}, "'row' is not valid"),
        (
            "rollouts",
            {"row": {"question": "q"}, "terms": {"model": "m", "sampling": 5}},
            "'sampling' must be an object",
        ),
        ("rollouts", {"row": {"question": "q"}, "terms": {"model": "m", "hook_timeout_s": "x"}}, "a number of seconds"),
        ("scores", {"states": [5]}, "'states' is missing"),
        ("scores", {"states": [{}], "scores": 5}, "one score per state"),
        ("scores", {"states": [{}], "scores": []}, "one score per state"),
        ("scores", {"states": [{}], "scores": [{}]}, "a score must have a reward and metrics"),
    ],
)
def test_what_cannot_be_played_or_scored_is_the_callers_fault_and_no_rollout(
    server: EnvServer, path: str, body: dict[str, Any], said: str
) -> None:
    status, reply, _ = request(f"{server.url}/{path}", {"terms": {"model": "m"}, **body})
    assert status == 400
    assert said in reply["error"]["message"]
    assert request(f"{server.url}/health")[1]["done"] == 0


def test_a_rollout_past_the_servers_deadline_is_failed_with_that() -> None:
    with EnvServer(twice(1, 60.0), limits=ServerLimits(deadline_s=0.2)) as server:
        (failed,) = vf.RemoteEnv(server.url).evaluate(client=vf.FakeClient(digit), model="m", use_tqdm=False).failed
    assert isinstance(failed["error"], vf.DeadlineError)
    assert "exceeded this server's limit of 0.2 s" in str(failed["error"])


def test_a_caller_who_hangs_up_frees_the_place() -> None:
    with EnvServer(twice(1, 60.0)) as server:

        async def main() -> None:
            env = vf.RemoteEnv(server.url)
            run = asyncio.ensure_future(env.evaluate_async(client=vf.FakeClient(digit), model="m", use_tqdm=False))
            while not server.served.playing:
                await asyncio.sleep(0.02)
            run.cancel()
            await asyncio.wait([run])

        asyncio.run(main())
        end = time.monotonic() + 30
        while server.served.playing and time.monotonic() < end:
            time.sleep(0.02)
        assert server.served.playing == 0


def test_a_key_is_asked_for_and_health_needs_none() -> None:
    with EnvServer(twice(2), api_key="secret") as server:
        assert request(f"{server.url}/health")[1]["status"] == "ok"
        assert request(f"{server.url}/environment")[0] == 401
        with pytest.raises(vf.AccessRefusedError, match="VERIFIERS_ENV_KEY"):
            vf.RemoteEnv(server.url)
        env = vf.RemoteEnv(server.url, api_key="secret")
        assert len(env.evaluate(client=vf.FakeClient(digit), model="m", use_tqdm=False)["rewards"]) == 2
    with pytest.raises(ValueError, match="without an API key"):
        EnvServer(twice(), host="0.0.0.0")


def test_a_server_that_is_gone_fails_the_rollouts_and_resume_goes_on(tmp_path: Path) -> None:
    asked = {"client": vf.FakeClient(digit), "model": "m", "use_tqdm": False, "results_path": tmp_path / "run"}
    with EnvServer(twice()) as server:
        env = vf.RemoteEnv(server.url, patience_s=0.3)
        len(env.get_dataset())
        port = server.port
    results = env.evaluate(**asked)
    assert len(results.failed) == 8
    assert isinstance(results.failed[0]["error"], vf.ConnectionFailedError)
    with EnvServer(twice(), port=port):
        assert env.evaluate(**asked, resume=True)["rewards"] == [0.5] * 8
    with pytest.raises(vf.ConnectionFailedError, match="cannot be reached"):
        vf.RemoteEnv(f"http://127.0.0.1:{port}", patience_s=0.3)
    with pytest.raises(ValueError, match="not the URL of an environment server"):
        vf.RemoteEnv("localhost")


# --- the command --------------------------------------------------------------------------------------------------


def served(*args: str, cwd: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "verifiers", "env-serve", *args]
    process = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    return process, line.split(" at ")[1].split(";")[0] if " at " in line else line


def test_vf_env_serve_serves_vf_eval_and_sigterm_finishes_what_is_under_way(tmp_path: Path) -> None:
    (tmp_path / "slow_one.py").write_text("")
    home = tmp_path / "environments" / "slow_one"
    home.mkdir(parents=True)
    (home / "slow_one.py").write_text(
        "import asyncio\nimport verifiers as vf\n"
        "class Slow(vf.SingleTurnEnv):\n"
        "    async def setup_state(self, state):\n"
        "        await asyncio.sleep(1.0)\n"
        "        return state\n"
        "def load_environment():\n"
        "    return Slow(dataset=[{'question': 'q', 'answer': 'a'}], rubric=vf.Rubric([lambda completion: 1.0]))\n"
    )
    process, url = served("slow_one", "--port", "0", cwd=tmp_path)
    try:
        evaluated = subprocess.Popen(
            [sys.executable, "-m", "verifiers", "eval", url, "-m", "fake", "-n", "1", "-r", "1", "--json"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        while not request(f"{url}/health")[1]["playing"]:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, _ = evaluated.communicate(timeout=60)
        assert json.loads(out)["reward"]["mean"] == 1.0
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        command = [sys.executable, "-m", "verifiers", "env-serve", "arithmetic", "--port", port]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.returncode == 1
    assert "cannot listen on" in done.stderr
    assert "Traceback" not in done.stderr
