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
    assert states[0]["trajectory"][0]["tokens"] == {
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
