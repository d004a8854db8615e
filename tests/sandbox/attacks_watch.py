"""Attempts on those who watch: to put the memory and the time of a shell's programs where nobody looks."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.sandbox.arena import Arena, attack, descendants, wait_until
from verifiers.sandbox import Result

MEBIBYTE = 1 << 20
ALLOWED_MB = 128
# What one look misses: what twelve programs fill on a busy machine until the next.
HELD_MB = 2.5 * ALLOWED_MB
TWELVE = """
import ctypes, os, resource, signal, socket, sys, threading, time
def fill(mebibytes=60):
    kept = bytearray(mebibytes << 20)
    for at in range(0, len(kept), 4096): kept[at] = 1
    return kept
def fork(times):
    for number in range(times):
        if os.fork() == 0: return number
"""


def held_mb(pids: set[int]) -> float:
    """Memory of processes, shared pages counted once among them; of one whose first thread has ended, by its others."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    rows = (task / "smaps_rollup" if (task / "smaps_rollup").exists() else task / "smaps").read_text()
                    found = [row.split() for row in rows.splitlines() if row.startswith(("Pss_Anon:", "Pss_Shmem:"))]
                    if not found:
                        found = [row.split() for row in rows.splitlines() if row.startswith("Pss:")]
                    if found:
                        total += sum(int(row[1]) for row in found)
                        break
    return total / 1024


def fight(arena: Arena, program: str, command: str = "python3 -S program.py; wait", **settings: object) -> Result:
    """Run a program in a shell that may have 128 MiB, and see that it never had much more."""
    settings = {"language": "bash", "memory_mb": ALLOWED_MB, "files": {"program.py": TWELVE + program}, **settings}
    before = set(descendants(os.getpid()))
    most, is_done = [0.0], threading.Event()

    def look() -> None:
        while not is_done.wait(0.01):
            most.append(held_mb(set(descendants(os.getpid())) - before))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        result: Result = arena.sandbox(**settings).run(command, timeout_s=20)
    finally:
        is_done.set()
        looker.join()
    assert max(most) < HELD_MB, (max(most), result)
    arena.still_works(language="bash")
    return result


@attack("full")
def takes_memory_in_twelve_forks_after_replacing_the_shell(arena: Arena) -> None:
    result = fight(arena, "fork(11); x = fill(); time.sleep(60)", "exec python3 -S program.py")
    assert result.status == "memory", result


@attack("full")
def takes_memory_in_twelve_forks_that_left_their_parents(arena: Arena) -> None:
    result = fight(
        arena,
        "for number in range(12):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        for fd in range(64):\n"
        "            try: os.close(fd)\n"
        "            except OSError: pass\n"
        "        x = fill(); time.sleep(60)\n"
        "time.sleep(60)",
    )
    assert result.status == "memory", result


@attack("full")
def hides_memory_behind_a_first_thread_that_has_ended(arena: Arena) -> None:
    result = fight(
        arena,
        "fork(11)\n"
        "def hold():\n    time.sleep(0.3); global x; x = fill(); time.sleep(60)\n"
        "threading.Thread(target=hold).start()\n"
        f"ctypes.CDLL(None).syscall({93 if os.uname().machine == 'aarch64' else 60}, 0)",
        "python3 -S program.py; sleep 60",
    )
    assert result.status == "memory", result


@attack("full")
def keeps_memory_in_sockets_of_thirty_processes(arena: Arena) -> None:
    result = fight(
        arena,
        "fork(29); kept = []\n"
        "try:\n"
        "    while True:\n"
        "        kept += socket.socketpair()\n"
        "        for end in kept[-2:]:\n"
        "            end.setblocking(False)\n"
        "            try:\n"
        "                while end.send(bytes(65536)): pass\n"
        "            except BlockingIOError: pass\n"
        "except OSError: time.sleep(60)",
    )
    assert result.status == "memory", result


