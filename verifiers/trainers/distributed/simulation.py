"""Throughput measured on one GPU → predicted utilisation of a run on many: a discrete-event simulation, without torch.

Assumptions:

- Sampler replicas are identical. Each decodes up to ``slots`` sequences at once. Each sequence runs at
  ``tokens_per_s_alone`` until they reach ``tokens_per_s_full`` together, which they then share equally. Both figures
  include prefill.
- A rollout alternates between a turn of the model and a wait for its environment. Each turn goes to the least busy
  replica. Tokens per turn and waits are independent log-normal samples (``sigma`` 0: always the mean).
- At most ``max_staleness + 1`` batches are started ahead of the weights; 0 is synchronous. An update takes the oldest
  rollouts that are ready, and waits for those that would be too stale for the next update.
- An update takes ``8 × parameters`` FLOPs per token (forward, backward, and the forward that checkpointing repeats) at
  the measured share of the peak (``mfu``). It scales with the trainer's GPUs, which is optimistic for small batches.
- Then all samplers pause for the weight transfer, which takes its bytes at ``sync_gb_per_s`` (to all at once, as in a
  broadcast) plus ``sync_latency_s``. With ``colocated`` GPUs, the samplers also pause during the update.
- Scoring a rollout occupies one of ``env_workers`` workers for ``score_s``.
- Nothing fails, and the network has no other users.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

BYTES_PER_PARAMETER = 2  # weights are sent in bf16
FLOPS_PER_PARAMETER = 8  # per token
AT_LEAST_1 = ("sampler_gpus", "gpus_a_replica", "slots", "turns", "env_workers", "trainer_gpus", "batch", "steps")
MAX_VALUE, MAX_SIGMA, MAX_TURNS = 1e18, 10, 20_000_000


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run: the throughput measured on one GPU, and all sizes."""

    parameters: float = 8e9
    # the samplers
    sampler_gpus: int = 768
    gpus_a_replica: int = 1
    slots: int = 64
    tokens_per_s_alone: float = 60.0
    tokens_per_s_full: float = 2500.0
    # the rollouts
    turns: int = 4
    tokens_a_turn: float = 400.0
    tokens_sigma: float = 0.6
    prompt_tokens: float = 500.0
    env_s: float = 2.0
    env_sigma: float = 1.0
    score_s: float = 0.02
    env_workers: int = 256
    # the trainer
    trainer_gpus: int = 232
    batch: int = 8192
    peak_tflops: float = 989.0
    mfu: float = 0.35
    max_staleness: int = 1
    sync_gb_per_s: float = 20.0
    sync_latency_s: float = 1.0
    train_s: float | None = None
    colocated: bool = False
    # the simulation
    steps: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "bool" or (value is None and one.name == "train_s"):
                continue
            kinds, word = ((int,), "whole number") if one.type == "int" else ((int, float), "number")
            least, most = (
                (1 if one.name in AT_LEAST_1 else 0),
                (MAX_SIGMA if one.name.endswith("_sigma") else MAX_VALUE),
            )
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise ValueError(f"{one.name}={value!r} must be a {word}, {least} to {most:g}")
        for name in ("tokens_per_s_alone", "tokens_per_s_full", "tokens_a_turn", "peak_tflops", "mfu", "sync_gb_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0")
        if self.mfu > 1:
            raise ValueError(f"mfu={self.mfu!r} must be at most 1: it is a share of the peak")
        if self.sampler_gpus % self.gpus_a_replica:
            raise ValueError(
                f"sampler_gpus={self.sampler_gpus} must be a multiple of gpus_a_replica={self.gpus_a_replica}"
            )
        if self.colocated and self.trainer_gpus != self.sampler_gpus:
            raise ValueError(
                f"with colocated=True the same GPUs sample and train: trainer_gpus={self.trainer_gpus} must equal "
                f"sampler_gpus={self.sampler_gpus}"
            )
        if self.tokens_per_s_full < self.tokens_per_s_alone:
            raise ValueError("tokens_per_s_full is of all sequences together: it cannot be below tokens_per_s_alone")
        if (turns := (self.steps + 2 * self.max_staleness + 2) * self.batch * self.turns) > MAX_TURNS:
            raise ValueError(
                f"{turns:,} turns are too many to simulate (at most {MAX_TURNS:,}, which take minutes): reduce steps, "
                "max_staleness, batch or turns (a tenth of the GPUs with a tenth of the batch gives about the same)"
            )

    @property
    def replicas(self) -> int:
        return self.sampler_gpus // self.gpus_a_replica

    @property
    def gpus(self) -> int:
        return self.sampler_gpus if self.colocated else self.sampler_gpus + self.trainer_gpus

    @property
    def sync_s(self) -> float:
        return self.parameters * BYTES_PER_PARAMETER / (self.sync_gb_per_s * 1e9) + self.sync_latency_s

    def update_s(self, tokens: float) -> float:
        """Seconds of one update on this number of tokens."""
        if self.train_s is not None:
            return self.train_s
        return FLOPS_PER_PARAMETER * self.parameters * tokens / (self.trainer_gpus * self.peak_tflops * 1e12 * self.mfu)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The steady state of a simulated run, without the first steps, which fill the pipeline."""

    step_s: float
    sampler_use: float  # sampled tokens ÷ tokens that the replicas would have sampled with all slots busy
    trainer_use: float  # share of the time spent in updates
    sync_share: float  # share of the time spent in weight transfer
    mean_staleness: float
    worst_staleness: int
    tokens_per_s: float
    gpus: int
    bottleneck: str

    @property
    def steps_an_hour(self) -> float:
        return 3600.0 / self.step_s


@dataclass(eq=False, slots=True)
class _Rollout:
    version: int
    turns_left: int
    tokens: float = 0.0


class _Replica:
    """One sampler replica. ``served`` is the number of tokens of a sequence that had run since the start."""

    __slots__ = ("alone", "at", "full", "is_paused", "next_end", "running", "served", "slots", "waiting")

    def __init__(self, setup: Setup) -> None:
        self.alone, self.full, self.slots = setup.tokens_per_s_alone, setup.tokens_per_s_full, setup.slots
        self.served = self.at = 0.0
        self.running: list[tuple[float, int, _Rollout]] = []  # a heap by the value of `served` at which they end
        self.waiting: deque[tuple[float, _Rollout]] = deque()
        self.is_paused = False
        self.next_end = math.inf  # time of the event at which the next sequence ends

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def rate(self) -> float:
        """Tokens per second of each sequence."""
        return 0.0 if self.is_paused or not self.running else min(self.alone, self.full / len(self.running))

    def advance(self, now: float) -> None:
        self.served += self.rate * (now - self.at)
        self.at = now

    def admit(self, order: Iterator[int]) -> None:
        while self.waiting and len(self.running) < self.slots:
            tokens, rollout = self.waiting.popleft()
            heapq.heappush(self.running, (self.served + tokens, next(order), rollout))


class _Simulation:
    """A queue of events: (time, order among equal times, function, argument)."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.order = itertools.count()
        self.replicas = [_Replica(setup) for _ in range(setup.replicas)]
        self.loads = [(0, i) for i in range(setup.replicas)]  # a heap; entries with an outdated load are skipped
        self.version = self.started = 0
        self.in_flight: Counter[int] = Counter()  # rollouts by the version they started with
        self.ready: list[tuple[int, int, _Rollout]] = []  # a heap by version
        self.num_ready: Counter[int] = Counter()  # the number of rollouts in `ready`, by version
        self.is_training = False
        self.busy_workers = 0
        self.to_score: deque[_Rollout] = deque()
        self.sampled = self.trained_s = self.synced_s = 0.0
        self.ends: list[
            tuple[float, float, float, float]
        ] = []  # at the end of each step: time, tokens, seconds of updates, of syncs
        self.staleness: list[int] = []

    def schedule(self, seconds: float, function: Callable[[Any], None], argument: Any = None) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), function, argument))

    def run(self, steps: int) -> None:
        self.start_rollouts()
        while len(self.ends) < steps:
            self.now, _, function, argument = heapq.heappop(self.events)
            function(argument)

    # --- rollouts -------------------------------------------------------------------------------------------------

    def start_rollouts(self) -> None:
        """Start as many rollouts as the bound on staleness allows."""
        while self.started < (self.version + self.setup.max_staleness + 1) * self.setup.batch:
            self.started += 1
            self.in_flight[self.version] += 1
            self.start_turn(_Rollout(self.version, self.setup.turns))

    def start_turn(self, rollout: _Rollout) -> None:
        tokens = _lognormal(self.random, self.setup.tokens_a_turn, self.setup.tokens_sigma)
        rollout.tokens += tokens
        rollout.turns_left -= 1
        i = self.least_busy()
        replica = self.replicas[i]
        replica.advance(self.now)
        replica.waiting.append((tokens, rollout))
        replica.admit(self.order)
        heapq.heappush(self.loads, (replica.load, i))
        self.schedule_end(i)

    def least_busy(self) -> int:
        while True:
            load, i = heapq.heappop(self.loads)
            if load == self.replicas[i].load:
                return i

    def schedule_end(self, i: int) -> None:
        """Schedule the end of a replica's next sequence, unless an earlier event is scheduled for it."""
        replica = self.replicas[i]
        if (rate := replica.rate) > 0:
            end = self.now + max(replica.running[0][0] - replica.served, 0.0) / rate
            if end < replica.next_end:
                replica.next_end = end
                self.schedule(end - self.now, self.end_turns, (i, end))

    def end_turns(self, event: tuple[int, float]) -> None:
        i, end = event
        replica = self.replicas[i]
        if replica.next_end != end:  # superseded by an earlier event, or by a pause
            return
        replica.next_end = math.inf
        replica.advance(self.now)
        ended = []
        # Late in a long run, the remaining tokens may be below the resolution of a float.
        tolerance = 1e-6 + 2 * (math.ulp(replica.served) + replica.rate * math.ulp(self.now))
        while replica.running and replica.running[0][0] <= replica.served + tolerance:
            ended.append(heapq.heappop(replica.running)[2])
        if ended:
            replica.admit(self.order)
            heapq.heappush(self.loads, (replica.load, i))
        self.schedule_end(i)
        for rollout in ended:
            if rollout.turns_left:
                wait_s = _lognormal(self.random, self.setup.env_s, self.setup.env_sigma)
                self.schedule(wait_s, self.start_turn, rollout)
            else:
                self.sampled += rollout.tokens
                self.to_score.append(rollout)
        self.score()

    def score(self) -> None:
        while self.to_score and self.busy_workers < self.setup.env_workers:
            self.busy_workers += 1
            self.schedule(self.setup.score_s, self.end_score, self.to_score.popleft())

    def end_score(self, rollout: _Rollout) -> None:
        self.busy_workers -= 1
        self.in_flight[rollout.version] -= 1
        self.num_ready[rollout.version] += 1
        heapq.heappush(self.ready, (rollout.version, next(self.order), rollout))
        self.score()
        self.update()

    # --- updates --------------------------------------------------------------------------------------------------

    def update(self) -> None:
        if self.is_training or len(self.ready) < self.setup.batch or self.would_be_too_stale():
            return
        self.is_training = True
        taken = [heapq.heappop(self.ready)[2] for _ in range(self.setup.batch)]
        self.num_ready.subtract(one.version for one in taken)
        self.staleness += [self.version - one.version for one in taken]
        update_s = self.setup.update_s(sum(one.tokens + self.setup.prompt_tokens for one in taken))
        self.trained_s += update_s
        if self.setup.colocated:
            self.pause_samplers(True)
        self.schedule(update_s, self.sync)

    def would_be_too_stale(self) -> bool:
        """Whether an update now would leave more rollouts of some version than later updates can take in time."""
        batch, left, taken = self.setup.batch, 0, self.setup.batch
        for version in range(self.version - self.setup.max_staleness, self.version + 1):
            ready = self.num_ready[version]
            left += self.in_flight[version] + ready - min(ready, taken)
            taken -= min(ready, taken)
            if left > batch * (version + self.setup.max_staleness - self.version):
                return True
        return False

    def sync(self, _: None) -> None:
        self.pause_samplers(True)
        self.synced_s += self.setup.sync_s
        self.schedule(self.setup.sync_s, self.end_step)

    def end_step(self, _: None) -> None:
        self.version += 1
        self.pause_samplers(False)
        self.ends.append((self.now, self.sampled, self.trained_s, self.synced_s))
        self.is_training = False
        self.start_rollouts()
        self.update()

    def pause_samplers(self, is_paused: bool) -> None:
        for i, replica in enumerate(self.replicas):
            replica.advance(self.now)
            replica.is_paused = is_paused
            replica.next_end = math.inf
            self.schedule_end(i)


