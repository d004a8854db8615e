"""Attempts to signal another session, or to keep the machine's own programs waiting, by what all of them can see."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import threading
import time
from pathlib import Path

from tests.sandbox.arena import Arena, Skip, attack
from verifiers.sandbox import Session

SHARED = ("/usr/bin/env", "/usr/lib", "/dev/null", "/", "/etc/passwd")
LOCK_ALL = """
import fcntl, os, struct
EVERYTHING = struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0)
def lock(path):
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.isdir(path):
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.fcntl(fd, 37, EVERYTHING)
    return fd
def question(fd):
    wanted = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)
    return struct.unpack_from('h', fcntl.fcntl(fd, 36, wanted))[0] == fcntl.F_UNLCK
kept = [lock(path) for path in SHARED]
print(all(question(fd) for fd, path in zip(kept, SHARED) if not os.path.isdir(path)))
"""


def is_free_out_here(path: str) -> bool:
    """Can a program of the machine lock this file?"""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def lock_all(arena: Arena, session: Session) -> str:
    code = f"SHARED = {SHARED if arena.level == 'full' else SHARED[:3]!r}\n{LOCK_ALL}"
    if session.sandbox.language == "python":
        return str(session.run(code).stdout)
    session.write("locks.py", code + "import sys, time; sys.stdout.flush(); os.close(1); time.sleep(60)")
    result = session.run("mkfifo pipe; python3 -S locks.py > pipe & cat pipe")
    return str(result.stdout)


@attack()
def locks_files_that_all_share(arena: Arena) -> None:
    readable = [path for path in SHARED[:3] if os.access(path, os.R_OK)]
    for language in ("python", "bash") if arena.level == "full" else ("python",):
        sandbox = arena.sandbox(language=language)
        with sandbox.session() as one, sandbox.session() as other:
            assert lock_all(arena, one) == "True\n"
            assert all(is_free_out_here(path) for path in readable)
            assert lock_all(arena, other) == "True\n"


@attack("full")
def exchanges_a_file_while_its_lock_is_looked_at(arena: Arena) -> None:
    program = (
        "import fcntl, os, threading, time\n"
        "own, shared, fd = os.open('own', os.O_CREAT | os.O_RDWR), os.open('/usr/bin/env', os.O_RDONLY), 40\n"
        "def swap():\n    while True: os.dup2(own, fd); os.dup2(shared, fd)\n"
        "threading.Thread(target=swap, daemon=True).start()\n"
        "ends = time.monotonic() + 2\n"
        "while time.monotonic() < ends:\n"
        "    try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except OSError: pass\n"
    )
    seen, is_done = [], threading.Event()

    def look() -> None:
        while not is_done.wait(0.001):
            seen.append(is_free_out_here("/usr/bin/env"))

    looker = threading.Thread(target=look)
    looker.start()
    result = arena.bash("python3 -S program.py", files={"program.py": program})
    is_done.set()
    looker.join()
    assert result.status == "ok", result
    assert seen
    assert all(seen)


@attack()
def takes_leases_and_leaves_notes_on_files_that_all_share(arena: Arena) -> None:
    arena.refused(
        "import fcntl\nfd = os.open('/usr/bin/env', os.O_RDONLY)\nfolder = os.open('/usr/bin', os.O_RDONLY)\n"
        # F_SETLEASE, F_NOTIFY, F_SET_RW_HINT, F_SET_FILE_RW_HINT, F_SETDELEG
        "[attempt(fcntl.fcntl, which, command, bytes(8)) for which in (fd, folder)"
        " for command in (1024, 1026, 1036, 1038, 1040)]",
        "PermissionError",
    )
    arena.denied("inotify_init1", 0)
    arena.denied("fanotify_init", 0, 0)


@attack()
def changes_the_flags_of_what_all_read_from(arena: Arena) -> None:
    code = "import fcntl\n[fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (0, 1, 2)]"
    sandbox = arena.sandbox()
    with sandbox.session() as one, sandbox.session() as other:
        before = other.run(code).value
        one.run("import fcntl, os\n[fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND) for fd in (0, 1, 2)]")
        assert one.run(code).value != before
        assert other.run(code).value == before
        with sandbox.session() as third:
            assert third.run(code).value == before


@attack()
def drops_what_others_have_in_memory(arena: Arena) -> None:
    if not sys.platform.startswith("linux"):
        raise Skip("only Linux tells what of a file is in memory")
    path = os.path.join(os.path.dirname(os.__file__), "turtle.py")
    if not os.access(path, os.R_OK):
        raise Skip("this Python has no file that nobody else reads")
    size = len(Path(path).read_bytes())
    arena.run(
        f"fd = os.open({path!r}, os.O_RDONLY)\nfor _ in range(50): os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)"
    )
    time.sleep(0.1)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        pages = -(-size // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        done = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), resident)
        del start
    assert done == 0
    assert sum(page & 1 for page in resident) > pages // 2