@attack()
def gives_a_thread_descriptors_of_its_own_to_fill(arena: Arena) -> None:
    # A thread that does not share its files; a process that does.
    calls = [0x10000 | 0x800 | 0x100] + ([0x400 | 0x100 | 0x4000] if arena.level == "full" else [])
    arena.refused(f"[attempt(call, 'clone', flags, 0, 0, 0, 0) for flags in {calls}]", "Errno 1]", "Errno 11]")
    arena.refused("[attempt(call, 'close_range', 200, 255, flags) for flags in (2, 6)]", "Errno 22]")


@attack("full")
def stops_and_interrupts_all_that_it_can_see(arena: Arena) -> None:
    result = fight(
        arena,
        "fork(11)\n"
        "for name in os.listdir('/proc'):\n"
        "    for number in range(1, 65):\n"
        "        if name.isdigit() and int(name) == 1:\n"
        "            try: os.kill(1, number)\n"
        "            except OSError: pass\n"
        "x = fill(); time.sleep(60)",
        "python3 -S program.py",
    )
    assert result.status == "memory", result
    with arena.sandbox(language="bash").session() as session:
        session.run("echo kept > file")
        assert session.run("kill -STOP $$; echo here", timeout_s=0.5).status == "timeout"
        assert session.run("kill -INT 1; kill -ALRM 1; kill -STOP -1; cat file", timeout_s=5).stdout in ("", "kept\n")
        assert session.run("cat file").stdout == "kept\n"


@attack("full")
def takes_from_the_watching_process_what_it_needs(arena: Arena) -> None:
    result = arena.bash(
        "python3 -S -c '\n"
        "import os, resource\n"
        "for kind in range(16):\n"
        "    try: resource.prlimit(1, kind, (0, 0)); print(kind)\n"
        "    except (OSError, ValueError): pass\n"
        "try: os.sched_setaffinity(1, [0]); print(1)\n"
        "except OSError: pass'"
    )
    assert (result.status, result.stdout) == ("ok", ""), result


@attack("full")
def takes_the_exit_codes_from_the_watching_process(arena: Arena) -> None:
    steal = (
        "fd = os.open(f'/proc/{os.getppid()}/fd/8', os.O_RDWR)\n"
        "if os.fork():\n    while True: os.write(fd, bytes(8))\n"
        "while True: os.read(fd, 3)"
    )
    with arena.sandbox(language="bash", files={"program.py": TWELVE + steal}).session() as session:
        session.run("python3 -S program.py &")
        began = time.monotonic()
        result = session.run("sleep 0.2; while :; do :; done", timeout_s=1.0)
        assert result.status in ("timeout", "error", "ok"), result
        assert "did not stop" not in (result.error or ""), result
        assert time.monotonic() - began < 20


@attack("full")
def replaces_the_shell_to_outlive_its_time(arena: Arena) -> None:
    with arena.sandbox(language="bash").session() as session:
        session.run("echo kept > file")
        for command in (
            "exec sleep 100",
            "exec 8>&- 9<&-; exec sleep 100",
            "exec setsid sleep 100",
            "sleep 100 & exit",
        ):
            result = session.run(f"x=1; {command}", timeout_s=0.5)
            assert (result.status, result.error) == ("timeout", "it ran out of time") or "exit" in command, result
            after = session.run("cat file; echo $x")
            assert (after.stdout, after.is_fresh) == ("kept\n\n", True), (command, after)


@attack("full")
def takes_memory_by_a_trap_while_no_cell_runs(arena: Arena) -> None:
    program = TWELVE + "fork(11); x = fill(); time.sleep(600)"
    settings = {"language": "bash", "memory_mb": ALLOWED_MB, "files": {"program.py": program}}
    before = set(descendants(os.getpid()))
    with arena.sandbox(**settings).session() as session:
        session.run("trap 'exec python3 -S program.py' USR1; (sleep 0.3; exec kill -USR1 $$) &")
        assert wait_until(lambda: len(set(descendants(os.getpid())) - before) > 6)
        assert wait_until(lambda: held_mb(set(descendants(os.getpid())) - before) < HELD_MB)
        time.sleep(1.0)
        assert held_mb(set(descendants(os.getpid())) - before) < ALLOWED_MB
    arena.still_works(language="bash")
