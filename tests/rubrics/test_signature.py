"""A reward function's signature decides what it is given; one that cannot be served is refused when it is added."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import GraderError
from verifiers.parsers import Parser
from verifiers.rubrics import Rubric, cpu_bound, group_reward
from verifiers.rubrics.signature import Plan, as_score, name_of
from verifiers.types import State


def state(**fields: Any) -> State:
    row = {"prompt": "2+2?", "answer": "4", "task": "sums", "info": {"level": 1}, "example_id": 7}
    return State({"input": row, "completion": "4", "trajectory": [], **fields})


def test_a_function_gets_what_it_names_and_nothing_else() -> None:
    def reward(answer, completion): ...

    plan = Plan(reward, {"parser": Parser()})
    assert plan.arguments(state(), {}) == {"answer": "4", "completion": "4"}


def test_a_function_with_kwargs_gets_everything() -> None:
    def reward(completion, **kwargs): ...

    parser = Parser()
    given = Plan(reward, {"parser": parser}).arguments(state(), {"parser": parser})
    assert given.keys() == {"prompt", "completion", "answer", "state", "task", "info", "parser"}
    assert given["parser"] is parser
    assert given["info"] == {"level": 1}


def test_missing_fields_have_harmless_values() -> None:
    def reward(prompt, completion, answer, task, info): ...

    given = Plan(reward, {}).arguments(State(), {})
    assert given == {"prompt": None, "completion": None, "answer": "", "task": "default", "info": {}}


def test_an_unknown_argument_is_refused_and_the_message_says_what_there_is() -> None:
    def reward(completion, tokenizer): ...

    with pytest.raises(
        TypeError, match=r"'reward' has unknown arguments \['tokenizer'\]; it may have prompt, completion.*parser"
    ):
        vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.RubricGroup([Rubric(), Rubric(funcs=[reward])]))


@pytest.mark.parametrize("wrong", ["anwser", "completionss", "promt", "tokeniser"])
def test_a_misspelled_argument_is_refused_when_the_function_is_added(wrong: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def reward(completion, {wrong}): ...", namespace)
    with pytest.raises(TypeError, match=rf"has unknown arguments \['{wrong}'\]"):
        Rubric(funcs=[namespace["reward"]], class_objects={"tokenizer": 1})
    with pytest.raises(TypeError, match=rf"has unknown arguments \['{wrong}'\]"):
        Rubric(class_objects={"tokenizer": 1}).add_reward_func(namespace["reward"])


@pytest.mark.parametrize("how", ["item", "all", "method"])
@pytest.mark.parametrize("takes", ["by name", "with a default", "kwargs"])
def test_objects_may_be_added_after_the_functions_that_use_them(how: str, takes: str) -> None:
    def by_name(completion, scale): return scale  # fmt: skip

    def with_default(completion, scale=0.0): return scale  # fmt: skip

    def by_kwargs(completion, **kwargs): return kwargs.get("scale", 0.0)  # fmt: skip

    rubric = Rubric(parser=vf.Parser())
    rubric.add_reward_func({"by name": by_name, "with a default": with_default, "kwargs": by_kwargs}[takes])
    if takes != "by name":
        assert rubric.score_rollout_sync("", "", "", {})["reward"] == 0.0
    if how == "item":
        rubric.class_objects["scale"] = 0.5
    elif how == "all":
        rubric.class_objects = {"parser": rubric.parser, "scale": 0.5}
    else:
        rubric.add_class_object("scale", 0.5)
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=rubric)
    assert env.evaluate(vf.FakeClient("a"), "fake", use_tqdm=False)["reward"] == [0.5]


def test_an_object_that_is_never_added_is_missed_before_anything_is_scored() -> None:
    def reward(completion, tokenizer): ...

    rubric = Rubric(funcs=[reward])
    with pytest.raises(TypeError, match="unknown arguments"):
        rubric.score_rollout_sync("", "", "", {})


def test_an_unknown_argument_with_a_default_keeps_it() -> None:
    def reward(completion, threshold=0.5): ...

    assert Plan(reward, {}).args == ("completion",)


def test_a_positional_only_argument_cannot_be_injected() -> None:
    def reward(completion, /): ...

    with pytest.raises(TypeError, match="has unknown arguments"):
        Plan(reward, {})


def test_what_is_not_callable_or_cannot_be_read_is_refused() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        Plan("exact_match", {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wrap it in a Python function"):
        Plan(type, {})


def test_plural_names_or_the_decorator_make_a_group_reward() -> None:
    def by_names(completions, answers): ...

    @group_reward
    def declared(states): ...

    def single(completion): ...

    assert Plan(by_names, {}).is_group
    assert Plan(declared, {}).is_group
    assert not Plan(single, {}).is_group
    given = Plan(by_names, {}).group_arguments([state(), state(completion="5")], {})
    assert given == {"completions": ["4", "5"], "answers": ["4", "4"]}


def test_a_group_reward_that_asks_for_one_rollouts_field_is_refused() -> None:
    def mixed(completions, answer): ...

    with pytest.raises(TypeError, match=r"\['answer'\]; it may have prompts, completions"):
        Plan(mixed, {})


def test_partials_methods_and_objects_are_functions_too() -> None:
    class Judge:
        def __call__(self, completion): ...

        def method(self, completion, answer): ...

    def reward(completion, threshold): ...

    assert Plan(Judge(), {}).args == ("completion",)
    assert Plan(Judge().method, {}).args == ("completion", "answer")
    assert name_of(Judge()) == "Judge"
    bound = functools.partial(reward, threshold=0.5)
    assert Plan(bound, {}).args == ("completion",)
    assert name_of(bound) == "reward"


def test_cpu_bound_may_carry_a_limit_of_its_own() -> None:
    @cpu_bound
    def slow(completion): ...

    @cpu_bound(timeout_s=2.5)
    def slower(completion): ...

    assert Plan(slow, {}).is_cpu_bound
    assert Plan(slow, {}).hook.limit_s == 600.0
    assert Plan(slower, {}).hook.timeout_s == 2.5
    assert not Plan(len_of, {}).is_cpu_bound


def len_of(completion): ...


@pytest.mark.parametrize(("value", "score"), [(True, 1.0), (False, 0.0), (3, 3.0), (0.25, 0.25)])
def test_what_reads_as_a_number_is_a_score(value: Any, score: float) -> None:
    result = as_score(value, "reward")
    assert result == score
    assert type(result) is float


@pytest.mark.parametrize(
    "value", [None, "yes", "1.0", b"1.0", [1.0], float("nan"), float("inf"), -float("inf"), 1e101, 10**400, object()]
)
def test_what_is_no_finite_number_is_the_graders_failure(value: Any) -> None:
    with pytest.raises(GraderError, match="reward 'exact' returned"):
        as_score(value, "exact")
