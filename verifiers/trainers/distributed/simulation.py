"""Measured figures of one card → how well a run on many of them would use them: a simulation of events, without torch.

What is assumed, and where it ends:

- Sampler replicas are alike. Each decodes up to ``slots`` sequences at once, every one at ``tokens_per_s_alone`` until
  together they reach ``tokens_per_s_full``, which they then share equally. Reading prompts is part of these figures.
- A rollout alternates a turn of the model and a wait for its environment; it goes to the least busy replica each turn.
  Tokens of a turn and waits are drawn from log-normal distributions (``sigma`` 0: always the mean), all independent.
- No more than ``max_staleness + 1`` batches are begun ahead of the weights; 0 is synchronous. An update takes the
  oldest of those that are ready, and waits for one that would be too stale for the next.
- An update takes ``8 × parameters`` operations a token (forward, backward, and the forward that checkpointing repeats),
  at the share of the cards' peak (``mfu``) that was measured. It is taken to scale with the trainer's cards, which
  is too good where a batch is small for them.
- Then all samplers stop while the weights come: their bytes through ``sync_gb_per_s`` (to all at once, as a broadcast
  does), and ``sync_latency_s``. With ``colocated`` cards the samplers stop while the trainer learns, too.
- Scoring takes ``score_s`` of one of ``env_workers`` processors for each rollout.
- Nothing fails, and nobody else uses the network.
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

BYTES_A_PARAMETER = 2  # weights are sent in bf16
OPERATIONS_A_TOKEN = 8
AT_LEAST_1 = ("sampler_gpus", "gpus_a_replica", "slots", "turns", "env_workers", "trainer_gpus", "batch", "steps")
MOST, MOST_SIGMA, MOST_TURNS = 1e18, 10, 20_000_000


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run: what was measured on one card, and how many there are of what."""

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
            least, most = (1 if one.name in AT_LEAST_1 else 0), (MOST_SIGMA if one.name.endswith("_sigma") else MOST)
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise ValueError(f"{one.name}={value!r} must be a {word}, {least} to {most:g}")
        for name in ("tokens_per_s_alone", "tokens_per_s_full", "tokens_a_turn", "peak_tflops", "mfu", "sync_gb_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0")
        if self.mfu > 1:
            raise ValueError(f"mfu={self.mfu!r} is a share of the peak, at most 1")
        if self.sampler_gpus % self.gpus_a_replica:
            raise ValueError(
                f"{self.sampler_gpus} GPUs of samplers are no multiple of gpus_a_replica={self.gpus_a_replica}"
            )
        if self.colocated and self.trainer_gpus != self.sampler_gpus:
            raise ValueError(
                f"colocated: the same cards sample and learn, so that trainer_gpus={self.trainer_gpus} must be "
                f"sampler_gpus={self.sampler_gpus}"
            )
        if self.tokens_per_s_full < self.tokens_per_s_alone:
            raise ValueError("tokens_per_s_full is of all sequences together, and not below tokens_per_s_alone")
        if (turns := (self.steps + 2 * self.max_staleness + 2) * self.batch * self.turns) > MOST_TURNS:
            raise ValueError(
                f"{turns:,} turns would have to be played out, and {MOST_TURNS:,} take minutes: take fewer of steps, "
                "max_staleness, batch or turns (a tenth of the cards with a tenth of the batch is about the same)"
            )

    @property
    def replicas(self) -> int:
        return self.sampler_gpus // self.gpus_a_replica

    @property
    def gpus(self) -> int:
        return self.sampler_gpus if self.colocated else self.sampler_gpus + self.trainer_gpus

    @property
    def sync_s(self) -> float:
        return self.parameters * BYTES_A_PARAMETER / (self.sync_gb_per_s * 1e9) + self.sync_latency_s

    def update_s(self, tokens: float) -> float:
        """Seconds that one update on so many tokens takes."""
        if self.train_s is not None:
            return self.train_s
        return OPERATIONS_A_TOKEN * self.parameters * tokens / (self.trainer_gpus * self.peak_tflops * 1e12 * self.mfu)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a simulated run came to, once it was under way: the first steps, which fill the pipeline, are left out."""

    step_s: float
    sampler_use: float  # tokens that were sampled ÷ those that full replicas would have sampled
    trainer_use: float  # of the time, learning
    sync_share: float  # of the time, all samplers stopped
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
    """Sequences that share one replica. ``served`` is what each of them has been given so far, in tokens."""

    __slots__ = ("alone", "at", "full", "is_paused", "live", "looks_at", "served", "slots", "waiting")

    def __init__(self, setup: Setup) -> None:
        self.alone, self.full, self.slots = setup.tokens_per_s_alone, setup.tokens_per_s_full, setup.slots
        self.served = self.at = 0.0
        self.live: list[tuple[float, int, _Rollout]] = []  # by what they will have been given when they end
        self.waiting: deque[tuple[float, _Rollout]] = deque()
        self.is_paused = False
        self.looks_at = math.inf  # when it is looked at next

    @property
    def load(self) -> int:
        return len(self.live) + len(self.waiting)

    @property
    def rate(self) -> float:
        """Tokens a second of each sequence."""
        return 0.0 if self.is_paused or not self.live else min(self.alone, self.full / len(self.live))

    def advance(self, now: float) -> None:
        self.served += self.rate * (now - self.at)
        self.at = now

    def admit(self, numbers: Iterator[int]) -> None:
        while self.waiting and len(self.live) < self.slots:
            tokens, rollout = self.waiting.popleft()
            heapq.heappush(self.live, (self.served + tokens, next(numbers), rollout))


class _Run:
    """Events in the order of their time; each is a function that is called then."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.draw = random.Random(setup.seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.numbers = itertools.count()
        self.replicas = [_Replica(setup) for _ in range(setup.replicas)]
        self.loads = [(0, i) for i in range(setup.replicas)]  # a heap with entries that may be out of date
        self.version = self.begun = 0
        self.unfinished: Counter[int] = Counter()  # rollouts under way, by the version they began with
        self.ready: list[tuple[int, int, _Rollout]] = []
        self.finished: Counter[int] = Counter()  # those of `ready`, by version
        self.is_training = False
        self.scoring = 0
        self.to_score: deque[_Rollout] = deque()
        self.sampled = self.trained_s = self.synced_s = 0.0
        self.ends: list[tuple[float, float, float, float]] = []  # of each step: time, tokens, learning, syncing
        self.staleness: list[int] = []

    def later(self, seconds: float, then: Callable[[Any], None], what: Any = None) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), then, what))

    def finish(self, steps: int) -> None:
        self.begin_rollouts()
        while len(self.ends) < steps:
            self.now, _, then, what = heapq.heappop(self.events)
            then(what)

    # --- rollouts -------------------------------------------------------------------------------------------------

    def begin_rollouts(self) -> None:
        """As many as the bound on staleness lets begin."""
        while self.begun < (self.version + self.setup.max_staleness + 1) * self.setup.batch:
            self.begun += 1
            self.unfinished[self.version] += 1
            self.begin_turn(_Rollout(self.version, self.setup.turns))

    def begin_turn(self, rollout: _Rollout) -> None:
        tokens = _drawn(self.draw, self.setup.tokens_a_turn, self.setup.tokens_sigma)
        rollout.tokens += tokens
        rollout.turns_left -= 1
        at = self.least_busy()
        replica = self.replicas[at]
        replica.advance(self.now)
        replica.waiting.append((tokens, rollout))
        replica.admit(self.numbers)
        heapq.heappush(self.loads, (replica.load, at))
        self.watch(at)

    def least_busy(self) -> int:
        while True:
            load, at = heapq.heappop(self.loads)
            if load == self.replicas[at].load:
                return at

    def watch(self, at: int) -> None:
        """Look at a replica when its next sequence ends; one that will be looked at before that is left alone."""
        replica = self.replicas[at]
        if (rate := replica.rate) > 0:
            end = self.now + max(replica.live[0][0] - replica.served, 0.0) / rate
            if end < replica.looks_at:
                replica.looks_at = end
                self.later(end - self.now, self.end_turns, (at, end))

    def end_turns(self, what: tuple[int, float]) -> None:
        at, looked_at = what
        replica = self.replicas[at]
        if replica.looks_at != looked_at:  # there was a reason to look at it before
            return
        replica.looks_at = math.inf
        replica.advance(self.now)
        ended = []
        # What is left may be less than the clock can tell apart, late in a long run.
        near = 1e-6 + 2 * (math.ulp(replica.served) + replica.rate * math.ulp(self.now))
        while replica.live and replica.live[0][0] <= replica.served + near:
            ended.append(heapq.heappop(replica.live)[2])
        if ended:
            replica.admit(self.numbers)
            heapq.heappush(self.loads, (replica.load, at))
        self.watch(at)
        for rollout in ended:
            if rollout.turns_left:
                self.later(_drawn(self.draw, self.setup.env_s, self.setup.env_sigma), self.begin_turn, rollout)
            else:
                self.sampled += rollout.tokens
                self.to_score.append(rollout)
        self.score()

    def score(self) -> None:
        while self.to_score and self.scoring < self.setup.env_workers:
            self.scoring += 1
            self.later(self.setup.score_s, self.scored, self.to_score.popleft())

    def scored(self, rollout: _Rollout) -> None:
        self.scoring -= 1
        self.unfinished[rollout.version] -= 1
        self.finished[rollout.version] += 1
        heapq.heappush(self.ready, (rollout.version, next(self.numbers), rollout))
        self.score()
        self.learn()

    # --- updates --------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        if self.is_training or len(self.ready) < self.setup.batch or self.would_be_late():
            return
        self.is_training = True
        taken = [heapq.heappop(self.ready)[2] for _ in range(self.setup.batch)]
        self.finished.subtract(one.version for one in taken)
        self.staleness += [self.version - one.version for one in taken]
        took = self.setup.update_s(sum(one.tokens + self.setup.prompt_tokens for one in taken))
        self.trained_s += took
        if self.setup.colocated:
            self.stop_samplers(True)
        self.later(took, self.sync)

    def would_be_late(self) -> bool:
        """Would an update leave more rollouts of some age than can still be learned from in time?"""
        batch, left, taken = self.setup.batch, 0, self.setup.batch
        for version in range(self.version - self.setup.max_staleness, self.version + 1):
            ready = self.finished[version]
            left += self.unfinished[version] + ready - min(ready, taken)
            taken -= min(ready, taken)
            if left > batch * (version + self.setup.max_staleness - self.version):
                return True
        return False

    def sync(self, _: None) -> None:
        self.stop_samplers(True)
        self.synced_s += self.setup.sync_s
        self.later(self.setup.sync_s, self.go_on)

    def go_on(self, _: None) -> None:
        self.version += 1
        self.stop_samplers(False)
        self.ends.append((self.now, self.sampled, self.trained_s, self.synced_s))
        self.is_training = False
        self.begin_rollouts()
        self.learn()

    def stop_samplers(self, is_paused: bool) -> None:
        for at, replica in enumerate(self.replicas):
            replica.advance(self.now)
            replica.is_paused = is_paused
            replica.looks_at = math.inf
            self.watch(at)


