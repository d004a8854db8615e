"""Agents of others are trained with GRPO as they are: exact tokens, sub-agents included, and a reward that goes up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import verifiers as vf
from tests.engine import tiny
from tests.trainers import making
from verifiers.samples import samples_of


async def streaming_agent(base_url: str, api_key: str, prompt: Any) -> str:
    """As somebody may have written it for another model: it streams, names a model, and asks twice."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        draft = await client.chat.completions.create(model="gpt-4o", messages=prompt, temperature=0.2)
        text = ""
        messages = [*prompt, {"role": "assistant", "content": draft.choices[0].message.content}]
        messages.append({"role": "user", "content": "say it again"})
        async for chunk in await client.chat.completions.create(model="gpt-4o", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text


def agent_env(run: Any = streaming_agent, **kwargs: Any) -> vf.AgentEnv:
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(16)]
    return vf.AgentEnv(run=run, dataset=rows, rubric=vf.Rubric([making.share_of_e]), **kwargs)


def test_an_agent_of_the_openai_sdk_is_trained_without_a_changed_line_and_its_reward_goes_up(tmp_path: Path) -> None:
    trainer = making.trainer(tmp_path, env=agent_env(), learning_rate=0.03, max_steps=12)
    report = trainer.train()
    rewards = report.rewards
    for step in report.steps:  # on-policy: what was learned from is what was sampled
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards


def test_the_turns_of_an_agent_have_the_tokens_that_the_engine_sampled_and_the_runs_temperature() -> None:
    tokenizer = tiny.tokenizer()
    with vf.LocalModel(tiny.model(tokenizer), tokenizer) as model:
        args = {"temperature": 1.0, "max_tokens": 6, "seed": 3}
        results = agent_env().evaluate(client=model, num_examples=2, sampling_args=args, use_tqdm=False)
        assert not results.failed
        for state in results.rollouts:
            for step in state["trajectory"]:
                tokens = step["tokens"]
                assert tokens["sampling"]["temperature"] == 1.0
                assert len(tokens["completion_ids"]) <= 6
                said = model.load().codec.continuation(tokens["prompt_ids"], tokens["completion_ids"])
                assert said.startswith(step["completion"][0]["content"])
            learned = sum(sum(sample.completion_mask) for sample in samples_of(state["trajectory"]))
            assert learned == sum(len(step["tokens"]["completion_ids"]) for step in state["trajectory"])


def test_advantages_by_turn_reach_the_turns_they_are_of_where_a_sub_agent_was_asked_in_between() -> None:
    from verifiers.trainers.learning.sequences import advantages_of_samples

    def step(prompt: list[int], reply: list[int]) -> dict[str, Any]:
        tokens = {"prompt_ids": prompt, "completion_ids": reply, "completion_logprobs": [-1.0] * len(reply)}
        return {"tokens": tokens}

    trajectory = [step([1, 2], [3]), step([7], [8, 9]), step([1, 2, 3, 4], [5, 6])]
    samples = samples_of(trajectory)
    assert [sample.steps for sample in samples] == [(0, 2), (1,)]
    spread = advantages_of_samples([0.1, 0.2, 0.3], samples, {"trajectory": trajectory})
    assert spread == [[0.1, 0.0, 0.3, 0.3], [0.2, 0.2]]
    by_token = advantages_of_samples([1.0, 2.0, 3.0, 4.0, 5.0], samples, {"trajectory": trajectory})
    assert by_token == [[1.0, 0.0, 4.0, 5.0], [2.0, 3.0]]
