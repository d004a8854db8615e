"""Whatever a model writes: every parser and tool of ours answers at once, and never raises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import verifiers as vf
from verifiers.parsers import extract_boxed_answer, extract_hash_answer, strip_non_numeric
from verifiers.rubrics.judge_template import Template, read_score
from verifiers.tools import ask, calculator, search
from verifiers.tools.protocols import tagged_calls

MILLION = 1_000_000
TEXTS = {
    "digits": "9" * MILLION,
    "braces": "{" * MILLION,
    "boxes": "\\boxed{" * (MILLION // 7),
    "closed boxes": ("\\boxed{" * 500 + "}" * 500) * 250,
    "opening tags": "<answer>" * (MILLION // 8),
    "pairs of tags": "<answer></answer>" * (MILLION // 17),
    "thoughts": "<think>" * (MILLION // 14) + "</think>" * (MILLION // 14),
    "scores": "<score>1</score>" * (MILLION // 16),
    "a long score": "<score>" + "9" * MILLION + "</score>",
    "points in a score": "<score>" + "1." * (MILLION // 2) + "</score>",
    "calls": "<tool>" * (MILLION // 6),
    "broken calls": "<tool>{" * (MILLION // 7),
    "a deep call": "<tool>" + "[" * MILLION,
    "calls in strings": '<tool>{"a":"' * (MILLION // 12),
    "hashes": "####" * (MILLION // 4),
    "spaces": " " * MILLION,
    "nulls": "\0" * MILLION,
    "superscripts": "²" * 1000,
    "half surrogate pairs": "\ud800" * 1000,
    "a power tower": "9**9**9**9",
    "factorials": "factorial(500)" + "*factorial(500)" * 120,
    "nested calls": "abs(" * 400 + "1" + ")" * 400,
    "python": "().__class__.__mro__[1].__subclasses__()",
}
XML = vf.XMLParser(["reasoning", ("tool", "answer")])
DOCUMENTS = search(["Otters eat fish.", "Hares eat grass."]).function


def reply(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


READERS: dict[str, Callable[[str], Any]] = {
    "Parser": lambda text: vf.Parser(extract_boxed_answer).parse_answer(reply(text)),
    "MaybeThinkParser": lambda text: vf.MaybeThinkParser(extract_boxed_answer).parse_answer(reply(text)),
    "ThinkParser": lambda text: vf.ThinkParser().parse_answer(reply(text)),
    "the format of ThinkParser": lambda text: vf.ThinkParser().get_format_reward_func()(reply(text)),
    "XMLParser": lambda text: XML.parse_answer(reply(text)),
    "the format of XMLParser": lambda text: XML.get_format_reward_func()(reply(text)),
    "extract_hash_answer": extract_hash_answer,
    "strip_non_numeric": strip_non_numeric,
    "a judge's score": lambda text: read_score(text, (0, 10)),
    "a judge's prompt": lambda text: Template("<r>{response}</r>").render({"response": text}),
    "calls in tags": tagged_calls,
    "calculator": calculator,
    "search": DOCUMENTS,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_any_text_is_read_at_once(read: Callable[[str], Any], text: str) -> None:
    began = time.process_time()
    read(text)
    assert time.process_time() - began < 1.0  # of a megabyte; a few hundredths on a machine that is not busy


def test_what_is_left_of_a_number_is_a_number() -> None:
    assert strip_non_numeric("x² = ٣ or 4.5") == "4.5"


def test_a_question_without_end_is_told_to_the_model_and_does_not_reach_the_other_model() -> None:
    client = vf.FakeClient("hello")
    with pytest.raises(vf.ToolError, match="the question has 1,000,000 characters; at most 100,000 are allowed"):
        asyncio.run(ask("helper", client).function("x" * MILLION))
    assert client.requests == []


@pytest.mark.parametrize(
    "arguments",
    ["[" * 100_000, "9" * 100_000, '{"expression": ' + "9" * 5000 + "}", '{"expression": "\\ud800"}', '"' * 999],
)
def test_arguments_that_cannot_be_read_are_told_to_the_model_and_the_rollout_is_scored(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    env = vf.ToolEnv(tools=[calculator], dataset=[{"question": "?", "answer": ""}])
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}, "done"]
    results = env.evaluate(vf.FakeClient(said), "fake", use_tqdm=False)
    assert results.failed == []
    assert results["completion"][0][1]["content"].startswith("Error: ")
