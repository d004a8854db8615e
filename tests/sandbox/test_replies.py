"""What a session sends is measured before it is decoded, and decoded where no event loop waits for it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from tests.sandbox.arena import PRELUDE
from tests.sandbox.attacks_replies import SOCKET
from tests.support.tool_calls import call, calling
from verifiers.errors import Error
from verifiers.sandbox import Sandbox
from verifiers.sandbox.inside.wire import DEEPEST, MAX_LISTS, depth, outline
from verifiers.sandbox.replies import (
    FILE_READ,
    FILE_WRITTEN,
    FILES_LISTED,
    BadReplyError,
    Shape,
    cell_ran,
    function_returned,
    read_reply,
)
from verifiers.sandbox.session import SessionLostError

OUTPUT = 64 << 10
SHAPES = {
    "run": cell_ran(OUTPUT),
    "call": function_returned(OUTPUT),
    "write": FILE_WRITTEN,
    "read": FILE_READ,
    "files": FILES_LISTED,
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["number", "status", "value", "error", "exit_code", "is_fresh", "errno", "content", "names", "ended"]
)


@given(st.sampled_from(sorted(SHAPES)), st.dictionaries(NAMES, VALUES) | VALUES)
def test_whatever_json_is_sent_it_is_a_reply_or_refused(kind: str, body: object) -> None:
    try:
        reply = read_reply(json.dumps(body).encode(), SHAPES[kind])
    except BadReplyError:
        return
    assert reply.keys() <= SHAPES[kind].fields.keys() | {"ended"}
    assert type(reply.get("number", 0)) is int
    json.dumps(reply.get("value"), ensure_ascii=False).encode()


@given(st.sampled_from(sorted(SHAPES)), st.binary() | st.text('{}[]",:\\u1d0efals \n').map(str.encode))
def test_whatever_bytes_are_sent_they_are_a_reply_or_refused(kind: str, message: bytes) -> None:
    try:
        reply = read_reply(message, SHAPES[kind])
    except BadReplyError:
        return
    assert reply.keys() <= SHAPES[kind].fields.keys() | {"ended"}


@given(VALUES)
def test_an_outline_has_the_brackets_of_the_value_and_none_of_its_texts(value: object) -> None:
    def lists(part: object) -> int:
        if isinstance(part, dict):
            return 1 + sum(map(lists, part.values()))
        return 1 + sum(map(lists, part)) if isinstance(part, list) else 0

    def nested(part: object) -> int:
        if isinstance(part, dict):
            return 1 + max(map(nested, part.values()), default=0)
        return 1 + max(map(nested, part), default=0) if isinstance(part, list) else 0

    signs = outline(json.dumps(value).encode())
    assert signs.count(b"[") + signs.count(b"{") == lists(value)
    assert depth(signs) == nested(value)


HARMFUL = {
    "empty lists": b'{"number": 1, "value": [' + b"[]," * 80_000 + b"[]]}",
    "small objects": b'{"number": 1, "value": [' + b'{"":0},' * 30_000 + b"0]}",
    "numbers": b'{"number": 1, "value": [' + b"1e9," * 60_000 + b"0]}",
    "many fields": b'{"number": 1' + b"".join(b', "%d": 0' % n for n in range(40_000)) + b"}",
    "a long name in wide characters": b'{"number": 1, "' + b"x" * 500_000 + "\U0001f600".encode() + b'": 0}',
    "quotation marks": b'{"number": 1, "value": "' + b'\\"' * 300_000,
    "backslashes": b'{"number": 1, "value": "' + b"\\" * 600_001,
    "openings": b"[" * 700_000,
}


@pytest.mark.parametrize("kind", sorted(SHAPES))
@pytest.mark.parametrize("message", HARMFUL.values(), ids=HARMFUL)
def test_a_harmful_reply_takes_little_memory_and_time(message: bytes, kind: str) -> None:
    shape = SHAPES[kind]
    if len(message) > shape.most_bytes:
        return  # it is not even read
    tracemalloc.start()
    began = time.process_time()
    try:
        read_reply(message, shape)
    except BadReplyError:
        pass
    took_s, (_, most) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < (30 if kind == "call" else 12) * shape.most_bytes + (1 << 16), most
    assert took_s < 5


@pytest.mark.parametrize(
    ("shape", "most"),
    [(FILE_WRITTEN, 1 << 13), (FILE_READ, 1 << 19), (FILES_LISTED, 1 << 21), (SHAPES["run"], 1 << 20)],
)
def test_a_reply_may_be_as_long_as_what_was_asked_for_and_no_longer(shape: Shape, most: int) -> None:
    assert shape.most_bytes < most


@pytest.mark.usefixtures("full_level")
def test_replies_as_long_as_they_may_be_arrive(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert session.run(f"'\\U0001f600' * {OUTPUT - 2}").value == repr("\U0001f600" * (OUTPUT - 2))
        assert session.run(f"'\\ud800' * {OUTPUT // 6}").is_ok
        session.run("def f(n): return [[]] * n\ndef g(n): return [g(n - 1)] if n else 0\ndef h(n): return '\"' * n")
        assert session.call("f", [65_000]).value == [[]] * 65_000
        assert session.call("h", [OUTPUT]).value == '"' * OUTPUT
        assert session.call("g", [DEEPEST]).is_ok


@pytest.mark.usefixtures("full_level")
def test_a_value_of_too_many_parts_is_said_to_be() -> None:
    with Sandbox(output_kb=1024) as sandbox, sandbox.session() as session:
        session.run("def f(n): return [[]] * n\ndef g(n): return [g(n - 1)] if n else 0")
        for result in (session.call("f", [MAX_LISTS]), session.call("g", [DEEPEST + 1])):
            assert (result.status, result.value) == ("output", None), result
            assert f"more than {MAX_LISTS} lists and dicts, or is nested more than {DEEPEST}" in (result.error or "")


@pytest.mark.usefixtures("full_level")
def test_a_listing_stops_at_a_mebibyte_of_names() -> None:
    with Sandbox(disk_mb=256, timeout_s=60) as sandbox, sandbox.session() as session:
        session.run("for n in range(6000): open(f'{n:0>250}', 'w').close()")
        assert 4000 < len(session.files()) < 4300


@pytest.mark.usefixtures("full_level")
def test_a_long_forged_reply_stops_no_event_loop_and_blames_the_code() -> None:
    forged = (
        'send(frame(b\'{"number": 1, "status": "ok"}\'))\n'
        "body = b'{\"number\": 2, \"content\": [' + b'[],' * 28_000_000 + b'[]]}'\n"
        "send(frame(body))"
    )
    threads: set[str] = set()

    async def main() -> tuple[list[object], float]:
        longest, outcomes = 0.0, []

        async def beat() -> None:
            nonlocal longest
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0.001)
                longest = max(longest, time.perf_counter() - began)

        async with Sandbox(warm=0, timeout_s=30) as sandbox:
            for ask in ("read", "files"):
                async with sandbox.session() as session:
                    assert (await session.run(PRELUDE + SOCKET + forged)).is_ok
                    beating = asyncio.create_task(beat())
                    try:
                        await (session.read("file") if ask == "read" else session.files())
                    except OSError as error:
                        outcomes.append(error)
                    beating.cancel()
            async with sandbox.session() as session:
                await session.run("def f(): return [0] * 50_000")
                assert (await session.call("f")).value == [0] * 50_000
                threads.update(thread.name for thread in threading.enumerate())
        return outcomes, longest

    outcomes, longest = asyncio.run(main())
    assert [type(outcome) for outcome in outcomes] == [SessionLostError] * 2
    assert all(isinstance(outcome, Error) and outcome.blame == "policy" for outcome in outcomes)
    assert longest < 5  # seconds at the least, when the whole of it was decoded here
    assert any("sandbox-replies" in name for name in threads)


def forged_errno(number: int) -> str:
    """A cell that answers for itself, and then forges the answer to what is asked next."""
    replies = f"[{{'number': {number}, 'status': 'ok'}}, {{'number': {number + 1}, 'errno': 10 ** 30}}]"
    return f"{PRELUDE}{SOCKET}for reply in {replies}: send(frame(json.dumps(reply).encode()))"


@pytest.mark.usefixtures("full_level")
def test_a_rollout_whose_code_forges_an_error_number_is_scored_and_not_failed() -> None:
    env = vf.PythonEnv(dataset=[{"question": "?", "answer": ""}], packages=[], collect=["out.txt"])
    client = vf.FakeClient([calling(call("python", {"code": forged_errno(1)})), "done"])
    results = env.evaluate(client=client, model="fake", use_tqdm=False)
    env.close()
    assert not results.failed
    assert results.scored[0]["files"] == {}


@pytest.mark.usefixtures("full_level")
def test_a_hook_that_does_not_expect_a_lost_session_does_not_fail_the_rollout() -> None:
    class Reader(vf.MultiTurnEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State) -> vf.Messages:
            async with Sandbox(warm=0) as sandbox, sandbox.session() as session:
                await session.run(forged_errno(1))
                await session.read("out.txt")
            return []

    env = Reader(dataset=[{"question": "?", "answer": ""}], rubric=vf.Rubric([lambda completion: 0.0]), max_turns=2)
    results = env.evaluate(client=vf.FakeClient("1"), model="fake", use_tqdm=False)
    assert (results["rewards"], len(results.failed)) == ([0.0], 0)
    assert results.scored[0]["stop_condition"] == "SessionLostError"
