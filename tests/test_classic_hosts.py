"""Trainers and other programs written for classic 0.1.x drive environments as they did."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

import verifiers as vf
from tests.support.classic import HostClient, chat_completion, load_arithmetic, openai_mock, quiet, with_tokens


def test_a_trainer_runs_a_group_and_reads_its_tokens() -> None:
    env = load_arithmetic()
    client = HostClient(with_tokens("\\boxed{2}", [1, 2, 3], [4, 5]))

    async def main() -> list[vf.State]:
        from verifiers.utils.async_utils import maybe_semaphore

        row = env.get_dataset(n=2)[1]
        inputs = [vf.RolloutInput(**{k: row[k] for k in ("prompt", "answer", "task", "example_id")}) for _ in range(3)]
        return await env.run_group(
            group_inputs=inputs,
            client=client,
            model="policy",
            gen_sampling_args={"logprobs": True, "extra_body": {"return_token_ids": True}},
            gen_sem=await maybe_semaphore(2),
            score_sem=await maybe_semaphore(-1),
        )

    states = asyncio.run(main())
    assert [state["reward"] for state in states] == [1.0] * 3
    assert len({state["trajectory_id"] for state in states}) == 3
    tokens = states[0]["trajectory"][0]["tokens"]
    assert tokens.pop("sampling") == {"asked": {"logprobs": True, "extra_body": {"return_token_ids": True}}}
    assert tokens == {
        "prompt_ids": [1, 2, 3],
        "prompt_mask": [0, 0, 0],
        "completion_ids": [4, 5],
        "completion_mask": [1, 1],
        "completion_logprobs": [-0.5, -0.5],
        "overlong_prompt": False,
        "is_truncated": False,
    }
    request = client.requests[0]
    assert request["model"] == "policy"
    assert request["logprobs"] is True
    assert request["extra_body"] == {"return_token_ids": True}
    assert [state["client"] for state in states] == [client] * 3


def test_tokens_may_be_spelled_as_token_id_strings_and_come_in_plain_namespaces() -> None:
    entries = [SimpleNamespace(token=f"token_id:{i}", logprob=-0.25, bytes=None, top_logprobs=[]) for i in (7, 8)]
    message = SimpleNamespace(role="assistant", content="\\boxed{0}", tool_calls=None)
    choice = SimpleNamespace(message=message, finish_reason="stop", logprobs=SimpleNamespace(content=entries))
    client = HostClient(SimpleNamespace(choices=[choice], prompt_token_ids=[1, 2], usage=None, id="x", model="m"))
    state = load_arithmetic().evaluate(client, **quiet(num_examples=1))["state"][0]
    tokens = state["trajectory"][0]["tokens"]
    assert (tokens["completion_ids"], tokens["completion_logprobs"]) == ([7, 8], [-0.25, -0.25])


def test_a_longest_sequence_cuts_the_tokens_and_marks_the_rollout() -> None:
    env = load_arithmetic(max_seq_len=4)
    client = HostClient(with_tokens("\\boxed{0}", [1, 2, 3], [4, 5]))
    state = env.evaluate(client, **quiet(num_examples=1))["state"][0]
    assert state["trajectory"][0]["tokens"]["completion_ids"] == [4]
    assert state["is_truncated"] is True
    env.set_kwargs(max_seq_len=2, score_rollouts=False)
    state = env.evaluate(client, **quiet(num_examples=1))["state"][0]
    assert state["trajectory"][0]["tokens"]["overlong_prompt"] is True


def test_run_rollout_generates_and_scores_only_if_asked() -> None:
    env = load_arithmetic()
    row = env.get_dataset()[0]

    async def main() -> tuple[vf.State, vf.State]:
        sem = asyncio.Semaphore(1)
        bare = await env.run_rollout(row, openai_mock("\\boxed{0}"), "m", {}, sem)
        scored = await env.run_rollout(
            row, openai_mock("\\boxed{0}"), "m", gen_sampling_args={}, gen_sem=sem, score_sem=sem, score=True
        )
        return bare, scored

    bare, scored = asyncio.run(main())
    assert bare["reward"] is None
    assert bare["completion"]
    assert scored["reward"] == 1.0


def test_a_host_rolls_out_and_scores_by_hand() -> None:
    env = load_arithmetic()

    async def main() -> vf.State:
        row = env.get_dataset()[0]
        state = await env.rollout(input=row, client=openai_mock("\\boxed{0}"), model="m", sampling_args={"n": 1})
        await env.rubric.score_rollout(state, score_sem=asyncio.Semaphore(1))
        return state

    state = asyncio.run(main())
    assert state["reward"] == 1.0
    assert state["sampling_args"]["n"] == 1


def test_prompts_may_be_numpy_arrays() -> None:
    env = load_arithmetic()
    prompt = np.array([{"role": "user", "content": "1 + 1?"}], dtype=object)
    row = {"prompt": prompt, "answer": "2", "task": "t", "example_id": 5, "info": {}}
    client = openai_mock("\\boxed{2}")

    async def main() -> list[vf.State]:
        sem = asyncio.Semaphore(1)
        (first,) = await env.run_group([row], client, "m", {}, sem, sem)
        second = await env.rollout(row, client, "m", {})
        return [first, second, *(await env.generate([row], client=client, **quiet()))["state"]]

    for state in asyncio.run(main()):
        assert state["error"] is None
        assert state["example_id"] == 5
        assert state["completion"] == [{"role": "assistant", "content": "\\boxed{2}"}]
    for call in client.chat.completions.create.call_args_list:
        assert call.kwargs["messages"][-1] == {"role": "user", "content": "1 + 1?"}


def test_generate_takes_rows_repeated_by_the_host_in_their_order() -> None:
    env = load_arithmetic()
    rows = env.get_dataset(n=2).to_list()
    repeated = [row for row in rows for _ in range(3)]

    async def main() -> Any:
        return await env.generate(repeated, client=openai_mock("\\boxed{2}"), **quiet(max_concurrent=2))

    results = asyncio.run(main())
    assert results["example_id"] == [0, 0, 0, 1, 1, 1]
    assert results["reward"] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    inputs = env.get_dataset(n=2).repeat(2)  # a Hugging Face Dataset
    assert env.generate(inputs, client=openai_mock("\\boxed{2}"), **quiet())["example_id"] == [0, 1, 0, 1]
    assert env.generate_sync(rows, client=openai_mock("\\boxed{2}"), **quiet())["reward"] == [0.0, 1.0]


def test_calls_may_be_tasks_gathered_timed_and_made_in_any_thread() -> None:
    env = load_arithmetic()
    row = env.get_dataset()[0]
    client = openai_mock("\\boxed{0}")

    async def main() -> list[float]:
        sem = asyncio.Semaphore(4)
        task = asyncio.create_task(env.run_group([row], client, "m", {}, sem, sem))
        rollouts = await asyncio.gather(*(env.run_rollout(row, client, "m", {}, sem, sem, True) for _ in range(2)))
        state = await asyncio.wait_for(env.rollout(row, client, "m"), timeout=30)
        await env.rubric.score_rollout(state, sem)
        results = await asyncio.ensure_future(env.evaluate(client, **quiet(num_examples=1)))
        return [state["reward"] for state in (*await task, *rollouts, state, *results["state"])]

    rewards: list[float] = []
    worker = threading.Thread(target=lambda: rewards.extend(asyncio.run(main())))
    worker.start()
    worker.join(60)
    assert rewards == [1.0] * 5


def test_a_client_may_be_a_subclass_of_openais_that_answers_by_itself() -> None:
    class Engine(AsyncOpenAI):
        def __init__(self) -> None:
            super().__init__(api_key="none", base_url="http://nowhere.invalid/v1")

        @property
        def chat(self) -> Any:
            async def create(*args: Any, **kwargs: Any) -> ChatCompletion:
                return with_tokens("\\boxed{0}", [1], [2])

            return SimpleNamespace(completions=SimpleNamespace(create=create))

    state = load_arithmetic().evaluate(Engine(), **quiet(num_examples=1))["state"][0]
    assert (state["reward"], state["trajectory"][0]["tokens"]["completion_ids"]) == (1.0, [2])
    assert state["trajectory"][0]["response"].prompt_token_ids == [1]


def test_a_mixture_of_environments_is_trained_as_one() -> None:
    with pytest.warns(UserWarning, match="map_kwargs has no effect"):
        group = vf.EnvGroup(
            envs=[load_arithmetic(), load_arithmetic()], env_names=["a", "b"], map_kwargs={"writer_batch_size": 1}
        )
    group.set_max_seq_len(3)
    assert [env.max_seq_len for env in group.envs] == [3, 3]
    rows = group.get_dataset(seed=3).to_list()
    assert sorted(row["example_id"] for row in rows) == list(range(8))

    async def main() -> list[vf.State]:
        sem = asyncio.Semaphore(8)
        row = next(row for row in rows if row["task"] == "b" and row["answer"] == "0")
        client = HostClient(with_tokens("\\boxed{0}", [1, 2], [3, 4]))
        return await group.run_group([vf.RolloutInput(**row)] * 2, client, "m", {}, sem, sem)

    states = asyncio.run(main())
    assert [state["reward"] for state in states] == [1.0, 1.0]
    assert [(state["task"], state["is_truncated"], state["advantage"]) for state in states] == [("b", True, 0.0)] * 2
    assert all(state["timing"]["total_ms"] > 0 for state in states)


def test_a_hook_may_ask_the_client_in_the_state() -> None:
    class Helped(vf.MultiTurnEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            reply = await state["client"].chat.completions.create(model=state["model"], messages=messages)
            state["hint"] = reply.choices[0].message.content
            return [{"role": "user", "content": state["hint"]}]

    env = Helped(dataset=Dataset.from_list([{"question": "q", "answer": ""}]), max_turns=2)
    assert env.evaluate(openai_mock("a", "hint", "b"), **quiet())["state"][0]["hint"] == "hint"


def test_one_endpoint_that_fails_costs_its_own_rollout_only() -> None:
    def answer(request: dict[str, Any]) -> Any:
        if "2 + 2" in request["messages"][-1]["content"]:
            raise ConnectionError("reset by peer")
        if "3 + 3" in request["messages"][-1]["content"]:
            return SimpleNamespace(choices=None)
        return chat_completion("\\boxed{0}")

    results = load_arithmetic().evaluate(HostClient(answer), **quiet())
    assert results["reward"] == [1.0, 0.0]
    kinds = [type(state["error"]) for state in results.failed]
    assert kinds == [vf.ConnectionFailedError, vf.EmptyModelResponseError]
    assert all(issubclass(kind, vf.ModelError) for kind in kinds)


def test_results_are_saved_where_classic_saves_them_with_the_columns_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = load_arithmetic(env_id="sums")
    client = openai_mock("\\boxed{0}")
    results = env.evaluate(client, **quiet(model="org/m", save_results=True, state_columns=["turn"]))
    path = Path(results["metadata"]["path_to_save"])
    assert re.fullmatch(r"outputs/evals/sums--org--m/[0-9a-f]{8}", path.as_posix())
    rows = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    core = "example_id prompt completion task reward error generation_ms scoring_ms total_ms info answer correct turn"
    assert len(rows) == 4
    assert set(core.split()) <= set(rows[0])
    metadata = json.loads((path / "metadata.json").read_text())
    assert metadata["env_id"] == "sums"
    assert metadata["model"] == "org/m"
    assert metadata["avg_reward"] == 0.25


def test_rollouts_become_a_hugging_face_dataset() -> None:
    env = load_arithmetic()
    dataset = env.make_dataset(env.evaluate(openai_mock("\\boxed{0}"), **quiet()))
    assert isinstance(dataset, Dataset)
    assert {"prompt", "completion", "answer", "reward", "task", "example_id", "correct"} <= set(dataset.column_names)


# --- the shapes of 0.1.8 and 0.1.10 -------------------------------------------------------------------------------


def test_run_rollout_takes_the_semaphore_first_as_in_0_1_8() -> None:
    env = load_arithmetic()
    row = env.get_dataset()[0]

    async def main() -> list[vf.State]:
        sem = asyncio.Semaphore(1)
        first = await env.run_rollout(sem, row, openai_mock("\\boxed{0}"), "m", {"n": 1})
        second = await env.run_rollout(sem=sem, input=row, client=openai_mock("\\boxed{0}"), model="m")
        await env.rubric.score_rollout(first, score_sem=sem)
        return [first, second]

    first, second = asyncio.run(main())
    assert (first["reward"], first["sampling_args"]["n"]) == (1.0, 1)
    assert second["reward"] is None
    assert second["completion"]


def test_a_host_of_0_1_10_gets_plain_data_with_the_columns_it_names() -> None:
    env = load_arithmetic()
    row = env.get_dataset(n=1)[0]
    client = HostClient(with_tokens("\\boxed{0}", [1, 2], [3]))

    async def main() -> tuple[Any, Any, Any]:
        shape = {"client": client, "model": "m", "sampling_args": {"temperature": 0.5}, "max_retries": 2}
        group = await env.run_group([row, row], **shape, state_columns=["trajectory"], env_client=None)
        one = await env.run_rollout(row, **shape, state_columns=["trajectory"])
        state = await env.run_rollout(row, client, "m", {}, 2)  # the fifth argument is a number of retries
        return group, one, state

    group, one, state = asyncio.run(main())
    for output in (*group, one):
        assert isinstance(output, vf.RolloutOutput)
        assert (output["reward"], output["metrics"]["correct"], output["error"]) == (1.0, 1.0, None)
        assert output["is_completed"]
        assert output["timing"]["total_ms"] > 0
        assert output["trajectory"][0]["tokens"]["completion_ids"] == [3]
        assert json.loads(json.dumps(output)) == output
    assert client.requests[0]["temperature"] == 0.5
    assert isinstance(state, vf.State)
    assert state["reward"] == 1.0


def test_a_rollout_that_failed_is_played_again_as_often_as_a_host_says() -> None:
    env = load_arithmetic()
    row = env.get_dataset()[0]

    def flaky() -> vf.FakeClient:
        return vf.FakeClient([vf.ServerError("down"), vf.ServerError("down"), "\\boxed{0}"])

    assert [state["reward"] for state in env.run_group([row], flaky(), "m", max_retries=2)] == [1.0]
    group = env.run_group([row], flaky(), "m", max_retries=1)
    assert (list(group), [str(state["error"]) for state in group.failed]) == ([], ["down"])
    with pytest.raises(ValueError, match="max_retries=-1"):
        env.run_group([row], flaky(), "m", max_retries=-1)


def test_a_group_that_is_scored_again_keeps_the_rewards_that_its_turns_were_given() -> None:
    class Late(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: vf.State) -> str:
            state["trajectory"][-1]["reward"] = float(len(state["trajectory"]) == 2)
            return "next"

        @vf.stop
        def is_over(self, state: vf.State) -> bool:
            return len(state["trajectory"]) == 2 and state["trajectory"][-1]["reward"] is not None

    def summed(state: vf.State) -> float:
        return sum(step["reward"] or 0.0 for step in state["trajectory"])

    def moody(state: vf.State) -> float:
        asked.append(state)
        if len(asked) == 1:
            raise ConnectionError("the grader is down")
        return 0.0

    asked: list[vf.State] = []
    env = Late(dataset=[{"question": "?"}], rubric=vf.Rubric([summed, moody]))
    row = env.get_dataset()[0]
    group = env.run_group([row, row], vf.FakeClient("x"), "m", max_retries=1)
    assert [state["reward"] for state in group] == [1.0, 1.0]
    assert [[step["reward"] for step in state["trajectory"]] for state in group] == [[0.0, 1.0]] * 2


def test_a_reward_that_failed_is_asked_again_and_the_rollout_is_not_played_again() -> None:
    tries: list[str] = []

    def moody(completion: vf.Messages, answer: str) -> float:
        tries.append(answer)
        if len(tries) == 1:
            raise ConnectionError("the grader is away")
        return 1.0

    env = vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "q", "answer": "a"}]), rubric=vf.Rubric([moody]))
    client = vf.FakeClient(["once"])
    (state,) = env.run_group([env.get_dataset()[0]], client, "m", max_retries=1)
    assert (state["reward"], state["error"], len(tries)) == (1.0, None, 2)
    assert [step["reward"] for step in state["trajectory"]] == [1.0]


def test_what_a_trainer_receives_has_a_number_for_a_reward_and_failures_are_left_out() -> None:
    def broken(completion: vf.Messages, answer: str) -> float:
        if completion[-1]["content"] == "bad":
            raise KeyError("no such thing")
        return 1.0

    env = vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "q", "answer": "a"}]), rubric=vf.Rubric([broken]))
    row = env.get_dataset()[0]
    group = env.run_group([row] * 3, vf.FakeClient(["good", "bad", "good"]), "m")
    assert [state["reward"] for state in group] == [1.0, 1.0]
    assert [step["reward"] for state in group for step in state["trajectory"]] == [1.0, 1.0]
    assert [type(state["error"]) for state in group.failed] == [vf.GraderError]

    async def workflow() -> float:
        """As rLLM's: it plays, scores with a semaphore of its own, and makes a step with a float."""
        from verifiers.utils.async_utils import maybe_semaphore

        state = await env.rollout(input=row, client=vf.FakeClient("bad"), model="m", sampling_args={})
        await env.rubric.score_rollout(state, score_sem=await maybe_semaphore(-1))
        return float(state["reward"])

    with pytest.raises(vf.GraderError, match="no such thing"):
        asyncio.run(workflow())
    with pytest.raises(vf.GraderError, match="no such thing"):
        env.run_rollout(row, vf.FakeClient("bad"), "m", score=True)


