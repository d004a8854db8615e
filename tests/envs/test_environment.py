"""What an environment is made of: its settings, one rollout in two forms, scoring, pickling, closing."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf

ROWS = [{"question": "2+2?", "answer": "4", "info": {"n": 1}}, {"question": "3+3?", "answer": "6"}]


def exact(completion: Any, answer: str) -> bool:
    return bool(completion[-1]["content"] == answer)


def env(**kwargs: Any) -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(**{"dataset": ROWS, "rubric": vf.Rubric([exact]), **kwargs})


def evaluate(environment: vf.Environment, reply: Any = "4", **kwargs: Any) -> Any:
    return environment.evaluate(client=vf.FakeClient(reply), model="m", use_tqdm=False, **kwargs)


# --- settings -----------------------------------------------------------------------------------------------------


def test_every_documented_setting_is_kept_and_any_other_becomes_an_attribute() -> None:
    client = vf.FakeClient("4")
    made = env(
        system_prompt="Be brief.",
        few_shot_examples=[("1+1?", "2")],
        client=client,
        model="m",
        message_type="chat",
        sampling_args={"temperature": 0.5},
        max_retries=3,
        timeout=60,
        max_seq_len=100,
        env_id="sums",
        env_args={"split": "train"},
        custom_param="value",
    )
    assert (made.system_prompt, made.max_retries, made.timeout, made.max_seq_len) == ("Be brief.", 3, 60, 100)
    assert (made.env_id, made.env_args, made.custom_param) == ("sums", {"split": "train"}, "value")  # type: ignore[attr-defined]
    results = made.evaluate(use_tqdm=False)
    assert results["rewards"] == [1.0, 0.0]
    assert [m["role"] for m in client.requests[0].prompt] == ["system", "user", "assistant", "user"]  # type: ignore[union-attr]
    assert client.requests[0].sampling == {"temperature": 0.5}
    assert client.requests[0].timeout_s == 60


def test_a_keyword_that_would_hide_a_method_is_refused() -> None:
    with pytest.raises(TypeError, match="'evaluate', which is one of its methods"):
        env(evaluate=True)


@pytest.mark.parametrize("setting", [{"map_kwargs": {"num_proc": 4}}, {"interleaved_rollouts": True}])
def test_a_setting_without_effect_says_so(setting: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="has no effect"):
        env(**setting)


def test_the_parser_is_the_rubrics_where_none_is_given() -> None:
    parser = vf.XMLParser(["answer"])
    assert env(rubric=vf.Rubric(parser=parser)).parser is parser
    assert isinstance(vf.SingleTurnEnv(dataset=ROWS).parser, vf.Parser)


def test_the_callers_sampling_arguments_are_never_changed() -> None:
    mine = {"max_tokens": 5, "temperature": None, "extra_body": {"top_k": 1}}
    before = copy.deepcopy(mine)
    made = env(sampling_args=mine)
    evaluate(made, sampling_args=mine)
    made.rollout(made.dataset[0], vf.FakeClient("4"), "m", mine)  # type: ignore[index]
    assert mine == before
    assert made.sampling_args == before


def test_setters_reach_the_setting() -> None:
    made = env()
    made.set_kwargs(max_seq_len=7, score_rollouts=False, temperature_schedule=[1.0])
    assert (made.max_seq_len, made.score_rollouts) == (7, False)
    assert made.temperature_schedule == [1.0]  # type: ignore[attr-defined]
    results = evaluate(made)
    assert results["rewards"] == [None, None]


def test_a_second_rubric_scores_as_well() -> None:
    def brief(completion: Any) -> float:
        return 0.5

    made = env()
    made.add_rubric(vf.Rubric([brief]))
    made.add_rubric(vf.Rubric([lambda completion: 0.25]))
    assert evaluate(made)["rewards"] == [1.75, 0.75]


# --- one rollout in two forms -------------------------------------------------------------------------------------


def test_the_row_form_gives_the_state() -> None:
    made = env(system_prompt="S")
    state = made.rollout(input=made.dataset[0], client=vf.FakeClient("4"), model="m", sampling_args={"seed": 1})  # type: ignore[index]
    assert isinstance(state, vf.State)
    assert (state["answer"], state["info"], state["task"], state["example_id"]) == ("4", {"n": 1}, "default", 0)
    assert state["completion"] == [{"role": "assistant", "content": "4"}]
    positional = made.rollout(made.dataset[0], vf.FakeClient("4"), "m", {"seed": 1})  # type: ignore[index]
    assert positional["completion"] == state["completion"]


def test_a_raw_row_is_formatted_first() -> None:
    client = vf.FakeClient("4")
    made = env(system_prompt="S")
    for row in ({"question": "2+2?"}, {"prompt": "2+2?"}, {"prompt": [{"role": "user", "content": "2+2?"}]}):
        assert made.rollout(row, client, "m")["error"] is None
    expected = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2?"}]
    assert [r.prompt for r in client.requests] == [expected] * 3
    with pytest.raises(ValueError, match="no 'prompt' and no 'question'"):
        made.rollout({"text": "x"}, client, "m")


def test_the_prompt_form_gives_completion_and_state() -> None:
    client = vf.FakeClient("4")
    made = env(system_prompt="S")
    completion, state = made.rollout(
        client=client,
        model="m",
        prompt="2+2?",
        answer="4",
        task="sums",
        info={"a": 1},
        temperature=0.3,
        max_new_tokens=9,
    )
    assert completion is state["completion"]
    assert (state["task"], state["info"], state["answer"]) == ("sums", {"a": 1}, "4")
    assert client.requests[0].sampling == {"temperature": 0.3, "max_tokens": 9}
    assert client.requests[0].prompt[0] == {"role": "system", "content": "S"}
    again, _ = made.rollout(client, "m", "2+2?", "4")
    assert again == completion


def test_both_forms_work_from_a_running_loop_awaited_or_not() -> None:
    made = env()
    client = vf.FakeClient("4")

    async def main() -> None:
        completion, state = await made.rollout(client, "m", "2+2?", "4")
        unpacked, _ = made.rollout(client, "m", "2+2?", "4")
        assert unpacked == completion
        assert made.rollout(made.dataset[0], client, "m")["answer"] == "4"  # type: ignore[index]
        assert (await made.rollout(made.dataset[0], client, "m"))["answer"] == state["answer"]  # type: ignore[index]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"client": None, "model": "m"}, "needs a row .* or a prompt"),
        ((), {"prompt": "x", "temprature": 1}, r"'temprature'; did you mean 'temperature'"),
        ((), {"prompt": "x", "colour": 1}, "extra_body"),
        ((1, 2, 3, 4, 5, 6, 7, 8), {}, "at most client, model, prompt, answer"),
        (({"prompt": "x"}, 2, 3, 4, 5), {}, "at most input, client, model, sampling_args"),
    ],
)
def test_a_call_that_makes_no_sense_says_why(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        env().rollout(*args, **kwargs)


def test_without_a_model_or_a_client_the_error_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="model="):
        vf.SingleTurnEnv(dataset=ROWS).rollout(client="http://127.0.0.1:9/v1", prompt="x", answer="")
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        vf.SingleTurnEnv(dataset=ROWS).rollout(model="m", prompt="x", answer="")


def test_generate_completion_takes_a_prompt_and_uses_the_environments_own_client() -> None:
    client = vf.FakeClient("4")
    completion, state = env(client=client, model="m").generate_completion("2+2?", temperature=0.3)
    assert completion[0]["content"] == "4"
    assert state["sampling_args"]["temperature"] == 0.3


# --- overrides of rollout -----------------------------------------------------------------------------------------


def make(rollout: Any, **kwargs: Any) -> vf.SingleTurnEnv:
    cls = type("Own", (vf.SingleTurnEnv,), {"rollout": rollout})
    made = cls(
        **{"dataset": [{**row, "level": i} for i, row in enumerate(ROWS)], "rubric": vf.Rubric([exact]), **kwargs}
    )
    assert isinstance(made, vf.SingleTurnEnv)
    return made


def pair_sync(self: Any, client: Any, model: Any, prompt: Any, answer: Any) -> Any:
    assert threading.current_thread() is not threading.main_thread()
    return vf.SingleTurnEnv.rollout(self, client, model, prompt, answer)


def pair_kwargs(self: Any, client: Any, model: Any, prompt: Any, answer: Any, **kwargs: Any) -> Any:
    completion, _ = vf.SingleTurnEnv.rollout(self, client, model, prompt, answer, **kwargs)
    return completion, {"own": True}


async def pair_async(self: Any, client: Any, model: Any, prompt: Any, answer: Any, task: str, **kwargs: Any) -> Any:
    return await vf.SingleTurnEnv.rollout(self, client, model, prompt, answer, task=task, **kwargs)


async def row_async(self: Any, input: Any, client: Any, model: Any, sampling_args: Any = None, **kwargs: Any) -> Any:
    return await vf.SingleTurnEnv.rollout(self, input, client, model, sampling_args)


def row_sync(self: Any, input: Any, client: Any, model: Any, sampling_args: Any = None) -> Any:
    return vf.SingleTurnEnv.rollout(self, input, client, model, sampling_args)


def completion_alone(self: Any, client: Any, model: Any, prompt: Any, answer: Any) -> Any:
    completion, _ = vf.SingleTurnEnv.rollout(self, client, model, prompt, answer)
    return completion


async def pair_with_completion(
    self: Any, client: Any, model: Any, prompt: Any, completion: Any = None, answer: str = "", **kwargs: Any
) -> Any:
    assert (completion, answer) in [(None, "4"), (None, "6")]  # as 0.1.6 had them
    return await vf.SingleTurnEnv.rollout(self, client, model, prompt, answer, **kwargs)


FORMS = [pair_sync, pair_kwargs, pair_async, pair_with_completion, row_async, row_sync, completion_alone]


@pytest.mark.parametrize("rollout", FORMS)
def test_an_override_in_either_form_sync_or_async_is_played_scored_and_keeps_its_row(rollout: Any) -> None:
    results = evaluate(make(rollout), rollouts_per_example=2)
    assert results.causes == {}
    assert results["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert results["example_id"] == [0, 0, 1, 1]
    assert results["answer"] == ["4", "4", "6", "6"]
    assert [s["level"] for s in results.states] == [0, 0, 1, 1]


def test_a_state_from_a_cache_is_scored_for_each_rollout_by_itself() -> None:
    cache: dict[str, Any] = {}

    def cached(self: Any, client: Any, model: Any, prompt: Any, answer: Any, **kwargs: Any) -> Any:
        key = prompt[-1]["content"][:3]
        if key not in cache:
            cache[key] = vf.SingleTurnEnv.rollout(self, client, model, prompt, answer, **kwargs)
        return cache[key]

    rows = [{"question": "2+2?", "answer": "4"}, {"question": "2+2=", "answer": "4"}]
    results = evaluate(make(cached, dataset=rows), rollouts_per_example=2, max_concurrent=1)
    assert results["example_id"] == [0, 0, 1, 1]
    assert len({id(state) for state in results.states}) == 4
    assert results["rewards"] == [1.0] * 4


def test_an_override_in_a_running_loop_works_called_directly() -> None:
    made = make(pair_kwargs)

    async def main() -> Any:
        return await made.evaluate(client=vf.FakeClient("4"), model="m", use_tqdm=False)

    assert asyncio.run(main())["rewards"] == [1.0, 0.0]
    completion, update = made.rollout(vf.FakeClient("4"), "m", "2+2?", "4")
    assert (completion[0]["content"], update) == ("4", {"own": True})


# --- scoring by the environment -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "metrics"),
    [
        (0.5, {}),
        ({"reward": 0.5, "style": 1}, {"style": 1.0}),
        ({"reward": 0.5, "metrics": {"style": 1.0}}, {"style": 1.0}),
    ],
)
def test_score_rollout_on_the_environment_replaces_the_rubric(returned: Any, metrics: Any) -> None:
    class Own(vf.SingleTurnEnv):
        def score_rollout(self, prompt: Any, completion: Any, answer: str, state: Any, **kwargs: Any) -> Any:
            assert completion[-1]["content"] == "4"
            return returned

    results = evaluate(Own(dataset=ROWS, rubric=vf.Rubric([exact])))
    assert results["rewards"] == [0.5, 0.5]
    assert results.states[0]["metrics"] == {**metrics, "num_turns": 1.0}


def test_score_rollout_on_the_environment_may_return_the_state() -> None:
    class Own(vf.SingleTurnEnv):
        async def score_rollout(self, state: vf.State) -> vf.State:  # type: ignore[override]
            state["reward"], state["metrics"] = 0.5, {"style": 1}
            return state

    results = evaluate(Own(dataset=ROWS))
    assert (results["rewards"], results["style"]) == ([0.5, 0.5], [1.0, 1.0])


def test_score_rollout_may_ask_super_and_a_failure_of_the_rubric_stays_the_cause() -> None:
    def picky(completion: Any, answer: str) -> float:
        if answer == "6":
            raise LookupError("judge is down")
        return 1.0

    class Own(vf.SingleTurnEnv):
        async def score_rollout(self, state: vf.State) -> Any:  # type: ignore[override]
            score = await super().score_rollout(state)
            return {**score, "reward": (score["reward"] or 0.0) / 2}

    results = evaluate(Own(dataset=ROWS, rubric=vf.Rubric([picky])))
    assert results["rewards"] == [0.5]
    assert "judge is down" in str(results.failed[0]["error"])


def test_scoring_by_hand_writes_into_the_state() -> None:
    made = env()
    state = made.rollout(made.dataset[0], vf.FakeClient("4"), "m")  # type: ignore[index]
    assert state["reward"] is None
    assert made.score_rollout(state) == {"exact": 1.0, "reward": 1.0}
    assert (state["reward"], state["trajectory"][0]["reward"]) == (1.0, 1.0)


# --- groups for hosts ---------------------------------------------------------------------------------------------


def test_a_group_is_scored_together_and_its_failures_come_apart_from_it() -> None:
    def best(completions: Any) -> list[float]:
        return [float(c[-1]["content"] == "4") for c in completions]

    made = env(rubric=vf.Rubric([best]))
    replies = vf.FakeClient(["4", vf.ServerError("down"), "5"])
    states = made.run_group([made.dataset[0]] * 3, replies, "m", {"temperature": 1.0})  # type: ignore[index]
    assert sorted(s["reward"] for s in states) == [0.0, 1.0]
    assert [s["advantage"] for s in states] in ([0.5, -0.5], [-0.5, 0.5])
    assert [type(s["error"]) for s in states.failed] == [vf.ServerError]
    one = made.run_rollout(made.dataset[0], vf.FakeClient("4"), "m", {}, score=True)  # type: ignore[index]
    assert one["reward"] == 1.0


def test_semaphores_of_a_host_are_respected() -> None:
    made = env()
    most = now = 0

    async def reply(messages: Any) -> str:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return "4"

    async def main() -> list[vf.State]:
        gate = asyncio.Semaphore(2)
        states: list[vf.State] = await made.run_group(
            [made.dataset[0]] * 8,
            vf.FakeClient(reply),
            "m",
            {},
            gate,
            asyncio.Semaphore(1),  # type: ignore[index]
        )
        return states

    assert [s["reward"] for s in asyncio.run(main())] == [1.0] * 8
    assert most == 2


# --- life ---------------------------------------------------------------------------------------------------------


class Keeper(vf.SingleTurnEnv):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.my_hooks = ["kept"]

    @vf.teardown
    async def give_back(self) -> None:
        print("given back")


def test_an_environment_that_was_used_pickles_and_copies() -> None:
    made = Keeper(dataset=ROWS, rubric=vf.Rubric([exact]), system_prompt="S")
    evaluate(made)
    for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert twin.my_hooks == ["kept"]
        assert evaluate(twin)["rewards"] == [1.0, 0.0]
    assert evaluate(made)["rewards"] == [1.0, 0.0]


def test_teardown_runs_on_close(capsys: pytest.CaptureFixture[str]) -> None:
    made = Keeper(dataset=ROWS)
    made.close()

    async def main() -> None:
        await made.close()

    asyncio.run(main())
    assert capsys.readouterr().out == "given back\n" * 2


def test_teardown_runs_at_exit_only_for_what_was_used_and_nothing_warns(repo: Path) -> None:
    code = """
