"""`vf simulate` compared with real processes: predicted and measured seconds per step, with 1, 2 and 4 samplers.

Samplers are HTTP servers in separate processes that sleep as long as decoding would take, so that the cores of this
machine do not matter. The library runs the rollouts, and the trainer sleeps. The simulator's settings for a sampler are
measured on one of them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import verifiers as vf
from verifiers.clients import HTTPClient
from verifiers.clients.protocol import Request
from verifiers.clients.replicas import ReplicaClient
from verifiers.trainers.distributed.simulation import Setup, simulate

ALONE, FULL, SLOTS = 40.0, 240.0, 12  # tokens per second of one sequence and of all together; concurrent sequences
TICK_S = 0.1
STEPS = 4
SETUP = Setup(
    parameters=0,
    sampler_gpus=1,
    slots=SLOTS,
    turns=2,
    tokens_a_turn=40,
    tokens_sigma=0.4,
    env_s=1.2,
    env_sigma=0.6,
    score_s=0,
    trainer_gpus=1,
    batch=24,
    train_s=2.0,
    sync_latency_s=0.6,
    steps=40,
)


# --- a sampler process --------------------------------------------------------------------------------------------


class Sampler:
    """Replies after the time that a replica of the simulator would take; ``pause 0.3`` stops it for 0.3 s."""

    def __init__(self) -> None:
        self.live = 0
        self.paused_until = 0.0
        self.slots = asyncio.Semaphore(SLOTS)

    async def __call__(self, messages: Any) -> str:
        asked = str(messages[-1]["content"]).split()
        if asked[0] == "pause":
            self.paused_until = time.monotonic() + float(asked[1])
            return "paused"
        left = float(asked[1])
        async with self.slots:
            self.live += 1
            try:
                while left > 1e-9:
                    rate = min(ALONE, FULL / self.live)
                    began = time.monotonic()
                    await asyncio.sleep(min(TICK_S, left / rate))
                    now = time.monotonic()
                    stopped = min(max(self.paused_until - began, 0.0), now - began)
                    left -= rate * (now - began - stopped)
            finally:
                self.live -= 1
        return "x"


def serve() -> None:
    with vf.FakeServer(Sampler()) as server:
        print(server.url, flush=True)
        sys.stdin.read()


@contextmanager
def samplers(count: int) -> Iterator[list[HTTPClient]]:
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            command = [sys.executable, __file__, "sampler"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            clients.append(HTTPClient(process.stdout.readline().strip(), "none"))
        yield clients


# --- a run over them ----------------------------------------------------------------------------------------------


def drawn(draw: random.Random, mean: float, sigma: float) -> float:
    return draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


class Tools(vf.MultiTurnEnv):
    """Waits between two turns, like a tool, and sets the length of the next reply."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        draw = random.Random(f"{state['info']['seed']}/{len(messages)}")
        await asyncio.sleep(drawn(draw, SETUP.env_s, SETUP.env_sigma))
        return [{"role": "user", "content": reply_of(draw)}]


def reply_of(draw: random.Random) -> str:
    return f"tokens {drawn(draw, SETUP.tokens_a_turn, SETUP.tokens_sigma)}"


class Pipeline:
    """Starts rollouts as far ahead as staleness allows, and trains (sleeps) on the first that are ready, repeatedly."""

    def __init__(self, setup: Setup, clients: list[HTTPClient]) -> None:
        self.setup, self.clients = setup, clients
        self.client = ReplicaClient(clients)
        self.env = Tools(dataset=[{"question": "q"}], max_turns=setup.turns)
        self.numbers = itertools.count()
        self.under_way: dict[asyncio.Task[Any], int] = {}
        self.ready: list[int] = []  # the weight versions that finished rollouts began with
        self.version = self.begun = 0

    def begin(self) -> None:
        while self.begun < (self.version + self.setup.max_staleness + 1) * self.setup.batch:
            self.begun += 1
            seed = next(self.numbers)
            row = {"question": reply_of(random.Random(str(seed))), "info": {"seed": seed}}
            task = asyncio.ensure_future(self.env.rollout(input=row, client=self.client, model="m"))
            self.under_way[task] = self.version

    def is_enough(self) -> bool:
        oldest = self.version - self.setup.max_staleness
        return len(self.ready) >= self.setup.batch and all(one > oldest for one in self.under_way.values())

    async def step(self) -> None:
        self.begin()
        while not self.is_enough():
            done, _ = await asyncio.wait(self.under_way, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                assert task.result()["error"] is None
                self.ready.append(self.under_way.pop(task))
        self.ready = sorted(self.ready)[self.setup.batch :]
        await asyncio.sleep(self.setup.train_s or 0.0)
        await asyncio.gather(*(ask(client, f"pause {self.setup.sync_s}") for client in self.clients))
        await asyncio.sleep(self.setup.sync_s)
        self.version += 1

    async def run(self) -> float:
        """Seconds per step once the pipeline is full."""
        for _ in range(1 + self.setup.max_staleness):
            await self.step()
        began = time.perf_counter()
        for _ in range(STEPS):
            await self.step()
        took = time.perf_counter() - began
        for task in self.under_way:
            task.cancel()
        await asyncio.gather(*self.under_way, return_exceptions=True)
        return took / STEPS


async def ask(client: HTTPClient, text: str) -> float:
    began = time.perf_counter()
    await client.complete(Request(model="m", prompt=[{"role": "user", "content": text}]))
    return time.perf_counter() - began


def measure_one() -> tuple[float, float]:
    """Tokens per second of one sampler: with one sequence, and with all its slots."""

    async def main(client: HTTPClient) -> tuple[float, float]:
        await ask(client, "tokens 1")
        alone = statistics.median([40 / await ask(client, "tokens 40") for _ in range(5)])
        together = [await asyncio.gather(*(ask(client, "tokens 40") for _ in range(SLOTS))) for _ in range(3)]
        return alone, SLOTS * 40 / statistics.median([statistics.mean(one) for one in together])

    with samplers(1) as (client,):
        return asyncio.run(main(client))


@dataclass(frozen=True)
class Row:
    processes: int
    max_staleness: int
    predicted_s: float
    measured_s: float


def compare(processes: int) -> list[Row]:
    """Predicted and measured seconds per step, synchronous and with a staleness of 1."""
    alone, full = measure_one()
    rows = []
    for staleness in (0, 1):
        setup = replace(
            SETUP,
            sampler_gpus=processes,
            batch=SETUP.batch * processes,
            max_staleness=staleness,
            tokens_per_s_alone=alone,
            tokens_per_s_full=full,
        )
        with samplers(processes) as clients:
            measured = asyncio.run(Pipeline(setup, clients).run())
        rows.append(Row(processes, staleness, simulate(setup).step_s, measured))
    return rows


if __name__ == "__main__":
    if sys.argv[1:] == ["sampler"]:
        serve()
        sys.exit()
    for processes in (1, 2, 4):
        for row in compare(processes):
            error = row.predicted_s / row.measured_s - 1
            shown = f"predicted {row.predicted_s:.2f} s a step, measured {row.measured_s:.2f} s ({error:+.0%})"
            print(f"{row.processes} samplers, max_staleness {row.max_staleness}: {shown}")
