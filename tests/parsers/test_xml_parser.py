"""Fields in tags: reading them, writing them, rewarding their form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.parsers import XMLParser

PARSER = XMLParser(["reasoning", "answer"])
TOOLS = XMLParser(["reasoning", ("tool", "answer")])


def assistant(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text} for text in texts]


def test_every_name_is_an_attribute_and_none_where_absent() -> None:
    parsed = TOOLS.parse("<reasoning>add</reasoning>\n<answer>\n 4 \n</answer>")
    assert vars(parsed) == {"reasoning": "add", "tool": None, "answer": "4"}


def test_an_empty_field_is_there() -> None:
    assert PARSER.parse("<answer> </answer>").answer == ""


def test_white_space_is_kept_on_request() -> None:
    assert PARSER.parse("<answer>\n  4\n</answer>", strip=False).answer == "\n  4\n"


def test_of_a_repeated_field_the_first_or_on_request_the_last_is_read() -> None:
    text = "<answer>3</answer> no: <answer>4</answer>"
    assert PARSER.parse(text).answer == "3"
    assert PARSER.parse(text, last=True).answer == "4"


def test_a_field_may_hold_other_tags() -> None:
    parsed = PARSER.parse("<reasoning>if a<b then <answer>1</answer></reasoning>")
    assert parsed.reasoning == "if a<b then <answer>1</answer>"
    assert parsed.answer == "1"


def test_a_field_ends_at_the_first_closing_tag() -> None:
    nested = "<answer>1<answer>2</answer>3</answer>"
    assert PARSER.parse(nested).answer == "1<answer>2"
    assert PARSER.parse(nested, last=True).answer == "1<answer>2"


@pytest.mark.parametrize(
    "text",
    [
        "<answer>4",
        "4</answer>",
        "</answer>4<answer>",
        '<answer id="1">4</answer>',
        "<Answer>4</Answer>",
        "< answer>4</ answer>",
    ],
)
def test_what_is_not_a_pair_of_plain_tags_is_no_field(text: str) -> None:
    assert PARSER.parse(text).answer is None
    assert PARSER.parse(text, last=True).answer is None
    assert PARSER.parse_answer(text) is None


def test_an_unclosed_tag_does_not_hide_an_earlier_field() -> None:
    assert PARSER.parse("<answer>4</answer> <answer>5", last=True).answer == "4"


def test_names_are_taken_literally() -> None:
    parser = XMLParser(["a.b", "final answer"], answer_field="final answer")
    assert vars(parser.parse("<axb>1</axb>")) == {"a.b": None, "final answer": None}
    assert parser.parse_answer("<final answer>4</final answer>") == "4"


def test_the_answer_of_a_string_is_the_last_one() -> None:
    assert PARSER.parse_answer("<answer>3</answer><answer>4</answer>") == "4"


def test_the_answer_of_a_chat_is_in_the_last_message_that_has_one() -> None:
    assert PARSER.parse_answer(assistant("<answer>3</answer>", "<answer>4</answer>", None, "Goodbye!")) == "4"
    assert PARSER.parse_answer(assistant("no tags")) is None
    assert PARSER.parse_answer([{"role": "user", "content": "<answer>4</answer>"}]) is None


def test_another_field_can_be_the_answer() -> None:
    assert XMLParser(["guess"], answer_field="guess").parse_answer("<guess>[crane]</guess>") == "[crane]"


def test_an_answer_field_that_is_no_field_has_no_answer() -> None:
    assert XMLParser(["guess"]).parse_answer("<guess>4</guess><answer>4</answer>") is None


def test_the_function_is_applied_to_the_answer_only() -> None:
    parser = XMLParser(["reasoning", "answer"], extract_fn=str.upper)
    assert parser.parse("<answer>yes</answer>").answer == "yes"
    assert parser.parse_answer("<answer>yes</answer>") == "YES"
    assert parser.parse_answer(assistant("<answer>yes</answer>")) == "YES"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ("answer", TypeError, "list of names"),
        (None, TypeError, "list of names"),
        ([1], TypeError, "not 1"),
        ([["tool", "answer"]], TypeError, "tuple"),
        ([("tool", None)], TypeError, "tuple"),
        ([], ValueError, "at least one"),
        ([()], ValueError, "at least one"),
        ([""], ValueError, "''"),
        ([" "], ValueError, "' '"),
        (["<answer>"], ValueError, "'<answer>'"),
        (["/answer"], ValueError, "'/answer'"),
        (["a", "b", "a"], ValueError, "Duplicate field name 'a'"),
        (["a", ("b", "a")], ValueError, "Duplicate field name 'a'"),
        ([("a", "a")], ValueError, "Duplicate field name 'a'"),
    ],
)
def test_fields_that_make_no_sense_are_refused_at_once(fields: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        XMLParser(fields)


def test_an_answer_field_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="answer_field"):
        XMLParser(["answer"], answer_field=None)  # type: ignore[arg-type]


def test_fields_go_by_their_first_names() -> None:
    assert TOOLS.get_fields() == ["reasoning", "tool"]


def test_the_format_is_shown_with_its_alternatives() -> None:
    assert TOOLS.get_format_str() == "<reasoning>\n...\n</reasoning>\n<[ tool | answer ]>\n...\n</[ tool | answer ]>"


def test_a_value_may_be_given_under_any_name_and_is_written_under_the_first() -> None:
    assert TOOLS.format(reasoning="add", answer=4) == "<reasoning>\nadd\n</reasoning>\n<tool>\n4\n</tool>"
    assert TOOLS.format(reasoning="", tool="t", answer="a").endswith("<tool>\nt\n</tool>")


def test_format_asks_for_every_field() -> None:
    with pytest.raises(ValueError, match=r"'tool'; pass tool=… or answer=…"):
        TOOLS.format(reasoning="add")


names = st.lists(st.text("abcxyz_-.", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


@given(names, st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_formatted_parses_back(fields: list[str], data: st.DataObject) -> None:
    parser = XMLParser(fields, answer_field=fields[-1])
    text = st.text(st.characters(exclude_categories=(), exclude_characters="<"))
    values = {name: data.draw(text) for name in fields}
    reply = parser.format(**values)
    assert vars(parser.parse(reply)) == {name: value.strip() for name, value in values.items()}
    assert parser.parse(reply, last=True) == parser.parse(reply)
    assert parser.parse_answer(reply) == values[fields[-1]].strip()
    assert parser.get_format_reward_func()(assistant(reply)) == 1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<reasoning>r</reasoning><answer>4</answer>", 1.0),
        ("\n <reasoning>\nr\n</reasoning>\n\n<answer>\n4\n</answer> \n", 1.0),
        ("<reasoning>r</reasoning><answer>4</answer> done", 0.8),
        ("So: <reasoning>r</reasoning><answer>4</answer> done", 0.6),
        ("<answer>4</answer>", 0.2 + 0.2 + 0.2),
        ("<reasoning>r</reasoning>", 0.2 + 0.2 + 0.2),
        ("<answer>4</answer> <reasoning>r", 0.6),
        ("<reasoning>r <answer>4", 0.4),
        ("plain text", 0.2),
        ("", 0.2),
        (None, 0.2),
    ],
)
def test_the_format_reward_adds_up(text: str | None, score: float) -> None:
    assert PARSER.get_format_reward_func()(assistant(text)) == pytest.approx(score)


def test_either_alternative_follows_the_format() -> None:
    reward = TOOLS.get_format_reward_func()
    assert reward(assistant("<reasoning>r</reasoning><tool>t</tool>")) == 1.0
    assert reward(assistant("<reasoning>r</reasoning><answer>4</answer>")) == 1.0


def test_the_format_reward_is_the_mean_over_the_assistants_messages() -> None:
    good, bad = PARSER.format(reasoning="r", answer=4), "plain text"
    chat = [*assistant(good), {"role": "user", "content": "?"}, *assistant(bad)]
    assert PARSER.get_format_reward_func()(chat, answer="4") == pytest.approx((1.0 + 0.2) / 2)
    assert PARSER.get_format_reward_func()(good) == 1.0
    assert PARSER.get_format_reward_func()([]) == 0.0
