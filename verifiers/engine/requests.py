"""What is asked of the engine, and what comes back: ids in, ids and logprobs out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from secrets import randbits

NO_TOP_K = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn, and when to stop."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (no limit) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
        )
        for name, is_right, wanted in checks:
            if not is_right:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One completion, exactly as it was sampled.

    ``logprobs`` are under the distribution each token was drawn from (tempered, truncated, biased); ``raw_logprobs``
    under the model's own. ``weights`` counts the updates of the weights it was sampled from, at its start and end.
    """

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str
    reused: int = 0
    weights: tuple[int, int] = (0, 0)


OnToken = Callable[[int, float], bool]
"""Told of each token as it comes; returns True to end the request there."""


class Answer(Future[Generated]):
    """What a request will give. Cancelling it while it is under way frees its row before the next token."""

    is_unwanted = False
    on_cancel: Callable[[], None] | None = None

    def cancel(self) -> bool:
        if self.done():
            return False
        self.is_unwanted = True
        if self.on_cancel is not None:
            self.on_cancel()
        return super().cancel()


@dataclass(eq=False, slots=True)
class Ask:
    """One request on its way through the engine."""

    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    on_token: OnToken | None = None
    future: Answer = field(default_factory=Answer)
    row: int = -1
    reused: int = 0
    weights: int = 0

    @property
    def is_cancelled(self) -> bool:
        return self.future.is_unwanted


class Seeds:
    """Seeds for requests that have none: random, or from one number, the prompt, and how often it was asked.

    >>> first, second = Seeds(7), Seeds(7)
    >>> first.draw([1]) == second.draw([1]) != first.draw([1])
    True
    """

    def __init__(self, seed: int | None = None) -> None:
        self._key = None if seed is None else seed.to_bytes(16, "little", signed=True)
        self._asked: defaultdict[bytes, count[int]] = defaultdict(count)

    def draw(self, prompt_ids: Sequence[int]) -> int:
        if self._key is None:
            return randbits(62)
        prompt = blake2b(repr(prompt_ids).encode(), digest_size=16).digest()
        times = next(self._asked[prompt])
        digest = blake2b(prompt + times.to_bytes(8, "little"), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2
