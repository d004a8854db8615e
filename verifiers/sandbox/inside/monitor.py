"""Living sessions → those that hold more than they may: the memory and disk that no limit of the kernel's counts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.sandbox.inside.scratch import Scratch

EACH_S = 0.1
AT_ONCE = 64
SLACK = 16 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Watched:
    """A session as the zygote sees it; ``offence`` is what it was ended for."""

    pid: int
    pidfd: int
    conn: int
    order: Mapping[str, Any]
    scratch: Scratch
    offence: str | None = None


class Monitor:
    """Looks at the sessions in turn, a few ten times a second, so that thousands cost no more than a few."""

    def __init__(self) -> None:
        self._own = 0
        self._next = 0
        self._due = 0.0

    def offenders(self, sessions: Mapping[int, Watched]) -> list[Watched]:
        """Those of the next few that are to be ended."""
        now = time.monotonic()
        if not sessions or now < self._due:
            return []
        self._due = now + EACH_S
        self._own = self._own or resident_memory(os.getpid())
        living = list(sessions.values())
        start = self._next % len(living)
        self._next = start + AT_ONCE
        found = []
        for session in (living[start:] + living[:start])[:AT_ONCE]:
            session.offence = session.offence or self._offence(session)
            if session.offence:
                found.append(session)
        return found

    def _offence(self, session: Watched) -> str | None:
        allowed = self._own + session.order["memory"] + SLACK
        # All resident pages are quick to ask for; those of files count only in this first look.
        if resident_memory(session.pid, with_files=True) > allowed and resident_memory(session.pid) > allowed:
            return "memory"
        disk, scratch = session.order["disk"], session.scratch
        if scratch.is_on_disk and scratch.size(disk) + scratch.nameless_size(session.pid, disk) > disk:
            return "disk"
        return None


def resident_memory(pid: int, *, with_files: bool = False) -> int:
    """Bytes of memory that a process holds, shared memory included; 0 if it is gone."""
    try:
        if with_files:
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * PAGE
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            rows = [line.split() for line in file if line.startswith(("RssAnon:", "RssShmem:"))]
        return sum(int(row[1]) * 1024 for row in rows)
    except (OSError, ValueError, IndexError):
        return 0


def session_memory() -> int:
    """Bytes of memory that all processes of this namespace hold, but the first."""
    return sum(resident_memory(int(name)) for name in os.listdir("/proc") if name.isdigit() and name != "1")
