"""JSON in a reply: found wherever it is, by fields or by schema, and never an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.parsers import JSONParser
from verifiers.parsers.json_parser import objects_in

PARSER = JSONParser(["reasoning", "answer"])
SCHEMA = {
    "properties": {
        "label": {"enum": ["spam", "ham"]},
        "n": {"type": "integer", "minimum": 0},
        "words": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["label"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "text",
    [
        '{"reasoning": "r", "answer": 4}',
        'Sure!\n```json\n{"reasoning": "r", "answer": 4}\n```\nDone.',
        '{not json} {"answer": 1} {"reasoning": "r", "answer": 4, "x": "{"}',
        '{"reasoning": "old", "answer": 3} wait {"reasoning": "r", "answer": 4, "sure": true}',
        '{"reasoning": NaN, "answer": 1} {"reasoning": "r", "answer": 4} {"reasoning": "r", "answer": Infinity}',
    ],
    ids=["alone", "code block", "among braces", "the last that fits", "no numbers"],
)
def test_the_last_object_that_fits_is_read_wherever_it_stands(text):
    assert PARSER.parse(text).reasoning == "r"
    assert PARSER.parse(text).answer == 4
    assert PARSER.parse_answer([{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]) == "4"


@pytest.mark.parametrize(
    "text", ["", "no", "{", '{"answer": 1}', '[{"a": 1}', "4", '{"reasoning": "r", "answer": 1' + "0" * 5000 + "}"]
)
def test_a_reply_without_such_an_object_has_no_answer(text):
    assert PARSER.parse(text).answer is None
    assert PARSER.parse_answer(text) is None


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ({"label": "spam"}, True),
        ({"label": "ham", "n": 3, "words": ["a"]}, True),
        ({"label": "maybe"}, False),
        ({"n": 3}, False),
        ({"label": "ham", "n": True}, False),
        ({"label": "ham", "n": 1.5}, False),
        ({"label": "ham", "n": -1}, False),
        ({"label": "ham", "words": ["a", 1]}, False),
        ({"label": "ham", "words": ["a", "b", "c"]}, False),
        ({"label": "ham", "other": 1}, False),
    ],
)
def test_a_schema_is_kept_or_not(found, fits):
    parser = JSONParser(schema=SCHEMA, answer_field="label")
    assert (parser.parse_answer(json.dumps(found)) is not None) == fits


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({}, TypeError, "takes either fields"),
        ({"fields": ["a"], "schema": {}}, TypeError, "takes either fields"),
        ({"fields": []}, ValueError, "empty"),
        ({"fields": "answer"}, TypeError, "list of names"),
        ({"fields": ["a", "a"]}, ValueError, "twice"),
        ({"schema": {"pattern": "a+"}}, ValueError, "'pattern', which is not supported"),
        ({"schema": {"properties": {"a": {"type": "strnig"}}}}, ValueError, "schema.a: type 'strnig'"),
        ({"schema": {"properties": {"a": {"minimum": "1"}}}}, ValueError, "minimum must be a number"),
    ],
)
def test_what_would_have_no_effect_is_an_error_when_the_parser_is_made(kwargs, error, words):
    with pytest.raises(error, match=words):
        JSONParser(**kwargs)


@given(st.text(alphabet='{}[]":,ab1 \\\\n', max_size=200))
def test_no_text_raises(text):
    PARSER.parse(text)
    PARSER.parse_answer(text)
    assert 0 <= PARSER.get_format_reward_func()([{"role": "assistant", "content": text}]) <= 1


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.lists(st.booleans(), max_size=3)))
def test_every_object_is_read_back_from_among_words(found):
    assert objects_in(f"so: {json.dumps(found)} and {{that}} is it") == [found]


def test_what_format_writes_is_what_parse_reads():
    reply = PARSER.format(reasoning="2 and 2", answer=[1, "two"])
    assert PARSER.parse(reply).answer == [1, "two"]
    assert PARSER.parse_answer(reply) == '[1, "two"]'
    with pytest.raises(ValueError, match="'answer' is missing"):
        PARSER.format(reasoning="r")
