"""Attempts on the kernel: namespaces, mounts, rarely used calls, other architectures, and taking off the locks."""

from __future__ import annotations

import platform

from tests.sandbox.arena import NUMBERS, Arena, Skip, attack

NEW_NAMESPACES = (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80)


@attack()
def makes_a_namespace(arena: Arena) -> None:
    arena.refused(f"[attempt(call, 'unshare', flag) for flag in {NEW_NAMESPACES}]", "Errno 1]")


@attack()
def makes_a_namespace_while_forking(arena: Arena) -> None:
    arena.refused(
        f"[attempt(call, 'clone', flag | 17, 0, 0, 0, 0) for flag in {NEW_NAMESPACES}]", "Errno 1]", "Errno 11]"
    )


@attack("full")
def makes_a_namespace_in_a_shell(arena: Arena) -> None:
    result = arena.bash("unshare -Ur id -u; unshare -m true; unshare -n true; nsenter -t 1 -m true; ip netns add x")
    assert result.stdout == "", result


@attack()
def forks_by_the_newest_call(arena: Arena) -> None:
    arena.refused("attempt(call, 435, ctypes.create_string_buffer(88), 88)", "Errno 38]")


@attack()
def enters_a_namespace(arena: Arena) -> None:
    arena.refused("fd = os.open('/dev/null', os.O_RDONLY)\nattempt(call, 'setns', fd, 0)", "Errno 1]")


@attack()
def mounts_and_unmounts(arena: Arena) -> None:
    for name in ("mount", "umount2", "pivot_root", "chroot", "mount_setattr"):
        arena.denied(name, 0, 0, 0, 0, 0)


@attack()
def mounts_by_the_newer_calls(arena: Arena) -> None:
    for name in ("fsopen", "fsconfig", "fsmount", "fspick", "open_tree", "move_mount"):
        arena.denied(name, 0, 0, 0, 0, 0)


@attack()
def loads_a_program_into_the_kernel(arena: Arena) -> None:
    for name in ("bpf", "init_module", "finit_module", "delete_module", "kexec_load"):
        arena.denied(name, 0, 0, 0)


@attack()
def puts_a_filter_program_on_a_socket(arena: Arena) -> None:
    arena.refused("a, b = socket.socketpair()\nattempt(a.setsockopt, socket.SOL_SOCKET, 26, bytes(16))", "Errno 1]")


@attack()
def goes_around_the_filter_by_io_uring(arena: Arena) -> None:
    for name in ("io_uring_setup", "io_uring_enter", "io_uring_register", "io_setup", "io_submit"):
        arena.denied(name, 1, 0, 0, 0)


@attack()
def watches_the_machine(arena: Arena) -> None:
    for name in ("perf_event_open", "syslog", "fanotify_init", "inotify_init1", "lookup_dcookie", "quotactl", "acct"):
        if name in NUMBERS:
            arena.denied(name, 3, 0, 0, 0, 0)


@attack()
def handles_page_faults_by_itself(arena: Arena) -> None:
    arena.denied("userfaultfd", 0)


@attack()
def reads_the_keys_of_the_kernel(arena: Arena) -> None:
    for name in ("keyctl", "add_key", "request_key"):
        arena.denied(name, 0, 0, 0, 0, 0)


@attack()
def changes_the_clock_and_the_name(arena: Arena) -> None:
    arena.refused(
        "[attempt(time.clock_settime, time.CLOCK_REALTIME, 0), attempt(socket.sethostname, 'x')]", "PermissionError"
    )
    for name in ("settimeofday", "adjtimex", "clock_adjtime", "setdomainname"):
        arena.denied(name, 0, 0)


@attack()
def turns_the_machine_off(arena: Arena) -> None:
    for name in ("reboot", "swapon", "swapoff", "vhangup"):
        arena.denied(name, 0, 0, 0, 0)


@attack()
def uses_shared_memory_and_queues_of_the_host(arena: Arena) -> None:
    for name in ("shmget", "shmat", "semget", "msgget", "mq_open"):
        arena.denied(name, 1234, 4096, 0o1666)


@attack()
def moves_memory_between_nodes(arena: Arena) -> None:
    for name in ("migrate_pages", "move_pages", "mbind", "set_mempolicy"):
        arena.denied(name, 0, 0, 0, 0, 0, 0)


@attack()
def talks_to_the_hardware(arena: Arena) -> None:
    for name in ("iopl", "ioperm", "modify_ldt"):
        if name in NUMBERS:
            arena.denied(name, 3, 1, 1)


@attack()
def calls_what_does_not_exist(arena: Arena) -> None:
    arena.refused("[attempt(call, number, 0, 0, 0) for number in (*range(460, 512), 1000, 100_000)]", "Errno 38]")


@attack()
def loosens_its_filter(arena: Arena) -> None:
    arena.denied("seccomp", 1, 0, 0)
    arena.refused("attempt(call, 'prctl', 22, 2, 0, 0, 0)", "Errno 1]")
    arena.denied("landlock_restrict_self", 3, 0)


@attack()
def changes_its_personality(arena: Arena) -> None:
    arena.refused("[attempt(call, 'personality', value) for value in (0x0040000, 0x0400000, 0x8)]", "Errno 1]")


@attack()
def types_into_a_terminal(arena: Arena) -> None:
    requests = (0x5412, 0x541C, 0x5423)
    arena.refused(f"import fcntl\n[attempt(fcntl.ioctl, fd, it, b'x') for fd in (0, 1, 2) for it in {requests}]")


MACHINE_CODE = """
import mmap
flags, prot = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
page = mmap.mmap(-1, 4096, flags, prot)
page.write(bytes.fromhex({code!r}))
run = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print('GOT', run())
"""


@attack()
def calls_the_kernel_as_a_32_bit_program(arena: Arena) -> None:
    if platform.machine() != "x86_64":
        raise Skip("machine code for x86_64")
    result = arena.run(MACHINE_CODE.format(code="53b814000000cd805bc3"))  # getpid, by interrupt 0x80
    assert result.status == "killed", result
    assert "SIGSYS" in (result.error or ""), result


@attack()
def calls_the_kernel_by_the_x32_numbers(arena: Arena) -> None:
    if platform.machine() != "x86_64":
        raise Skip("machine code for x86_64")
    result = arena.run("print('GOT', call(0x40000000 + 39))")
    assert result.status == "killed", result
    assert "SIGSYS" in (result.error or ""), result


@attack()
def runs_machine_code_of_its_own(arena: Arena) -> None:
    if platform.machine() != "x86_64":
        raise Skip("machine code for x86_64")
    result = arena.run(MACHINE_CODE.format(code="b8290000 00 bf02000000 be01000000 31d2 0f05 c3".replace(" ", "")))
    assert result.stdout == "GOT -1\n", result  # socket(AF_INET): its own code is as bound as Python's
