"""Our environments in TRL: what its trainer is handed, and (slow) its real trainer learning from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import verifiers as vf
from tests.support.venvs import python_with, run_contract
from verifiers.integrations.trl import Rollouts, ToolEnvironments


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [{"role": "user", "content": "again"}]


def long(completion: vf.Messages, answer: str) -> float:
    return float(len(completion) == int(answer))


def make_env(rows: Any = None, **kwargs: Any) -> vf.Environment:
    rows = rows or [{"question": "a?", "answer": "3"}, {"question": "b?", "answer": "1"}]
    return Twice(dataset=rows, rubric=vf.Rubric([long]), max_turns=2, **kwargs)


def make_trainer(**kwargs: Any) -> Any:
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "max_completion_length": 16}
    tokenizer = SimpleNamespace(eos_token_id=2, apply_chat_template=lambda prompt, **_: [1, 1])
    return SimpleNamespace(**{**settings, "processing_class": tokenizer, "use_vllm": False, **kwargs})


def test_each_prompt_gets_a_rollout_with_its_tokens_its_mask_and_its_reward() -> None:
    client = vf.FakeClient("yes", tokens=True)
    rollouts = Rollouts(make_env(), client=client)
    prompts = [row["prompt"] for row in rollouts.dataset() for _ in range(2)]
    out = rollouts(prompts, make_trainer())
    assert out["vf_reward"] == [1.0, 1.0, 0.0, 0.0]
    for ids, mask, logprobs in zip(out["completion_ids"], out["env_mask"], out["logprobs"], strict=True):
        assert len(ids) == len(mask) == len(logprobs)
        assert mask[0] == mask[-1] == 1
        assert 0 in mask  # what the environment said between the two replies
    assert rollouts.reward(completions=[None] * 4, vf_reward=out["vf_reward"]) == out["vf_reward"]
    assert out["vf_metrics"][0] == {"long": 1.0, "num_turns": 2.0}


def test_the_trainer_says_how_to_sample_and_ones_own_arguments_come_first() -> None:
    rollouts = Rollouts(make_env(), client="http://localhost:1/v1", sampling_args={"max_tokens": 4})
    assert rollouts.sampling(make_trainer(temperature=0.7)) == {"temperature": 0.7, "top_p": 1.0, "max_tokens": 4}
    with pytest.raises(ValueError, match="repetition_penalty"):
        rollouts.sampling(make_trainer(repetition_penalty=1.1))


def test_a_rollout_that_failed_has_no_reward_and_nothing_to_learn_from() -> None:
    def refuse(messages: Any) -> str:
        raise vf.RequestRefusedError("no")

    rollouts = Rollouts(make_env(), client=vf.FakeClient(refuse))
    out = rollouts([rollouts.dataset()[0]["prompt"]], make_trainer())
    assert out["vf_reward"] == [None]
    assert (out["prompt_ids"], out["completion_ids"], out["env_mask"]) == ([[1, 1]], [[2]], [[0]])


def test_rows_that_only_their_answers_tell_apart_are_refused_and_so_is_a_foreign_prompt() -> None:
    with pytest.raises(ValueError, match="same prompt"):
        Rollouts(make_env([{"question": "a?", "answer": "1"}, {"question": "a?", "answer": "2"}]))
    rollouts = Rollouts(make_env(), client=vf.FakeClient("yes", tokens=True))
    with pytest.raises(ValueError, match="no row"):
        rollouts([[{"role": "user", "content": "c?"}]], make_trainer())


def test_vllm_inside_of_trl_needs_a_client_of_its_own() -> None:
    rollouts = Rollouts(make_env())
    with pytest.raises(ValueError, match="pass client"):
        rollouts([rollouts.dataset()[0]["prompt"]], make_trainer(use_vllm=True))


def double(x: int, times: int = 1) -> int:
    """Twice a number.

    Args:
        x: The number.
        times: How often.
    """
    return x * 2**times


def right(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"] == answer)  # type: ignore[index, typeddict-item]


def test_tools_become_methods_of_trls_environments_and_the_rubric_scores_the_conversation() -> None:
    env = vf.ToolEnv(dataset=[{"question": "Double 21.", "answer": "42"}], tools=[double], rubric=vf.Rubric([right]))
    tools = ToolEnvironments(env)
    one, other = tools(), tools()
    for environment in (one, other):
        environment.reset(**tools.dataset()[0])
    assert one.double(x=21) == "42"
    assert "Twice a number." in one.double.__doc__
    assert "x: The number." in one.double.__doc__
    call = {"type": "function", "function": {"name": "double", "arguments": {"x": 21}}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "double", "content": "42"},
        {"role": "assistant", "content": "42"},
    ]
    wrong = [{"role": "assistant", "content": "41"}]
    assert tools.reward(completions=[said, wrong], environments=[one, other]) == [1.0, 0.0]
    one.reset(**tools.dataset()[0])
    assert not one._state["trajectory"]


def test_an_environment_without_tools_is_sent_to_the_other_way() -> None:
    with pytest.raises(TypeError, match="Rollouts"):
        ToolEnvironments(make_env())  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trl_itself_learns_token_for_token_leaves_failures_out_and_calls_our_tools(tmp_path: Path) -> None:
    python = python_with("trl", "torch==2.13.0", "trl==1.16.0")
    said = run_contract(python, "trl_contract.py", str(tmp_path))
    assert [line for line in said.splitlines() if line.endswith(": holds")] == [
        "learn: holds",
        "fail: holds",
        "call_tools: holds",
        "documented: holds",
    ]
