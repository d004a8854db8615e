"""Builds the seccomp filter for the system calls that a session may make.

It is an allow-list: unknown calls fail with ENOSYS (so that libraries fall back to others), calls known to be dangerous
fail with EPERM, and calls of another architecture kill the process.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Mapping, Sequence

from verifiers.sandbox.inside import syscalls

LOAD, JUMP, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, AND, RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
FARTHEST = 255
ALLOW, KILL, FAIL, NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16

CLONE_FILES, CLONE_THREAD = 0x00000400, 0x00010000
CLONE_NAMESPACES = 0x7E020000
AF_UNIX = 1
# Left out: signals to any process (F_SETOWN, F_SETSIG), leases and notifications, larger pipes, write hints.
FCNTL_HARMLESS = (0, 1, 2, 3, 4, 5, 9, 11, 16, 36, 1025, 1027, 1028, 1030, 1032, 1033, 1034, 1035)
FCNTL_PROCESS_LOCKS, FCNTL_LOCKS = (6, 7), (37, 38)
FIRST_PROCESS = 1
CLOSE_RANGE_HARMLESS = (0, 4)  # close now or on exec; not CLOSE_RANGE_UNSHARE
TERMINAL_QUERIES = (0x5401, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451)
PRCTL_HARMLESS = (3, 15, 16, 21, 23, 27, 30, 39, 0x53564D41)  # get or set names, and queries
PERSONALITY_QUESTIONS = (0, 0xFFFFFFFF)
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000

Instruction = tuple[int, int, int, int]
Body = tuple[Instruction, ...]
"""The instructions for one call; every path ends in a verdict."""


def fail(number: int) -> int:
    """The verdict that the call is not made and fails with this errno."""
    return FAIL | number


NO_EFFECT = fail(0)
"""The call does nothing and returns success."""


def always(verdict: int) -> Body:
    """The same verdict for all arguments."""
    return ((RETURN, 0, 0, verdict),)


def filter_program(
    *, may_fork: bool, may_thread: bool = True, may_lock: bool = False, only_pid: int | None = None
) -> bytes:
    """The program for one kind of session. ``only_pid``: without namespaces, calls may concern only this process.

    ``may_lock``: another filter (`lock_program`) passes file locks to a listener; else they have no effect.

    >>> len(filter_program(may_fork=False)) % 8
    0
    """
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, AUDIT[syscalls.MACHINE]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if syscalls.MACHINE == "x86_64":
        program += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    allowed = [syscalls.FILES, syscalls.DESCRIPTORS, syscalls.MEMORY, syscalls.SIGNALS_AND_TIME, syscalls.OWN_PROCESS]
    allowed += [syscalls.OTHER_PROCESSES, syscalls.FILE_ATTRIBUTES] if only_pid is None else []
    allowed += [syscalls.NEW_PROCESSES] if may_fork else []
    refused = [syscalls.REFUSED, syscalls.NEW_PROCESSES, syscalls.FILE_ATTRIBUTES]
    bodies = {number: always(fail(errno.EPERM)) for group in refused for number in group.values()}
    bodies |= {number: always(ALLOW) for group in allowed for number in group.values()}
    numbers = syscalls.BY_ARGUMENT | syscalls.OTHER_PROCESSES
    for name, body in by_argument(
        may_fork=may_fork, may_thread=may_thread, may_lock=may_lock, only_pid=only_pid
    ).items():
        if name in numbers:
            bodies[numbers[name]] = body
    program += search(spans(bodies, otherwise=always(fail(errno.ENOSYS))))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def spans(bodies: Mapping[int, Body], otherwise: Body) -> list[tuple[int, Body]]:
    """All call numbers as ranges with the same body: the start of each range, and its body.

    >>> [start for start, _ in spans({1: always(ALLOW), 2: always(ALLOW), 7: always(ALLOW)}, always(KILL))]
    [0, 1, 3, 7, 8]
    """
    found: list[tuple[int, Body]] = []
    for number in range(max(bodies) + 2):
        body = bodies.get(number, otherwise)
        if not found or found[-1][1] != body:
            found.append((number, body))
    return found


def search(ranges: Sequence[tuple[int, Body]]) -> list[Instruction]:
    """A binary search over ranges: the kernel runs it for every call, and for all numbers once at installation."""
    if len(ranges) == 1:
        return list(ranges[0][1])
    middle = len(ranges) // 2
    below, above = search(ranges[:middle]), search(ranges[middle:])
    start = ranges[middle][0]
    if len(below) <= FARTHEST:
        return [(JUMP_AT_LEAST, len(below), 0, start), *below, *above]
    return [(JUMP_AT_LEAST, 0, 1, start), (JUMP, 0, 0, len(below)), *below, *above]


def by_argument(*, may_fork: bool, may_thread: bool, may_lock: bool, only_pid: int | None) -> dict[str, Body]:
    """The calls whose verdict depends on their arguments."""
    no = fail(errno.EPERM)
    locks = ALLOW if may_lock else NO_EFFECT
    bodies = {
        "clone": clone(may_fork=may_fork, may_thread=may_thread),
        "socketpair": only(0, (AF_UNIX,), fail(errno.EAFNOSUPPORT)),
        "close_range": only(2, CLOSE_RANGE_HARMLESS, fail(errno.EINVAL)),
        # A process lock excludes only other processes: without forks there are none, so it may have no effect.
        "fcntl": fcntl(locks, of_process=locks if may_fork else NO_EFFECT),
        "flock": always(locks),
        # Advice on shared files could drop pages that others have cached; ignoring it is always valid.
        "fadvise64": always(NO_EFFECT),
        "readahead": always(NO_EFFECT),
        "ioctl": only(1, TERMINAL_QUERIES, fail(errno.ENOTTY)),
        "prctl": only(0, PRCTL_HARMLESS, no),
        "mmap": mmap(),
        "personality": only(0, PERSONALITY_QUESTIONS, no),
    }
    if may_fork:  # the first process of a shell's namespace monitors it, and must not be changed
        bodies["prlimit64"] = only(0, (0,), no)
        bodies["sched_setaffinity"] = never(0, (FIRST_PROCESS,), no)
    if only_pid is not None:
        for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
            bodies[name] = only(0, (only_pid,), no)
        for name in ("prlimit64", "sched_setaffinity"):
            bodies[name] = only(0, (0, only_pid), no)
        for name in ("tkill", "pidfd_open", "pidfd_send_signal"):
            bodies[name] = always(no)
    return bodies


def clone(*, may_fork: bool, may_thread: bool) -> Body:
    """Allow new processes or threads as configured, but no namespaces."""
    if not may_thread:
        return always(fail(errno.EAGAIN))
    no_namespace: Body = (
        (LOAD, 0, 0, ARGUMENTS),
        (JUMP_ANY_BIT, 0, 1, CLONE_NAMESPACES),
        (RETURN, 0, 0, fail(errno.EPERM)),
    )
    no_process: Body = ((JUMP_ANY_BIT, 1, 0, CLONE_THREAD), (RETURN, 0, 0, fail(errno.EPERM)))
    # Threads must share descriptors, because the monitor would not count a separate table; processes must not, because
    # one could replace a descriptor of another while it is checked.
    alike: Body = (
        (AND, 0, 0, CLONE_THREAD | CLONE_FILES),
        (JUMP_EQUAL, 2, 0, 0),
        (JUMP_EQUAL, 1, 0, CLONE_THREAD | CLONE_FILES),
        (RETURN, 0, 0, fail(errno.EPERM)),
    )
    return (*no_namespace, *(() if may_fork else no_process), *alike, (RETURN, 0, 0, ALLOW))


def fcntl(locks: int, *, of_process: int) -> Body:
    """Allow harmless commands; process locks and file locks have their own verdicts."""
    of_both = (*_compare(1, FCNTL_PROCESS_LOCKS, of_process), *_compare(1, FCNTL_LOCKS, locks))
    return (*of_both, *only(1, FCNTL_HARMLESS, fail(errno.EPERM)))


def lock_program() -> bytes:
    """The filter for the zygote: all file locks of its forks wait for an answer.

    >>> len(lock_program()) < len(filter_program(may_fork=True))
    True
    """
    numbers = syscalls.BY_ARGUMENT
    asks: Body = (*_compare(1, (*FCNTL_PROCESS_LOCKS, *FCNTL_LOCKS), NOTIFY), (RETURN, 0, 0, ALLOW))
    program: Body = (
        (LOAD, 0, 0, NUMBER),
        (JUMP_EQUAL, 0, 1, numbers["flock"]),
        (RETURN, 0, 0, NOTIFY),
        (JUMP_EQUAL, 0, len(asks), numbers["fcntl"]),
        *asks,
        (RETURN, 0, 0, ALLOW),
    )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def mmap() -> Body:
    """Refuse anonymous shared memory: if it is partly unmapped, the pages stay allocated, and no limit counts them."""
    no = (RETURN, 0, 0, fail(errno.EPERM))
    return (
        (LOAD, 0, 0, ARGUMENTS + 8 * 3),
        (JUMP_ANY_BIT, 0, 1, MAP_HUGETLB),
        no,
        (JUMP_ANY_BIT, 0, 2, MAP_SHARED),
        (JUMP_ANY_BIT, 0, 1, MAP_ANONYMOUS),
        no,
        (RETURN, 0, 0, ALLOW),
    )


def only(index: int, values: Iterable[int], otherwise: int) -> Body:
    """Allow the call if an argument has one of these values."""
    return (*_compare(index, values, ALLOW), (RETURN, 0, 0, otherwise))


def never(index: int, values: Iterable[int], verdict: int) -> Body:
    """Allow the call unless an argument has one of these values."""
    return (*_compare(index, values, verdict), (RETURN, 0, 0, ALLOW))


def _compare(index: int, values: Iterable[int], verdict: int) -> Body:
    load = (LOAD, 0, 0, ARGUMENTS + 8 * index)  # the low half: these arguments have 32 bits
    return (load, *(part for value in values for part in ((JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, verdict))))
