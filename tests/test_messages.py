"""Messages are joined, read and shown; content parts are never rewritten."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.messages import (
    as_messages,
    concat_messages,
    content_text,
    last_reply,
    messages_to_printable,
    role_of,
    sanitize_tool_calls,
    strip_nones_from_content,
    text_of,
)

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
PARTS = [{"type": "text", "text": "What "}, IMAGE, SOUND, {"type": "text", "text": "is it?"}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


class SDKMessage(SimpleNamespace):
    def model_dump(self, exclude_none: bool = False) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None or not exclude_none}


message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text()}
)
conversation = st.lists(message, max_size=5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ({"role": "system", "content": "s"}, [{"role": "system", "content": "s"}]),
        (["a", {"role": "assistant", "content": "b"}], ["user a", "assistant b"]),
        ((m for m in ["a"]), ["user a"]),
        (SDKMessage(role="assistant", content="x", tool_calls=None), [{"role": "assistant", "content": "x"}]),
        ([], []),
    ],
)
def test_strings_messages_and_lists_of_either_become_messages(value: Any, expected: list[Any]) -> None:
    wanted = [
        dict(zip(("role", "content"), e.split(" ", 1), strict=True)) if isinstance(e, str) else e for e in expected
    ]
    assert as_messages(value) == wanted


@given(st.lists(conversation, min_size=1, max_size=4))
def test_joining_keeps_every_message_in_order_and_changes_none(parts: list[list[dict[str, str]]]) -> None:
    before = copy.deepcopy(parts)
    assert concat_messages(parts) == [m for part in parts for m in part]
    assert parts == before


@given(st.lists(st.text(), min_size=1))
def test_texts_join_to_a_text(texts: list[str]) -> None:
    assert concat_messages(texts) == "".join(texts)


def test_joining_gives_a_new_list() -> None:
    first = [{"role": "user", "content": "a"}]
    joined = concat_messages([first, []])
    assert isinstance(joined, list)
    joined.append({"role": "user", "content": "b"})
    assert first == [{"role": "user", "content": "a"}]


def test_the_text_of_multimodal_content_is_its_text_parts() -> None:
    assert content_text(PARTS) == "What is it?"
    assert content_text(None) == content_text({"type": "text"}) == content_text(7) == ""
    assert content_text(["a", SimpleNamespace(text="b"), {"text": None}]) == "ab"
    assert text_of({"role": "user", "content": PARTS}) == "What is it?"
    assert text_of(SDKMessage(content="x")) == "x"
    assert (role_of(SDKMessage(role="tool")), role_of({"role": 3}), role_of("text")) == ("tool", None, None)


@given(conversation)
def test_the_last_reply_is_the_last_thing_the_assistant_said(messages: list[dict[str, str]]) -> None:
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    assert last_reply(messages) == (said[-1] if said else "")


def test_the_last_reply_of_nothing_is_nothing() -> None:
    assert last_reply(None) == last_reply([]) == ""
    assert last_reply("text") == "text"


def test_pictures_and_sounds_are_shown_as_placeholders_and_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "a cat"}]
    before = copy.deepcopy(messages)
    shown = messages_to_printable(messages)
    assert shown[0] == {"role": "user", "content": "What \n[image]\n[audio]\nis it?"}
    assert shown[1] == messages[1]
    assert messages == before
    assert messages_to_printable("text") == "text"


def test_nones_that_a_data_set_filled_in_are_dropped_from_parts_only() -> None:
    parts = [{"type": "text", "text": "x", "image_url": None}, {"type": "image_url", "text": None, **IMAGE}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    before = copy.deepcopy(messages)
    stripped = strip_nones_from_content(messages)
    assert stripped[0]["content"] == [{"type": "text", "text": "x"}, IMAGE]
    assert stripped[1] is messages[1]
    assert messages == before


def test_tool_calls_become_strings_so_that_rows_fit_one_column() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL, SDKMessage(id="2")]}, {"role": "tool"}]
    clean = sanitize_tool_calls(messages)
    assert [type(c) for c in clean[0]["tool_calls"]] == [str, str]
    assert '"name":"add"' in clean[0]["tool_calls"][0]
    assert messages[0]["tool_calls"][0] is CALL
    assert clean[1] == {"role": "tool"}