def test_calls_of_hosts_that_say_two_things_are_refused() -> None:
    env = load_arithmetic()
    row = env.get_dataset()[0]
    client = vf.FakeClient("x")
    with pytest.raises(TypeError, match="two names for the same argument"):
        env.run_group([row], client, "m", sampling_args={"n": 1}, gen_sampling_args={"n": 2})
    with pytest.raises(TypeError, match="'client' twice"):
        env.run_group([row], client, "m", client=client)
    with pytest.raises(TypeError, match="needs group_inputs"):
        env.run_group(client=client, model="m")
    with pytest.raises(TypeError, match="state_columns must be a list of names"):
        env.run_group([row], client, "m", state_columns="trajectory")
    with pytest.warns(UserWarning, match="run_group: priority= has no effect"):
        env.run_group([row], client, "m", priority=3)


def test_the_response_of_a_step_is_openais_object() -> None:
    env = load_arithmetic()
    for client in (vf.FakeClient("\\boxed{0}", tokens=True), HostClient(with_tokens("\\boxed{0}", [1], [2]))):
        step = env.evaluate(client, **quiet(num_examples=1))["state"][0]["trajectory"][0]
        response = step["response"]
        assert isinstance(response, ChatCompletion)
        assert isinstance(response, vf.ChatCompletion)
        dumped = response.model_dump()
        assert dumped["choices"][0]["message"]["content"] == "\\boxed{0}"
        assert ChatCompletion.model_validate(dumped).choices[0].finish_reason == "stop"
        assert step.get("response") is response
    with vf.FakeServer("\\boxed{0}") as server:
        sdk = AsyncOpenAI(base_url=server.url, api_key="none")
        response = env.evaluate(sdk, **quiet(num_examples=1))["state"][0]["trajectory"][0]["response"]
    assert isinstance(response, ChatCompletion)
    assert response.usage.total_tokens > 0


