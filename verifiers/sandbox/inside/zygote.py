"""The zygote: a freshly executed process that forks a confined process for each order on its socket.

It ends, with everything forked from it, when the application's end of the socket closes or the application ends in any
way.
"""

from __future__ import annotations

import array
import gc
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from verifiers.sandbox.inside import kernel, locks, namespaces, syscalls
from verifiers.sandbox.inside.cells import PythonCells
from verifiers.sandbox.inside.confine import Policy, confine, limits, verify
from verifiers.sandbox.inside.modules import IF_UNREADABLE, preload
from verifiers.sandbox.inside.monitor import Monitor, Watched
from verifiers.sandbox.inside.runner import prepare, rehearse, serve_session
from verifiers.sandbox.inside.scratch import Scratch

CONTROL = 0
ORDER_BYTES, MOST_ORDERS = 1 << 16, 64
INTEGER = struct.Struct("i")
TICK_S = 0.1
SELF_TEST = {
    "language": "python",
    "memory": 64 << 20,
    "disk": 1 << 20,
    "inodes": 64,
    "processes": 4,
    "output": 4096,
}


def main(config: Mapping[str, Any]) -> None:
    """Find the best level that works, and fork sessions until the application is gone."""
    sys.path[:0] = [path for path in config["paths"] if path not in sys.path]
    client = os.pidfd_open(config["client"])
    if os.getppid() != config["client"]:
        os._exit(1)
    wanted, reasons = config["level"], []
    if syscalls.MACHINE not in syscalls.MACHINES:
        reasons.append(f"the processor is {syscalls.MACHINE}, but only {' and '.join(syscalls.MACHINES)} are supported")
        wanted = wanted or "none"
    if wanted in (None, "full"):
        reasons.append(_try_full(config, client))
    if wanted in (None, "reduced"):
        policy = _policy("reduced", config)
        problem = _try_reduced(policy)
        if problem is None:
            Zygote(policy, client, config["packages"]).serve(reasons)
        reasons.append(problem)
    policy = _policy("none", config)
    if wanted in ("full", "reduced") or not config["allow_unsafe"]:
        _say_hello(CONTROL, policy, reasons)
        os._exit(0)
    Zygote(policy, client, config["packages"]).serve(reasons)


def _policy(level: str, config: Mapping[str, Any], world: namespaces.World | None = None) -> Policy:
    return Policy(
        level=level,
        readable=config["readable"],
        hidden=config["hidden"],
        programs=config["programs"],
        landlock=kernel.landlock_version(),
        world=world,
    )


def _try_full(config: Mapping[str, Any], client: int) -> str:
    """Serve at the full level in a child and never return; if that is impossible, return the reason."""
    came, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(came)
        kernel.die_with_parent()
        try:
            world = namespaces.enter(config["readable"], config["hidden"], lambda child: _wait_for(child, client))
            policy = _policy("full", config, world)
            zygote = Zygote(policy, client, config["packages"])
            zygote.self_test()
        except OSError as error:
            os.write(told, _reason(error).encode())
            os._exit(1)
        os.close(told)
        zygote.serve([] if policy.landlock else ["this kernel has no Landlock, a second protection of files"])
    os.close(told)
    with open(came, "rb") as pipe:
        reason = pipe.read().decode(errors="replace")
    if not reason:
        _wait_for(child, client)
    os.waitpid(child, 0)
    return f"namespaces cannot be used ({reason})"


def _try_reduced(policy: Policy) -> str | None:
    """Try to confine a process without namespaces; the reason if that fails, else None."""
    if not policy.landlock:
        return "this kernel has no Landlock"
    came, told = os.pipe()
    scratch = Scratch.make(policy)
    child = os.fork()
    if child == 0:
        try:
            confine(policy, {**SELF_TEST, "uid": scratch.uid}, scratch.path)
            verify(policy)
        except OSError as error:
            os.write(told, _reason(error).encode())
        os._exit(0)
    os.close(told)
    with open(came, "rb") as pipe:
        reason = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    scratch.remove()
    return f"a process cannot be confined ({reason})" if reason else None


def _wait_for(child: int, client: int) -> NoReturn:
    """In a process that is only the parent of a namespace: wait, and end with the child or with the application."""
    watched = sorted((os.pidfd_open(child), client))
    _close_all_but(watched)
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN)
    poll.poll()
    os._exit(0)  # the child dies with this process (PR_SET_PDEATHSIG)


def _reason(error: OSError) -> str:
    """What failed, with the file if it was one."""
    return (error.strerror or str(error)) + (f": {error.filename}" if error.filename else "")


def _say_hello(control: int, policy: Policy, reasons: list[str]) -> None:
    hello = {"level": policy.level, "reasons": reasons, "landlock": policy.landlock}
    os.write(control, json.dumps(hello).encode())


