"""The forms in which newer families write calls: what a template writes is read back, and written the same again."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tests.engine.tiny import tokenizer
from verifiers.chat import ChatTemplate
from verifiers.chat.call_syntax import calls_between
from verifiers.chat.tool_calls import parse, shown_length

TEXT = "(v if v is string else v | tojson)"
# What each family writes for the calls of a reply.
FORMS = {
    "qwen3-coder": (
        "{% for c in calls %}{{ '<tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments | items %}"
        "{{ '<parameter=' + k + '>\n' + (v | string if v is not mapping and v is not sequence else " + TEXT + ") "
        "+ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"
    ),
    "glm": (
        "{% for c in calls %}{{ '\n<tool_call>' + c.name + '\n' }}{% for k, v in c.arguments | items %}"
        "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' + " + TEXT + " + '</arg_value>\n' }}{% endfor %}"
        "{{ '</tool_call>' }}{% endfor %}"
    ),
    "minimax": (
        "{{ '<minimax:tool_call>\n' }}{% for c in calls %}{{ '<invoke name=\"' + c.name + '\">\n' }}"
        "{% for k, v in c.arguments | items %}{{ '<parameter name=\"' + k + '\">' + " + TEXT + " + '</parameter>\n' }}"
        "{% endfor %}{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}"
    ),
    "deepseek-v3.2": (
        "{% set d = '｜DSML｜' %}{{ '<' + d + 'function_calls>\n' }}{% for c in calls %}"
        "{{ '<' + d + 'invoke name=\"' + c.name + '\">\n' }}{% for k, v in c.arguments | items %}"
        "{{ '<' + d + 'parameter name=\"' + k + '\" string=\"' + ('true' if v is string else 'false') + '\">' + "
        + TEXT + " + '</' + d + 'parameter>\n' }}{% endfor %}{{ '</' + d + 'invoke>\n' }}{% endfor %}"
        "{{ '</' + d + 'function_calls>' }}"
    ),
    "deepseek-v3.1": (
        "{{ '<｜tool▁calls▁begin｜>' }}{% for c in calls %}{{ '<｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' "
        "+ (c.arguments | tojson) + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    ),
    "deepseek-v3": (
        "{{ '<｜tool▁calls▁begin｜>' }}{% for c in calls %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.name "
        "+ '\n```json\n' + (c.arguments | tojson) + '\n```<｜tool▁call▁end｜>\n' }}{% endfor %}"
        "{{ '<｜tool▁calls▁end｜>' }}"
    ),
    "kimi-k2": (
        "{{ '<|tool_calls_section_begin|>' }}{% for c in calls %}{{ '<|tool_call_begin|>functions.' + c.name + ':' "
        "+ loop.index0 | string + '<|tool_call_argument_begin|>' + (c.arguments | tojson) + '<|tool_call_end|>' }}"
        "{% endfor %}{{ '<|tool_calls_section_end|>' }}"
    ),
    "command-a": (
        "{{ '<|START_ACTION|>[\n' }}{% for c in calls %}{{ '{\"tool_call_id\": \"0\", \"tool_name\": \"' + c.name "
        "+ '\", \"parameters\": ' + (c.arguments | tojson) + '}' }}{{ ',\n' if not loop.last else '\n' }}{% endfor %}"
        "{{ ']<|END_ACTION|>' }}"
    ),
    "nemotron": (
        "{{ '<TOOLCALL>[' }}{% for c in calls %}{{ c | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
        "{{ ']</TOOLCALL>' }}"
    ),
    "minimax-m1": (
        "{{ '<tool_calls>\n' }}{% for c in calls %}{{ (c | tojson) + '\n' }}{% endfor %}{{ '</tool_calls>' }}"
    ),
    "gemma4": (
        "{% macro g(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is mapping %}{{ '{' }}"
        "{% for k, x in v | items %}{{ k + ':' + g(x) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
        "{% elif v is sequence %}{{ '[' }}{% for x in v %}{{ g(x) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}"
        "{% elif v is none %}None{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        "{% for c in calls %}{{ '<|tool_call>call:' + c.name + g(c.arguments) + '<tool_call|>' }}{% endfor %}"
    ),
    "gpt-oss": (
        "{% for c in calls %}{{ '<|start|>assistant' if not loop.first }}{{ ' to=functions.' + c.name "
        "+ '<|channel|>commentary json<|message|>' + (c.arguments | tojson) + '<|call|>' }}{% endfor %}"
    ),
    "mistral-3.2": (
        "{% for c in calls %}{{ '[TOOL_CALLS]' + c.name + '[CALL_ID]123456789[ARGS]' + (c.arguments | tojson) }}"
        "{% endfor %}"
    ),
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "is_on": {"type": "boolean"},
        "list": {"type": "array"},
        "more": {"type": "object"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
ASKED = [{"role": "user", "content": "hello"}]
# Without the tags themselves: no form escapes them.
plain_text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"), exclude_characters="<>`|｜[]"))
texts = st.one_of(plain_text, st.sampled_from(["5", "true", "null", "{}", "a\nb", "\n", "</div><a>", "'\"\\"]))
keys = st.text("abcXYZ_05é", min_size=1)  # Gemma 4 writes them without quotes
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "count": st.integers(-(2**50), 2**50),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "is_on": st.booleans(),
        "list": st.lists(values, max_size=3),
        "more": st.dictionaries(keys, values, max_size=3),
        "maybe": st.none() | plain_text.filter(lambda text: text.strip() not in ("null", "None")),
    },
)


def template(form: str) -> ChatTemplate:
    made = tokenizer(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if m.tool_calls %}"
        "{% set calls = m.tool_calls | map(attribute='function') | list %}" + FORMS[form] + "{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return ChatTemplate(made)


TEMPLATES = {form: template(form) for form in FORMS}


def written(form: str, calls: list[Any], content: str = "") -> str:
    """The reply as the template writes it, without the end of its turn."""
    made = TEMPLATES[form]
    prompt = made.render(ASKED, [TOOL])
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    whole = made.render([*ASKED, message], [TOOL], add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("<|im_end|>\n")


def call(given: Any) -> Any:
    function = {"name": "look_up", "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": "a23456789", "type": "function", "function": function}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(some=st.lists(arguments, min_size=1, max_size=3))
def test_calls_are_read_as_they_were_written_and_written_as_they_were_read(form: str, some: list[Any]) -> None:
    text = written(form, [call(one) for one in some])
    reply = parse(text, TEMPLATES[form].style([TOOL]), tools={"look_up": SCHEMA})
    assert reply.content is None
    assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in reply.calls] == [
        ("look_up", one) for one in some
    ]
    assert written(form, reply.calls) == text


@pytest.mark.parametrize("form", FORMS)
def test_a_call_cut_off_anywhere_stays_text_and_is_never_half_a_call(form: str) -> None:
    text = written(form, [call({"text": "two words", "count": 7})], content="Let me see.")
    style = TEMPLATES[form].style([TOOL])
    assert len(parse(text, style, tools={"look_up": SCHEMA}).calls) == 1
    for end in range(len(text) - 1):
        reply = parse(text[:end], style, tools={"look_up": SCHEMA})
        assert not reply.calls or [json.loads(one["function"]["arguments"]) for one in reply.calls] == [
            {"text": "two words", "count": 7}
        ]
        assert reply.calls or reply.content == text[:end]
        assert text.startswith(text[:end][: shown_length(text[:end], style)])


def test_a_form_that_cannot_be_read_back_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    made = ChatTemplate(tokenizer(TEMPLATES["glm"].source().replace("<tool_call>", "<do>")), model="some/model")
    with caplog.at_level(logging.WARNING, "verifiers.chat"):
        for _ in range(2):
            assert made.style([TOOL]) == "hermes"
    assert ["some/model" in one.message and "<do>" in one.message for one in caplog.records] == [True]


@pytest.mark.parametrize(
    ("value", "kind", "read"),
    [
        ("5", "string", "5"),
        ("5", "integer", 5),
        ("5", ["string", "null"], "5"),
        ("None", ["string", "null"], None),
        ("True", "boolean", True),
        ("five", "integer", "five"),  # for the tool to refuse
        ("NaN", "number", "NaN"),
        ('{"a": 1}', "object", {"a": 1}),
        ('{"a": 1}', "string", '{"a": 1}'),
        ("a<parameter=b>c", "string", "a<parameter=b>c"),
        ("a</parameter>b", "string", "a</parameter>b"),
    ],
)
def test_an_argument_in_plain_text_has_the_type_of_its_schema(value: str, kind: Any, read: Any) -> None:
    tools = {"f": {"type": "object", "properties": {"x": {"type": kind}}}}
    for framed in (value, f"\n{value}\n"):
        found = calls_between(f"<function=f>\n<parameter=x>{framed}</parameter>\n</function>", tools)
        assert found is not None
        assert json.loads(found[0][1]) == {"x": read}


@given(st.text('<>="/\n {}|ab5') | st.lists(st.sampled_from(["<function=", "<parameter=", "</parameter>", "x", ">"])))
def test_no_text_between_tags_raises(pieces: Any) -> None:
    for prefix in ("", "<function=", '<invoke name="', "<|tool_call_begin|>", "<arg_key>"):
        calls_between(prefix + "".join(pieces), {"x": None})
