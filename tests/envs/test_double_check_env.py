"""Another look before an answer counts: which reply is scored, what is asked, and what is reported of it."""

from __future__ import annotations

from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.double_check_env import ARE_YOU_SURE, DoubleCheckEnv

ROWS = [{"question": "2+2?", "answer": "4"}]


def exact(parser: vf.Parser, completion: vf.Messages, answer: str) -> bool:
    return parser.parse_answer(completion) == answer


def play(reply: Any, **kwargs: Any) -> vf.State:
    env = DoubleCheckEnv(dataset=ROWS, rubric=vf.Rubric([exact]), **kwargs)
    results = env.evaluate(client=vf.FakeClient(reply), model="m", use_tqdm=False)
    assert not results.failed
    (state,) = results.rollouts
    assert isinstance(state, vf.State)
    return state


def test_the_second_answer_counts_and_the_change_is_reported() -> None:
    better, worse = play(["5", "4"]), play(["4", "5"])
    assert [message["content"] for message in better["completion"]] == ["5", ARE_YOU_SURE, "4"]
    assert (better["reward"], worse["reward"]) == (1.0, 0.0)
    assert better["metrics"]["changed_answer"] == worse["metrics"]["changed_answer"] == 1.0
    assert play("4")["metrics"]["changed_answer"] == 0.0
    assert better["stop_condition"] == "max_turns_reached"


def test_each_check_is_a_turn() -> None:
    state = play(["1", "2", "4"], checks=["Really?", "Last chance."])
    assert [message["content"] for message in state["completion"]] == ["1", "Really?", "2", "Last chance.", "4"]
    assert state["metrics"]["num_turns"] == 3.0


def test_completions_without_roles_are_checked_too() -> None:
    state = play(["5", "4"], message_type="completion", checks=" Sure? ")
    assert state["completion"] == "5 Sure? 4"
    assert state["metrics"]["changed_answer"] == 1.0


def test_a_parser_of_ones_own_that_raises_changes_no_score() -> None:
    class Broken(vf.Parser):
        def parse_answer(self, completion: Any) -> Any:
            raise RuntimeError("no")

    env = DoubleCheckEnv(dataset=ROWS, rubric=vf.Rubric([lambda answer: 1.0]), parser=Broken())
    assert env.evaluate(client=vf.FakeClient("4"), model="m", use_tqdm=False)["rewards"] == [1.0]


@pytest.mark.parametrize("checks", ["", [], ["Sure?", " "]])
def test_a_check_that_says_nothing_is_refused(checks: Any) -> None:
    with pytest.raises(ValueError, match="checks must be a message to the model or a list of messages, not"):
        DoubleCheckEnv(dataset=ROWS, checks=checks)
