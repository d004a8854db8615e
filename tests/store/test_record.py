"""States become records and lines, whatever hooks have put into them."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
from collections import Counter, OrderedDict, deque
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.errors import HookError, JudgeError, OverlongPromptError
from verifiers.store import encode, example_key, is_failed, to_record
from verifiers.types import State, Usage


def finished(**fields: Any) -> State:
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "task": "sums", "example_id": 3}
    return State(input=row, completion=[{"role": "assistant", "content": "4"}], reward=1.0, **fields)


def read_back(record: dict[str, Any]) -> dict[str, Any]:
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    back: dict[str, Any] = msgspec.json.decode(line)
    return back


def test_a_rollout_becomes_its_core_columns_with_metrics_at_the_top_level_too() -> None:
    state = finished(
        metrics={"exact": 1.0, "reward": 0.5},
        timing={"start_time": 1.0, "generation_ms": 5.0, "scoring_ms": 1.0, "total_ms": 6.0},
        usage=Usage(prompt_tokens=7, completion_tokens=2, cost_usd=0.1),
        stop_condition="max_turns_reached",
        is_truncated=True,
    )
    assert to_record(state, rollout=1) == {
        "example_id": 3,
        "rollout": 1,
        "task": "sums",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "answer": "4",
        "info": {},
        "reward": 1.0,
        "error": None,
        "metrics": {"exact": 1.0, "reward": 0.5},
        "generation_ms": 5.0,
        "scoring_ms": 1.0,
        "total_ms": 6.0,
        "stop_condition": "max_turns_reached",
        "is_truncated": True,
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "cost_usd": 0.1},
        "exact": 1.0,
    }


def test_a_failed_rollout_has_its_cause_and_no_reward() -> None:
    record = to_record(finished(error=JudgeError("down")), rollout=0)
    assert record["reward"] is None
    assert (record["error"]["type"], record["error"]["blame"]) == ("JudgeError", "grader")
    assert is_failed(record)


def test_what_the_policy_caused_is_no_failure_and_keeps_its_reward() -> None:
    record = to_record(finished(error=OverlongPromptError("too long")), rollout=0)
    assert record["reward"] == 1.0
    assert not is_failed(record)


def test_an_unscored_rollout_is_not_a_failed_one() -> None:
    state = finished()
    state["reward"] = None
    assert not is_failed(to_record(state, rollout=0))


def test_a_state_that_never_got_anywhere_is_a_record_too() -> None:
    record = to_record(State(error=HookError("setup_state raised")), rollout=0)
    assert record["completion"] is None
    assert is_failed(read_back(record))


def test_named_state_columns_are_kept_and_core_columns_win_over_them() -> None:
    state = finished(board=[[0, 1], [1, 0]], metrics={"board": 9.0})
    record = to_record(state, rollout=0, state_columns=["board", "reward", "absent"])
    assert record["board"] == [[0, 1], [1, 0]]
    assert record["metrics"] == {"board": 9.0}
    assert (record["reward"], record["absent"]) == (1.0, None)


def test_a_trajectory_keeps_its_tokens_and_drops_the_endpoints_reply() -> None:
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}
    state = finished(trajectory=[{"prompt": "a", "completion": "b", "response": object(), "tokens": tokens}])
    record = to_record(state, rollout=0, state_columns=["trajectory"])
    assert record["trajectory"] == [{"prompt": "a", "completion": "b", "tokens": tokens}]


def test_sdk_objects_in_messages_become_plain_data() -> None:
    openai = pytest.importorskip("openai.types.chat")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = openai.ChatCompletionMessage.model_validate({"role": "assistant", "content": "", "tool_calls": [call]})
    state = finished()
    state["completion"] = [{"role": "assistant", "content": "", "tool_calls": message.tool_calls}, message]
    plain_message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert to_record(state, rollout=0)["completion"] == [plain_message, plain_message]


def test_a_record_does_not_change_when_its_state_does() -> None:
    state = finished(info_column={"seen": [1]})
    record = to_record(state, rollout=0, state_columns=["info_column"])
    state["info_column"]["seen"].append(2)
    state["completion"].clear()
    assert record["info_column"] == {"seen": [1]}
    assert len(record["completion"]) == 1


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class BrokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


class BrokenDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


class BrokenDump:
    def model_dump(self, **_: Any) -> Any:
        raise RuntimeError("no dump")


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Node:
    name: Any
    next: Any = None


def circle() -> Any:
    ring: list[Any] = [1]
    ring.append({"again": ring})
    return ring


def self_holding_dataclass() -> Any:
    node = Node("a")
    node.next = node
    return node


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


STRANGE: dict[str, Any] = {
    "set": {1, 2},
    "bytes": b"\xff\n",
    "path": Path("a/b"),
    "pure path": PurePosixPath("a"),
    "datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "timedelta": datetime.timedelta(seconds=3),
    "exception": ValueError("x"),
    "nan": float("nan"),
    "infinity": [float("inf"), -math.inf],
    "surrogate": "a\ud800b",
    "surrogate in a key": {"\udfff": 1},
    "tuple keys": {(1, 2): 3, None: 4, True: 5},
    "huge integer": 10**5000,
    "big integer": 2**100,
    "circle": circle(),
    "dataclass": Node("a", Node({(1,): "\ud800"})),
    "circular dataclass": self_holding_dataclass(),
    "deep": nest(300),
    "very deep": nest(100_000),
    "enum": Colour.RED,
    "complex": 1j,
    "function": len,
    "class": dict,
    "pydantic-like class": BrokenDump,
    "generator": (i for i in range(3)),
    "counter": Counter("aab"),
    "ordered": OrderedDict(a=1),
    "deque": deque([1, {2}]),
    "proxy": MappingProxyType({"a": {(1,): 2}}),
    "namespace": SimpleNamespace(a=1),
    "mock": MagicMock(),
    "raw": msgspec.Raw(b"not\njson"),
    "no repr": Broken(),
    "no items": BrokenDict(a=1),
    "no dump": BrokenDump(),
    "str subclass": type("Text", (str,), {})("x"),
    "int subclass": type("Count", (int,), {})(3),
    "float subclass": type("Score", (float,), {})(0.5),
}


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE.keys())
def test_a_strange_value_never_loses_the_rollout(value: Any) -> None:
    state = finished(strange=value, metrics={"strange metric": value})
    state["input"]["info"] = {"nested": [value]}
    record = to_record(state, rollout=2, state_columns=["strange"])
    back = read_back(record)
    assert (back["example_id"], back["rollout"], back["answer"], back["reward"]) == (3, 2, "4", 1.0)
    assert read_back({**back, "raw": value})["answer"] == "4"


def test_strange_values_keep_what_json_can_say_of_them() -> None:
    kept = read_back({name: STRANGE[name] for name in ("set", "path", "datetime", "enum", "deque", "counter", "proxy")})
    assert kept == {
        "set": [1, 2],
        "path": "a/b",
        "datetime": "2026-01-02T00:00:00Z",
        "enum": "red",
        "deque": [1, [2]],
        "counter": {"a": 2, "b": 1},
        "proxy": {"a": {"(1,)": 2}},
    }
    assert read_back({"x": STRANGE["nan"], "y": STRANGE["infinity"]}) == {"x": None, "y": [None, None]}
    assert read_back({"x": STRANGE["circle"]}) == {"x": [1, {"again": "<circular>"}]}
    assert read_back({"x": STRANGE["surrogate"], "y": "\ud83d\ude00"}) == {"x": "a\\ud800b", "y": "😀"}
    assert read_back({"x": STRANGE["dataclass"]})["x"]["next"]["name"] == {"(1,)": "\\ud800"}


def test_numpy_values_become_numbers_and_lists() -> None:
    numpy = pytest.importorskip("numpy")
    values = {"f": numpy.float32(0.5), "i": numpy.int64(3), "a": numpy.arange(4).reshape(2, 2), "s": numpy.str_("x")}
    record = to_record(finished(**values), rollout=0, state_columns=list(values))
    assert {name: record[name] for name in values} == {"f": 0.5, "i": 3, "a": [[0, 1], [2, 3]], "s": "x"}
    assert read_back({"x": {numpy.int64(1): numpy.array([float("nan"), 1.0])}})["x"].popitem()[1] == [None, 1.0]


def test_an_error_that_cannot_describe_itself_is_still_a_failure() -> None:
    assert is_failed(read_back(to_record(finished(error=BrokenError()), rollout=0)))
    assert is_failed(read_back(to_record(finished(error="something"), rollout=0)))


def test_example_ids_are_integers_or_strings() -> None:
    numpy = pytest.importorskip("numpy")
    ids = [7, "a", numpy.int64(7), (1, "x"), None, 1.5]
    assert [example_key(i) for i in ids] == [7, "a", 7, '[1,"x"]', "null", "1.5"]


texts = st.text()
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
odd_text = st.text(st.characters(categories=["L", "Cs", "Cc"]))
odd_keys = odd_text | st.integers() | st.floats() | st.booleans() | st.none() | st.tuples(st.integers())
odd_values = st.recursive(
    st.none()
    | st.floats()
    | odd_text
    | st.binary()
    | st.datetimes()
    | st.complex_numbers()
    | st.builds(ValueError, odd_text)
    | st.builds(object)
    | st.decimals()
    | st.sets(st.integers()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(odd_keys, inner, max_size=4)
        | st.builds(Node, inner, inner)
        | st.tuples(inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(texts.filter(lambda name: name not in {"input", "error"}), json_values, max_size=5), json_values)
def test_any_json_state_comes_back_as_it_was(columns: dict[str, Any], info: Any) -> None:
    state = State(input={"example_id": "é", "task": "t", "prompt": "p", "answer": info, "info": info}, **columns)
    record = to_record(state, rollout=0, state_columns=list(columns))
    assert read_back(record) == record


@given(st.dictionaries(odd_text, odd_values, max_size=4), odd_values)
def test_no_state_at_all_makes_a_record_fail(columns: dict[str, Any], value: Any) -> None:
    state = State(columns)
    state["input"] = {"example_id": 1, "task": value, "prompt": value, "answer": value, "info": value}
    state["metrics"] = {"m": value}
    back = read_back(to_record(state, rollout=0, state_columns=list(columns)))
    assert (back["example_id"], back["rollout"]) == (1, 0)


def test_the_ordinary_record_does_not_take_the_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any) -> Any:
        raise AssertionError(f"taken piece by piece: {value!r}")

    monkeypatch.setattr("verifiers.store.plain.sanitise", refuse)
    turns = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}] * 200  # many brackets, not deep
    read_back(to_record(finished(metrics={"exact": 1.0}, turns=turns), rollout=0, state_columns=["turns"]))
