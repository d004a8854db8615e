"""Structured output and forced tool calls over HTTP: what a schema says is what comes, whoever else is in the batch."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

from tests.engine.support.served import NAME, Served  # noqa: E402

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "colour": {"enum": ["red", "blue"]}},
    "required": ["x", "colour"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": POINT}}
STOP = {"type": "function", "function": {"name": "stop"}}


def formatted(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": schema, "strict": strict}}


def check_point(text: str) -> None:
    point = json.loads(text)
    assert set(point) == {"x", "colour"}
    assert 0 <= point["x"] <= 99
    assert point["colour"] in ("red", "blue")


@pytest.mark.parametrize("seed", range(5))
def test_a_reply_follows_the_schema_of_its_response_format(served: Served, seed: int) -> None:
    choice = served.chat(response_format=formatted(POINT), seed=seed)
    assert choice["finish_reason"] == "stop"
    check_point(choice["message"]["content"])


def test_a_json_object_is_one(served: Served) -> None:
    choice = served.chat(response_format={"type": "json_object"}, seed=1, max_tokens=1500)
    assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_the_openai_sdk_parses_a_pydantic_model(served: Served) -> None:
    class Step(pydantic.BaseModel):
        done: bool
        votes: list[int]

    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "go"}]
        reply = client.chat.completions.parse(model=NAME, messages=messages, response_format=Step, seed=3)
        assert isinstance(reply.choices[0].message.parsed, Step)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"add", "stop"}), ({"type": "function", "function": {"name": "add"}}, {"add"})],
    ids=["required", "named"],
)
def test_a_forced_call_is_a_call_of_a_function_that_fits_its_parameters(
    served: Served, choice: Any, names: set[str]
) -> None:
    found = set()
    for seed in range(6):
        said = served.chat(tools=[ADD, STOP], tool_choice=choice, seed=seed)
        assert said["finish_reason"] == "tool_calls"
        (call,) = said["message"]["tool_calls"]
        found.add(call["function"]["name"])
        if call["function"]["name"] == "add":
            check_point(call["function"]["arguments"])
    assert found == names


def test_a_streamed_forced_call_and_a_streamed_object_are_the_whole_ones(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"messages": messages, "seed": 5}
    chunks = served.events("/v1/chat/completions", **asked, response_format=formatted(POINT))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == served.chat("hello", seed=5, response_format=formatted(POINT))["message"]["content"]
    check_point(text)
    chunks = served.events("/v1/chat/completions", **asked, tools=[ADD], tool_choice="required")
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls") or ()]
    check_point(calls[0]["function"]["arguments"])


def test_constrained_rows_change_nothing_for_the_others_in_their_batch(served: Served) -> None:
    def free(seed: int) -> str:
        return served.chat("world", seed=seed, max_tokens=24, ignore_eos=True)["message"]["content"]

    def bound(seed: int) -> str:
        return served.chat(seed=seed, response_format=formatted(POINT))["message"]["content"]

    alone = [free(seed) for seed in range(3)]
    with ThreadPoolExecutor(6) as pool:
        said = [pool.submit(free, seed) for seed in range(3)]
        constrained = [pool.submit(bound, seed) for seed in range(3)]
        assert [one.result() for one in said] == alone
        for one in constrained:
            check_point(one.result())


def test_recursive_schemas_with_references_work(served: Served) -> None:
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
    }
    said = served.chat(response_format=formatted(tree), seed=2, max_tokens=1500)
    assert json.loads(said["message"]["content"])["v"] in (True, False)
    tool = {"type": "function", "function": {"name": "plant", "parameters": tree}}
    call = served.chat(tools=[tool], tool_choice="required", seed=2, max_tokens=1500)["message"]["tool_calls"][0]
    assert "kids" in json.loads(call["function"]["arguments"])


def deep(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


ABUSES = {
    "not a type": ({"type": "banana"}, "banana"),
    "nothing fits": ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    "only itself": ({"$ref": "#"}, "cannot be followed"),
    "elsewhere": ({"$ref": "http://localhost/schema.json"}, "schema.json"),
    "unknown keyword": ({"not": {"type": "string"}}, "not"),
    "deep": (deep(200), "64 deep"),
    "long": ({"type": "string", "description": "x" * 200_000}, "at most 131,072"),
    "wide": ({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(4500)}}, "at most 1,000"),
    "many choices": (
        {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(2000)]},
        "at most 1,000",
    ),
    "look-ahead": ({"type": "string", "pattern": "^(?=.*a)b$"}, "look-around"),
}


@pytest.mark.parametrize("name", ABUSES)
def test_a_schema_that_cannot_be_followed_is_a_clear_400(served: Served, name: str) -> None:
    schema, said = ABUSES[name]
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": NAME, "messages": messages, "response_format": formatted(schema), "max_tokens": 8}
    status, reply = served.post("/v1/chat/completions", body)
    assert status == 400, reply
    assert reply["error"]["type"] == "invalid_request_error"
    assert said in reply["error"]["message"]
    assert len(reply["error"]["message"]) < 500


def test_a_schema_of_ten_megabytes_is_refused_by_its_size(served: Served) -> None:
    status, reply = served.post("/v1/chat/completions", {"response_format": formatted({"enum": ["x" * (10 << 20)]})})
    assert status == 413
    assert "Too Large" in reply["error"]["message"]


BOMBS = [
    "^((a{1,1000}){1,1000}){1,1000}$",
    "^(a+)+b$",
    "(.*a.{50}){20}",
    ".*a.{300}b.{300}",
    "(.*[ab].{30}){20}|(.*[bc].{40}){20}",
]


def test_patterns_that_explode_and_grammars_without_an_end_hold_up_nobody(served: Served) -> None:
    def attack(schema: Any) -> int:
        body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
        return served.post("/v1/chat/completions", {**body, "response_format": formatted(schema, strict=False)})[0]

    endless = {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}
    schemas = [{"type": "string", "pattern": bomb} for bomb in BOMBS] + [endless]
    schemas += [{"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(900)}}]
    with ThreadPoolExecutor(len(schemas)) as pool:
        attacks = [pool.submit(attack, schema) for schema in schemas]
        waits = []
        while not all(one.done() for one in attacks):
            started = time.monotonic()
            served.chat(max_tokens=2)
            waits.append(time.monotonic() - started)
        assert all(one.result() in (200, 400) for one in attacks)
    assert max(waits, default=0) < 20  # seconds, on a machine that has much else to do
