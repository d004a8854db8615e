"""One request: its sampling arguments, its state in the engine, and its result (token ids and logprobs)."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import count
from operator import index
from secrets import randbits
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verifiers.types import VersionSpan

if TYPE_CHECKING:
    from verifiers.engine.constraints import Constraint
    from verifiers.engine.logits import LogitsProcessor

NO_TOP_K = 1 << 30
GREEDY_BELOW = 1e-5  # lower temperatures are treated as 0: logits divided by them would overflow
LARGEST = 1e30  # largest accepted number: float32 arithmetic can still multiply it without overflow
# The minimum of each count, and the counts that may be None.
LEAST = {"max_tokens": 1, "top_k": 0, "min_tokens": 0, "top_logprobs": 0, "prompt_logprobs": 0, "seed": -math.inf}
OPTIONAL = ("prompt_logprobs", "seed")
RECENT = 64  # prompts whose checked ids, array and digest are cached, because a group shares one prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are sampled, and when sampling stops."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    constraint: Constraint | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", frozenset(map(index, self.stop_ids)))
        for name, least in LEAST.items():
            value = getattr(self, name)
            is_count = isinstance(value, (int, np.integer)) and value >= least
            if not (is_count or (value is None and name in OPTIONAL)):
                more = "" if name == "seed" else f" of at least {least}"
                raise ValueError(f"{name} must be a whole number{more}, got {value!r}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and 0 or more, got {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p!r}")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty!r}")
        penalties = (self.presence_penalty, self.frequency_penalty)
        if wrong := [one for one in (*self.logit_bias.values(), *map(abs, penalties)) if not one <= LARGEST]:
            raise ValueError(f"logit_bias and penalties must be numbers of at most {LARGEST:g}, got {wrong[0]!r}")
        if not self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens!r}, but max_tokens is only {self.max_tokens!r}")

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def changes_logits(self) -> bool:
        return bool(self.logit_bias) or self.has_penalties or self.min_tokens > 0 or self.constraint is not None

    @property
    def needs_token_check(self) -> bool:
        """Whether the host must check each token: the request has stop ids or a constraint, or ignores the EOS."""
        return bool(self.stop_ids) or self.ignore_eos or self.constraint is not None

    @property
    def needs_logits(self) -> bool:
        """Whether the host needs the logits of each step, not only the sampled token."""
        return self.changes_logits or self.top_logprobs > 0


Alternatives = list[tuple[int, float]]
"""The most likely tokens of one step and their logprobs, most likely first."""

PromptLogprob = tuple[float, Alternatives] | None
"""The raw logprob of a prompt token, and its alternatives; None for the first token."""


class Generated(NamedTuple):
    """One completion, exactly as it was sampled.

    ``logprobs`` are those of the sampling distribution (after temperature, truncation and bias); ``raw_logprobs`` are
    those of the model's own distribution. ``top_logprobs`` has the alternatives of each token under the sampling
    distribution, if requested. ``weights`` are the numbers of weight changes seen before its start and before its end.
    ``weight_versions`` are the versions that its tokens were sampled from, in order.
    """

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str
    reused: int = 0
    weights: tuple[int, int] = (0, 0)
    weight_versions: tuple[VersionSpan, ...] = ()
    top_logprobs: Sequence[Alternatives] = ()
    prompt_logprobs: Sequence[PromptLogprob] | None = None


Sampled = tuple[Sequence[int], Sequence[float], Sequence[float]]
"""Tokens, their logprobs, and their raw logprobs."""

OnToken = Callable[[int, float], bool]
"""Called with each token, except a stop token, and its logprob. Returns True to end the request after this token."""


class Answer(Future[Generated]):
    """The result of a request. Cancelling it while it is in flight frees its blocks before the next step."""

    is_unwanted = False
    on_cancel: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.prompt_logprobs: list[PromptLogprob] = []
        self.top_logprobs: list[Alternatives] = []  # of the tokens so far, if requested

    def claim(self) -> bool:
        """Mark as running, so that `cancel` no longer ends it immediately; False if it was already cancelled."""
        return self.running() or self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        if self.done():
            return False
        self.is_unwanted = True
        if self.on_cancel is not None:
            self.on_cancel()
        return super().cancel()


class _Delivery(threading.local):
    """Futures to set when this thread's current `delivery` ends, by event loop; None outside a `delivery`."""

    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] | None = None


_delivery = _Delivery()


@contextmanager
def delivery() -> Iterator[None]:
    """Collect the answers that are set within this block, and wake each event loop once when the block ends."""
    _delivery.by_loop = {}
    try:
        yield
    finally:
        by_loop, _delivery.by_loop = _delivery.by_loop, None
        for loop, waiting in by_loop.items():
            _wake(loop, waiting)


async def results_of(futures: Iterable[Future[Generated]]) -> list[Generated]:
    """The results of requests, awaited in an event loop."""
    results = []
    for future in futures:
        if not future.done():
            loop = asyncio.get_running_loop()
            waiting: asyncio.Future[None] = loop.create_future()
            future.add_done_callback(partial(_on_done, loop, waiting))
            await waiting
        try:
            results.append(future.result())
        except CancelledError:  # concurrent.futures' own class, which asyncio does not treat as a cancellation
            raise asyncio.CancelledError from None
    return results


def _on_done(loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[None], _: object) -> None:
    if _delivery.by_loop is None:
        _wake(loop, [waiting])
    else:
        _delivery.by_loop.setdefault(loop, []).append(waiting)


