"""Attempts on the application itself, by what a session sends it instead of an honest reply."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from tests.sandbox.arena import PRELUDE, Arena, attack
from verifiers.sandbox import Result, Session

# The session's only descriptor beyond the standard ones is its socket.
SOCKET = """
import json, struct
fd = next(fd for fd in range(3, 256) if attempt(os.fstat, fd).startswith('GOT'))
def frame(body): return struct.pack('<I', len(body)) + body
def send(body):
    while body: body = body[os.write(fd, body):]
"""


def forge(arena: Arena, code: str, **settings: Any) -> Result:
    result = arena.run(SOCKET + code, **settings)
    arena.still_works()
    return result


@attack()
def claims_a_reply_of_four_gigabytes(arena: Arena) -> None:
    result = forge(arena, "send(b'\\xff\\xff\\xff\\xff'); time.sleep(60)")
    assert result.status == "killed", result
    assert "4294967295 bytes" in (result.error or "")


@attack()
def sends_a_long_reply_bit_by_bit(arena: Arena) -> None:
    result = forge(arena, "send(struct.pack('<I', 100_000))\nwhile True: send(b' '); time.sleep(0.01)", timeout_s=0.5)
    assert result.status == "timeout", result


@attack()
def sends_garbage(arena: Arena) -> None:
    for body in ("b'\\xff' * 100", "b'not json'", "b'[1, 2]'", "b'null'", "b'\"text\"'", "b''"):
        result = forge(arena, f"send(frame({body})); time.sleep(60)")
        assert result.status == "killed", result


@attack()
def sends_a_flood_of_garbage(arena: Arena) -> None:
    result = forge(arena, "while True: send(os.urandom(65536))")
    assert result.status == "killed", result


@attack()
def sends_json_nested_without_end(arena: Arena) -> None:
    for body in ("b'[' * 200_000", "b'{\"a\":' * 50_000"):
        result = forge(arena, f"send(frame({body})); time.sleep(60)")
        assert result.status == "killed", result


@attack()
def sends_a_number_too_long_to_read(arena: Arena) -> None:
    result = forge(arena, "send(frame(b'{\"number\": ' + b'9' * 100_000 + b'}')); time.sleep(60)")
    assert result.status == "killed", result


WRONG = {
    "status": ("['ok']", "7", "'fine'", "None"),
    "value": ("['x']", "7", "float('nan')", "{}", "True"),
    "error": ("{'a': 1}", "7"),
    "exit_code": ("'0'", "10 ** 30", "-1", "256", "True", "0.0"),
    "is_fresh": ("7", "'yes'", "None"),
    "number": ("True", "1.0", "'1'", "10 ** 30", "None"),
    "stdout": ("'forged'",),
}


@attack()
def sends_fields_of_the_wrong_kind(arena: Arena) -> None:
    for name, values in WRONG.items():
        for value in values:
            result = forge(
                arena,
                f"body = {{'number': 1, 'status': 'ok', 'value': 'forged', {name!r}: {value}}}\n"
                "send(frame(json.dumps(body).encode())); time.sleep(60)",
            )
            assert (result.status, result.value, result.exit_code) == ("killed", None, None), (name, value, result)
            assert "it sent an invalid reply" in (result.error or "") or name == "number", result


@attack()
def sends_the_same_field_many_times(arena: Arena) -> None:
    result = forge(arena, 'send(frame(b\'{"number": 1, "status": 7, "status": "ok"}\')); time.sleep(60)')
    assert result.status == "ok", result
    result = forge(arena, "send(frame(b'{\"number\": 1' + b', \"status\": \"ok\"' * 30_000 + b'}')); time.sleep(60)")
    assert result.status == "killed", result


@attack()
def sends_half_of_a_character(arena: Arena) -> None:
    result = forge(
        arena,
        "body = {'number': 1, 'status': 'ok', 'value': '\\ud800 \U0001f600', 'error': '\\udfff'}\n"
        "send(frame(json.dumps(body).encode())); time.sleep(60)",
    )
    assert (result.value, result.error) == ("? \U0001f600", "?"), result


ASKED: dict[str, Callable[[Session], object]] = {
    "read": lambda session: session.read("file"),
    "write": lambda session: session.write("file", "text"),
    "files": lambda session: session.files(),
}
FORGED = {
    "an error that there is none of": "b'\"errno\": 1000000000000000000000000000000'",
    "an error below all": "b'\"errno\": -1'",
    "an error that is none": "b'\"errno\": null'",
    "content that is a list": "b'\"content\": []'",
    "content that is not encoded": 'b\'"content": "***"\'',
    "names that are no list": 'b\'"names": "file"\'',
    "millions of lists": "b'\"names\": [' + b'[],' * 1_000_000 + b'[]]'",
    "lists in one another": "b'\"names\": ' + b'[' * 1_000 + b']' * 1_000",
    "more names than can be": "b'\"names\": [' + b'\"a\",' * 20_000 + b'\"a\"]'",
    "a text that does not end": "b'\"content\": \"' + b'\\\\\"' * 100_000",
    "what is not UTF-8": 'b\'"content": "\\xff\\xfe"\'',
    "no more than the start": 'b\'"content": "aaaa\'',
}


@attack()
def forges_what_is_said_of_its_files(arena: Arena) -> None:
    honest = "send(frame(json.dumps({'number': 1, 'status': 'ok'}).encode()))\n"
    for name, ask in ASKED.items():
        for what, body in FORGED.items():
            with arena.sandbox().session() as session:
                forged = f"send(frame(b'{{\"number\": 2, ' + {body} + b'}}'))\ntime.sleep(60)"
                result = session.run(PRELUDE + SOCKET + honest + forged)
                assert result.is_ok, (what, result)
                error = raised(ask, session)
                assert isinstance(error, TimeoutError), (name, what, error)
                assert getattr(error, "blame", None) == "policy", (name, what, error)
    arena.still_works()


def raised(ask: Callable[[Session], object], session: Session) -> Exception | None:
    try:
        ask(session)
    except Exception as error:  # whatever it is, it is looked at
        return error
    return None


@attack()
def says_that_its_file_never_ends(arena: Arena) -> None:
    with arena.sandbox(disk_mb=1).session() as session:
        session.run(
            PRELUDE + SOCKET + "import base64\n"
            'send(frame(b\'{"number": 1, "status": "ok"}\'))\n'
            "for number in range(2, 1000):\n"
            "    body = {'number': number, 'content': base64.b64encode(bytes(256 << 10)).decode()}\n"
            "    send(frame(json.dumps(body).encode()))"
        )
        error = raised(ASKED["read"], session)
        assert isinstance(error, OSError), error
        assert error.errno == errno.EFBIG, error


@attack("full")
def has_a_pipe_read_that_nobody_writes_to(arena: Arena) -> None:
    with arena.sandbox().session() as session:
        session.run("import os; os.mkfifo('pipe')")
        assert session.read("pipe") == b""


@attack()
def names_files_that_lead_out_of_its_folder(arena: Arena) -> None:
    with arena.sandbox().session() as session:
        names = ["../../etc/cron.d/x", "/etc/passwd", "a/../../b", "..", "", 7, None, "a\0b", "good/name"]
        replies = [{"number": 1, "status": "ok"}, {"number": 2, "names": names}]
        session.run(PRELUDE + SOCKET + f"for reply in {replies!r}: send(frame(json.dumps(reply).encode()))")
        assert session.files() == ["good/name"]


@attack()
def answers_before_it_is_asked(arena: Arena) -> None:
    with arena.sandbox().session() as session:
        forged = (
            "for n in range(1, 50): send(frame(json.dumps({'number': n, 'status': 'ok', 'value': 'forged'}).encode()))"
        )
        assert session.run(PRELUDE + SOCKET + forged).value == "forged"  # its own cell, about which it may lie
        second = session.run("1")
        assert second.status in ("ok", "killed")
    arena.still_works()


@attack()
def pretends_that_the_zygote_had_ended_it(arena: Arena) -> None:
    for note in ({"why": "memory"}, {"why": "signal", "number": 10**30}, {"why": None, "number": "x"}, {"why": ["x"]}):
        result = forge(arena, f"send(frame(json.dumps({{'ended': {note!r}}}).encode())); time.sleep(60)")
        assert result.status in ("memory", "killed"), result


@attack()
def closes_its_socket(arena: Arena) -> None:
    for way in ("os.close(fd)", "socket.socket(fileno=fd).shutdown(socket.SHUT_RDWR)"):
        result = forge(arena, f"{way}; time.sleep(60)", timeout_s=1.0)
        assert result.status in ("killed", "timeout"), result


@attack()
def sends_descriptors_to_the_application(arena: Arena) -> None:
    result = forge(arena, "attempt(socket.send_fds, socket.socket(fileno=os.dup(fd)), [frame(b'{}')], [0] * 100)")
    assert "PermissionError" in result.value, result


@attack()
def prints_what_is_not_text(arena: Arena) -> None:
    result = arena.run("os.write(1, bytes(range(256))); print('\\ud800'); '\\ud800'")
    assert result.status == "ok", result
    assert "\\ud800" in result.stdout


@attack()
def moves_the_end_of_its_output(arena: Arena) -> None:
    result = arena.run("print('x'); os.lseek(1, 1 << 40, os.SEEK_SET)")
    assert len(result.stdout) <= 64 << 10, result
    arena.still_works()


@attack()
def breaks_what_its_replies_are_made_with(arena: Arena) -> None:
    for code in (
        "import json; json.dumps = None",
        "import builtins; builtins.len = lambda x: 10 ** 30",
        "import builtins; builtins.dict = None; builtins.BaseException = int",
        "import struct; struct.pack = None; sys.modules.clear()",
        "sys.stdout.close(); os.close(1); os.close(2)",
        "import signal; signal.setitimer = None",
        "import gc; [o.clear() for o in gc.get_objects() if type(o) is dict]",
    ):
        result = arena.run(code, timeout_s=2.0)
        assert result.status in ("ok", "error", "killed", "timeout"), (code, result)
    arena.still_works()


@attack()
def gives_a_value_whose_text_attacks(arena: Arena) -> None:
    for body in ("raise SystemExit(0)", "import os; os._exit(0)", "return 5", "return Text('x')", "while True: pass"):
        result = arena.run(
            f"class Text(str):\n    def __len__(self): return 1 << 40\n    def __getitem__(self, at): return self\n"
            f"class A:\n    def __repr__(self):\n        {body}\nA()",
            timeout_s=0.5,
        )
        assert result.status in ("ok", "error", "killed", "timeout"), result
        assert result.value is None or len(result.value) < 100
    arena.still_works()
