"""A process that evaluates one environment, made to be killed: ``python evaluation.py '{"url": …, "path": …}'``.

It says on stdout how it ended, as one line of JSON. Run as a script it must not import anything of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import verifiers as vf

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(kw_only=True)
class Plan:
    """What the process does."""

    url: str
    path: str
    rows: int = 100
    repeats: int = 2
    resume: bool = False
    is_async: bool = False
    max_concurrent: int = 16
    temperature: float = 0.7
    # alone, group, cpu_bound, slow (half a second each); from the seventh call on: hanging, holding the loop for ever
    # ("holding"), the same whatever is raised in it ("stubborn"), or leaving by sys.exit ("leaving"); the same function
    # without its fault ("mended")
    rewards: str = "alone"
    fail_share: float = 0.0  # of the rewards, in this session
    session: int = 0
    die_at_step: int | None = None  # kill this process at the n-th file operation in the run directory
    file_limit: int | None = None  # bytes; a file that grows past it meets an error, as on a full disk
    show: bool = False
    is_caught: bool = True

    @contextmanager
    def started(self, **options: Any) -> Iterator[subprocess.Popen[str]]:
        """The process, with its output in pipes unless ``options`` say otherwise; killed if it is still there."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, __file__, json.dumps(asdict(self))]
        with subprocess.Popen(command, env=environment, **{**pipes, **options}) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self) -> dict[str, Any]:
        """Run it to its end; gives what it said."""
        with self.started() as process:
            said, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        outcome: dict[str, Any] = json.loads(said)
        return outcome


def make_env(plan: Plan) -> vf.SingleTurnEnv:
    parser = vf.XMLParser(["answer"])

    def right(completion: Any, state: vf.State, parser: vf.XMLParser) -> float:
        if _share(f"{state['example_id']}/{completion[-1]['content']}/{plan.session}") < plan.fail_share:
            raise ConnectionError("the grader is down")
        return 1.0 if parser.parse_answer(completion) else 0.0

    def slow(completion: Any) -> float:
        time.sleep(0.5)
        return 1.0

    def hanging(completion: Any) -> float:
        if next(calls) >= 6:
            time.sleep(300)
        return 1.0

    async def holding(completion: Any) -> float:
        if next(calls) >= 6:
            threading.Event().wait()
        return 1.0

    async def stubborn(completion: Any) -> float:
        while next(calls) >= 6:
            with contextlib.suppress(BaseException):
                threading.Event().wait()
        return 1.0

    async def leaving(completion: Any) -> float:
        if next(calls) >= 6:
            sys.exit(3)
        return 1.0

    async def mended(completion: Any) -> float:
        return 1.0

    calls = itertools.count()
    further = {one.__name__: one for one in (hanging, holding, stubborn, leaving, mended)}
    for one in further.values():
        one.__name__ = "second"  # a run is resumed with the functions it was made with
    rubric = vf.Rubric(funcs=[right], parser=parser)
    if plan.rewards == "group":
        rubric.add_reward_func(longest, 0.5)
    elif plan.rewards == "cpu_bound":
        rubric.add_reward_func(vf.cpu_bound(counted))
    elif plan.rewards == "slow":
        rubric.add_reward_func(slow)
    elif plan.rewards in further:
        rubric.add_reward_func(further[plan.rewards])
    rows = [{"question": f"question {i}", "answer": "x"} for i in range(plan.rows)]
    return vf.SingleTurnEnv(dataset=rows, parser=parser, rubric=rubric, env_id="made-to-be-killed")


def longest(completions: Any) -> list[float]:
    """Of one example's rollouts; each gets the size of the group, so that a group cut short shows."""
    return [float(len(completions)) for _ in completions]


def counted(completion: Any) -> float:
    return float(len(completion))


def _share(text: str) -> float:
    return zlib.crc32(text.encode()) / 2**32


def die_at_step(step: int, folder: str) -> None:
    """SIGKILL at the n-th time that something in the folder is opened, renamed, cut or removed."""
    left = [step]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.truncate", "os.remove", "fcntl.flock"):
            return
        is_here = event in ("os.truncate", "fcntl.flock") or str(args[0]).startswith(folder)
        if is_here:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


async def evaluate(plan: Plan) -> vf.Results:
    return await start(plan)


def start(plan: Plan) -> Any:
    return make_env(plan).evaluate(
        client=vf.HTTPClient(plan.url, "sk-test"),
        model="m",
        temperature=plan.temperature,
        rollouts_per_example=plan.repeats,
        max_concurrent=plan.max_concurrent,
        results_path=plan.path,
        resume=plan.resume,
        use_tqdm=plan.show,
    )


def main(plan: Plan) -> None:
    if plan.file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.file_limit, resource.RLIM_INFINITY))
    if plan.die_at_step is not None:
        die_at_step(plan.die_at_step, plan.path)
    if not plan.is_caught:
        say(asyncio.run(evaluate(plan)) if plan.is_async else start(plan))
        return
    try:
        say(asyncio.run(evaluate(plan)) if plan.is_async else start(plan))
    except vf.RunInterruptedError as stop:
        say(stop.results, stopped=str(stop))
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))


def say(results: vf.Results, **more: Any) -> None:
    print(json.dumps({"rollouts": len(results.rollouts), "failed": len(results.failed), **more}))


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