def _wake(loop: asyncio.AbstractEventLoop, waiting: Sequence[asyncio.Future[None]]) -> None:
    try:
        loop.call_soon_threadsafe(_set_done, waiting)
    except RuntimeError:  # the loop is closed, so nothing is waiting
        return


def _set_done(waiting: Sequence[asyncio.Future[None]]) -> None:
    for one in waiting:
        if not one.done():
            one.set_result(None)


@dataclass(eq=False, slots=True)
class ActiveSequence:
    """The state of one request in the engine."""

    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    on_token: OnToken | None = None
    future: Answer = field(default_factory=Answer)
    row: int = -1  # of the decode batch; -1: none
    blocks: list[int] = field(default_factory=list)  # during prefill; in the decode batch, the table has them
    sampled: Sampled = ((), (), ())  # before its last preemption
    tokens: np.ndarray = field(init=False)  # to prefill: the prompt, and tokens sampled before its last preemption
    computed: int = 0  # how many of `tokens` have keys and values
    order: int = -1  # index of its first admission; -1: not admitted yet
    reused: int = 0  # prompt tokens found in the prefix cache
    weights: int = 0  # number of weight changes before its first admission
    versions: list[tuple[int, str]] = field(default_factory=list)  # (first token, weight version) of each span
    cache_version: int = -1  # version of the prefix cache when its prefill began
    processor: LogitsProcessor | None = None
    failure: Exception | None = None  # of its constraint; the sequence ends with it at the next token
    ids: list[int] = field(default_factory=list)  # for `SequentialCache`: all tokens so far
    state: dict[str, Any] = field(default_factory=dict)  # for `SequentialCache`: the model's own cache of these tokens

    def __post_init__(self) -> None:
        self.tokens = _as_array(tuple(self.prompt_ids))

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt's tokens are requested and some are still missing."""
        return self.sampling.prompt_logprobs is not None and len(self.future.prompt_logprobs) < len(self.prompt_ids)

    @property
    def is_cancelled(self) -> bool:
        return self.future.is_unwanted

    def note_version(self, version: str, tokens: int) -> None:
        """Record that tokens after the first ``tokens`` are sampled from this version of the weights."""
        if self.versions and self.versions[-1][0] == tokens:
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((tokens, version))

    def version_spans(self, tokens: int) -> tuple[VersionSpan, ...]:
        """The versions that the first ``tokens`` tokens were sampled from.

        >>> sequence = ActiveSequence([1], Sampling(), 0, versions=[(0, "3"), (2, "4")])
        >>> [(span.version, span.start, span.end) for span in sequence.version_spans(5)]
        [('3', 0, 2), ('4', 2, 5)]
        """
        ends = [*(start for start, _ in self.versions[1:]), tokens]
        spans = zip(self.versions, ends, strict=True)
        return tuple([VersionSpan(name, start, end) for (start, name), end in spans if start < end])


@dataclass(eq=False, slots=True)
class Group:
    """A sequence that is being prefilled, and others with the same tokens, which will share its blocks."""

    first: ActiveSequence
    copies: list[ActiveSequence] = field(default_factory=list)

    @property
    def members(self) -> list[ActiveSequence]:
        return [self.first, *self.copies]

    @property
    def left(self) -> int:
        """Tokens still to prefill."""
        return len(self.first.tokens) - self.first.computed


class Chunk(NamedTuple):
    """Tokens ``[start, end)`` of a group to prefill in this step."""

    group: Group
    start: int
    end: int


def sharing_key(sequence: ActiveSequence) -> tuple[int | None, bytes]:
    """Sequences with equal keys are prefilled once, as one group."""
    return sequence.sampling.prompt_logprobs if sequence.needs_prompt_logprobs else None, sequence.tokens.tobytes()


class Finished(NamedTuple):
    """A finished sequence, its finish reason or error, and how many tokens were sampled after its last one."""

    sequence: ActiveSequence
    reason: str | Exception
    overrun: int = 0


class Seeds:
    """Seeds for requests that have none: random, or a hash of ``seed``, the rollout, the prompt, and how often that
    rollout used the prompt before.

    So processes with the same ``seed`` and different rollouts draw different seeds for the same prompt.

    >>> first, second = Seeds(7), Seeds(7)
    >>> first.draw([1]) == second.draw([1]) != first.draw([1])
    True
    >>> first.draw([1], "3#0") == second.draw([1], "3#0") != second.draw([1], "3#1")
    True
    """

    def __init__(self, seed: int | None = None) -> None:
        self._key = None if seed is None else seed.to_bytes(16, "little", signed=True)
        self._asked: defaultdict[bytes, count[int]] = defaultdict(count)

    def draw(self, prompt_ids: Sequence[int], rollout: str | None = None) -> int:
        if self._key is None:
            return randbits(62)
        asked = _digest(tuple(prompt_ids)) + (rollout or "").encode()
        times = next(self._asked[asked])
        digest = blake2b(times.to_bytes(8, "little") + asked, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2


@lru_cache(RECENT)
def check_tokens(tokens: tuple[int, ...], vocabulary: int) -> tuple[int, ...]:
    """The tokens as ints. Raises ValueError if one is outside the vocabulary."""
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        unknown = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ValueError(f"token {unknown} does not exist: the vocabulary has {vocabulary} tokens")
    return tuple(map(index, tokens))


@lru_cache(RECENT)
def _as_array(tokens: tuple[int, ...]) -> np.ndarray:
    return np.array(tokens, np.int32)  # shared: never written to


@lru_cache(RECENT)
def _digest(prompt_ids: tuple[int, ...]) -> bytes:
    return blake2b(repr(list(prompt_ids)).encode(), digest_size=16).digest()
