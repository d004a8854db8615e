"""Saved runs used again: new scores without a model, the same rollouts from their record, and what has changed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.clients.asking_for import asking_for
from verifiers.clients.protocol import Request
from verifiers.envs.gym_env import EpisodicSumRubric
from verifiers.reruns import no_network, replay, rescore
from verifiers.reruns.judges import judges_of, judges_recorded
from verifiers.reruns.replay import CASSETTE
from verifiers.store import RunDir

ROWS = [{"question": f"say {n}", "answer": str(n)} for n in range(4)]


def exact(completion, answer):
    return completion[-1]["content"] == answer


def turns(state):
    return float(len(state["trajectory"]))


class Twice(vf.MultiTurnEnv):
    """Asks again once, in words that can be changed."""

    word = "again"

    async def env_response(self, messages, state):
        return self.word


def saved(env: vf.Environment, path: Path, reply="1", **options) -> RunDir:
    env.evaluate(client=vf.FakeClient(reply), model="m", results_path=path, use_tqdm=False, **options)
    return RunDir.open(path)


def single(*funcs, **kwargs) -> vf.Environment:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(list(funcs)), **kwargs)


# --- scores -------------------------------------------------------------------------------------------------------


def test_a_run_is_scored_anew_from_what_was_saved(tmp_path):
    run = saved(single(exact), tmp_path / "run", rollouts_per_example=2)

    def generous(completion, answer):
        return 0.5

    found = asyncio.run(rescore(single(generous), run))
    records = list(found.records())
    assert [record["reward"] for record in records] == [0.5] * 8
    assert records[0]["metrics"] == {"generous": 0.5, "num_turns": 1.0}
    assert "exact" not in records[0]
    assert [(record["example_id"], record["rollout"]) for record in records] == [
        (i, k) for i in range(4) for k in (0, 1)
    ]


def test_turns_are_put_together_again_where_they_were_not_saved(tmp_path):
    env = Twice(dataset=ROWS, rubric=vf.Rubric([turns]), max_turns=2)
    run = saved(env, tmp_path / "run")
    found = asyncio.run(rescore(env, run))
    assert [state["reward"] for state in found.states] == [2.0] * 4
    _, second = found.states[0]["trajectory"]
    assert [message["content"] for message in second["prompt"]] == ["say 0", "1", "again"]


def test_saved_turns_get_the_new_reward(tmp_path):
    def half(completion):
        return 0.5

    run = saved(single(exact), tmp_path / "run", state_columns=["trajectory"])
    found = asyncio.run(rescore(single(half), run))
    assert [step["reward"] for state in found.states for step in state["trajectory"]] == [0.5] * 4


@pytest.mark.parametrize("value", [(1, 2), {1: "x"}, date(2026, 1, 1), Decimal("1.10"), b"ab", "\ud800"], ids=repr)
def test_what_json_cannot_hold_is_rescored_and_resumed_as_the_row_has_it(tmp_path, value):
    def same(answer, info):
        return answer == value and info == {"value": value}

    def all_same(answers, infos):
        return [float(same(*pair)) for pair in zip(answers, infos, strict=True)]

    env = vf.SingleTurnEnv(
        dataset=[{"question": "?", "answer": value, "info": {"value": value}}], rubric=vf.Rubric([same, all_same])
    )
    client = vf.FakeClient(["x", RuntimeError("down"), "x"])
    settings = {"client": client, "model": "m", "results_path": tmp_path / "run", "use_tqdm": False}
    assert env.evaluate(**settings, rollouts_per_example=2, max_concurrent=1)["reward"] == [2.0]
    assert env.evaluate(**settings, rollouts_per_example=2, resume=True)["reward"] == [2.0, 2.0]
    found = asyncio.run(rescore(env, RunDir.open(tmp_path / "run")))
    assert [state["reward"] for state in found.states] == [2.0, 2.0]


def test_where_the_data_set_was_corrected_since_the_saved_answers_score_unless_its_own_are_asked_for(tmp_path):
    def listed(completion, info):
        return completion[-1]["content"] in info["right"]

    def env(rows):
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([exact, listed], weights=[1.0, 0.1]))

    rows = [{"question": f"say {n}", "answer": str(n), "info": {"right": [str(n)]}} for n in range(4)]
    run = saved(env(rows), tmp_path / "run")
    assert RunDir.open(tmp_path / "run").metadata["avg_reward"] == 1.1 / 4
    mended = [dict(row) for row in rows]
    mended[0]["answer"] = "1"
    mended[2]["info"] = '{"right": ["1", "2"]}'  # a text with JSON is read as it is in an evaluation
    mended[3] |= {"question": "say 1", "answer": "1"}  # not what was asked
    found = asyncio.run(rescore(env(mended), run))
    assert [state["reward"] for state in found.states] == [0.0, 1.1, 0.0, 0.0]
    assert (found.differing, found.unknown) == ({0, 2}, {3})
    found = asyncio.run(rescore(env(mended), run, dataset_answers=True))
    assert [state["reward"] for state in found.states] == [1.0, 1.1, 0.1, 0.0]
    assert [record["answer"] for record in found.records()] == ["1", "1", "2", "3"]
    found = asyncio.run(rescore(env(rows), run))
    assert (found.differing, found.unknown) == (set(), set())
    rows[1]["info"] = "no JSON"
    found = asyncio.run(rescore(env(rows), run))
    assert ([state["reward"] for state in found.states], found.differing) == ([0.0, 1.1, 0.0, 0.0], {1})


def test_a_rollout_that_failed_in_grading_gets_a_score_and_one_that_was_never_made_does_not(tmp_path):
    def broken(completion, state):
        if state["example_id"] < 2:
            raise RuntimeError("the grader is down")
        return 1.0

    def reply(messages):
        if messages[-1]["content"] == "say 3":
            raise ConnectionError("no endpoint")
        return "1"

    run = saved(single(broken), tmp_path / "run", reply)
    found = asyncio.run(rescore(single(exact), run))
    assert [state["reward"] for state in found.states] == [0.0, 1.0, 0.0]
    assert found.left_out == 1


def test_group_rewards_see_the_whole_group_again(tmp_path):
    def first_of_group(completions):
        return [float(i == 0) for i in range(len(completions))]

    run = saved(single(exact), tmp_path / "run", rollouts_per_example=3)
    found = asyncio.run(rescore(single(first_of_group), run))
    assert [state["reward"] for state in found.states] == [1.0, 0.0, 0.0] * 4


def test_it_is_told_what_functions_look_for_in_a_saved_state_and_do_not_find(tmp_path):
    class Guessing(Twice):
        async def env_response(self, messages, state):
            state["guesses"] = state.get("guesses", 0) + 1
            return "again"

    def patient(state):
        return float(state.get("guesses", 0))

    env = Guessing(dataset=ROWS, rubric=vf.Rubric([patient, turns]), max_turns=2)
    found = asyncio.run(rescore(env, saved(env, tmp_path / "without")))
    assert [state["reward"] for state in found.states] == [2.0] * 4
    assert found.missed == {"guesses"}
    found = asyncio.run(rescore(env, saved(env, tmp_path / "with", state_columns=["guesses"])))
    assert [state["reward"] for state in found.states] == [3.0] * 4
    assert found.missed == set()


class Counting:
    """A game that gives a point for each of its two moves."""

    def reset(self, seed=None, options=None):
        self.moves = 0
        return "begin", {}

    def step(self, action):
        self.moves += 1
        return "next", 1.0, self.moves == 2, False, {}


@pytest.mark.parametrize(("rubric", "column"), [(None, "gym_rewards"), (EpisodicSumRubric(), "trajectory")])
def test_a_game_whose_rewards_were_not_saved_has_no_score_rather_than_0(tmp_path, rubric, column):
    env = vf.GymEnv(Counting, num_eval_episodes=2, rubric=rubric)
    found = asyncio.run(rescore(env, saved(env, tmp_path / "without")))
    assert [state["reward"] for state in found.states] == [None] * 2
    assert f"vf eval -C {column}" in str(found.states[0]["error"])
    found = asyncio.run(rescore(env, saved(env, tmp_path / "with", state_columns=[column])))
    assert [state["reward"] for state in found.states] == [2.0] * 2
    assert [state["metrics"]["episode_steps"] for state in found.states] == [2.0] * 2


def test_what_was_counted_while_it_was_played_is_the_same_when_it_is_rescored(tmp_path):
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}
    env = vf.ToolEnv(tools=[add], dataset=ROWS, rubric=vf.Rubric([exact]))
    run = saved(env, tmp_path / "run", [{"role": "assistant", "content": "", "tool_calls": [call]}, "1"] * 4)
    before = {record["example_id"]: record["metrics"] for record in run.records()}
    assert sum(metrics["bad_json_faults"] for metrics in before.values()) == 4
    found = asyncio.run(rescore(env, run))
    assert {state["example_id"]: state["metrics"] for state in found.states} == before


# --- plays --------------------------------------------------------------------------------------------------------


def test_a_run_replays_without_a_model(tmp_path):
    env = Twice(dataset=ROWS, rubric=vf.Rubric([exact, turns]), max_turns=2)
    run = saved(env, tmp_path / "run", ["1", "2", "3"], rollouts_per_example=2, max_concurrent=1)
    found = asyncio.run(replay(env, run))
    assert (found.same, found.changes, found.left_out) == (8, [], 0)


def test_what_goes_another_way_is_named(tmp_path):
    env = Twice(dataset=ROWS, rubric=vf.Rubric([exact]), max_turns=2)
    run = saved(env, tmp_path / "run")
    env.word = "once more"
    found = asyncio.run(replay(env, run))
    assert {change.what for change in found.changes} == {"message 2 of the completion differs"}
    env = Twice(dataset=ROWS, rubric=vf.Rubric([turns]), max_turns=2)
    assert asyncio.run(replay(env, run)).changes[0].what == "reward 0.000 → 2.000"
    env = Twice(dataset=ROWS, rubric=vf.Rubric([exact]), max_turns=3)
    what = asyncio.run(replay(env, run)).changes[0].what
    assert "the environment asks for reply 3, but only 2 were recorded" in what


# --- judges -------------------------------------------------------------------------------------------------------


def judged(client) -> vf.Environment:
    async def approved(judge, prompt, completion, answer, state):
        return (await judge(prompt, completion, answer, state)) == "yes"

    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.JudgeRubric(judge_client=client, funcs=[approved]))


def test_what_judges_said_is_recorded_and_said_again(tmp_path):
    env = judged(vf.FakeClient(["yes", "no", "no", "yes"]))
    with judges_recorded(env, tmp_path / "run" / CASSETTE):
        run = saved(env, tmp_path / "run", max_concurrent=1)
    assert isinstance(judges_of(env)[0].judge_client, vf.FakeClient)
    nobody = judged(vf.FakeClient(RuntimeError("the judge was asked")))
    found = asyncio.run(replay(nobody, run))
    assert [state["reward"] for state in found.states] == [1.0, 0.0, 0.0, 1.0]
    assert found.same == 4


@pytest.mark.parametrize("same_client", [True, False])
def test_what_two_judges_of_one_model_name_say_is_recorded_and_said_again_by_each(tmp_path, same_client):
    """The reward functions ask for themselves, so that only the cassette has what was said."""

    def judge(client):
        async def approved(judge_client, completion):
            request = Request(model="m", prompt=completion)
            return float((await judge_client.complete(request)).text == "yes")

        return vf.JudgeRubric(judge_client=client, funcs=[approved])

    def two(first, second):
        return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.RubricGroup([judge(first), judge(second)], weights=[1.0, 2.0]))

    said = ["yes", "no"] * len(ROWS)
    yes, no = (vf.FakeClient(said),) * 2 if same_client else (vf.FakeClient("yes"), vf.FakeClient("no"))
    env = two(yes, no)
    with judges_recorded(env, tmp_path / "run" / CASSETTE):
        run = saved(env, tmp_path / "run", max_concurrent=1)
    nobody = vf.FakeClient(RuntimeError("the judge was asked"))
    found = asyncio.run(replay(two(nobody, nobody if same_client else vf.FakeClient("nothing")), run))
    assert [state["reward"] for state in found.states] == [1.0] * len(ROWS)
    assert found.same == len(ROWS)


def test_a_replay_keeps_the_verdicts_that_were_saved_with_each_rollout_though_all_said_the_same(tmp_path):
    sampled = ["yes", "no", "no", "yes", "yes", "yes", "no", "yes"]
    env = judged(vf.FakeClient(sampled))
    run = saved(env, tmp_path / "run", ["7"], rollouts_per_example=2, max_concurrent=1)
    found = asyncio.run(replay(judged(vf.FakeClient(RuntimeError("the judge was asked"))), run))
    assert (found.same, found.changes) == (8, [])
    assert sum(state["reward"] for state in found.states) == sampled.count("yes")


def test_a_judge_is_not_asked_what_the_record_has_no_reply_to(tmp_path):
    run = saved(judged(vf.FakeClient("yes")), tmp_path / "run")
    other = judged(vf.FakeClient("yes"))
    judges_of(other)[0].judge_prompt += " Think again."
    found = asyncio.run(replay(other, run))
    assert found.same == 0
    assert "vf eval … --record" in found.changes[0].what


def test_a_rescored_run_asks_the_judge_that_there_is_now(tmp_path):
    run = saved(judged(vf.FakeClient("yes")), tmp_path / "run")
    stern = vf.FakeClient("no")
    found = asyncio.run(rescore(judged(stern), run))
    assert [state["reward"] for state in found.states] == [0.0] * 4
    assert len(stern.requests) == 4


@pytest.mark.parametrize("kind", ["group", "nested"])
def test_judges_are_found_wherever_they_are(kind):
    env = judged(vf.FakeClient("yes"))
    outer = vf.EnvGroup([env, single(exact)], ["a", "b"]) if kind == "group" else single(exact)
    if kind == "nested":
        outer.add_rubric(env.rubric)
    assert judges_of(outer) == [env.rubric]


# --- without a network --------------------------------------------------------------------------------------------


TRIES = """
import os, socket
from verifiers.reruns import NoNetworkError, no_network

