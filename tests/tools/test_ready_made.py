"""The tools that come ready-made: search, ask, python_executor, python, bash."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import sqlite3
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from tests.support.tool_calls import call, calling, tool_texts
from verifiers.tools import Corpus, ToolBox, as_tool, ask, bash, calculator, python, python_executor, search

TOWNS = [
    {"title": "Lund", "text": "A town in Scania with an old cathedral."},
    {"title": "Kiruna", "text": "A town in Lapland; the sun does not set in June."},
    {"title": "Visby", "text": "A town on an island, with a wall around it."},
]
ROW = {"question": "Which town is on an island?", "answer": "Visby"}


# --- search -------------------------------------------------------------------------------------------------------


def test_the_best_documents_come_first_with_words_in_other_forms() -> None:
    corpus = Corpus(TOWNS)
    assert corpus.search("towns with walls", 2)[0][0] == "Visby"
    assert corpus.search("Kiruna")[0][0] == "Kiruna"
    assert corpus.search("submarine") == []
    assert len(corpus.search("town", 2)) == 2


def test_documents_come_from_a_folder_a_file_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "otter.md").write_text("Otters eat fish.")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG fish")
    assert Corpus(tmp_path).search("fish") == [("deep/otter.md", "Otters eat fish.")]
    lines = tmp_path / "towns.jsonl"
    lines.write_text("".join(json.dumps(town) + "\n" for town in TOWNS))
    assert Corpus(lines).search("cathedral")[0][0] == "Lund"
    assert Corpus(["Otters eat fish."]).search("otter") == [("", "Otters eat fish.")]
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        Corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="document 0 is not a text"):
        Corpus([3]).search("x")


def test_an_index_in_a_file_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    first = Corpus(TOWNS, path=path)
    assert first.search("wall")
    first.close()
    kept = Corpus([], path=path)
    assert kept.search("wall")[0][0] == "Visby"
    kept.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM documents").fetchone() == (3,)
    connection.close()


@given(st.text())
def test_any_text_is_a_query(query: str) -> None:
    assert isinstance(CORPUS.search(query), list)


CORPUS = Corpus(TOWNS)


def test_searches_from_many_threads_are_all_answered() -> None:
    corpus = Corpus([f"document number {i}" for i in range(200)])
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(corpus.search("document")))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5] * 16


def test_a_model_searches() -> None:
    env = pickle.loads(pickle.dumps(vf.ToolEnv(tools=[search(TOWNS, limit=1)], dataset=[ROW])))
    calls = calling(call("search", {"query": "island"}), call("search", {"query": "?!"}))
    state = env.rollout(ROW, vf.FakeClient([calls, "Visby"]), "m")
    assert tool_texts(state) == [
        "1. Visby: A town on an island, with a wall around it.",
        "Nothing was found; try other words.",
    ]


# --- ask ----------------------------------------------------------------------------------------------------------


def test_another_model_is_asked() -> None:
    helper = vf.FakeClient(lambda messages: f"I was asked: {messages[-1]['content']}")
    tool = ask("helper", helper, name="expert", system_prompt="You know towns.", sampling_args={"temperature": 0.0})
    env = vf.ToolEnv(tools=[tool], dataset=[ROW])
    state = env.rollout(ROW, vf.FakeClient([calling(call("expert", {"question": "Visby?"})), "Visby"]), "m")
    assert tool_texts(state) == ["I was asked: Visby?"]
    assert helper.requests[0].model == "helper"
    assert helper.requests[0].prompt[0] == {"role": "system", "content": "You know towns."}


def test_a_helper_that_is_down_fails_the_rollout() -> None:
    tool = ask("helper", vf.FakeClient(vf.ServerError("502")))
    env = vf.ToolEnv(tools=[tool], dataset=[ROW])
    state = env.rollout(ROW, vf.FakeClient(calling(call("ask", {"question": "?"}))), "m")
    assert isinstance(state["error"], vf.ServerError)


# --- programs -----------------------------------------------------------------------------------------------------

LEVEL = vf.sandbox.level().name
needs_sandbox = pytest.mark.skipif(LEVEL == "none", reason="this machine can isolate nothing")
needs_bash = pytest.mark.skipif(LEVEL != "full", reason=f"bash needs the full level of the sandbox, here is {LEVEL}")


@needs_sandbox
def test_programs_say_what_they_printed_gave_and_raised() -> None:
    assert python_executor("print(sum(range(10)))") == "45"
    assert python_executor("print('a')\n'b'") == "a"
    assert python_executor("6 * 7") == "42"
    assert python("print('a')\n6 * 7") == "a\n42"
    assert python("x = 1") == "(no output)"
    assert python("import sys; print('out'); raise ValueError('bad')").startswith("out\nTraceback")
    assert "NameError" in python("x")  # each call starts from nothing


@needs_sandbox
def test_programs_are_awaited_inside_a_loop_and_offered_to_models() -> None:
    async def both() -> list[str]:
        return list(await asyncio.gather(python_executor("print(1)"), python("2")))

    assert asyncio.run(both()) == ["1", "2"]
    env = vf.ToolEnv(tools=[calculator, python_executor], dataset=[ROW])
    calls = calling(call("python_executor", {"code": "print(2)"}), call("calculator", {"expression": "1 + 2"}))
    state = env.rollout(ROW, vf.FakeClient([calls, "3"]), "m")
    assert tool_texts(state) == ["2", "3"]
    assert env.oai_tools is not None
    assert "Run a Python program" in env.oai_tools[1]["function"]["description"]


@needs_bash
def test_commands_say_what_they_wrote_and_how_they_ended() -> None:
    assert bash("echo $((6 * 7))") == "42"
    assert bash("echo to; echo fro >&2; exit 3").startswith("to\nfro\n")
    assert "3" in bash("exit 3")


# --- the box they come in -----------------------------------------------------------------------------------------


def test_a_box_of_tools_calls_by_name_outside_of_environments() -> None:
    box = ToolBox([calculator, as_tool(lambda: 3, name="three")])
    assert "three" in box
    assert [tool.name for tool in box] == ["calculator", "three"]
    assert asyncio.run(box.call("calculator", {"expression": "2 + 2"})) == "4"
    with pytest.raises(vf.ToolError, match="needs the argument 'expression'"):
        asyncio.run(box.call("calculator", ""))
    with pytest.raises(ValueError, match="tool_timeout_s=0"):
        ToolBox(timeout_s=0)
    with pytest.raises(ValueError, match="max_result_chars=1 "):
        ToolBox(max_result_chars=1)


def test_a_tools_own_timeout_error_is_not_ours() -> None:
    def wait() -> None:
        raise TimeoutError("the shop did not answer")

    env = vf.ToolEnv(tools=[wait], dataset=[ROW])
    state: Any = env.rollout(ROW, vf.FakeClient([calling(call("wait")), ""]), "m")
    assert tool_texts(state) == ["Error: TimeoutError: the shop did not answer"]
    assert state["tool_log"][0]["fault"] == "exception"


def test_an_index_that_nobody_needs_any_more_is_closed() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tool = search(TOWNS)
        assert "Lund" in tool.function("cathedral")
        del tool
        gc.collect()
    assert [str(one.message) for one in seen] == []
