"""What a caller passed, read: sampling arguments, who answers, and what an override returned."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import verifiers as vf
from verifiers.envs.calling import adopt_result, find_answerer, merge_sampling, read_call, sampling_from


def test_sampling_arguments_merge_and_leave_what_was_given_alone() -> None:
    one, two = {"temperature": 1.0, "extra_body": {"top_k": 5}}, {"temperature": 0.5, "extra_body": {"min_p": 0.1}}
    before = copy.deepcopy((one, two))
    merged = merge_sampling(one, None, two)
    assert merged == {"temperature": 0.5, "extra_body": {"top_k": 5, "min_p": 0.1}}
    merged["extra_body"]["seed"] = 1
    assert (one, two) == before


def test_loose_keywords_are_sampling_arguments_or_errors() -> None:
    assert sampling_from({"max_new_tokens": 5, "top_p": 0.9}, where="f") == {"max_tokens": 5, "top_p": 0.9}
    with pytest.raises(TypeError, match=r"f\(\) got an unknown keyword 'n_sampels'; did you mean 'n_samples'"):
        sampling_from({"n_sampels": 5}, known=("n_samples",), where="f")


def test_the_two_forms_are_told_apart() -> None:
    row = {"prompt": "x"}
    assert read_call((row,), {}).gives_pair is False
    assert read_call((), {"input": row, "temperature": 1}).sampling_args == {"temperature": 1}
    pair = read_call(("client", "m", "x", "4", {"seed": 1}), {"task": "t", "top_p": 0.5})
    assert (pair.gives_pair, pair.row["task"], pair.sampling_args) == (True, "t", {"seed": 1, "top_p": 0.5})
    assert read_call((row,), {}).row is not row


def test_a_call_by_position_is_read_in_the_order_of_0_1_5() -> None:
    call = read_call(("client", "m", "x", "4", "t", {"hint": 1}, {"seed": 1}), {"example_id": 3, "top_p": 0.5})
    assert call.row == {"prompt": "x", "answer": "4", "task": "t", "info": {"hint": 1}, "example_id": 3}
    assert (call.gives_pair, call.sampling_args) == (True, {"seed": 1, "top_p": 0.5})
    with pytest.raises(
        TypeError, match="at most client, model, prompt, answer, task, info, sampling_args as positional"
    ):
        read_call(("client", "m", "x", "4", "t", None, None, 0), {})


def test_who_answers_is_found_from_client_and_model() -> None:
    client = vf.FakeClient("x")
    found = find_answerer(client, "m")
    assert (found.given, found.client, found.model) == (client, client, "m")
    assert find_answerer(SimpleNamespace(complete=client.complete, model="its own"), None).model == "its own"
    with pytest.raises(TypeError, match="is not a client"):
        find_answerer(object(), "m")


def blank() -> vf.State:
    row = {"prompt": "p", "answer": "a", "task": "t", "example_id": 5, "level": 2}
    return vf.State(input=row, trajectory=[], completion=None, reward=None, level=2, timing={})


@pytest.mark.parametrize("shape", ["state", "pair", "update", "completion", "tuple of messages"])
def test_whatever_an_override_returns_becomes_a_rollout_of_its_row(shape: str) -> None:
    said: Any = [{"role": "assistant", "content": "x"}]
    other = vf.State(
        input={"prompt": "q", "answer": "b", "task": "default", "example_id": 0}, trajectory=[], completion=said
    )
    returned = {
        "state": other,
        "pair": (said, other),
        "update": (said, {"score": 1}),
        "completion": said,
        "tuple of messages": ("x", {"n": 1}),
    }[shape]
    state = adopt_result(returned, blank())
    assert (state["example_id"], state["task"], state["level"]) == (5, "t", 2)
    assert state["completion"] == ("x" if shape == "tuple of messages" else said)


def test_a_tuple_of_messages_is_a_completion_and_any_other_tuple_is_refused() -> None:
    said: Any = {"role": "assistant", "content": "x"}
    assert adopt_result((said, said), blank())["completion"] == [said, said]
    with pytest.raises(vf.Error, match="it must return the state, the completion, or both"):
        adopt_result(([said], {"score": 1}, "more"), blank())


def test_a_number_is_no_completion_and_a_number_of_turns_is_no_trajectory() -> None:
    for reward in (1.0, True, np.float32(0.5)):
        with pytest.raises(vf.Error, match="it must return the state, the completion, or both"):
            adopt_result(reward, blank())
    with pytest.raises(vf.Error, match=r"must be the list of the rollout's turns, which the library keeps, not 5"):
        adopt_result(("x", {"trajectory": 5}), blank())