def test_rollouts_are_saved_and_loaded_by_the_helpers_of_0_1_10(tmp_path: Path) -> None:
    from verifiers.envs.environment import get_results_path
    from verifiers.utils import save_utils

    env = load_arithmetic()
    results = env.evaluate(openai_mock("\\boxed{0}"), **quiet())
    path = get_results_path("sums", "org/m", base_path=tmp_path)
    assert path.parent == tmp_path / "evals" / "sums--org--m"
    outputs = save_utils.states_to_outputs(results["state"], ["turn"])
    save_utils.save_outputs(outputs[:2], path)
    save_utils.save_new_outputs(outputs[2:], path)
    save_utils.save_metadata({"env_id": "sums", "path_to_save": path, "error": ValueError("x")}, path)
    with (path / "results.jsonl").open("a") as file:
        file.write('{"cut o')
    loaded = save_utils.load_outputs(path)
    assert [(output["reward"], output["turn"]) for output in loaded] == [(1.0, 1), (0.0, 1), (0.0, 1), (0.0, 1)]
    assert json.loads((path / "metadata.json").read_text()) == {"env_id": "sums", "error": "ValueError('x')"}


def test_a_trainer_of_0_1_5_makes_one_batch_out_of_an_environments_rollouts() -> None:
    env = load_arithmetic()
    results = env.evaluate(HostClient(with_tokens("\\boxed{0}", [1, 2], [3, 4])), **quiet(num_examples=2))
    columns = [results[name] for name in ("prompt", "completion", "state", "reward")]
    batch = env.process_env_results_vllm(*columns, processing_class=None, max_seq_len=-1, mask_env_responses=True)
    assert batch["completion_ids"] == [[3, 4]] * 2
    assert batch["rewards"] == [1.0, 0.0]
    cut = env.process_env_results_vllm(
        *columns, None, max_seq_len=3, mask_truncated_completions=True, zero_truncated_completions=True
    )
    assert (cut["completion_mask"], cut["rewards"]) == ([[0]] * 2, [0.0, 0.0])
    with pytest.warns(UserWarning, match="mask_env_responses=False has no effect"):
        env.process_env_results_vllm(*columns, None, mask_env_responses=False)
