"""Conversations as text and ids: templates, tools for templates that know none, and ids that are remembered."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

from tests.engine import tiny
from verifiers.chat import ChatTemplate, Codec, KnownTexts, plain_message
from verifiers.errors import RequestRefusedError

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def template(source: str | None = tiny.CHATML) -> ChatTemplate:
    return ChatTemplate(tiny.tokenizer(source), model="tiny")


def test_a_conversation_is_written_by_the_models_own_template() -> None:
    text = template().render([{"role": "user", "content": "2+2?"}])
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_final_message_can_be_gone_on_with() -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}]
    assert template().render(messages, continue_final_message=True).endswith("<|im_start|>assistant\nIt is")


def test_tools_go_into_a_template_that_knows_them_with_arguments_as_objects() -> None:
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    text = template(tiny.HERMES).render(messages, [ADD])
    assert '"description": "Add."' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "None" not in text


def test_a_template_that_knows_no_tools_is_told_of_them_in_words() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    text = template().render(messages, [ADD])
    assert "Be brief.\n\nYou may call" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response>" in text
    assert messages[0]["content"] == "Be brief."
    assert template().render(messages[1:2], [ADD]).startswith("<|im_start|>system\nYou may call")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty"),
        (["hi"], "a message must be a dict"),
        ([{"content": "hi"}], "a message must be a dict"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "user", "content": 3}], "content must be a text"),
        ([{"role": "assistant", "content": "", "tool_calls": ["x"]}], "a tool call must have a function"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "tool_calls must be a list"),
    ],
)
def test_messages_that_are_none_are_refused(messages: list[Any], said: str) -> None:
    with pytest.raises(RequestRefusedError, match=said):
        template().render(messages)


def test_a_template_that_refuses_and_one_that_is_missing_say_so() -> None:
    strict = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestRefusedError, match="roles must alternate"):
        strict.render([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestRefusedError, match="tiny has a tokenizer without a chat template"):
        template(None).render([{"role": "user", "content": "hi"}])


def test_text_parts_are_joined_and_nothing_passed_in_is_changed() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert plain_message(message)["content"] == "ab"
    assert isinstance(message["content"], list)


def test_the_token_after_a_reply_is_found_where_the_tokenizer_has_another_eos() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ChatTemplate(tokenizer).end_of_turn(Codec(tokenizer)) == ends
    assert template("{% for m in messages %}{{ m.content }}. {% endfor %}").end_of_turn(Codec(tokenizer)) is None


# --- ids already known --------------------------------------------------------------------------------------------


def test_the_longest_known_beginning_is_found() -> None:
    known = KnownTexts()
    for prompt, reply in (("a", "b"), ("ab", "cd"), ("ab", "ce"), ("b", "")):
        known.remember(prompt, reply, [len(prompt + reply), ord((prompt + reply)[-1])])
    assert known.longest("abcdef") == (4, [4, ord("d")])
    assert known.longest("abcz") == (2, [2, ord("b")])
    assert known.longest("a") == (0, [])
    assert known.longest("") == (0, [])


words = st.text(alphabet="ab", max_size=4)


@given(st.lists(st.tuples(words.filter(bool), words)), st.text(alphabet="ab", max_size=8))
def test_it_is_the_one_that_a_plain_search_finds(texts: list[tuple[str, str]], text: str) -> None:
    known = KnownTexts()
    for prompt, reply in texts:
        known.remember(prompt, reply, [len(prompt + reply)])
    best = max((len(one) for one in map("".join, texts) if text.startswith(one)), default=0)
    assert known.longest(text) == (best, [best] if best else [])


def test_the_oldest_are_forgotten_and_memory_is_bounded() -> None:
    known = KnownTexts(max_chars=100)
    for n in range(50):
        known.remember(f"{n:09d}", "!", [n])
        known.longest("000000000!")
    assert len(known) == 10
    assert known.longest("000000000!") == (10, [0])
    assert known.longest("000000001!") == (0, [])
    known.remember("x" * 100, "!", [1])
    assert len(known) == 10


def test_of_a_prompt_that_is_asked_on_and_on_the_oldest_replies_are_forgotten() -> None:
    known = KnownTexts(max_chars=100)
    for n in range(50):
        known.remember("again", f"{n:05d}", [n])
    assert len(known) == 19
    assert known.longest("again00049, and") == (10, [49])
    assert known.longest("again00030, and") == (0, [])


def test_a_text_that_is_kept_is_not_given_for_another_template_or_conversation():
    tokenizer = tiny.tokenizer()
    template = ChatTemplate(tokenizer)
    asked = [{"role": "user", "content": "hello"}]
    first = template.render(asked)
    assert template.render([dict(asked[0])]) == first
    assert template.render(asked, add_generation_prompt=False) != first
    asked[0]["content"] = "goodbye"
    assert "goodbye" in template.render(asked)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    assert template.render(asked) == "[goodbye]"
