"""One question, one reply: the environment most people start with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import verifiers as vf


def test_a_whole_evaluation_in_a_few_lines() -> None:
    parser = vf.XMLParser(["reasoning", "answer"])

    def correct(completion: Any, answer: str, **kwargs: Any) -> bool:
        return bool(parser.parse(completion).answer == answer)

    env = vf.SingleTurnEnv(
        [{"prompt": "2+2?", "answer": "4", "task": "arithmetic"}, {"prompt": "3+3?", "answer": "7"}],
        system_prompt="Use tags.",
        parser=parser,
        rubric=vf.Rubric(funcs=[correct, parser.get_format_reward_func()], weights=[0.9, 0.1], parser=parser),
    )
    client = vf.FakeClient(lambda m: "<reasoning>\nr\n</reasoning>\n<answer>\n4\n</answer>")
    results = env.evaluate(client=client, model="m", rollouts_per_example=2, use_tqdm=False)
    assert results["rewards"] == pytest.approx([1.0, 1.0, 0.1, 0.1])
    assert results["tasks"] == ["arithmetic", "arithmetic", "default", "default"]
    assert [s["stop_condition"] for s in results.states] == ["max_turns_reached"] * 4
    assert results["num_turns"] == [1.0] * 4


def test_the_model_speaks_once_whatever_it_says() -> None:
    client = vf.FakeClient("I am not done yet")
    env = vf.SingleTurnEnv(dataset=[{"question": "x"}])
    state = env.rollout(env.dataset[0], client, "m")  # type: ignore[index]
    assert len(client.requests) == 1
    assert len(state["completion"]) == 1


def test_more_turns_need_an_answer_of_the_environment() -> None:
    with pytest.raises(TypeError, match="must define env_response"):
        vf.SingleTurnEnv(dataset=[{"question": "x"}], max_turns=3)


def test_a_real_server_gives_the_same_as_the_fake_client() -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": str(i), "answer": str(i)} for i in range(20)])
    with vf.FakeServer(lambda messages: messages[-1]["content"], tokens=True) as server:
        plain = env.evaluate(client=server.url, model="m", use_tqdm=False)

        async def main() -> Any:
            return await env.evaluate(client=server.url, model="m", use_tqdm=False)

        awaited = asyncio.run(main())
    assert (
        plain["completions"]
        == awaited["completions"]
        == [[{"role": "assistant", "content": str(i)}] for i in range(20)]
    )
    assert plain.states[0]["trajectory"][0]["tokens"]["completion_ids"][0] == ord("0")
    assert plain.usage.completion_tokens == awaited.usage.completion_tokens > 0
