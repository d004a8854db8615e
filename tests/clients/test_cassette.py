"""Recording and replaying: what a cassette keeps, what it refuses, and what it says is missing."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers import errors
from verifiers.clients import Cassette, Completion, FakeClient, NotRecordedError, ReplicaClient, Request, Tokens
from verifiers.clients.records import completion_record, read_completion, read_json, write_json
from verifiers.types import Usage

REQUEST = Request(model="m", prompt=[{"role": "user", "content": "2+2?"}], sampling={"temperature": 0.7})


def ask(client: Any, request: Request = REQUEST) -> Completion:
    return asyncio.run(client.complete(request))


def request(**changes: Any) -> Request:
    fields = {"model": REQUEST.model, "prompt": REQUEST.prompt, "sampling": REQUEST.sampling}
    return Request(**{**fields, **changes})


def test_what_was_recorded_is_replayed_without_a_client(tmp_path: Path) -> None:
    live = FakeClient("4", tokens=True)
    recorded = ask(Cassette(tmp_path / "runs" / "tape.jsonl", live))
    assert ask(Cassette(tmp_path / "runs" / "tape.jsonl", mode="replay")) == recorded
    assert ask(Cassette(tmp_path / "runs" / "tape.jsonl", live)) == recorded
    assert len(live.requests) == 1


def test_the_same_request_replays_in_the_order_it_was_recorded_and_then_asks_again(tmp_path: Path) -> None:
    tape, live = tmp_path / "tape.jsonl", FakeClient(["a", "b", "c"])
    recording = Cassette(tape, live)
    assert [ask(recording).text for _ in range(2)] == ["a", "b"]
    again = Cassette(tape, live)
    assert [ask(again).text for _ in range(3)] == ["a", "b", "c"]
    replay = Cassette(tape, mode="replay")
    assert [ask(replay).text for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(NotRecordedError, match="has 3 replies to this request, but it was made 4 times"):
        ask(replay)


def test_recording_anew_replaces_what_is_replayed_and_removes_nothing_from_the_file(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    ask(Cassette(tape, FakeClient("old")))
    ask(Cassette(tape, FakeClient("new"), mode="record"))
    assert ask(Cassette(tape, mode="replay")).text == "new"
    assert len(tape.read_text().splitlines()) == 2


def test_many_at_once_are_all_recorded(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"

    async def ask_all(client: Any) -> list[str]:
        requests = [request(prompt=[{"role": "user", "content": str(n % 50)}]) for n in range(200)]
        return [completion.text for completion in await asyncio.gather(*map(client.complete, requests))]

    live = asyncio.run(ask_all(Cassette(tape, FakeClient(lambda m: "re: " + m[0]["content"], latency_s=0.01))))
    assert asyncio.run(ask_all(Cassette(tape, mode="replay"))) == live
    assert len(tape.read_text().splitlines()) == 200


def test_a_failure_is_not_recorded_and_leaves_no_gap(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    recording = Cassette(tape, FakeClient([errors.ServerError("oh"), "4"]))
    with pytest.raises(errors.ServerError):
        ask(recording)
    assert ask(recording).text == "4"
    assert ask(Cassette(tape, mode="replay")).text == "4"


def test_a_conversation_that_did_not_fit_does_not_fit_in_the_replay_either(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    with pytest.raises(errors.OverlongPromptError, match="too long"):
        ask(Cassette(tape, FakeClient(errors.OverlongPromptError("too long"))))
    with pytest.raises(errors.OverlongPromptError, match="too long"):
        ask(Cassette(tape, mode="replay"))


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"model": "other"}, r"the model differs: 'other' asked, 'm' recorded"),
        ({"sampling": {"temperature": 1.0}}, r"the sampling argument temperature differs: 1 asked, 0\.7 recorded"),
        ({"sampling": {"temperature": 0.7, "seed": 3}}, r"the sampling argument seed differs: 3 asked, None recorded"),
        ({"tools": [{"type": "function"}]}, r"the tools differ"),
        (
            {"prompt": [{"role": "user", "content": "3+3?"}]},
            r"message 1 differs: \{.*'3\+3\?'.*\} asked, \{.*'2\+2\?'.*\} recorded",
        ),
        (
            {"prompt": [*REQUEST.prompt, {"role": "user", "content": "and?"}]},
            r"the number of messages differs: 2 asked, 1 recorded",
        ),
        ({"prompt": "2+2=", "message_type": "completion"}, r"the message_type differs"),
    ],
)
def test_a_missing_request_is_compared_with_the_nearest(
    tmp_path: Path, changed: dict[str, Any], difference: str
) -> None:
    tape = tmp_path / "tape.jsonl"
    recording = Cassette(tape, FakeClient("4"))
    ask(recording, request(model="far", prompt=[{"role": "user", "content": "else"}], sampling={}))
    ask(recording)
    with pytest.raises(NotRecordedError, match=difference):
        ask(Cassette(tape, mode="replay"), request(**changed))


def test_without_a_client_nothing_new_can_be_recorded_and_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotRecordedError, match="is empty, and there is no client to ask"):
        ask(Cassette(tmp_path / "tape.jsonl"))
    with pytest.raises(ValueError, match="needs a client"):
        Cassette(tmp_path / "tape.jsonl", mode="record")
    with pytest.raises(FileNotFoundError, match="no cassette to replay at"):
        Cassette(tmp_path / "tape.jsonl", mode="replay")
    with pytest.raises(ValueError, match="auto, record or replay"):
        Cassette(tmp_path / "tape.jsonl", mode="rewind")  # type: ignore[arg-type]


def test_a_disk_that_was_full_for_a_while_costs_the_replies_of_that_while_and_no_others(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    live = Cassette(tape, FakeClient(lambda messages: messages[-1]["content"]), mode="record")
    asked = [request(prompt=[{"role": "user", "content": text}]) for text in ("first", "second", "third")]
    ask(live, asked[0])
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (tape.stat().st_size + 50, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            ask(live, asked[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    ask(live, asked[2])
    replayed = Cassette(tape, mode="replay")
    assert [ask(replayed, one).text for one in (asked[0], asked[2])] == ["first", "third"]


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_last_line_is_left_out_and_repaired_by_the_next_recording(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    tape = tmp_path / "tape.jsonl"
    recording = Cassette(tape, FakeClient(["a", "b"]))
    ask(recording), ask(recording)
    whole = tape.read_bytes()
    first_line = whole.index(b"\n") + 1
    tape.write_bytes(whole[: first_line + cut])
    with caplog.at_level(logging.WARNING):
        assert ask(Cassette(tape, mode="replay")).text == "a"
    assert "is incomplete" in caplog.text
    assert tape.read_bytes() == whole[: first_line + cut], "a replay writes nothing"
    mended = Cassette(tape, FakeClient("c"))
    assert [ask(mended).text for _ in range(2)] == ["a", "c"]
    assert [json.loads(line)["turn"] for line in tape.read_text().splitlines()] == [0, 1]


def test_a_last_line_that_lacks_only_its_end_still_counts(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    ask(Cassette(tape, FakeClient("a")))
    tape.write_bytes(tape.read_bytes().rstrip(b"\n"))
    mended = Cassette(tape, FakeClient("b"))
    assert [ask(mended).text for _ in range(2)] == ["a", "b"]
    assert len(tape.read_text().splitlines()) == 2


@pytest.mark.parametrize("bad", ["not json", '{"key": 1}', "[]"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, bad: str) -> None:
    tape = tmp_path / "tape.jsonl"
    ask(Cassette(tape, FakeClient("a")))
    tape.write_text(tape.read_text() + bad + "\n" + tape.read_text())
    with pytest.raises(ValueError, match=r"tape\.jsonl:2 is no"):
        Cassette(tape, mode="replay")


def test_keys_are_never_written(tmp_path: Path) -> None:
    live = FakeClient("you sent sk-secret-1 and sk-secret-2")
    live.api_key = "sk-secret-1"
    headers = {"Authorization": "Bearer sk-secret-2", "X-Title": "mine"}
    sampling = {"extra_headers": headers, "api_key": "sk-secret-3", "extra_query": {"key": "sk-secret-4"}}
    asked = request(sampling=sampling)
    ask(Cassette(tmp_path / "tape.jsonl", ReplicaClient([live])), asked)
    assert "sk-secret" not in (tmp_path / "tape.jsonl").read_text()
    assert "[hidden]" in ask(Cassette(tmp_path / "tape.jsonl", mode="replay"), asked).text


floats = st.floats(allow_nan=False, max_value=0)
values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(), lambda x: st.lists(x, max_size=3))


@given(
    content=st.text(st.characters()),
    logprobs=st.lists(floats, max_size=5),
    raw=st.none() | st.dictionaries(st.text(), values, max_size=3),
    cost_usd=st.none() | st.floats(0, 10),
)
def test_a_completion_survives_the_round_trip(
    content: str, logprobs: list[float], raw: dict[str, Any] | None, cost_usd: float | None
) -> None:
    completion = Completion(
        message={"role": "assistant", "content": content},
        finish_reason="length",
        tokens=Tokens(prompt_ids=[1], completion_ids=list(range(len(logprobs))), logprobs=logprobs),
        usage=Usage(prompt_tokens=3, completion_tokens=4, cost_usd=cost_usd),
        model="m",
        raw=raw,
    )
    assert read_completion(read_json(write_json(completion_record(completion)))) == completion


def test_an_sdk_object_is_kept_as_what_it_dumps_to(tmp_path: Path) -> None:
    import openai

    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}
    chat = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    raw = openai.types.chat.ChatCompletion.model_validate(chat)
    completion = Completion(message=choice["message"], raw=raw)  # type: ignore[arg-type]
    ask(Cassette(tmp_path / "tape.jsonl", FakeClient(completion)))
    replayed = ask(Cassette(tmp_path / "tape.jsonl", mode="replay"))
    assert replayed.choices[0].message.content == "4"
    assert replayed.id == "1"