import verifiers as vf
class Keeper(vf.SingleTurnEnv):
    @vf.teardown
    def give_back(self): print("given back", self.name)
given = {"dataset": [{"question": "x"}], "rubric": vf.Rubric([lambda completion: 1.0])}
used, unused = Keeper(**given, name="used"), Keeper(**given, name="unused")
used.evaluate(client=vf.FakeClient("x"), model="m", use_tqdm=False)
used.evaluate(client=vf.FakeClient("x"), model="m", use_tqdm=False)
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=repo, timeout=60
    )
    assert (done.stdout, done.stderr) == ("end\ngiven back used\n", "")


def test_building_an_environment_has_no_side_effects() -> None:
    threads = threading.active_count()
    env()
    assert threading.active_count() == threads


def test_an_environment_that_plays_nothing_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="must define rollout"):
        vf.Environment(dataset=ROWS).rollout(vf.FakeClient("x"), "m", "q", "a")


# --- mistakes of those who build one ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rubric": [len]}, "is not a rubric"),
        ({"rubric": len}, "is not a rubric"),
        ({"rubric": vf.Rubric}, "is not a rubric"),
        ({"parser": vf.Parser}, "parser=Parser is a class"),
        ({"max_turns": "3"}, "max_turns='3' must be a number"),
    ],
)
def test_what_could_only_end_in_zeros_is_refused_when_the_environment_is_made(given: Any, told: str) -> None:
    class Game(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> str:
            return "go on"

    with pytest.raises(TypeError, match=re.escape(told)):
        Game(dataset=ROWS, **given)
    assert Game(dataset=ROWS, eval_dataset_name="test", difficulty=3).difficulty == 3  # type: ignore[attr-defined]


def test_a_keyword_that_is_nearly_another_is_kept_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Split(vf.SingleTurnEnv):
        def __init__(self, difficulty: int, **kwargs: Any) -> None:
            super().__init__(difficulty=difficulty, level="easy", **kwargs)

    assert Split(3, dataset=ROWS).difficulty == 3  # type: ignore[attr-defined]
    assert not caplog.messages
    made: Any = Split(3, dataset=ROWS, rubrik=vf.Rubric(), dificulty=4)
    assert made.dificulty == 4
    assert sorted(caplog.messages) == [
        "the unknown keyword 'dificulty' becomes an attribute; did you mean 'difficulty'?",
        "the unknown keyword 'rubrik' becomes an attribute; did you mean 'rubric'?",
    ]


def test_an_environment_whose_init_is_a_partial_method_can_be_made() -> None:
    class Easy(vf.SingleTurnEnv):
        __init__ = functools.partialmethod(vf.SingleTurnEnv.__init__, system_prompt="Be brief.")  # type: ignore[assignment]

    assert Easy(dataset=ROWS).system_prompt == "Be brief."


@pytest.mark.parametrize("make_rubric", [lambda own: own, lambda own: vf.RubricGroup([vf.Rubric([exact]), own])])
def test_a_rubric_whose_score_rollouts_no_environment_asks_is_warned_of(make_rubric: Any) -> None:
    class Batched(vf.Rubric):
        def score_rollouts(self, prompts: Any, completions: Any, *args: Any, **kwargs: Any) -> Any:
            return {"reward": [1.0] * len(prompts), "metrics": {}}

    with pytest.warns(UserWarning, match=r"environments do not call Batched.score_rollouts"):
        vf.SingleTurnEnv(dataset=ROWS, rubric=make_rubric(Batched([exact])))


@pytest.mark.parametrize(
    "made",
    [lambda: vf.Rubric(funcs=len), lambda: vf.Rubric(funcs=[len], weights=[None])],
)
def test_a_rubric_of_one_function_alone_or_a_weight_that_is_none_is_refused(made: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=r"funcs must be a list|a weight must be a finite number, not None"
    ):
        made()


def test_an_evaluation_that_nothing_scores_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = vf.SingleTurnEnv(dataset=ROWS)
    made.evaluate(client=vf.FakeClient("x"), model="m", use_tqdm=False)
    vf.EnvGroup([made]).evaluate(client=vf.FakeClient("x"), model="m", use_tqdm=False)
    assert [record.message.split(",")[0] for record in caplog.records] == ["the rubric is empty"] * 2


def test_what_a_rollout_puts_into_containers_of_its_row_does_not_reach_the_next_rollout() -> None:
    def counts(info: Any) -> float:
        info["seen"].add(len(info["seen"]))
        info["boards"][0].append("x")
        return float(len(info["seen"]) + len(info["boards"][0]))

    rows = [{"question": "q", "answer": "", "info": {"seen": set(), "boards": ([],)}}]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([counts]))
    results = env.evaluate(client=vf.FakeClient("x"), model="m", rollouts_per_example=3)
    assert results.rewards == [2.0, 2.0, 2.0]
    assert rows[0]["info"] == {"seen": set(), "boards": ([],)}
