"""``--launch``: runs a command in several processes, which start, stop and end together."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import IO, TYPE_CHECKING

import click

from verifiers.cli.knobs import WORDS
from verifiers.trainers.base_config import is_count

if TYPE_CHECKING:
    from verifiers.cli.training import Job
    from verifiers.trainers.base_config import TrainingConfig

# The settings of configs/*.yaml as environment variables, as ``accelerate launch`` passes them to its processes.
ENGINES: Mapping[str, Mapping[str, str]] = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    },
}
GRACE_S = 20.0  # for processes to end by themselves after one has failed, or after SIGTERM
LAUNCHER = "VERIFIERS_LAUNCHER"  # environment variable with the id of the launching process


def launched(job: Job) -> int | None:
    """Run the command in several processes and return its exit code; None if this process must run it itself."""
    engine, count = job.given["launch"], job.given["processes"]
    if os.environ.get(LAUNCHER):
        _end_with_launcher()
        return None
    if engine is None:
        if count is not None:
            raise click.UsageError("--processes needs --launch, which sets how they share the model: --launch ddp")
        return None
    job.model()
    count = count or _devices()
    _check_batch(job.config(), count)
    _check(engine)
    words = [*job.ctx.command_path.split()[1:], *job.ctx.meta[WORDS]]
    return Ranks(words, ENGINES[engine], count).run()


def divide_batch(config: TrainingConfig) -> None:
    """In a launched process, reduce the batch size to its share."""
    if os.environ.get(LAUNCHER):
        config.batch_size //= int(os.environ["WORLD_SIZE"])


def _check_batch(config: TrainingConfig, count: int) -> None:
    """Check that the batch can be divided among the processes, each with whole groups."""
    size, group = config.batch_size, getattr(config, "group_size", 1)
    unit, among = count, f"{count} processes"
    if is_count(group) and is_count(config.gradient_accumulation_steps) and group > 1:
        unit = count * group // math.gcd(group, config.gradient_accumulation_steps)
        among += f", each with whole groups of group_size = {group}"
    if is_count(size) and size % unit:
        near = [str(n) for n in (size // unit * unit, -(-size // unit) * unit) if n]
        raise click.UsageError(
            f"batch_size = {size} cannot be divided among {among}: use {' or '.join(near)}, or another number of "
            "processes"
        )
    config.batch_size //= count
    try:
        config.check(count)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _check(engine: str) -> None:
    if engine.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        raise click.ClickException(f"--launch {engine} needs DeepSpeed: pip install 'verifiers[deepspeed]'")


def _devices() -> int:
    from verifiers.trainers.distributed.processes import devices

    found = devices()
    if not found:
        raise click.UsageError("there is no GPU here: pass the number of processes, as in --processes 2")
    return found


class Ranks:
    """The processes of one training on this machine. Signals go to all; if one fails, the others are ended."""

    def __init__(self, words: Sequence[str], settings: Mapping[str, str], count: int) -> None:
        self._words, self._count = list(words), count
        self._settings = {
            **settings,
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            LAUNCHER: str(os.getpid()),
        }
        self._settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self._running: list[subprocess.Popen[bytes]] = []
        self._stderr: list[IO[bytes]] = []  # of all but the first process, which writes to the terminal

    def run(self) -> int:
        with ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                stack.callback(signal.signal, number, signal.signal(number, self._forward))
            stack.callback(self._end)
            for rank in range(self._count):
                self._stderr.append(stack.enter_context(tempfile.TemporaryFile()))
                self._running.append(self._start(rank))
            return self._wait()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, **self._settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._count)))
        words = [sys.executable, "-m", "verifiers", *self._words]
        if rank == 0:
            return subprocess.Popen(words, env=env, process_group=0, stdin=subprocess.DEVNULL)
        quiet = subprocess.DEVNULL
        return subprocess.Popen(words, env=env, process_group=0, stdin=quiet, stdout=quiet, stderr=self._stderr[rank])

    def _wait(self) -> int:
        """Wait for all; return the exit code of the first that failed, or 0."""
        while (rank := self._failed()) is None:
            if all(one.poll() == 0 for one in self._running):
                return 0
            time.sleep(0.1)
        code, until = self._running[rank].returncode, time.monotonic() + GRACE_S
        while code > 0 and time.monotonic() < until and any(one.poll() is None for one in self._running):
            time.sleep(0.1)  # usually the others fail for the same reason, and report it themselves
        self._end()
        self._tell(rank)
        return code if code >= 0 else 128 - code

    def _failed(self) -> int | None:
        return next((i for i, one in enumerate(self._running) if one.poll()), None)

    def _tell(self, rank: int) -> None:
        """Print the error of the first process that failed, if it is not already on the terminal."""
        code = self._running[rank].returncode
        if code < 0:
            click.echo(
                f"Error: process {rank} was ended by {signal.Signals(-code).name}, and the others with it", err=True
            )
        elif rank and self._running[0].returncode <= 0:
            self._stderr[rank].seek(0)
            click.echo(self._stderr[rank].read().decode(errors="replace"), err=True, nl=False)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        for one in self._running:
            if one.poll() is None:
                one.send_signal(number)

    def _end(self) -> None:
        """End all processes that still run."""
        for one in self._running:
            if one.poll() is None:
                one.terminate()
        until = time.monotonic() + GRACE_S
        for one in self._running:
            try:
                one.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _end_with_launcher() -> None:
    """End this launched process when its launcher ends in any way."""
    above = int(os.environ[LAUNCHER])
    threading.Thread(target=_watch, args=(above,), name="verifiers-launcher", daemon=True).start()


def _watch(above: int) -> None:
    while os.getppid() == above:
        time.sleep(1.0)
    os._exit(1)
