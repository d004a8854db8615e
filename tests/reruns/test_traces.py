"""Traces that were recorded elsewhere become runs: scored, read, compared and learned from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from verifiers.cli.main import vf as command
from verifiers.reruns.spans import read_spans
from verifiers.reruns.traces import import_traces
from verifiers.store import RunDir, to_sft

QUESTION = "What is the capital of France?"
TOOL = {"type": "function", "name": "look", "description": "Look it up.", "parameters": {"type": "object"}}


def part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "content": text}]


def message(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "parts": part(text), **more}


CALLED = {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"what": "France"}}
TURNS = [
    ([message("user", QUESTION)], {"role": "assistant", "parts": [CALLED], "finish_reason": "tool_call"}),
    (
        [
            message("user", QUESTION),
            {"role": "assistant", "parts": [CALLED]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": {"city": "Paris"}}]},
        ],
        message("assistant", "Paris", finish_reason="stop"),
    ),
]


def attributes(asked: Any, said: Any, **more: Any) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.system_instructions": json.dumps(part("Be brief.")),
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps([said]),
        "gen_ai.tool.definitions": json.dumps([TOOL]),
        **more,
    }


def otlp_value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [otlp_value(one) for one in value]}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def otlp(trace: str, number: int, about: dict[str, Any], **more: Any) -> dict[str, Any]:
    pairs = [{"key": key, "value": otlp_value(value)} for key, value in about.items()]
    named = {"traceId": trace, "spanId": f"{trace}{number}", "name": "chat gpt-4o", "startTimeUnixNano": str(number)}
    return {**named, "attributes": pairs, **more}


def exported(*spans: Any) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]})


def trace_of(trace: str, turns: Any = TURNS, **more: Any) -> list[dict[str, Any]]:
    root = otlp(trace, 0, {"user.id": "u7"})
    calls = [otlp(trace, n + 1, attributes(*turn, **more), parentSpanId=f"{trace}0") for n, turn in enumerate(turns)]
    return [*calls, root]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two traces as a collector writes them: an export a line."""
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(exported(*trace_of(name)) for name in ("aa", "bb")))
    return path


def test_a_trace_is_a_rollout_and_its_calls_are_turns(file: Path) -> None:
    made = import_traces([file])
    assert made.model == "gpt-4o"
    first, second = made.records
    assert (first["example_id"], first["rollout"]) == (0, 0)
    assert (second["example_id"], second["rollout"]) == (0, 1)
    assert first["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    roles = [one["role"] for one in first["completion"]]
    assert roles == ["assistant", "tool", "assistant"]
    call = first["completion"][0]["tool_calls"][0]
    assert call["function"] == {"name": "look", "arguments": '{"what": "France"}'}
    assert first["completion"][1] == {"role": "tool", "tool_call_id": "c1", "content": '{"city": "Paris"}'}
    assert first["completion"][-1] == {"role": "assistant", "content": "Paris"}
    assert [step["extras"]["branch"] for step in first["trajectory"]] == [0, 0]
    assert first["usage"] == {"prompt_tokens": 40, "completion_tokens": 6, "cost_usd": None}
    assert first["info"] == {"trace_id": "aa", "span": {"user.id": "u7"}}
    assert first["reward"] is None
    assert first["error"] is None


def test_events_and_numbered_attributes_of_older_conventions_are_read_too() -> None:
    events = [
        {"name": "gen_ai.user.message", "attributes": {"content": QUESTION}},
        {"name": "gen_ai.choice", "attributes": {"message": json.dumps({"content": "Paris"}), "finish_reason": "stop"}},
    ]
    about = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    sdk = {"name": "chat", "context": {"trace_id": "0x1", "span_id": "0x2"}, "attributes": about, "events": events}
    numbered = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": QUESTION,
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.tool_calls.0.id": "c1",
        "gen_ai.completion.0.tool_calls.0.name": "look",
        "gen_ai.completion.0.tool_calls.0.arguments": "{}",
    }
    other = {"name": "openai.chat", "context": {"trace_id": "0x3", "span_id": "0x4"}, "attributes": numbered}
    spans = read_spans(json.dumps(sdk, indent=4) + "\n" + json.dumps(other, indent=4))
    assert [span.trace for span in spans] == ["0x1", "0x3"]
    made = import_traces_of(json.dumps([sdk, other]))
    assert [record["prompt"] for record in made] == [[{"role": "user", "content": QUESTION}]] * 2
    assert made[0]["completion"] == [{"role": "assistant", "content": "Paris"}]
    assert made[1]["completion"][0]["tool_calls"][0]["function"]["name"] == "look"