def _drawn(draw: random.Random, mean: float, sigma: float) -> float:
    """From a log-normal distribution with this mean."""
    if sigma == 0 or mean == 0:
        return mean
    return draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def simulate(setup: Setup) -> Prediction:
    """Play a run out, and say how busy its parts were.

    >>> alike = dict(tokens_sigma=0, env_sigma=0, turns=1, tokens_a_turn=100, env_s=0, score_s=0, parameters=0)
    >>> small = Setup(**alike, sampler_gpus=2, slots=4, batch=8, tokens_per_s_alone=50, tokens_per_s_full=200,
    ...               train_s=2, sync_latency_s=1, max_staleness=0)
    >>> simulate(small).step_s  # 100 tokens at 50 a second, 2 s of learning, 1 s of waiting for the weights
    5.0
    """
    run = _Run(setup)
    skipped = 1 + setup.max_staleness
    run.finish(skipped + setup.steps)
    first, last = run.ends[skipped - 1], run.ends[-1]
    took, sampled, trained, synced = (end - begin for end, begin in zip(last, first, strict=True))
    if took <= 0:
        raise ValueError("a step takes no time with these figures, or less than can be told apart from the rest")
    sampler_use = sampled / (took * setup.replicas * setup.tokens_per_s_full)
    trainer_use = trained / took
    seen = run.staleness[skipped * setup.batch :]
    return Prediction(
        step_s=took / setup.steps,
        sampler_use=sampler_use,
        trainer_use=trainer_use,
        sync_share=synced / took,
        mean_staleness=sum(seen) / len(seen),
        worst_staleness=max(seen),
        tokens_per_s=sampled / took,
        gpus=setup.gpus,
        bottleneck=_bottleneck(setup, sampler_use, trainer_use, synced / took, took / setup.steps),
    )


def _bottleneck(setup: Setup, sampler_use: float, trainer_use: float, sync_share: float, step_s: float) -> str:
    if setup.score_s * setup.batch / setup.env_workers > 0.9 * step_s:
        return "scoring: more env_workers"
    if trainer_use + sync_share > 0.95:
        return "the trainer: more of the GPUs for it" if trainer_use > sync_share else "the network: weights take long"
    if setup.max_staleness == 0:
        return "waiting for one another: max_staleness of 1 or more"
    if sampler_use < 0.5:
        return "how long one rollout takes: more at once (max_staleness, batch); samplers would do with fewer GPUs"
    return "the samplers: more of the GPUs for them, or more slots and rollouts at once"