def _lognormal(generator: random.Random, mean: float, sigma: float) -> float:
    """A sample of a log-normal distribution with this mean."""
    if sigma == 0 or mean == 0:
        return mean
    return generator.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def simulate(setup: Setup) -> Prediction:
    """Simulate a run to predict its step time and the utilisation of its parts.

    >>> alike = dict(tokens_sigma=0, env_sigma=0, turns=1, tokens_a_turn=100, env_s=0, score_s=0, parameters=0)
    >>> small = Setup(**alike, sampler_gpus=2, slots=4, batch=8, tokens_per_s_alone=50, tokens_per_s_full=200,
    ...               train_s=2, sync_latency_s=1, max_staleness=0)
    >>> simulate(small).step_s  # 2 s of sampling (100 tokens at 50 a second), 2 s of update, 1 s of weight transfer
    5.0
    """
    simulation = _Simulation(setup)
    skipped = 1 + setup.max_staleness
    simulation.run(skipped + setup.steps)
    first, last = simulation.ends[skipped - 1], simulation.ends[-1]
    took, sampled, trained, synced = (end - begin for end, begin in zip(last, first, strict=True))
    if took <= 0:
        raise ValueError("with these figures a step takes no time, or less than the resolution of the simulation")
    step_s, sync_share, trainer_use = took / setup.steps, synced / took, trained / took
    sampler_use = sampled / (took * setup.replicas * setup.tokens_per_s_full)
    seen = simulation.staleness[skipped * setup.batch :]
    return Prediction(
        step_s=step_s,
        sampler_use=sampler_use,
        trainer_use=trainer_use,
        sync_share=sync_share,
        mean_staleness=sum(seen) / len(seen),
        worst_staleness=max(seen),
        tokens_per_s=sampled / took,
        gpus=setup.gpus,
        bottleneck=_bottleneck(setup, sampler_use, trainer_use, sync_share, step_s),
    )


def _bottleneck(setup: Setup, sampler_use: float, trainer_use: float, sync_share: float, step_s: float) -> str:
    if setup.score_s * setup.batch / setup.env_workers > 0.9 * step_s:
        return "scoring: more env_workers"
    if trainer_use + sync_share > 0.95:
        return "the trainer: give it more GPUs" if trainer_use > sync_share else "the network: weights take long"
    if setup.max_staleness == 0:
        return "waiting for each other: set max_staleness to 1 or more"
    if sampler_use < 0.5:
        return "the length of a rollout: start more at once (max_staleness, batch), or give the samplers fewer GPUs"
    return "the samplers: give them more GPUs, or more slots and rollouts at once"
