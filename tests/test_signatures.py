"""Functions whose annotations cannot be evaluated: names for type checkers only, and names defined elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import verifiers as vf

if TYPE_CHECKING:
    from nowhere import Thing

late_annotations = pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated early before 3.14")

LATE = """
from typing import TYPE_CHECKING

import verifiers as vf

if TYPE_CHECKING:
    from nowhere import Thing


def good(completion: Thing, answer: list[Thing]) -> Thing:
    return 1.0


def add(a: int, b: Thing, c: list[Thing]) -> Thing:
    '''Add.'''
    return str(a)


def model(request: Thing) -> Thing:
    return "hello"


class Talk(vf.MultiTurnEnv):
    def __init__(self, greeting: Thing = "go on", **kwargs: Thing) -> None:
        super().__init__(**kwargs)
        self.greeting = greeting

    def is_completed(self, messages: Thing, state: Thing) -> Thing:
        return len(messages) > 2

    def env_response(self, messages: Thing, state: Thing) -> Thing:
        return self.greeting


def load_environment(greeting: Thing = "go on") -> Thing:
    return Talk(greeting, dataset=[{"question": "q", "answer": "a"}], rubric=vf.Rubric([good]))


def solve(rows: Thing, state: Thing) -> Thing:
    return "hello"


@vf.cpu_bound
def in_a_worker(completion: Thing) -> Thing:
    class Seen:
        what: Thing

    return 1.0 if Seen() and Local().value(1) else 0.0


class Local:
    kept: Thing

    def value(self, number: Thing) -> Thing:
        return number
"""


@pytest.fixture
def late(tmp_path: Path) -> ModuleType:
    (tmp_path / "late_env.py").write_text(LATE)
    spec = importlib.util.spec_from_file_location("late_env", tmp_path / "late_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@late_annotations
def test_an_environment_may_annotate_with_names_that_exist_for_type_checkers_only(late: ModuleType) -> None:
    results = late.load_environment().evaluate(vf.FakeClient(late.model), "fake", num_examples=1)
    assert not results.failed
    assert results["rewards"] == [1.0]
    assert [message["content"] for message in results["completions"][0]] == ["hello", "go on"]


@late_annotations
def test_a_reward_in_a_worker_process_may_annotate_with_names_that_exist_for_type_checkers_only(
    late: ModuleType,
) -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.Rubric([late.in_a_worker]))
    results = env.evaluate(vf.FakeClient("hello"), "fake")
    assert not results.failed, results.failed
    assert results["rewards"] == [1.0]


@late_annotations
def test_a_tool_keeps_the_types_that_exist_if_its_annotations_are_evaluated_late(late: ModuleType) -> None:
    properties = vf.tools.as_tool(late.add).schema["function"]["parameters"]["properties"]
    assert properties == {"a": {"type": "integer"}, "b": {}, "c": {}}


def test_a_tool_keeps_the_types_that_exist_if_one_of_its_annotations_names_what_does_not() -> None:
    def add(a: int, b: Thing, c: list[str] | None = None) -> str:
        return str(a)

    tool = vf.tools.as_tool(add)
    strings = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    assert tool.schema["function"]["parameters"]["properties"] == {"a": {"type": "integer"}, "b": {}, "c": strings}
    assert tool.check({"a": "3", "b": [1]}) == {"a": 3, "b": [1]}


@dataclass
class Point:
    x: int
    y: Thing


def test_a_tool_with_a_field_of_a_type_that_does_not_exist_is_refused_with_what_to_do() -> None:
    def move(to: Point) -> str:
        return ""

    with pytest.raises(TypeError, match="fields of 'Point', which a tool takes, cannot be evaluated: name 'Thing'"):
        vf.tools.as_tool(move)