def reaches(host):
    try:
        socket.create_connection((host, server.getsockname()[1]), timeout=5).close()
    except NoNetworkError as error:
        return str(error)
    return "reached"

with socket.create_server(("127.0.0.1", 0)) as server, no_network():
    print(reaches("127.0.0.1"), reaches("localhost"), os.environ["HF_HUB_OFFLINE"])
    print(reaches("192.0.2.1"), "|", reaches("example.invalid"))
    with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.sendto(b"x", ("192.0.2.1", 53))
        except NoNetworkError as error:
            print(error)
print("HF_HUB_OFFLINE" in os.environ)
"""


def test_without_a_network_this_machine_is_reached_and_no_other():
    """In a process of its own: the tests have a guard before every connection themselves."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run([sys.executable, "-c", TRIES], env=env, capture_output=True, text=True, check=True)
    here, stream, datagram, after = done.stdout.splitlines()
    assert here == "reached reached 1"
    assert stream.split("|")[0].strip() == "[Errno 101] 192.0.2.1 was not reached: there is no network here"
    assert "example.invalid was not reached" in stream
    assert "192.0.2.1 was not reached" in datagram
    assert after == "False"


def test_a_reward_that_would_use_the_network_fails_its_rollout_in_a_replay(tmp_path):
    async def fetched(completion):
        await asyncio.open_connection("192.0.2.1", 80)

    run = saved(single(exact), tmp_path / "run")
    with no_network():
        found = asyncio.run(replay(single(fetched), run))
    assert len(found.changes) == len(ROWS)
    assert all("192.0.2.1" in change.what for change in found.changes)


