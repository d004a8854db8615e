"""Confines a freshly forked process: the files it sees, its resource limits, and its system calls."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.sandbox.inside import kernel, landlock, namespaces, seccomp
from verifiers.sandbox.inside.namespaces import INNER, SCRATCH, World

STACK = 8 << 20
ADDRESS_SLACK = 256 << 20
OPEN_FILES = {"python": 256, "bash": 64}
"""For one process. Data in pipes and sockets uses memory that no limit counts, and a shell may have many processes."""
PENDING_SIGNALS = 256
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(kw_only=True)
class Policy:
    """What the zygote determines once for all sessions."""

    level: str
    readable: list[str]
    hidden: list[str]
    landlock: int
    programs: str = "/usr/bin"
    world: World | None = None
    listable: list[str] = field(default_factory=list)
    filters: dict[bool, kernel.Program] = field(default_factory=dict)
    address_space: int = 1 << 30
    private_memory: int = 256 << 20

    def measure(self) -> None:
        """Measure the memory that the zygote itself has mapped; a session's budget is added to that."""
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = [int(number) for number in file.read().split()]
        self.address_space, self.private_memory = pages[0] * PAGE, pages[5] * PAGE

    def prepare(self) -> None:
        """Compute the filters and the readable paths in advance, so that starting a session is fast."""
        if self.level == "reduced":
            self.listable = sorted({os.path.dirname(path) for path in self.hidden})
            self.readable = [path for folder in self.readable for path in _around(folder, self.hidden)]
        self.prepare_filters(may_lock=False)

    def prepare_filters(self, *, may_lock: bool) -> None:
        """Compute the filters; ``may_lock`` if a listener decides about the file locks that sessions request."""
        if self.level == "full":
            for may_fork in (False, True):
                instructions = seccomp.filter_program(may_fork=may_fork, may_lock=may_lock)
                self.filters[may_fork] = kernel.program(instructions)


def confine(policy: Policy, order: Mapping[str, Any], home: str) -> None:
    """Confine this process as the level requires. After an OSError, no code may run in it."""
    _be_expendable()
    if policy.world is not None:
        _own_world(policy.world, order)
    os.chdir(home)
    if policy.world is None:
        _be_nobody(order["uid"])
    _limit(policy, order)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if policy.level == "none":
        return
    if policy.landlock:
        is_full = policy.level == "full"  # then only readable files are mounted
        landlock.restrict(
            version=policy.landlock,
            readable=["/"] if is_full else policy.readable,
            listable=policy.listable,
            writable=[home],
            devices=["/dev"] if is_full else namespaces.DEVICES,
        )
    if "handover" in order:
        _hand_over(order["handover"])
    if policy.level == "full":
        kernel.seccomp(policy.filters[order["language"] == "bash"])
    else:  # without a PID namespace, only one process with one thread is allowed
        instructions = seccomp.filter_program(may_fork=False, may_thread=False, only_pid=os.getpid())
        kernel.seccomp(kernel.program(instructions))


def verify(policy: Policy) -> None:
    """Check that the confinement works: some kernels accept the system calls without effect."""
    try:
        socket.socket().close()
    except PermissionError:
        pass
    else:
        raise OSError(0, "the seccomp filter has no effect")
    if not policy.landlock:
        return
    try:
        os.close(os.open("/proc/self/comm", os.O_WRONLY))
    except PermissionError:
        return
    raise OSError(0, "Landlock has no effect")


def _around(folder: str, hidden: Sequence[str]) -> list[str]:
    """The paths of a folder without those hidden in it: the folder itself, or the siblings of the hidden paths."""
    if folder in hidden:
        return []
    if not any(path.startswith(folder + "/") for path in hidden):
        return [folder]
    return [path for name in os.listdir(folder) for path in _around(os.path.join(folder, name), hidden)]


def _be_expendable() -> None:
    """Make this process the first to be killed if the machine runs out of memory."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)
    except OSError:  # not a part of the isolation
        return


def _own_world(world: World, order: Mapping[str, Any]) -> None:
    """Make the mounts as the zygote's user, so that the session cannot change them; then switch to its own user."""
    kernel.unshare(kernel.NEWNS)
    options = f"size={order['disk']},nr_inodes={order['inodes']},mode=700,uid={world.uid},gid={world.gid}"
    kernel.mount("scratch", SCRATCH, "tmpfs", namespaces.TMPFS_FLAGS, options)
    kernel.mount("proc", "/proc", "proc", namespaces.PROC_FLAGS, "subset=pid")
    kernel.unshare(kernel.NEWUSER)
    namespaces.map_user(world.proc, world.uid, world.gid, INNER, INNER)
    os.close(world.proc)
    for name in (".tmp", ".shm"):
        os.mkdir(f"{SCRATCH}/{name}", 0o700)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1 if order["language"] == "python" else 0)


def _hand_over(handover: int) -> None:
    """Send the zygote this session's /proc, for the monitor; once confined, a process cannot send descriptors."""
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with socket.socket(fileno=handover) as far:
        socket.send_fds(far, [b"P"], [proc])
    os.close(proc)


def _be_nobody(uid: int | None) -> None:
    """Without namespaces: switch from root, if this is root, to a user that owns nothing."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()
    kernel.die_with_parent()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # so that the monitor can read its open files; no session can reach /proc


def limits(policy: Policy, order: Mapping[str, Any]) -> list[tuple[int, tuple[int, int]]]:
    """The resource limits of an order's session, within the hard limits of this process.

    RLIMIT_DATA limits private memory to the budget; RLIMIT_AS is looser, and limits shared memory.
    """
    memory = order["memory"]
    wanted = {
        resource.RLIMIT_CORE: 1,  # no core dumps; 0 would still pipe them to a core_pattern program
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: PENDING_SIGNALS,
        resource.RLIMIT_NOFILE: OPEN_FILES[order["language"]],
        resource.RLIMIT_FSIZE: max(order["disk"], order["output"]),
        resource.RLIMIT_STACK: STACK,
        resource.RLIMIT_DATA: policy.private_memory + memory,
        resource.RLIMIT_AS: policy.address_space + 2 * memory + ADDRESS_SLACK,
    }
    return [(kind, _within(kind, limit)) for kind, limit in wanted.items()]


def _limit(policy: Policy, order: Mapping[str, Any]) -> None:
    for kind, pair in order.get("limits") or limits(policy, order):
        resource.setrlimit(kind, pair)
    processes = order["processes"]
    if policy.level != "full" and order["uid"] is None:  # RLIMIT_NPROC counts all processes of the user
        if policy.level == "reduced":  # its filter allows only one thread anyway
            return
        processes += _tasks_of(os.geteuid())
    resource.setrlimit(resource.RLIMIT_NPROC, _within(resource.RLIMIT_NPROC, processes))


def _within(kind: int, limit: int) -> tuple[int, int]:
    hard = resource.getrlimit(kind)[1]
    value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    return value, value


def _tasks_of(uid: int) -> int:
    """The current number of processes and threads of a user."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has just ended
            continue
    return count
