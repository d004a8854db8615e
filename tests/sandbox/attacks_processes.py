"""Attempts on processes: signals, tracing, new processes and threads, staying alive, and being someone else."""

from __future__ import annotations

import os
import signal

from tests.sandbox.arena import NUMBERS, Arena, Skip, attack, descendants, wait_until


@attack()
def sends_a_signal_to_the_application(arena: Arena) -> None:
    arena.refused(f"[attempt(os.kill, pid, 0) for pid in ({os.getpid()}, {os.getppid()})]")


@attack()
def sends_a_signal_to_the_process_above_it(arena: Arena) -> None:
    result = arena.run("attempt(os.kill, os.getppid(), signal.SIGKILL)")
    # Above the first process of a namespace there is nobody: its parent's number is 0, its own group.
    assert result.status in ("ok", "killed"), result
    arena.still_works()


@attack("full")
def sends_a_signal_to_everybody(arena: Arena) -> None:
    with arena.sandbox().session() as other:
        other.run("x = 1")
        arena.run("attempt(os.kill, -1, signal.SIGKILL)")
        arena.bash("kill -9 -1")
        assert other.run("x").value == "1"
    arena.still_works()


@attack("reduced")
def sends_a_signal_to_everybody_without_a_namespace(arena: Arena) -> None:
    arena.refused("[attempt(os.kill, pid, 0) for pid in (-1, 1, os.getppid())]", "PermissionError")
    arena.refused("attempt(call, 'tkill', os.getppid(), 0)", "Errno 1]")
    arena.refused("attempt(os.pidfd_open, os.getppid())", "PermissionError")


@attack()
def has_the_kernel_send_a_signal_for_it(arena: Arena) -> None:
    arena.refused(
        "import fcntl\nr, w = os.pipe()\n"
        f"[attempt(fcntl.fcntl, r, 8, {os.getpid()}), attempt(fcntl.fcntl, r, 10, signal.SIGKILL),"
        f" attempt(fcntl.fcntl, r, 15, bytes(8)), attempt(fcntl.ioctl, r, 0x8901, {os.getpid()})]"
    )


@attack()
def slows_the_application_down(arena: Arena) -> None:
    arena.refused(
        f"[attempt(os.setpriority, os.PRIO_PROCESS, {os.getpid()}, 19), attempt(os.setpriority, os.PRIO_USER, 0, 19),"
        f" attempt(os.sched_setaffinity, {os.getpid()}, [0]), attempt(call, 'ioprio_set', 1, {os.getpid()}, 3 << 13)]"
    )


@attack()
def traces_another_process(arena: Arena) -> None:
    arena.denied("ptrace", 16, os.getpid(), 0, 0)
    arena.refused("[attempt(call, 'ptrace', 0x4206, pid, 0, 0) for pid in (1, os.getppid(), os.getpid())]", "Errno 1]")


