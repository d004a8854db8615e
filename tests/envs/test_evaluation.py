"""generate and evaluate: what is rolled out, how often, with what, and what comes back in each of the forms."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import verifiers as vf

ROWS = [{"question": f"q{i}", "answer": f"q{i}", "level": i} for i in range(4)]


def exact(completion: Any, answer: str) -> bool:
    return bool(completion[-1]["content"] == answer)


def echo(messages: Any) -> str:
    return str(messages[-1]["content"])


@pytest.fixture
def env() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([exact]), client=vf.FakeClient(echo), model="m")


# --- in every form ------------------------------------------------------------------------------------------------


def test_every_name_gives_the_same_from_plain_code_and_from_a_loop(env: vf.SingleTurnEnv) -> None:
    plain = [
        env.evaluate(use_tqdm=False),
        env.evaluate_sync(use_tqdm=False),
        env.generate(use_tqdm=False),
        env.generate_sync(use_tqdm=False),
    ]

    async def main() -> list[Any]:
        task = asyncio.create_task(env.evaluate(use_tqdm=False))
        return [
            await env.evaluate(use_tqdm=False),
            await env.evaluate_async(use_tqdm=False),
            await env.generate(use_tqdm=False),
            await env.generate_async(use_tqdm=False),
            await env.a_generate(use_tqdm=False),
            env.evaluate_sync(use_tqdm=False),
            *(await asyncio.gather(env.evaluate(use_tqdm=False), env.generate(use_tqdm=False))),
            await asyncio.wait_for(env.evaluate(use_tqdm=False), 10),
            await task,
            env.evaluate(use_tqdm=False),  # touched below, never awaited
        ]

    for results in [*plain, *asyncio.run(main())]:
        assert results["rewards"] == [1.0] * 4
        prompts, _, rewards = results
        assert len(prompts) == len(rewards) == 4


def test_in_a_notebook_cell_results_are_used_without_awaiting(
    env: vf.SingleTurnEnv, capsys: pytest.CaptureFixture[str]
) -> None:
    async def cell() -> None:
        results = env.evaluate(num_examples=3, use_tqdm=False)
        print(f"Average reward: {sum(results['rewards']) / len(results['rewards'])}")
        print(results)
        prompts, completions, rewards = env.generate(n_samples=2, use_tqdm=False)
        assert len(prompts) == len(completions) == len(rewards) == 2
        assert env.evaluate(use_tqdm=False).mean_reward == 1.0

    asyncio.run(cell())
    out = capsys.readouterr().out
    assert "Average reward: 1.0" in out
    assert "3 rollouts of 3 examples, 0 failed" in out


# --- how many -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "ids"),
    [
        ({}, [0, 1, 2, 3]),
        ({"n_samples": 2}, [0, 1]),
        ({"n_samples": 6}, [0, 1, 2, 3, 0, 1]),
        ({"n_samples": -1}, [0, 1, 2, 3]),
        ({"rollouts_per_example": 2}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"n_samples": 3, "rollouts_per_example": 2}, [0, 0, 1]),
    ],
)
def test_generate_makes_as_many_as_asked_going_round_the_rows(env: vf.SingleTurnEnv, kwargs: Any, ids: Any) -> None:
    assert env.generate(**kwargs, use_tqdm=False)["example_id"] == ids


def test_evaluate_takes_the_first_examples_so_many_times(env: vf.SingleTurnEnv) -> None:
    results = env.evaluate(num_examples=2, rollouts_per_example=3, use_tqdm=False)
    assert results["example_id"] == [0, 0, 0, 1, 1, 1]
    assert results.metadata["num_examples"] == 2
    assert results.metadata["rollouts_per_example"] == 3
    assert len(env.evaluate(num_examples=99, use_tqdm=False)) == 4


@pytest.mark.parametrize("name", ["evaluate", "generate"])
@pytest.mark.parametrize("n", [0, -1])
def test_no_rollouts_an_example_is_refused(env: vf.SingleTurnEnv, name: str, n: int) -> None:
    with pytest.raises(ValueError, match="rollouts_per_example must be at least 1"):
        getattr(env, name)(rollouts_per_example=n, use_tqdm=False)


# --- inputs of a host ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [
        [{"prompt": "q", "answer": "q"}],
        {"prompt": "q", "answer": "q"},
        {"question": "q", "answer": "q"},
        {"prompt": [{"role": "user", "content": "q"}], "answer": "q"},
        {"prompt": ["q"], "answer": ["q"]},
        {"prompt": [[{"role": "user", "content": "q"}]], "answer": ["q"]},
        Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "answer": "q"}]),
    ],
)
def test_rows_handed_in_may_be_a_list_columns_a_dataset_or_one_row(env: vf.SingleTurnEnv, inputs: Any) -> None:
    results = env.generate(inputs=inputs, use_tqdm=False)
    assert results["prompts"] == [[{"role": "user", "content": "q"}]]
    assert results["rewards"] == [1.0]


def test_the_same_id_several_times_means_several_rollouts_of_one_example(env: vf.SingleTurnEnv) -> None:
    rows = [{"prompt": "a", "example_id": 7}, {"prompt": "b", "example_id": 3}, {"prompt": "a", "example_id": 7}]
    results = env.generate(inputs=rows, use_tqdm=False)
    assert results["example_id"] == [7, 3, 7]
    assert results.metadata["num_examples"] == 2
    assert rows[0] == {"prompt": "a", "example_id": 7}


def test_a_row_without_an_id_is_no_rollout_of_another_rows_example(env: vf.SingleTurnEnv) -> None:
    rows = [
        {"question": "a", "example_id": 1},
        {"question": "b"},
        {"question": "c", "example_id": 3},
        {"question": "d"},
    ]
    results = env.generate(rows, client=vf.FakeClient(echo), model="m", use_tqdm=False)
    assert results["example_id"] == [1, 4, 3, 5]


def test_rows_of_the_environment_handed_back_in_are_the_same_rollouts(env: vf.SingleTurnEnv) -> None:
    picked = env.get_dataset(2, seed=1)
    for inputs in (picked, picked.to_list(), list(picked)):
        results = env.generate(inputs=inputs, use_tqdm=False)
        assert results["example_id"] == picked["example_id"]
        assert results["prompts"] == picked["prompt"]


# --- keywords -----------------------------------------------------------------------------------------------------


def test_loose_sampling_arguments_reach_the_model_and_override_the_environments(env: vf.SingleTurnEnv) -> None:
    env.sampling_args = {"temperature": 0.1, "seed": 3}
    client = vf.FakeClient("x")
    env.generate(client=client, model="m", n_samples=1, temperature=0.7, max_new_tokens=8, use_tqdm=False)
    env.evaluate(client, "m", {"temperature": 0.9}, num_examples=1, top_p=0.5, use_tqdm=False)
    assert [dict(r.sampling) for r in client.requests] == [
        {"temperature": 0.7, "seed": 3, "max_tokens": 8},
        {"temperature": 0.9, "seed": 3, "top_p": 0.5},
    ]


def test_a_system_prompt_for_one_call(env: vf.SingleTurnEnv) -> None:
    client = vf.FakeClient("x")
    env.generate(client=client, model="m", n_samples=1, system_prompt="You are a tutor.", use_tqdm=False)
    env.generate(client=client, model="m", n_samples=1, use_tqdm=False)
    assert [m["role"] for r in client.requests for m in r.prompt] == ["system", "user", "user"]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["evaluate", "generate"])
def test_an_unknown_keyword_is_an_error_that_says_what_was_meant(env: vf.SingleTurnEnv, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unknown keyword 'max_concurent'.*'max_concurrent'"):
        getattr(env, name)(max_concurent=3)


@pytest.mark.parametrize("kwargs", [{"batch_size": 10}, {"save_every": 5}])
def test_a_keyword_without_effect_says_so_once(env: vf.SingleTurnEnv, kwargs: Any) -> None:
    with pytest.warns(UserWarning, match="has no effect") as caught:
        env.generate(use_tqdm=False, **kwargs)
    assert len(caught) == 1


def test_scoring_can_be_left_out(env: vf.SingleTurnEnv) -> None:
    results = env.generate(score=False, use_tqdm=False)
    assert results["rewards"] == [None] * 4
    assert results.failed == []


def test_group_rewards_can_be_given_each_rollout_alone() -> None:
    sizes: list[int] = []

    def compare(completions: Any) -> list[float]:
        sizes.append(len(completions))
        return [1.0] * len(completions)

    env = vf.SingleTurnEnv(dataset=ROWS[:1], rubric=vf.Rubric([compare]), client=vf.FakeClient("x"), model="m")
    env.evaluate(rollouts_per_example=3, independent_scoring=True, use_tqdm=False)
    env.evaluate(rollouts_per_example=3, use_tqdm=False)
    assert sizes == [1, 1, 1, 3]


# --- what is kept -------------------------------------------------------------------------------------------------


def test_metadata_says_what_the_run_was(env: vf.SingleTurnEnv) -> None:
    metadata = env.evaluate(sampling_args={"seed": 1}, use_tqdm=False).metadata
    assert metadata["env_id"] == "SingleTurnEnv"
    assert (metadata["model"], metadata["avg_reward"], metadata["sampling_args"]) == ("m", 1.0, {"seed": 1})
    assert metadata["avg_metrics"] == {"exact": 1.0, "num_turns": 1.0}
    assert metadata["time_ms"] > 0


def test_a_saved_run_has_a_line_a_rollout_with_its_state_columns(env: vf.SingleTurnEnv, tmp_path: Path) -> None:
    path = tmp_path / "run"
    results = env.evaluate(results_path=path, state_columns=["level", "trajectory"], use_tqdm=False)
    lines = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    assert sorted(line["example_id"] for line in lines) == [0, 1, 2, 3]
    assert all(line["level"] == line["example_id"] and line["exact"] == 1.0 for line in lines)
    assert lines[0]["trajectory"][0]["completion"][0]["role"] == "assistant"
    assert json.loads((path / "metadata.json").read_text())["avg_reward"] == 1.0
    assert results.metadata["path_to_save"] == path
    with pytest.raises(FileExistsError, match="resume=True"):
        env.evaluate(results_path=path, use_tqdm=False)


def test_a_run_that_is_only_named_to_be_saved_goes_under_outputs(
    env: vf.SingleTurnEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env.evaluate(save_results=True, use_tqdm=False)
    assert len(list(tmp_path.glob("outputs/evals/SingleTurnEnv--m/*/results.jsonl"))) == 1


def test_resuming_needs_something_to_resume(env: vf.SingleTurnEnv, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="results_path"):
        env.evaluate(resume=True, use_tqdm=False)
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        env.evaluate(resume=tmp_path / "nothing", use_tqdm=False)


def test_a_dataset_of_results_leaves_failures_out(env: vf.SingleTurnEnv) -> None:
    def picky(completion: Any, answer: str) -> float:
        if answer == "q1":
            raise ValueError("no")
        return 0.5

    env.rubric = vf.Rubric([picky])
    dataset = env.make_dataset(env.evaluate(rollouts_per_example=2, use_tqdm=False), state_columns=["level"])
    assert isinstance(dataset, Dataset)
    assert dataset["example_id"][:] == [0, 0, 2, 2, 3, 3]
    assert dataset["level"][:] == [0, 0, 2, 2, 3, 3]
    assert dataset["reward"][:] == [0.5] * 6
    assert dataset["completion"][0][0]["content"] == "q0"
    with pytest.raises(ValueError, match="hub_name"):
        env.make_dataset(env.evaluate(use_tqdm=False), push_to_hub=True)


def test_batches_for_ones_own_training_loop(env: vf.SingleTurnEnv) -> None:
    results = env.generate(client=vf.FakeClient(echo, tokens=True), model="m", n_samples=5, use_tqdm=False)
    processed = env.process_env_results(
        prompts=results["prompts"],
        completions=results["completions"],
        states=results["states"],
        rewards=results["rewards"],
        batch_size=2,
    )
    assert [len(batch["rewards"]) for batch in processed] == [2, 2, 1]
    first = processed[0]
    assert bytes(first["completion_ids"][0][:2]).decode() == "q0"
    assert len(first["completion_logprobs"][0]) == len(first["completion_ids"][0])
    with pytest.raises(TypeError, match="'mask_everything'"):
        env.process_env_results([], [], [], [], mask_everything=True)
    whole = env.process_env_results(
        results["prompts"], results["completions"], results["states"], results["rewards"], max_seq_len=-1
    )
    assert whole[0]["prompt_ids"][0] == first["prompt_ids"][0]


def test_the_mean_that_is_written_down_counts_examples_equally_as_the_report_does(tmp_path: Path) -> None:
    asked = itertools.count()

    def brittle(answer: str) -> float:
        if answer == "hard" and next(asked):
            raise ConnectionError("the judge is down")
        return float(answer == "easy")

    rows = [{"question": "a", "answer": "easy"}, {"question": "b", "answer": "hard"}]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([brittle]))
    results = env.evaluate(
        client=vf.FakeClient("x"), model="m", rollouts_per_example=4, results_path=tmp_path / "run", use_tqdm=False
    )
    assert len(results.failed) == 3
    assert results.mean_reward == 0.5
    assert results.metadata["avg_reward"] == 0.5
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["avg_metrics"]["brittle"] == 0.5


@pytest.mark.parametrize("where", ["alone", "group"])
def test_a_rubric_of_ones_own_that_exits_fails_the_rollouts_of_a_host_and_does_not_end_it(where: str) -> None:
    class Leaving(vf.Rubric):
        async def score_alone(self, state: Any) -> Any:
            if where == "alone" and state["answer"] == "2":
                raise SystemExit(3)
            return await super().score_alone(state)

        async def add_group_scores(self, states: Any, scores: Any) -> None:
            if where == "group":
                raise SystemExit(3)

    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=Leaving([lambda: 1.0]))
    rows = [{"prompt": [{"role": "user", "content": "?"}], "answer": str(i), "example_id": 0} for i in range(3)]
    states = [*(group := env.run_group(rows, vf.FakeClient("x"), "m", {}, None, None)), *group.failed]
    failed = [state for state in states if state.get("error") is not None]
    assert len(failed) == (1 if where == "alone" else 3)
    assert "it called exit(3)" in str(failed[0]["error"])


PRICED = vf.Completion(
    message={"role": "assistant", "content": "1"},
    usage=vf.Usage(prompt_tokens=10, completion_tokens=1, cost_usd=0.5),
)


def test_what_failed_rollouts_took_stays_in_the_totals_when_they_are_run_again(tmp_path: Path) -> None:
    verdicts = iter([True, False, False])

    def exact(completion: Any, answer: str) -> bool:
        return next(verdicts, True) or bool(1 / 0)

    env, client = vf.SingleTurnEnv(dataset=ROWS[:3], rubric=vf.Rubric([exact])), vf.FakeClient(PRICED)
    for n_asked, n_failed in ((3, 2), (5, 0), (5, 0)):
        results = env.evaluate(
            client=client, model="m", results_path=tmp_path / "run", resume=n_asked > 3, use_tqdm=False
        )
        assert (len(client.requests), len(results.failed)) == (n_asked, n_failed)
        assert results.usage == vf.Usage(prompt_tokens=10 * n_asked, completion_tokens=n_asked, cost_usd=0.5 * n_asked)
    told = "tokens: 50 prompt + 5 completion, $2.5000 (22 of them in rollouts that failed and were run again)"
    assert told in str(results)
    assert sum(part.usage.prompt_tokens for part in results.by("answer").values()) == 30


def test_a_saved_rollout_that_could_not_be_scored_again_with_its_group_is_paid_for_once(tmp_path: Path) -> None:
    """Four rollouts: the first time one fails, the second time its whole group."""
    alone, together = iter([True, False]), iter([True, True, False])

    def exact(completion: Any, answer: str) -> bool:
        return next(alone, True) or bool(1 / 0)

    def grouped(completions: Any) -> list[float]:
        return [float(next(together, True) or 1 / 0)] * len(completions)

    env = vf.SingleTurnEnv(dataset=ROWS[:2], rubric=vf.Rubric([exact, grouped]))
    client = vf.FakeClient(PRICED)
    for n_asked, n_failed in ((4, 1), (5, 1), (6, 0)):
        results = env.evaluate(
            client=client,
            model="m",
            rollouts_per_example=2,
            results_path=tmp_path / "run",
            resume=n_asked > 4,
            use_tqdm=False,
            max_concurrent=1,
        )
        assert (len(client.requests), len(results.failed)) == (n_asked, n_failed)
        assert results.usage == vf.Usage(prompt_tokens=10 * n_asked, completion_tokens=n_asked, cost_usd=0.5 * n_asked)


# --- overrides that a run does not ask ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["generate", "run_group", "run_rollout"])
def test_an_override_of_what_made_a_run_in_0_1_9_is_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    made = type("Own", (vf.SingleTurnEnv,), {name: own})(dataset=ROWS, rubric=vf.Rubric([exact]))
    made.evaluate(vf.FakeClient(echo), "m", use_tqdm=False)
    assert f"Own.{name} is not called here" in caplog.text


def test_no_override_no_warning(env: vf.SingleTurnEnv, caplog: pytest.LogCaptureFixture) -> None:
    env.evaluate(use_tqdm=False)
    assert "is not called here" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling_args": {"model": "other"}}, "contain 'model', which every request has already; pass it as model="),
        ({"sampling_args": {"extra_body": {"model": "other"}}}, "contain 'model'"),
        ({"sampling_args": {"messages": []}}, "contain 'messages', which every request has already; it comes from"),
        ({"n": 2}, "n=2: a request has one reply; for several rollouts use rollouts_per_example=2"),
        ({"extra_body": {"n": 2}}, "n=2: a request has one reply"),
        ({"state_columns": "turn"}, "state_columns='turn' must be a list of names"),
        ({"num_examples": "5"}, "num_examples='5' must be an int; -1 means all"),
        ({"rollouts_per_example": 2.0}, "rollouts_per_example=2.0 must be an int"),
        ({"max_concurrent": None}, "max_concurrent must be a positive number, or -1 for no limit; got None"),
    ],
    ids=str,
)
def test_settings_that_would_silently_mean_something_else_are_refused_before_any_request(
    settings: dict[str, Any], message: str
) -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}], rubric=vf.Rubric([lambda completion: 1.0]))
    client = vf.FakeClient("x")
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        env.evaluate(client=client, model="m", use_tqdm=False, **settings)
    assert client.requests == []


def test_the_sampling_arguments_of_an_environment_or_a_judge_do_not_replace_the_model() -> None:
    with pytest.raises(ValueError, match="contain 'model'"):
        vf.SingleTurnEnv(dataset=[{"question": "q"}], sampling_args={"model": "other"})
    with pytest.raises(ValueError, match="contain 'model'"):
        vf.JudgeRubric(judge_sampling_args={"model": "other"})


@pytest.mark.parametrize("prompt", [["Be brief."], {"role": "system", "content": "Be brief."}, 5], ids=str)
def test_a_system_prompt_that_no_endpoint_would_understand_is_refused(prompt: Any) -> None:
    with pytest.raises(TypeError, match="system_prompt must be a string, or for chats a list of content parts; got"):
        vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}], system_prompt=prompt)
    parts: Any = [{"type": "text", "text": "Be brief."}]
    env = vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}], system_prompt=parts)
    assert env.dataset is not None
    assert env.dataset[0]["prompt"][0] == {"role": "system", "content": parts}
