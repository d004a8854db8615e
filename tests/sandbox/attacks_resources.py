"""Attempts to use up what all share: memory, disk, descriptors, output, time."""

from __future__ import annotations

import os

from tests.sandbox.arena import Arena, attack, descendants, wait_until


@attack()
def takes_all_memory_at_once(arena: Arena) -> None:
    result = arena.run("x = bytearray(8 << 30)")
    assert result.status == "memory", result
    arena.still_works()


@attack()
def takes_all_memory_bit_by_bit(arena: Arena) -> None:
    result = arena.run("x = []\nwhile True: x.append(bytearray(1 << 20))", timeout_s=30)
    assert result.status in ("memory", "killed"), result
    arena.still_works()


@attack()
def takes_all_memory_in_small_objects(arena: Arena) -> None:
    result = arena.run("x = []\nwhile True: x.append([0] * 100)", timeout_s=30, memory_mb=64)
    assert result.status in ("memory", "killed"), result
    arena.still_works()


@attack()
def takes_shared_memory(arena: Arena) -> None:
    result = arena.run(
        "import mmap\n"
        "kept = []\n"
        "while True:\n"
        "    file = open(f'{len(kept)}', 'w+b'); file.truncate(64 << 20)\n"
        "    kept.append(mmap.mmap(file.fileno(), 64 << 20))\n"
        "    for at in range(0, 64 << 20, 4096): kept[-1][at] = 1\n",
        timeout_s=30,
        memory_mb=64,
    )
    assert result.status in ("memory", "error"), result
    arena.still_works()


@attack()
def takes_memory_outside_of_every_count(arena: Arena) -> None:
    for name in ("memfd_create", "memfd_secret", "shmget", "mlockall", "mbind", "userfaultfd"):
        arena.refused(f"attempt(call, {name!r}, 0, 1 << 30, 0o1666)", "Errno 1]", "Errno 38]")


HOLD_WHAT_IS_NOT_MAPPED = """
import mmap
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SIZE, FAILED, held = 16 << 20, ctypes.c_void_p(-1).value, 0
def hold(flags, fd):
    global held
    while held < 512 << 20:
        at = libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if at == FAILED: raise OSError(ctypes.get_errno(), 'not mapped')
        ctypes.memset(at, 1, SIZE)
        libc.munmap(at + 4096, SIZE - 4096)
        held += SIZE
"""


@attack()
def holds_shared_memory_that_is_no_longer_mapped(arena: Arena) -> None:
    code = HOLD_WHAT_IS_NOT_MAPPED + "attempt(hold, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1)"
    arena.refused(code, "Errno 1]", memory_mb=64)


@attack()
def maps_a_device_for_memory_without_a_limit(arena: Arena) -> None:
    opened = "attempt(lambda: hold(mmap.MAP_SHARED, os.open('/dev/zero', os.O_RDWR)))"
    arena.refused(HOLD_WHAT_IS_NOT_MAPPED + opened, "Errno 13]", "Errno 19]", memory_mb=64)


@attack("full")
def takes_memory_in_thirty_processes(arena: Arena) -> None:
    code = "x = bytearray(100 << 20); import time; time.sleep(60)"
    result = arena.bash(f"for i in $(seq 30); do python3 -S -c '{code}' & done; wait", timeout_s=60)
    assert result.status == "memory", result
    arena.still_works(language="bash")
    assert wait_until(lambda: len(list(descendants(os.getpid()))) < 20)


@attack("full")
def takes_memory_in_the_background_between_cells(arena: Arena) -> None:
    with arena.sandbox(language="bash").session() as session:
        code = "x = [bytearray(100 << 20) for _ in range(2)]; import time; time.sleep(60)"
        session.run(f"for i in 1 2 3 4; do python3 -S -c '{code}' & done")
        assert wait_until(lambda: not session.run("pgrep -f bytearray; jobs -r").stdout.strip())


@attack()
def calls_itself_without_end(arena: Arena) -> None:
    assert "RecursionError" in (arena.run("def f(): f()\nf()").error or "")
    result = arena.run("sys.setrecursionlimit(10 ** 9)\ndef f(x): return [f(x) for _ in x]\nf([1])", timeout_s=1)
    assert result.status in ("killed", "memory", "error", "timeout"), result
    arena.still_works()


@attack()
def fills_the_disk(arena: Arena) -> None:
    result = arena.run(
        "block = b'x' * (1 << 20)\n"
        "try:\n"
        "    for number in range(10000):\n"
        "        with open(f'file{number}', 'wb') as file: file.write(block)\n"
        "except OSError as error: print(number, error)\n"
        "else: print(10000)\n",
        timeout_s=30,
    )
    if arena.level == "full":
        assert int(result.stdout.split()[0]) <= 8, result
    else:
        assert result.status == "killed", result
        assert "disk" in (result.error or "")
    arena.still_works()


@attack("reduced")
def fills_the_disk_with_files_it_has_deleted(arena: Arena) -> None:
    for close in ("", "kept.append(mmap.mmap(fd, 4096)); os.close(fd)"):
        result = arena.run(
            "import mmap\n"
            "kept, block = [], b'x' * (1 << 20)\n"
            "for number in range(100):\n"
            "    fd = os.open('file', os.O_CREAT | os.O_RDWR); os.unlink('file')\n"
            "    for _ in range(4): os.write(fd, block)\n"
            f"    time.sleep(0.05); {close}\n",
            timeout_s=30,
        )
        assert result.status == "killed", result
        assert "disk" in (result.error or "")
    arena.still_works()


