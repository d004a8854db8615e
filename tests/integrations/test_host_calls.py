"""The calls that trainers of others make on an environment: each release's shape, as its modules call it."""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from openai import AsyncOpenAI

import verifiers as vf
from tests.support.classic import HostClient, with_tokens
from verifiers.clients import NeMoRLChatCompletionsClient
from verifiers.envs.environment import get_results_path
from verifiers.types import GenerateOutputs, ProcessedOutputs, RolloutInput
from verifiers.utils import eval_utils, save_utils
from verifiers.utils.async_utils import maybe_semaphore

PRIME_SAMPLING = {"temperature": 1.0, "logprobs": True, "max_tokens": 8, "extra_body": {"return_token_ids": True}}


class Twice(vf.MultiTurnEnv):
    """The question, and then the same question again."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [{"role": "user", "content": "again"}]


def correct(completion: vf.Messages, answer: str, **kwargs: Any) -> float:
    return float(completion[-1]["content"] == answer)  # type: ignore[index, typeddict-item]


def make_env(**kwargs: Any) -> vf.Environment:
    rows = [{"question": f"What is {i}+{i}?", "answer": str(2 * i), "info": {"i": i}} for i in range(4)]
    dataset = Dataset.from_list(rows)
    return Twice(dataset=dataset, eval_dataset=dataset, rubric=vf.Rubric([correct]), max_turns=2, **kwargs)


def add(messages: Any) -> str:
    found = re.search(r"What is (\d+)", messages[0]["content"])
    assert found is not None
    return str(2 * int(found[1]))


class Tokenizer:
    """One token a character."""

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return [ord(c) for c in text] if tokenize else text


# --- prime-rl -----------------------------------------------------------------------------------------------------


def test_prime_rl_beside_0_1_3_generates_from_a_dict_of_lists_and_reads_the_batch_by_attribute() -> None:
    env = make_env()

    async def main() -> tuple[GenerateOutputs, ProcessedOutputs]:
        problems = [row for row in env.get_dataset(seed=1).to_list()[:2] for _ in range(2)]
        inputs = {key: [problem[key] for problem in problems] for key in ("prompt", "info", "task", "answer")}
        outputs = await env.a_generate(
            inputs=inputs, client=vf.FakeClient(add, tokens=True), model="m", sampling_args=PRIME_SAMPLING
        )
        batch = env.process_env_results_vllm(
            prompts=outputs.prompt,
            completions=outputs.completion,
            states=outputs.state,
            rewards=outputs.reward,
            processing_class=Tokenizer(),
            max_seq_len=512,
            mask_env_responses=True,
            zero_truncated_completions=False,
            mask_truncated_completions=False,
        )
        return outputs, batch

    outputs, batch = asyncio.run(main())
    assert outputs.reward == [1.0] * 4
    assert outputs.metrics["correct"] == [1.0] * 4
    assert batch.rewards == batch["rewards"] == [1.0] * 4
    assert [len(ids) for ids in batch.completion_ids] == [len(mask) for mask in batch.completion_mask]
    assert all(0 in mask and 1 in mask for mask in batch.completion_mask)
    with pytest.raises(AttributeError, match="completion_ids"):
        _ = batch.logits


def test_prime_rl_beside_0_1_5_generates_from_a_dataset_and_merges_outputs_by_column() -> None:
    env = make_env()

    async def main() -> GenerateOutputs:
        return await env.a_generate(
            inputs=Dataset.from_list([env.get_dataset().to_list()[1]] * 2),
            client=vf.FakeClient(add),
            model="m",
            sampling_args=PRIME_SAMPLING,
            max_concurrent=-1,
            use_tqdm=False,
        )

    outputs = asyncio.run(main())
    merged = GenerateOutputs(
        prompt=outputs.prompt * 2,
        completion=outputs.completion * 2,
        answer=outputs.answer * 2,
        state=outputs.state * 2,
        reward=outputs.reward * 2,
        info=outputs.info * 2,
        task=outputs.task * 2,
        metrics={name: values * 2 for name, values in outputs.metrics.items()},
    )
    assert merged.reward == [1.0] * 4
    assert merged.metrics["num_turns"] == [2.0] * 4


def test_prime_rl_groups_environments_by_name_and_sets_them_up() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two of these have no effect here, and say so
        group = vf.EnvGroup(envs=[make_env(), make_env()], env_names=["a", "b"], map_kwargs={"writer_batch_size": 1})
        group.set_interleaved_rollouts(True)
    group.set_max_seq_len(512)
    assert group.env_names == ["a", "b"]
    assert [env.max_seq_len for env in group.envs] == [512, 512]
    rows = group.get_dataset(seed=3).to_list()
    assert {row["task"] for row in rows} == {"a", "b"}
    assert len({row["example_id"] for row in rows}) == 8


def test_prime_rl_0_2_and_0_3_run_a_group_with_semaphores_and_one_rollout_semaphore_first() -> None:
    env = make_env()

    async def main() -> tuple[list[vf.State], vf.State]:
        semaphore = await maybe_semaphore(4)
        example = env.get_dataset().to_list()[2]
        client = vf.FakeClient(add, tokens=True)
        states = await env.run_group(
            group_inputs=[vf.RolloutInput(**example) for _ in range(2)],
            client=client,
            model="m",
            gen_sampling_args=PRIME_SAMPLING,
            gen_sem=semaphore,
            score_sem=semaphore,
        )
        state = await env.run_rollout(semaphore, vf.RolloutInput(**example), client, "m", PRIME_SAMPLING)
        await env.rubric.score_rollout(state, score_sem=semaphore)
        return states, state

    states, state = asyncio.run(main())
    assert [one["reward"] for one in (*states, state)] == [1.0] * 3
    flat = {field: states[0]["input"][field] for field in vf.State.INPUT_FIELDS if field in states[0]["input"]}
    assert flat["answer"] == "4"
    assert len(states[0]["trajectory"][1]["tokens"]["completion_ids"]) == 2
    assert states[0]["trajectory"][0]["response"].model_dump()["choices"]


def test_prime_rl_0_4_asks_for_outputs_with_columns_and_retries() -> None:
    env = make_env()

    async def main() -> tuple[list[vf.RolloutOutput], vf.RolloutOutput]:
        row = vf.RolloutInput(**env.get_dataset().to_list()[2])
        client = vf.FakeClient(add, tokens=True)
        outputs = await env.run_group(
            group_inputs=[row, row],
            client=client,
            model="m",
            sampling_args=PRIME_SAMPLING,
            max_retries=1,
            state_columns=["trajectory"],
        )
        one = await env.run_rollout(row, client, "m", PRIME_SAMPLING, max_retries=1, state_columns=["trajectory"])
        return outputs, one

    outputs, one = asyncio.run(main())
    for output in (*outputs, one):
        assert isinstance(output, vf.RolloutOutput)
        assert output["reward"] == 1.0
        assert output["error"] is None
        assert [len(step["tokens"]["completion_ids"]) for step in output["trajectory"]] == [2, 2]
        json.dumps(output)


def test_a_rollout_that_failed_is_given_with_its_error_to_hosts_that_gather_many_of_them() -> None:
    env = make_env()

    def refuse(messages: Any) -> str:
        raise vf.RequestRefusedError("no")

    async def main() -> vf.RolloutOutput:
        row = vf.RolloutInput(**env.get_dataset().to_list()[2])
        return await env.run_rollout(row, vf.FakeClient(refuse), "m", {}, max_retries=0, state_columns=["trajectory"])

    output = asyncio.run(main())
    assert output["reward"] is None
    assert output["error"]["error"] == "RequestRefusedError"


def test_rollouts_that_are_not_to_be_scored_have_a_zero_for_the_trainer() -> None:
    env = make_env()
    env.set_score_rollouts(False)
    row = vf.RolloutInput(**env.get_dataset().to_list()[2])
    states = env.run_group([row, row], vf.FakeClient(add), "m", sampling_args={})
    assert [(state["reward"], state["trajectory"][0]["reward"]) for state in states] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("home", [eval_utils, save_utils])
def test_prime_rl_saves_an_evaluation_that_it_gathered_itself(home: Any, tmp_path: Path) -> None:
    env = make_env(env_id="twice")
    rows = env.get_eval_dataset(n=2).to_list()
    outputs = [
        env.run_rollout(vf.RolloutInput(**row), vf.FakeClient(add), "m", {}, state_columns=["trajectory"])
        for row in rows
    ]
    results = env._prepare_rollout_results(
        all_states=outputs,
        model="m",
        client=AsyncOpenAI(base_url="http://user:a-long-password@localhost:1/v1", api_key="x"),
        state_columns=None,
        results_path=None,
        gen_sampling_args={"temperature": 1.0},
        start_time=0.0,
    )
    assert results["metadata"]["path_to_save"].parts[:3] == get_results_path("twice", "m").parts[:3]
    assert "a-long-password" not in str(results["metadata"]["base_url"])
    home.save_to_disk(home.make_dataset(results), home.sanitize_metadata(results["metadata"]), tmp_path / "run")
    saved = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in saved] == [1.0, 1.0]
    metadata = json.loads((tmp_path / "run" / "metadata.json").read_text())
    assert metadata["avg_reward"] == 1.0
    assert "date" not in metadata
    assert home.get_hf_hub_dataset_name(results) == "twice_m_n2_r1"


# --- SkyRL --------------------------------------------------------------------------------------------------------


def test_skyrl_generates_from_rollout_inputs_and_reads_the_batch_by_attribute() -> None:
    env = make_env()
    rows = env.get_dataset(2).map(lambda row, i: {**row, "data_source": "verifiers/x"}, with_indices=True)
    assert "data_source" in rows.column_names

    async def main() -> ProcessedOutputs:
        inputs = [
            RolloutInput(prompt=row["prompt"], answer=row["answer"], example_id=row["example_id"], info={}, task="t")
            for row in rows
            for _ in range(2)
        ]
        sampling = {"logprobs": True, "top_logprobs": 1, "extra_body": {"return_tokens_as_token_ids": True}}
        outputs = await env.generate(
            inputs=inputs, client=vf.FakeClient(add, tokens=True), model="m", sampling_args=sampling
        )
        return env.process_env_results_vllm(
            prompts=outputs.prompt,
            completions=outputs.completion,
            states=outputs.state,
            rewards=outputs.reward,
            processing_class=Tokenizer(),
            max_seq_len=512,
            mask_env_responses=True,
        )

    batch = asyncio.run(main())
    assert len(batch.prompt_ids) == len(batch.completion_ids) == len(batch.completion_logprobs) == 4
    assert batch.rewards == [1.0] * 4
    assert [sum(mask) for mask in batch.completion_mask] == [4] * 4


# --- NeMo Gym -----------------------------------------------------------------------------------------------------


def nemo_reply(request: dict[str, Any]) -> Any:
    reply = with_tokens("4", [1, 2, 3], [4])
    message = reply.choices[0].message
    reply.choices[0].logprobs = None
    turn = len(request["messages"])
    for name, value in (
        ("prompt_token_ids", [turn]),
        ("generation_token_ids", [7, 8]),
        ("generation_log_probs", [-0.5, -1.0]),
    ):
        setattr(message, name, value)
    return reply


def test_nemo_gym_reads_tokens_out_of_messages_and_gives_them_back_with_the_next_turn() -> None:
    env, host = make_env(), HostClient(nemo_reply)

    async def main() -> list[vf.RolloutOutput]:
        row = vf.RolloutInput(prompt=[{"role": "user", "content": "What is 2+2?"}], answer="4", info={}, example_id=0)
        return await env.run_group(
            group_inputs=[row],
            client=NeMoRLChatCompletionsClient(host),
            model="m",
            sampling_args={"max_tokens": 8, "temperature": 1.0, "top_p": 1.0},
            state_columns=["trajectory"],
        )

    output = asyncio.run(main())[0]
    assert output["reward"] == 1.0
    tokens = [step["tokens"] for step in output["trajectory"]]
    assert [(one["prompt_ids"], one["completion_ids"], one["completion_logprobs"]) for one in tokens] == [
        ([1], [7, 8], [-0.5, -1.0]),
        ([3], [7, 8], [-0.5, -1.0]),
    ]
    earlier = host.requests[1]["messages"][1]
    assert (earlier["prompt_token_ids"], earlier["generation_token_ids"]) == ([1], [7, 8])
    assert earlier["generation_log_probs"] == [-0.5, -1.0]
    assert "generation_token_ids" not in output["completion"][0]


def test_the_first_of_a_group_that_failed_whole_says_why_there_is_none() -> None:
    def refuse(request: dict[str, Any]) -> Any:
        raise RuntimeError("the engine is gone")

    env = make_env()
    row = vf.RolloutInput(**env.get_dataset().to_list()[0])
    outputs = env.run_group([row], NeMoRLChatCompletionsClient(HostClient(refuse)), "m", sampling_args={})
    with pytest.raises(IndexError, match="the engine is gone"):
        outputs[0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda env: env.run_group("x", client=vf.FakeClient("4"), model="m"), "group_inputs must be a list of rows"),
        (lambda env: env.run_group([], client=vf.FakeClient(), model="m", max_retries="2"), "max_retries='2' must be"),
        (lambda env: env.set_max_seq_len("1024"), "max_seq_len='1024' must be a number of tokens"),
        (lambda env: env.set_max_seq_len(0), "max_seq_len=0 must be a number of tokens"),
        (
            lambda env: env.generate({"prompt": ["a", "b"], "answer": ["4"]}, client=vf.FakeClient("4"), model="m"),
            "the dataset's columns differ in length: {'prompt': 2, 'answer': 1}",
        ),
    ],
)
def test_a_host_that_calls_with_something_else_is_told_in_a_sentence_what_it_gave(call: Any, said: str) -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "2+2?", "answer": "4"}], rubric=vf.Rubric([lambda: 1.0]))
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        call(env)
    env.set_max_seq_len(-1)
    assert env.max_seq_len is None
