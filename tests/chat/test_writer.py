"""Whole conversations as tokens: calls as each template writes them, and exactly the replies to learn."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.chat import templates
from tests.engine import tiny
from verifiers.chat import ChatWriter
from verifiers.samples import tokenized

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "2 + 3?"}]


def call(arguments: Any = '{"a": 2, "b": "é"}', name: str = "add") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*made: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(made)}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def writer(template: str) -> ChatWriter:
    special = templates.LLAMA_SPECIAL if template is templates.LLAMA31 else ()
    return ChatWriter(tiny.tokenizer(template, special=special))


def text(writer: ChatWriter, ids: list[int]) -> str:
    return writer.codec.decode(ids, special=True)


def trained(writer: ChatWriter, completion: Any, tools: Any = (ADD,)) -> list[list[str]]:
    """The stretches of each sample that are learned."""
    samples = tokenized(ASKED, completion, writer, list(tools))
    found = []
    for sample in samples:
        stretches: list[list[int]] = []
        before = 0
        for token, mask in zip(sample.completion_ids, sample.completion_mask, strict=True):
            if mask and not before:
                stretches.append([])
            if mask:
                stretches[-1].append(token)
            before = mask
        found.append([text(writer, ids) for ids in stretches])
    return found


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (templates.QWEN25, '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call><|im_end|>'),
        (templates.QWEN3, '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call><|im_end|>'),
        (templates.LLAMA31, '{"name": "add", "parameters": {"a": 2, "b": "é"}}<|eot_id|>'),
        (tiny.HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call><|im_end|>'),
    ],
    ids=["qwen2.5", "qwen3", "llama3.1", "hermes"],
)
def test_a_tool_call_is_encoded_once_and_learned_to_the_end_of_its_turn(template: str, written: str) -> None:
    end = written[written.rindex("<|") :]
    completion = [calls(call()), result("5"), reply("it is 5")]
    assert trained(writer(template), completion) == [[written, f"it is 5{end}"]]
    objects = [calls(call({"a": 2, "b": "é"})), result("5"), reply("it is 5")]
    assert trained(writer(template), objects) == [[written, f"it is 5{end}"]]


def test_a_template_that_knows_no_tools_is_told_of_them_in_words_as_the_engine_does() -> None:
    made = writer(templates.NO_TOOLS)
    completion = [calls(call('{"a": 2}')), result("5"), reply("it is 5")]
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert trained(made, completion) == [[written, "it is 5<|im_end|>"]]
    first, second = made.turns(ASKED, completion, [ADD])
    assert "You may call one or more of these functions" in text(made, first.prompt_ids)
    assert "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>" in text(made, second.prompt_ids)
    assert first.prompt_ids == made.prompt(ASKED, [ADD])[1]


def test_two_calls_and_their_two_results_are_one_sample() -> None:
    completion = [calls(call('{"a": 1}'), call('{"a": 2}')), result("5"), result("6"), reply("both")]
    for template in (templates.QWEN25, templates.QWEN3, templates.NO_TOOLS):
        ((first, last),) = trained(writer(template), completion)
        assert first.count("<tool_call>") == 2
        assert last == "both<|im_end|>"


def test_arguments_that_are_no_object_stay_the_text_they_are() -> None:
    ((written,),) = trained(writer(templates.QWEN3), [calls(call('{"a": '))])
    assert '"arguments": {"a": }' in written
    assert trained(writer(templates.QWEN25), [calls(call(None))])[0][0].count("{}") == 1


def test_calls_in_the_json_text_of_tables_are_read() -> None:
    table = [{**calls(), "tool_calls": '[{"function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]', "name": None}]
    texts = [{**calls(), "tool_calls": ['{"function": {"name": "add", "arguments": "{\\"a\\": 1}"}}']}]
    plain = [calls(call('{"a": 1}'))]
    made = writer(templates.QWEN25)
    assert trained(made, table) == trained(made, texts) == trained(made, plain)


def test_thoughts_that_a_template_drops_from_history_split_the_conversation_and_mask_nothing() -> None:
    made = writer(templates.QWEN3)
    thought = "<think>\nhm\n</think>\n\nfour"
    completion = [reply(thought), {"role": "user", "content": "sure?"}, reply("<think>\nyes\n</think>\n\nfour")]
    assert trained(made, completion) == [[f"{thought}<|im_end|>"], ["<think>\nyes\n</think>\n\nfour<|im_end|>"]]
    assert "hm" not in text(made, made.turns(ASKED, completion, None)[1].prompt_ids)


def test_what_a_template_writes_after_the_end_is_not_learned_even_where_the_end_is_not_the_tokenizers_own() -> None:
    made = writer(templates.QWEN25)
    made.tokenizer.eos_token = "<|endoftext|>"  # as base models have it; the template ends turns otherwise
    completion = [reply("four"), {"role": "user", "content": "sure?"}, reply("yes")]
    assert trained(made, completion, ()) == [["four<|im_end|>", "yes<|im_end|>"]]


def test_a_thought_opened_by_the_generation_prompt_is_gone_on_with() -> None:
    opened = templates.NO_TOOLS.replace("assistant\\n", "assistant\\n<think>\\n")
    made = writer(opened)
    (turn,) = made.turns(ASKED, [reply("hm</think>four")])
    assert text(made, turn.prompt_ids).endswith("<think>\n")
    assert text(made, turn.reply_ids) == "hm</think>four<|im_end|>"


def test_what_was_not_thought_is_written_without_the_thought_that_the_generation_prompt_opens() -> None:
    opened = templates.QWEN25.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
    made = writer(opened)
    called, replied = made.turns(ASKED, [calls(call('{"a": 2}')), result("5"), reply("it is 5")], [ADD])
    assert text(made, called.prompt_ids).endswith("<|im_start|>assistant\n")
    assert text(made, called.reply_ids) == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    )
    assert text(made, replied.prompt_ids).endswith("<|im_start|>assistant\n")
    assert text(made, replied.reply_ids) == "it is 5<|im_end|>"


def test_calls_that_a_template_would_leave_out_are_written_in_words() -> None:
    silent = "{% if tools %}{{ tools | tojson }}{% endif %}" + templates.NO_TOOLS
    ((written,),) = trained(writer(silent), [calls(call('{"a": 2}'))])
    assert written == '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'


def test_a_template_that_adds_arguments_to_a_text_is_given_them_as_text() -> None:
    adds = templates.QWEN3.replace("{%- if c.function.arguments is string %}{{- c.function.arguments }}", "")
    adds = adds.replace(
        "{%- else %}{{- c.function.arguments | tojson }}{%- endif %}", "{{- '' + c.function.arguments }}"
    )
    ((written,),) = trained(writer(adds), [calls(call('{"a": 2}'))])
    assert '"arguments": {"a": 2}}' in written


def test_tools_are_told_in_the_users_message_where_a_template_refuses_a_system_message() -> None:
    strict = (
        "{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
        + templates.NO_TOOLS
    )
    made = writer(strict)
    (turn,) = made.turns(ASKED, [reply("5")], [ADD])
    shown = text(made, turn.prompt_ids)
    assert shown.startswith("<|im_start|>user\nYou may call one or more of these functions")
    assert shown.endswith("2 + 3?<|im_end|>\n<|im_start|>assistant\n")


def test_variables_of_the_template_that_were_sampled_with_are_written_with_too() -> None:
    loud = templates.NO_TOOLS.replace("assistant\\n'", "assistant\\n' + ('!' if loud else '')")
    made = writer(loud)
    (turn,) = made.turns(ASKED, [reply("four")], loud=True)
    assert turn.prompt_ids == made.prompt(ASKED, loud=True)[1] != made.prompt(ASKED)[1]
    assert text(made, turn.reply_ids) == "four<|im_end|>"