def test_a_sampled_verdict_stays_with_its_rollout_however_the_judge_was_asked(tmp_path):
    """The judge is asked the same 60 times, and says yes or no at random."""
    draw = random.Random(7)

    async def sampled(request):
        await asyncio.sleep(draw.random() / 100)  # replies come in another order than questions
        return draw.choice(["yes", "no"])

    async def approved(judge, prompt, completion, answer, state):
        return (await judge(prompt, completion, answer, state)).startswith("yes")

    rows = [{"question": "the same", "answer": "x"}] * 6
    rubric = vf.JudgeRubric(judge_client=vf.FakeClient(sampled), funcs=[approved])
    env = vf.SingleTurnEnv(dataset=rows, rubric=rubric)
    path = tmp_path / "run"
    with judges_recorded(env, path / CASSETTE):
        results = env.evaluate(
            client=vf.FakeClient("same"), model="m", results_path=path, use_tqdm=False, rollouts_per_example=10
        )
    assert 0.2 < results.mean_reward < 0.8
    found = asyncio.run(replay(env, RunDir.open(path)))
    assert (found.same, found.changes) == (60, [])


def test_a_record_without_the_names_of_rollouts_is_replayed_in_the_order_in_which_replies_came(tmp_path):
    request = Request(prompt="the same", model="m")
    recorder = vf.Cassette(tmp_path / "tape.jsonl", vf.FakeClient(["one", "two"]))
    for _ in range(2):
        asyncio.run(recorder.complete(request))
    player = vf.Cassette(tmp_path / "tape.jsonl", mode="replay")
    with asking_for("0#0"):
        said = [asyncio.run(player.complete(request)).message["content"] for _ in range(2)]
    assert said == ["one", "two"]