@attack()
def reads_the_memory_of_another_process(arena: Arena) -> None:
    arena.denied("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0)
    arena.denied("process_vm_writev", os.getppid(), 0, 0, 0, 0, 0)
    arena.denied("process_madvise", 3, 0, 0, 0, 0)


@attack()
def takes_a_descriptor_from_another_process(arena: Arena) -> None:
    arena.denied("pidfd_getfd", 3, 0, 0)
    arena.denied("kcmp", os.getpid(), os.getppid(), 0, 0, 0)


@attack()
def changes_the_limits_of_another_process(arena: Arena) -> None:
    arena.refused(f"import resource\n[attempt(resource.prlimit, pid, 7) for pid in ({os.getpid()}, {os.getppid()})]")


@attack()
def raises_its_own_limits(arena: Arena) -> None:
    arena.refused(
        "import resource\n"
        "[attempt(resource.setrlimit, kind, (resource.RLIM_INFINITY,) * 2) for kind in"
        " (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)]",
        "ValueError",
        "PermissionError",
    )


@attack()
def forks(arena: Arena) -> None:
    arena.refused("attempt(os.fork)", "PermissionError", "BlockingIOError")


@attack()
def forks_by_every_call_there_is(arena: Arena) -> None:
    calls = [name for name in ("fork", "vfork") if name in NUMBERS]
    arena.refused(
        f"[attempt(call, name) for name in {calls}]"
        " + [attempt(call, 'clone', 17, 0, 0, 0, 0), attempt(call, 435, 0, 0)]"
    )


@attack()
def runs_a_program(arena: Arena) -> None:
    arena.refused(
        "import subprocess\n"
        "[attempt(os.execv, '/bin/sh', ['sh', '-c', 'echo GOT']), attempt(subprocess.run, ['/bin/true']),"
        " attempt(call, 'execveat', -100, 0, 0, 0, 0)]"
    )


@attack()
def runs_a_program_from_memory(arena: Arena) -> None:
    arena.refused("attempt(os.memfd_create, 'program')", "PermissionError")


@attack()
def starts_threads_without_end(arena: Arena) -> None:
    result = arena.run(
        "threads = []\n"
        "try:\n"
        "    while True:\n"
        "        threads.append(threading.Thread(target=time.sleep, args=(60,), daemon=True)); threads[-1].start()\n"
        "except RuntimeError as error: print(len(threads), error)\n",
    )
    assert int(result.stdout.split()[0]) <= 40, result
    arena.still_works()


@attack("full")
def forks_without_end(arena: Arena) -> None:
    result = arena.bash(":() { : | : & }; :; sleep 30", timeout_s=1.0)
    assert result.status == "timeout", result
    arena.still_works(language="bash")
    assert wait_until(lambda: len(list(descendants(os.getpid()))) < 20)


@attack("full")
def forks_without_end_in_python(arena: Arena) -> None:
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    result = arena.bash(f"python3 -c '{code}'", timeout_s=1.0)
    assert result.status in ("timeout", "memory"), result
    arena.still_works(language="bash")


@attack("full")
def leaves_a_daemon_behind(arena: Arena) -> None:
    before = set(descendants(os.getpid()))
    with arena.sandbox(language="bash").session() as session:
        session.run("(setsid nohup sh -c 'while :; do sleep 0.1; done' >/dev/null 2>&1 &)")
        assert len(set(descendants(os.getpid())) - before) >= 3
    assert wait_until(lambda: not set(descendants(os.getpid())) - before)


@attack("full")
def keeps_its_output_open_in_the_background(arena: Arena) -> None:
    result = arena.bash("sleep 60 & echo started")
    assert (result.status, result.stdout) == ("ok", "started\n"), result
    assert result.time_s < 8


@attack()
def ignores_every_signal(arena: Arena) -> None:
    result = arena.run(
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "while True: pass",
        timeout_s=0.5,
    )
    assert result.status == "timeout", result
    arena.still_works()


@attack()
def catches_the_alarm_and_goes_on(arena: Arena) -> None:
    result = arena.run(
        "while True:\n    try:\n        while True: x = 1\n    except BaseException: y = 2\n    finally: continue",
        timeout_s=0.5,
    )
    assert result.status == "timeout", result
    arena.still_works()


@attack()
def computes_where_no_alarm_is_heard(arena: Arena) -> None:
    assert arena.run("9 ** 9 ** 9", timeout_s=0.5).status in ("timeout", "memory")
    assert arena.run("'a' * 10 == sum(range(10 ** 12))", timeout_s=0.5).status == "timeout"


@attack("full")
def ignores_signals_in_a_shell(arena: Arena) -> None:
    result = arena.bash("trap '' TERM INT HUP ALRM; while :; do :; done", timeout_s=0.5)
    assert result.status == "timeout", result
    arena.still_works(language="bash")


@attack("full")
def ends_the_first_process_of_its_namespace(arena: Arena) -> None:
    with arena.sandbox(language="bash").session() as session:
        session.run("kill -9 1; kill -STOP 1; kill -SEGV 1")
        assert session.run("echo here").stdout == "here\n"


@attack("full")
def looks_into_the_first_process_of_its_namespace(arena: Arena) -> None:
    result = arena.bash("cat /proc/1/environ /proc/1/maps /proc/1/mem; ls -l /proc/1/fd; echo x > /proc/1/mem")
    assert result.stdout == "", result


@attack()
def ends_itself_without_a_word(arena: Arena) -> None:
    for way in ("os._exit(0)", "os.abort()", "ctypes.string_at(0)", "call('exit_group', 7)"):
        result = arena.run(way)
        assert result.status == "killed", (way, result)
        assert result.error is not None
    arena.still_works()


@attack()
def outlives_its_parent(arena: Arena) -> None:
    arena.refused("attempt(call, 'prctl', 1, 0, 0, 0, 0)", "Errno 1]")


@attack()
def makes_itself_readable_to_others(arena: Arena) -> None:
    arena.refused(
        "[attempt(call, 'prctl', option, 1, 0, 0, 0) for option in (4, 36, 35, 8, 22, 47, 0x59616d61)]", "Errno 1]"
    )


@attack()
def becomes_someone_else(arena: Arena) -> None:
    arena.refused(
        "[attempt(os.setuid, 0), attempt(os.setgid, 0), attempt(os.setresuid, 0, 0, 0), attempt(os.setgroups, [0]),"
        " attempt(call, 'setreuid', 0, 0), attempt(call, 'setfsuid', 0)]",
        "PermissionError",
    )
    assert arena.run("os.getuid() != 0 and os.geteuid() != 0 and 0 not in os.getgroups()").value == "True"


@attack("full")
def runs_a_program_with_another_users_rights(arena: Arena) -> None:
    result = arena.bash("for p in su sudo mount passwd newgrp; do timeout 2 $p </dev/null; done; id -u")
    assert result.stdout.strip().endswith("1000"), result
    result = arena.bash(
        "cp /bin/sh s; chmod 4755 s; ./s -c 'id -u'; grep -E 'NoNewPrivs|CapEff|CapBnd|CapPrm' /proc/self/status"
    )
    rows = dict(line.split(":\t") for line in result.stdout.splitlines() if ":" in line)
    assert rows == {"NoNewPrivs": "1", "CapEff": "0" * 16, "CapBnd": "0" * 16, "CapPrm": "0" * 16}, result


@attack()
def takes_back_a_capability(arena: Arena) -> None:
    arena.denied("capset", 0, 0)
    if arena.level == "full":
        result = arena.run("[line for line in open('/proc/self/status') if line.startswith('Cap')]")
        assert result.value.count("0000000000000000") == 5, result


@attack()
def takes_the_processor_for_itself(arena: Arena) -> None:
    arena.refused(
        "[attempt(os.setpriority, os.PRIO_PROCESS, 0, -20), attempt(os.sched_setscheduler, 0, os.SCHED_FIFO,"
        " os.sched_param(50)), attempt(call, 'ioprio_set', 1, 0, 0)]"
    )


@attack("full")
def finds_out_the_number_of_the_application(arena: Arena) -> None:
    if not hasattr(signal, "pidfd_send_signal"):
        raise Skip("this Python knows no process descriptors")
    assert arena.run("os.getpid(), os.getppid(), os.getsid(0) in (0, 1)").value.startswith("(1, 0")