def import_traces_of(text: str, env: Any = None) -> list[dict[str, Any]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans.json"
        path.write_text(text)
        return import_traces([path], env).records


def test_what_the_real_sdk_exports_is_read() -> None:
    export = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    from google.protobuf.json_format import MessageToJson
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("agent")
    with tracer.start_as_current_span("invoke_agent"):
        for turn in TURNS:
            with tracer.start_as_current_span("chat gpt-4o", attributes=attributes(*turn)):
                pass
    finished = kept.get_finished_spans()
    in_both = [MessageToJson(export.encode_spans(finished)), "\n".join(span.to_json() for span in finished)]
    for text in in_both:
        (record,) = import_traces_of(text)
        assert record["completion"][-1]["content"] == "Paris"
        assert len(record["trajectory"]) == 2


def test_a_sub_agent_in_a_trace_is_a_branch_of_its_own() -> None:
    turns = [TURNS[0], ([message("user", "a detail")], message("assistant", "of it")), TURNS[1]]
    (record,) = import_traces_of(exported(*trace_of("aa", turns)))
    assert [step["extras"]["branch"] for step in record["trajectory"]] == [0, 1, 0]
    assert record["completion"][-1]["content"] == "Paris"


def test_a_trace_that_failed_or_has_no_content_is_a_failed_rollout_and_no_zero() -> None:
    broken = otlp("cc", 1, attributes([message("user", QUESTION)], message("tool", "")))
    broken["status"] = {"code": 2, "message": "rate limited"}
    (record,) = import_traces_of(exported(broken))
    assert record["error"]["blame"] == "infrastructure"
    assert "rate limited" in record["error"]["message"]
    assert record["reward"] is None


def test_files_that_hold_no_spans_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, said in (
        ("{]", "line 1 is not JSON"),
        ('{"rows": 1}', "neither OTLP"),
        ("[4]", "a span must be an object"),
    ):
        path.write_text(text)
        result = CliRunner().invoke(command, ["import", "otel", str(path)])
        assert result.exit_code == 1
        assert said in " ".join(result.output.split())
    path.write_text(exported(otlp("aa", 0, {"http.method": "GET"})))
    result = CliRunner().invoke(command, ["import", "otel", str(path)])
    assert "no model call" in result.output


def test_imported_traces_are_scored_viewed_compared_and_exported(file: Path, tmp_path: Path) -> None:
    run, rubric = tmp_path / "run", tmp_path / "strict.py"
    rubric.write_text("def exact(completion, answer):\n    return float(completion[-1]['content'] == answer)\n")
    play = CliRunner().invoke
    result = play(command, ["import", "otel", str(file), "--env", "capitals", "-o", str(run)])
    assert result.exit_code == 0, result.output
    assert "2 rollouts in" in result.output
    assert "2 matched to rows of capitals" in " ".join(result.output.split())
    scored = play(command, ["rescore", str(run), "--rubric", f"{rubric}:exact", "-o", str(tmp_path / "scored")])
    assert scored.exit_code == 0, scored.output
    records = list(RunDir.open(tmp_path / "scored").records())
    assert [record["reward"] for record in records] == [1.0, 1.0]
    assert records[0]["answer"] == "Paris"
    assert records[0]["trajectory"]
    compared = play(command, ["compare", str(tmp_path / "scored"), str(tmp_path / "scored")])
    assert compared.exit_code == 0, compared.output
    viewed = play(command, ["view", str(tmp_path / "scored"), "--export", str(tmp_path / "page.html")])
    assert viewed.exit_code == 0, viewed.output
    (first, _) = to_sft(RunDir.open(tmp_path / "scored"), min_reward=1.0)
    assert [one["role"] for one in first["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert first["tools"][0]["function"]["name"] == "look"


def test_tokens_that_an_application_recorded_make_a_trace_fit_to_learn_from_with_grpo() -> None:
    from verifiers.samples import exact_samples

    exact = {
        "verifiers.prompt_ids": [1, 2],
        "verifiers.completion_ids": [3, 4],
        "verifiers.completion_logprobs": [-0.5, -0.25],
    }
    (with_tokens,) = import_traces_of(exported(*trace_of("aa", TURNS[1:], **exact)))
    (sample,) = exact_samples(with_tokens)
    assert sample.completion_ids == [3, 4]
    assert sample.completion_logprobs == [-0.5, -0.25]
    (without,) = import_traces_of(exported(*trace_of("aa", TURNS[1:])))
    with pytest.raises(ValueError, match="no token ids"):
        exact_samples(without)


def test_tokens_as_json_texts_are_read_and_those_that_are_none_are_refused_by_their_span() -> None:
    from verifiers.samples import exact_samples

    names = ("verifiers.prompt_ids", "verifiers.completion_ids", "verifiers.completion_logprobs")
    written = dict(zip(names, ("[1, 2]", "[3]", "[0]"), strict=True))
    (state,) = import_traces_of(exported(*trace_of("aa", TURNS[1:], **written)))
    assert exact_samples(state)[0].completion_ids == [3]
    for wrong in (("[1]", "[1, 2]", "[0]"), ("[1]", '["x"]', "[0]"), ("[1]", "[1", "[0]"), ("[1]", "[1]", None)):
        given = {name: value for name, value in zip(names, wrong, strict=True) if value is not None}
        with pytest.raises(ValueError, match=r"trace aa cannot be read.*one logprob for each id of the reply"):
            import_traces_of(exported(*trace_of("aa", TURNS[1:], **given)))


def test_spans_of_other_shapes_are_refused_in_a_sentence_that_names_file_or_trace(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    odd: Any = {"gen_ai.system_instructions": '["x"]'}
    for text, said in (
        ('{"resourceSpans": "x"}', "cannot be read as spans: AttributeError"),
        ('{"spanId": "a", "attributes": [{"value": {}}]}', "cannot be read as spans: KeyError: 'key'"),
        (exported(*trace_of("aa", TURNS[1:], **odd)), "trace aa cannot be read"),
        (exported(*trace_of("aa", TURNS[1:], **{"gen_ai.usage.input_tokens": "many"})), "trace aa cannot be read"),
    ):
        path.write_text(text)
        result = CliRunner().invoke(command, ["import", "otel", str(path), "-o", str(tmp_path / "run")])
        assert result.exit_code == 1
        assert said in " ".join(result.output.split()), result.output


def test_spans_of_openinference_are_read() -> None:
    """As Phoenix's instrumentors write them, numbered, in words of their own."""
    tool = json.dumps({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}})
    said = "llm.output_messages.0.message"
    first = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "gpt-4o",
        "llm.token_count.prompt": 20,
        "llm.token_count.completion": 3,
        "llm.tools.0.tool.json_schema": tool,
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.type": "text",
        "llm.input_messages.0.message.contents.0.message_content.text": QUESTION,
        f"{said}.role": "assistant",
        f"{said}.tool_calls.0.tool_call.id": "c1",
        f"{said}.tool_calls.0.tool_call.function.name": "look",
        f"{said}.tool_calls.0.tool_call.function.arguments": '{"what": "France"}',
    }
    asked = "llm.input_messages"
    second = {
        **{name: value for name, value in first.items() if not name.startswith(said)},
        f"{asked}.1.message.role": "assistant",
        f"{asked}.1.message.tool_calls.0.tool_call.id": "c1",
        f"{asked}.1.message.tool_calls.0.tool_call.function.name": "look",
        f"{asked}.1.message.tool_calls.0.tool_call.function.arguments": '{"what": "France"}',
        f"{asked}.2.message.role": "tool",
        f"{asked}.2.message.tool_call_id": "c1",
        f"{asked}.2.message.content": "Paris",
        f"{said}.role": "assistant",
        f"{said}.content": "Paris",
    }
    spans = [otlp("a", 2, second), otlp("a", 1, first), otlp("a", 0, {"openinference.span.kind": "AGENT"})]
    (record,) = import_traces_of(exported(*spans))
    check_capital(record)


def test_spans_of_vercels_ai_sdk_are_read() -> None:
    asked: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    called = {"toolCallId": "c1", "toolName": "look", "input": {"what": "France"}}
    common = {"ai.operationId": "ai.generateText.doGenerate", "ai.model.id": "gpt-4o", "ai.usage.promptTokens": 20}
    first = {
        **common,
        "ai.prompt.messages": json.dumps(asked),
        "ai.response.toolCalls": json.dumps([called]),
        "ai.response.finishReason": "tool-calls",
    }
    asked += [
        {"role": "assistant", "content": [{"type": "tool-call", **called}]},
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "c1", "output": "Paris"}]},
    ]
    second = {**common, "ai.prompt.messages": json.dumps(asked), "ai.response.text": "Paris"}
    outer = {"ai.operationId": "ai.generateText", "ai.prompt": json.dumps({"prompt": QUESTION})}
    spans = [otlp("a", 0, outer), otlp("a", 1, first), otlp("a", 2, second)]
    (record,) = import_traces_of(exported(*spans))
    check_capital(record)


def check_capital(record: Any) -> None:
    steps = record["trajectory"]
    assert [len(step["prompt"]) for step in steps] == [1, 3]
    (call,) = steps[0]["completion"][0]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"what": "France"})
    assert [one["role"] for one in record["completion"]] == ["assistant", "tool", "assistant"]
    assert record["completion"][-1]["content"] == "Paris"
    assert {step["trajectory_id"] for step in steps} == {"a"}


def test_a_span_that_was_sent_twice_or_recorded_by_framework_and_sdk_is_one_turn() -> None:
    framework = otlp("a", 8, attributes(*TURNS[1]), parentSpanId="a0", startTimeUnixNano="2")
    inner = otlp("a", 9, attributes(*TURNS[1]), parentSpanId="a8", startTimeUnixNano="3")
    first = otlp("a", 1, attributes(*TURNS[0]), parentSpanId="a0")
    looped = otlp("a", 7, {"x": 1}, parentSpanId="a7")  # its own parent
    (record,) = import_traces_of(exported(inner, framework, first, looped, first, otlp("a", 0, {})))
    assert [len(step["prompt"]) for step in record["trajectory"]] == [2, 4]