class Zygote:
    """Forks a confined process for each order, and reports to the application how each one ended."""

    def __init__(self, policy: Policy, client: int, packages: list[str]) -> None:
        self.policy = policy
        self.client = client
        self.packages = packages
        self.control = socket.socket(fileno=os.dup(CONTROL))
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, CONTROL)  # the standard input of every session
        os.close(null)
        self.orders: dict[bytes, Mapping[str, Any]] = {}
        self.sessions: dict[int, Watched] = {}
        self.shells: dict[int, Watched] = {}
        self.listener = -1
        self.monitor = Monitor()
        self.python = PythonCells()
        self.poll = select.epoll()
        policy.prepare()
        prepare(namespaces.SCRATCH, policy.programs)

    def self_test(self) -> None:
        """Confine one process as a test; OSError if that fails."""
        near, far = socket.socketpair()
        nothing = os.open("/dev/null", os.O_RDWR)
        with near, far:
            session = self._fork({**SELF_TEST, "is_test": True}, [far.fileno(), nothing, nothing])
            far.close()
            said = bytearray()
            while chunk := near.recv(4096):
                said += chunk
                if said == b"PR":
                    break
            os.close(nothing)
            os.kill(session.pid, signal.SIGKILL)
            os.waitpid(session.pid, 0)
            os.close(session.pidfd)
            if said != b"PR":
                raise OSError(0, said.lstrip(b"P")[5:].decode(errors="replace") or "a session ended at once")

    def serve(self, reasons: list[str]) -> NoReturn:
        """Say hello, and take orders until the application is gone."""
        if self.policy.world is None and os.geteuid() == 0 and not _is_readable_by_all(os.__file__):
            reasons.append("only root can read this Python's folder, so cells can import only preloaded modules")
            preload(IF_UNREADABLE.split())
        preload(self.packages)
        self.python = PythonCells()  # writes to descriptors 1 and 2, which are different files in each session
        rehearse(self.python)
        _spare_locks(self.policy)
        self.policy.measure()
        gc.collect()
        gc.freeze()
        gc.disable()
        if self.policy.level == "full":  # after importing packages, which may lock any files
            self.listener = locks.listen()
            self.policy.prepare_filters(may_lock=self.listener >= 0)
        os.dup2(CONTROL, 2)  # until here, the application reads why it failed from standard error
        _say_hello(self.control.fileno(), self.policy, reasons)
        for fd in (self.control.fileno(), self.client, *([self.listener] if self.listener >= 0 else [])):
            self.poll.register(fd, select.EPOLLIN)
        while True:
            self._serve_once(self.poll.poll(TICK_S if self.sessions else None))
            for session in self.monitor.offenders(self.sessions):
                os.kill(session.pid, signal.SIGKILL)

    def _serve_once(self, ready: list[tuple[int, int]]) -> None:
        """Handle lock requests, then ended sessions, then orders, so that no descriptor is reused within one round."""
        for fd, _ in ready:
            if fd == self.listener:
                locks.answer(fd)
            elif fd in self.shells:
                self._take_over(self.shells[fd])
        for fd, _ in ready:
            if fd in self.sessions:
                self._bury(fd)
        for fd, _ in ready:
            if fd == self.client:
                self._end()
            if fd == self.control.fileno():
                self._take_order()

    def _take_order(self) -> None:
        room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
        message, ancillary, _, _ = self.control.recvmsg(ORDER_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        if not message:
            self._end()
        fds = array.array("i")
        for _, _, packed in ancillary:
            fds.frombytes(packed)
        try:
            session = self._fork(self._read(message), list(fds))
        except OSError as error:
            _tell(fds[0], b"E" + _framed(f"a process could not be forked: {error}".encode()))
            for fd in fds:
                os.close(fd)
            return
        for fd in fds[1:]:
            os.close(fd)
        self.sessions[session.pidfd] = session
        self.poll.register(session.pidfd, select.EPOLLIN)
        if session.handover is not None:
            self.shells[session.handover.fileno()] = session
            self.poll.register(session.handover, select.EPOLLIN)

    def _take_over(self, session: Watched) -> None:
        """Receive a shell's /proc; without it the shell cannot be monitored, so it is killed."""
        assert session.handover is not None
        _, fds, _, _ = socket.recv_fds(session.handover, 1, 1, socket.MSG_CMSG_CLOEXEC)
        session.proc = fds[0] if fds else -1
        if not fds:
            os.kill(session.pid, signal.SIGKILL)
        self._close_handover(session)

    def _close_handover(self, session: Watched) -> None:
        if session.handover is not None:
            self.poll.unregister(session.handover)
            del self.shells[session.handover.fileno()]
            session.handover.close()
            session.handover = None

    def _read(self, message: bytes) -> Mapping[str, Any]:
        """An order with its resource limits; cached, because most orders are equal to an earlier one."""
        if message not in self.orders:
            if len(self.orders) == MOST_ORDERS:
                self.orders.clear()
            order = json.loads(message)
            self.orders[message] = {**order, "limits": limits(self.policy, order)}
        return self.orders[message]

    def _fork(self, order: Mapping[str, Any], fds: list[int]) -> Watched:
        """Fork one process for an order; at the full level it is the first process of a new PID namespace."""
        scratch = Scratch.make(self.policy)
        order = {**order, "uid": scratch.uid}
        world = self.policy.world
        near = far = None
        try:
            if world is not None:
                if order["language"] == "bash":
                    near, far = socket.socketpair()
                    order["handover"] = far.fileno()
                kernel.unshare(kernel.NEWPID)
            pid = os.fork()
            if pid == 0:
                self._be_session(order, fds, scratch.path)
        except OSError:
            scratch.remove()
            if near is not None:
                near.close()
            raise
        finally:
            if far is not None:
                far.close()
            if world is not None:
                kernel.setns(world.own_pids, kernel.NEWPID)
        pidfd = os.pidfd_open(pid)
        return Watched(pid=pid, pidfd=pidfd, conn=fds[0], order=order, scratch=scratch, handover=near)

    def _be_session(self, order: Mapping[str, Any], fds: list[int], home: str) -> NoReturn:
        """In the child: close all other descriptors, confine this process, and serve the session; never returns."""
        conn = fds[0]
        try:
            others = {order["handover"]} if "handover" in order else set()
            if self.policy.world is not None:
                others.add(self.policy.world.proc)
            conn = _keep(fds, others)
            _hand_over_self(conn)
            confine(self.policy, order, home)
            if "is_test" in order:
                verify(self.policy)
            serve_session(conn, order, home, self.python)
        except Exception as error:  # after any failure here the process must end
            why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            _tell(conn, b"E" + _framed(why.encode()))
        finally:
            os._exit(70)

    def _bury(self, pidfd: int) -> None:
        """Reap a session that has ended, report how on its socket, and clean up."""
        session = self.sessions.pop(pidfd)
        _, status = os.waitpid(session.pid, 0)
        number = os.waitstatus_to_exitcode(status)
        note = {"why": "signal", "number": -number} if number < 0 else {"why": "exit", "number": number}
        message = json.dumps({"ended": {"why": session.offence} if session.offence else note}).encode()
        _tell(session.conn, _framed(message))
        self.poll.unregister(pidfd)
        self._close_handover(session)
        for fd in (pidfd, session.conn, session.proc):
            if fd >= 0:
                os.close(fd)
        session.scratch.remove()

    def _end(self) -> NoReturn:
        """The application has ended: end all sessions, then this process."""
        for session in self.sessions.values():
            os.kill(session.pid, signal.SIGKILL)
        for session in self.sessions.values():
            os.waitpid(session.pid, 0)
            session.scratch.remove()
        os._exit(0)


def _keep(fds: list[int], others: set[int]) -> int:
    """Redirect standard input to /dev/null and output to the two files; close all but the socket and ``others``."""
    conn, out, err = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    # Open it again: sessions that shared one open file could communicate through its flags.
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    _close_all_but(sorted({0, 1, 2, conn} | others))
    return conn


def _close_all_but(kept: list[int]) -> None:
    for before, after in zip([-1, *kept], [*kept, 1 << 20], strict=True):
        if before + 1 < after:  # closerange(0, 0) would close everything
            os.closerange(before + 1, after)


def _spare_locks(policy: Policy) -> None:
    """Disable threading's work after a fork, which recreates locks and so copies many pages, if there is one thread.

    A Python cell cannot fork, so it does not need this either; except without isolation, where it can.
    """
    after_fork = getattr(threading, "_after_fork", None)
    if after_fork is not None and policy.level != "none" and threading.active_count() == 1:
        after_fork.__code__ = _nothing.__code__


def _nothing() -> None:
    return


def _is_readable_by_all(path: str) -> bool:
    """Whether any user can reach this file, judging by the modes of the folders above it."""
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
    return True


def _hand_over_self(conn: int) -> None:
    """Send the application a pidfd of this process; once confined, a process cannot send descriptors."""
    pidfd = os.pidfd_open(os.getpid())
    near = socket.SocketType(socket.AF_UNIX, socket.SOCK_STREAM, 0, conn)
    near.sendmsg([b"P"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, INTEGER.pack(pidfd))])
    near.detach()
    os.close(pidfd)


def _framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def _tell(conn: int, message: bytes) -> None:
    """Send a message on a session's socket without waiting."""
    with socket.socket(fileno=os.dup(conn)) as end:
        try:
            end.send(message, socket.MSG_DONTWAIT)
        except OSError:  # the other end is closed, or the session has filled the socket; its end of file is enough
            return
