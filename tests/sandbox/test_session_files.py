"""Files into a session's folder, and out of it."""

from __future__ import annotations

import os

import pytest

from verifiers.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("full_level")


def test_files_go_in_and_out(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.write("in.txt", "text")
        session.write("deep/er/in.bin", b"\x00\xff")
        session.run("open('out.txt', 'w').write(open('in.txt').read().upper())")
        assert session.read("out.txt") == b"TEXT"
        assert session.read("deep/er/in.bin") == b"\x00\xff"
        assert session.files() == ["deep/er/in.bin", "in.txt", "out.txt"]


def test_the_sandboxes_files_are_there_from_the_start_and_after_a_crash() -> None:
    with Sandbox(files={"a.txt": "A", "b/c.bin": b"C"}) as sandbox, sandbox.session() as session:
        assert session.run("open('a.txt').read() + open('b/c.bin').read()").value == "'AC'"
        session.run("import os; os.remove('a.txt'); os._exit(0)")
        assert session.files() == ["a.txt", "b/c.bin"]


def test_reading_what_is_not_there_raises_what_open_would(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        with pytest.raises(FileNotFoundError, match=r"none\.txt"):
            session.read("none.txt")
        with pytest.raises(IsADirectoryError):
            session.read(".")


def test_a_name_that_no_file_can_have_is_refused_and_the_session_goes_on(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("x = 1")
        for name in ("\ud800", "a\udfff\udfffb\ud800"):
            with pytest.raises(ValueError, match="text that can be encoded"):
                session.read(name)
            with pytest.raises(ValueError, match="text that can be encoded"):
                session.write(name, b"")
        session.write("\udcff", b"named by a byte")
        assert session.read("\udcff") == b"named by a byte"
        assert session.run("x").value == "1"


def test_a_file_that_does_not_fit_raises_what_write_would() -> None:
    with Sandbox(disk_mb=1) as sandbox, sandbox.session() as session:
        with pytest.raises(OSError, match=r"No space left|File too large"):
            session.write("big", b"x" * (2 << 20))
        assert session.run("1 + 1").value == "2"


def test_a_large_file_makes_the_round_trip(sandbox: Sandbox) -> None:
    content = os.urandom(8 << 20)
    with sandbox.session() as session:
        session.write("big", content)
        assert session.read("big") == content