@attack()
def writes_one_file_without_end(arena: Arena) -> None:
    result = arena.run(
        "block = b'x' * (1 << 20)\nwith open('file', 'wb') as file:\n    while True: file.write(block)\n",
        timeout_s=30,
    )
    assert result.status in ("error", "killed"), result
    arena.still_works()


@attack("full")
def uses_up_the_inodes(arena: Arena) -> None:
    result = arena.run("for number in range(100_000): write(f'f{number}', '')", timeout_s=30)
    assert "No space left" in (result.error or ""), result
    arena.still_works()


@attack("reduced")
def uses_up_the_inodes_of_the_hosts_disk(arena: Arena) -> None:
    result = arena.run("for number in range(10_000_000): write(f'f{number}', '')", timeout_s=60)
    assert result.status == "killed", result
    assert "disk" in (result.error or "")
    arena.still_works()


@attack()
def makes_folders_too_deep_to_remove(arena: Arena) -> None:
    before = set(os.listdir(os.path.dirname(arena.folder)))
    arena.run("for number in range(400):\n    os.mkdir('d' * 100); os.chdir('d' * 100)", timeout_s=30)
    arena.still_works()
    assert wait_until(
        lambda: not [name for name in set(os.listdir(os.path.dirname(arena.folder))) - before if "sandbox-" in name]
    )


@attack()
def makes_a_sparse_file_that_says_it_is_huge(arena: Arena) -> None:
    arena.refused("file = open('huge', 'wb')\nattempt(file.truncate, 1 << 40)", "OSError")


@attack()
def opens_files_without_end(arena: Arena) -> None:
    result = arena.run("kept = []\nwhile True: kept.append(open('/dev/null'))")
    assert "Too many open files" in (result.error or ""), result
    arena.still_works()


@attack()
def opens_pipes_without_end_and_fills_them(arena: Arena) -> None:
    result = arena.run(
        "kept = []\n"
        "while True:\n"
        "    kept.append(os.pipe()); os.set_blocking(kept[-1][1], False)\n"
        "    try:\n"
        "        while os.write(kept[-1][1], b'x' * 65536): pass\n"
        "    except BlockingIOError: pass\n"
    )
    assert "Too many open files" in (result.error or ""), result
    arena.refused("import fcntl\nr, w = os.pipe()\nattempt(fcntl.fcntl, w, 1031, 1 << 20)", "PermissionError")


@attack()
def keeps_descriptors_in_flight(arena: Arena) -> None:
    arena.refused("a, b = socket.socketpair()\nattempt(socket.send_fds, a, [b'x'], [0])", "PermissionError")


@attack()
def prints_without_end(arena: Arena) -> None:
    result = arena.run("while True: print('x' * 1000)")
    assert result.status == "output", result
    assert len(result.stdout) <= 64 << 10
    arena.still_works()


@attack()
def prints_errors_without_end(arena: Arena) -> None:
    result = arena.run("while True: sys.stderr.write('x' * 1000)")
    assert result.status == "output", result
    assert len(result.stderr) <= 64 << 10


@attack()
def writes_past_python_to_its_output(arena: Arena) -> None:
    result = arena.run("while True: os.write(1, b'x' * 1000)")
    assert result.status == "output", result
    assert len(result.stdout) <= 64 << 10


@attack("full")
def floods_its_output_from_many_programs(arena: Arena) -> None:
    result = arena.bash("yes & yes >&2 & cat /dev/zero & wait")
    assert result.status == "output", result
    assert len(result.stdout) <= 64 << 10


@attack()
def gives_a_value_without_end(arena: Arena) -> None:
    result = arena.run("'x' * (100 << 20)")
    assert result.status == "ok", result
    assert len(result.value) < 70 << 10
    assert arena.run("class A:\n    def __repr__(self): return 'x' * (100 << 20)\nA()").status == "ok"


@attack()
def raises_an_error_without_end(arena: Arena) -> None:
    result = arena.run("raise ValueError('x' * (50 << 20))")
    assert result.status == "error", result
    assert len(result.error or "") < 70 << 10


@attack()
def sleeps_for_ever(arena: Arena) -> None:
    assert arena.run("time.sleep(1000)", timeout_s=0.3).status == "timeout"
    assert arena.run("lock = threading.Lock(); lock.acquire(); lock.acquire()", timeout_s=0.3).status == "timeout"


@attack("full")
def leaves_a_thread_running_when_its_cell_is_done(arena: Arena) -> None:
    before = set(descendants(os.getpid()))
    with arena.sandbox().session() as session:
        result = session.run("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()")
        assert result.status == "ok", result
        assert session.run("1 + 1").value == "2"
    assert wait_until(lambda: not set(descendants(os.getpid())) - before)


@attack()
def queues_timers_and_signals_without_end(arena: Arena) -> None:
    result = arena.run(
        "made = 0\n"
        "ids = ctypes.c_int()\n"
        "libc.timer_create.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]\n"
        "while made < 100_000 and libc.timer_create(1, None, ctypes.byref(ids)) == 0: made += 1\n"
        "made"
    )
    assert result.status == "ok", result
    assert int(result.value) <= 1024, result
