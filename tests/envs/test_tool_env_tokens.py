"""Tool turns with a model in this process: what it sampled is trained on, what the tools said is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from verifiers.clients.protocol import Completion, Request  # noqa: E402
from verifiers.engine import LocalModel  # noqa: E402
from verifiers.samples import samples_of  # noqa: E402


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Told:
    """A local model that says these texts one after the other, sampled token by token as any other reply."""

    def __init__(self, replies: list[str]) -> None:
        self.tokenizer = tiny.tokenizer(tiny.HERMES)
        module = tiny.model(self.tokenizer, context=2048)
        self.script = tiny.Scripted(module)
        self.local = LocalModel(module, self.tokenizer, rows=2, name="tiny")
        self.replies = iter(replies)

    async def complete(self, request: Request) -> Completion:
        _, shown = self.local.load().writer.prompt(request.prompt, request.tools)
        ids = self.tokenizer.encode(next(self.replies) + "<|im_end|>", add_special_tokens=False)
        self.script.say(ids, after=len(shown))
        return await self.local.complete(request)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


@pytest.fixture
def told() -> Iterator[Any]:
    made: list[Told] = []

    def make(*replies: str) -> Told:
        made.append(Told(list(replies)))
        return made[-1]

    yield make
    for one in made:
        one.local.close()


def roll_out(env: vf.ToolEnv, client: Told) -> vf.State:
    row = {"question": "2 + 3?", "answer": "5"}
    state: vf.State = env.rollout(row, client, "tiny", sampling_args={"temperature": 0, "max_tokens": 400})
    assert state["error"] is None
    return state


def masked(sample: Any, mask: int) -> list[int]:
    return [
        token for token, is_said in zip(sample.completion_ids, sample.completion_mask, strict=True) if is_said == mask
    ]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def test_native_calls_give_one_sample_in_which_results_are_masked(told: Any) -> None:
    client = told(CALL, "the answer is 5")
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "2 + 3?"}])
    state = roll_out(env, client)
    assert [message["role"] for message in state["completion"]] == ["assistant", "tool", "assistant"]
    (sample,) = samples_of(state["trajectory"])
    assert client.text(masked(sample, 1)) == f"{CALL}<|im_end|>the answer is 5<|im_end|>"
    between = client.text(masked(sample, 0))
    assert "<|im_start|>tool\n5<|im_end|>" in between
    assert "answer is" not in between
    steps = [step["tokens"] for step in state["trajectory"]]
    assert masked(sample, 1) == [token for step in steps for token in step["completion_ids"]]
    logprobs = [x for x, is_said in zip(sample.completion_logprobs, sample.completion_mask, strict=True) if is_said]
    assert logprobs == [x for step in steps for x in step["completion_logprobs"]]


def test_a_call_that_the_template_would_write_otherwise_splits_the_rollout_and_masks_nothing_sampled(told: Any) -> None:
    odd = CALL.replace('": ', '":')
    state = roll_out(vf.ToolEnv(tools=[add], dataset=[{"question": "?"}]), client := told(odd, "5"))
    assert state["completion"][1]["content"] == "5"
    first, second = samples_of(state["trajectory"])
    assert client.text(first.completion_ids) == f"{odd}<|im_end|>"
    assert client.text(second.completion_ids) == "5<|im_end|>"
    assert set(first.completion_mask) == set(second.completion_mask) == {1}


def test_calls_in_tags_give_one_sample_in_which_results_are_masked_however_the_call_is_written(told: Any) -> None:
    call = '<reasoning>add</reasoning> <tool>{"name":"add",  "args":{"a":2,"b":3}}</tool>'
    client = told(call, "<tool>{oops", "<answer>5</answer>")
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "?"}], parser=vf.XMLParser(["reasoning", ("tool", "answer")]))
    state = roll_out(env, client)
    assert state["stop_condition"] == "answer_given"
    (sample,) = samples_of(state["trajectory"])
    assert client.text(masked(sample, 1)) == f"{call}<|im_end|><tool>{{oops<|im_end|><answer>5</answer><|im_end|>"
    between = client.text(masked(sample, 0))
    assert "<result>\n5\n</result>" in between
    assert "is incomplete" in between


def test_a_call_cut_off_by_the_length_limit_ends_the_rollout_as_truncated(told: Any) -> None:
    env = vf.ToolEnv(tools=[add], dataset=[{"question": "?"}])
    row = {"question": "2 + 3?", "answer": "5"}
    state = env.rollout(row, told(CALL), "tiny", sampling_args={"temperature": 0, "max_tokens": 20})
    assert (state["error"], state["stop_condition"], state["is_truncated"]) == (None, "no_tools_called", True)
