"""What is asked of the engine, and what comes back: ids in, ids and logprobs out."""

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
from secrets import randbits
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from verifiers.types import VersionSpan

if TYPE_CHECKING:
    from verifiers.engine.constraints import Constraint
    from verifiers.engine.logits import LogitsProcessor

NO_TOP_K = 1 << 30
RECENT = 64  # prompts of which is known what they come to: a group sequences the same many times over


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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    constraint: Constraint | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not self.max_tokens >= 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens!r}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not self.top_k >= 0:
            raise ValueError(f"top_k must be 0 (no limit) or more, got {self.top_k!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p!r}")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty!r}")
        added = (*self.logit_bias.values(), self.presence_penalty, self.frequency_penalty)
        if wrong := [one for one in added if not one < math.inf]:
            raise ValueError(f"logit_bias and penalties must be numbers below infinity, got {wrong[0]!r}")
        if not self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens!r}, and max_tokens {self.max_tokens!r}")

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
    def is_watched(self) -> bool:
        """Must each token be looked at on its own: is it one that ends others, can the request fail at it?"""
        return self.ignore_eos or self.constraint is not None

    @property
    def needs_logits(self) -> bool:
        """Must a step's logits be looked at for this request, and not only the token drawn from them?"""
        return self.changes_logits or self.top_logprobs > 0


Alternatives = list[tuple[int, float]]
"""The likeliest tokens of one step with their logprobs, the likeliest first."""

PromptLogprob = tuple[float, Alternatives] | None
"""The logprob of a prompt's token under the model's own distribution, and its alternatives; None of the first."""


class Generated(NamedTuple):
    """One completion, exactly as it was sampled.

    ``logprobs`` are under the distribution each token was drawn from (tempered, truncated, biased); ``raw_logprobs``
    under the model's own. ``top_logprobs`` has the alternatives of each token, under the distribution it was drawn
    from, where they were asked for. ``weights`` counts the changes of the weights that were noticed up to its start
    and its end; ``weight_versions`` are the versions that its tokens were sampled from, in order.
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
"""Tokens, their logprobs under what they were drawn from, and under the model's own distribution."""

OnToken = Callable[[int, float], bool]
"""Told of each token as it comes; returns True to end the request there."""


class Answer(Future[Generated]):
    """What a request will give. Cancelling it while it is under way frees its blocks before the next step."""

    is_unwanted = False
    on_cancel: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.prompt_logprobs: list[PromptLogprob] = []
        self.top_logprobs: list[Alternatives] = []  # of the tokens so far, where they were asked for

    def cancel(self) -> bool:
        if self.done():
            return False
        self.is_unwanted = True
        if self.on_cancel is not None:
            self.on_cancel()
        return super().cancel()


class _Ended(threading.local):
    """Those in event loops who wait for what has ended in this thread, while a `delivery` lasts."""

    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] | None = None


_ended = _Ended()


@contextmanager
def delivery() -> Iterator[None]:
    """Answers that are given while this lasts are heard of when it ends: each event loop is woken once for all."""
    _ended.by_loop = {}
    try:
        yield
    finally:
        by_loop, _ended.by_loop = _ended.by_loop, None
        for loop, waiting in by_loop.items():
            _wake(loop, waiting)


async def arrivals(futures: Iterable[Future[Generated]]) -> list[Generated]:
    """What requests give, awaited in an event loop."""
    arrived = []
    for future in futures:
        if not future.done():
            loop = asyncio.get_running_loop()
            waiting: asyncio.Future[None] = loop.create_future()
            future.add_done_callback(partial(_note_end, loop, waiting))
            await waiting
        try:
            arrived.append(future.result())
        except CancelledError:  # not the class that asyncio means by it
            raise asyncio.CancelledError from None
    return arrived


def _note_end(loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[None], _: object) -> None:
    if _ended.by_loop is None:
        _wake(loop, [waiting])
    else:
        _ended.by_loop.setdefault(loop, []).append(waiting)


def _wake(loop: asyncio.AbstractEventLoop, waiting: Sequence[asyncio.Future[None]]) -> None:
    try:
        loop.call_soon_threadsafe(_settle, waiting)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return


def _settle(waiting: Sequence[asyncio.Future[None]]) -> None:
    for one in waiting:
        if not one.done():
            one.set_result(None)


@dataclass(eq=False, slots=True)
class ActiveSequence:
    """One request on its way through the engine."""

    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    on_token: OnToken | None = None
    future: Answer = field(default_factory=Answer)
    row: int = -1  # of the batch that decodes; -1: none
    blocks: list[int] = field(default_factory=list)  # of the KV cache, while its prompt is run; then the table has them
    sampled: Sampled = ((), (), ())  # before it was preempted, the last time
    tokens: np.ndarray = field(init=False)  # those to run before the next one is drawn: the prompt, and then these
    computed: int = 0  # of them have keys and values
    order: int = -1  # in which sequences were first admitted
    reused: int = 0
    weights: int = 0
    versions: list[tuple[int, str]] = field(default_factory=list)  # (first token, version of the weights) of each span
    kept_version: int = -1  # of the prefix cache, when its keys were begun
    processor: LogitsProcessor | None = None
    failure: Exception | None = None  # of what was asked for, found out between two tokens

    def __post_init__(self) -> None:
        self.tokens = _as_array(tuple(self.prompt_ids))

    @property
    def is_to_be_scored(self) -> bool:
        """Are logprobs of the prompt's tokens asked for, and not all there yet?"""
        return self.sampling.prompt_logprobs is not None and len(self.future.prompt_logprobs) < len(self.prompt_ids)

    @property
    def is_cancelled(self) -> bool:
        return self.future.is_unwanted

    def note_version(self, version: str, tokens: int) -> None:
        """What is sampled after so many tokens is of this version of the weights."""
        if self.versions and self.versions[-1][0] == tokens:
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((tokens, version))

    def version_spans(self, tokens: int) -> tuple[VersionSpan, ...]:
        """The versions that so many tokens were sampled from.

        >>> sequence = ActiveSequence([1], Sampling(), 0, versions=[(0, "3"), (2, "4")])
        >>> [(span.version, span.start, span.end) for span in sequence.version_spans(5)]
        [('3', 0, 2), ('4', 2, 5)]
        """
        ends = [*(start for start, _ in self.versions[1:]), tokens]
        spans = zip(self.versions, ends, strict=True)
        return tuple([VersionSpan(name, start, end) for (start, name), end in spans if start < end])


@dataclass(eq=False, slots=True)
class Group:
    """A sequence whose tokens are run, and those with the same tokens, which will share its blocks."""

    first: ActiveSequence
    copies: list[ActiveSequence] = field(default_factory=list)

    @property
    def members(self) -> list[ActiveSequence]:
        return [self.first, *self.copies]

    @property
    def left(self) -> int:
        """Tokens that are still to be run."""
        return len(self.first.tokens) - self.first.computed


class Chunk(NamedTuple):
    """Tokens ``[start, end)`` of a group, to be run in this step."""

    group: Group
    start: int
    end: int


def sharing_key(sequence: ActiveSequence) -> tuple[int | None, bytes]:
    """What sequences must have in common for one to share the other's blocks."""
    return sequence.sampling.prompt_logprobs if sequence.is_to_be_scored else None, sequence.tokens.tobytes()


def in_order(sequences: Iterable[ActiveSequence]) -> list[ActiveSequence]:
    """Requests by prompt and seed: an order that does not depend on who came first."""
    by_prompt: dict[tuple[int, ...], list[ActiveSequence]] = {}
    for sequence in sequences:
        by_prompt.setdefault(tuple(sequence.prompt_ids), []).append(sequence)
    groups = (by_prompt[prompt] for prompt in sorted(by_prompt))
    return [sequence for group in groups for sequence in sorted(group, key=lambda sequence: sequence.seed)]


def tell(on_token: OnToken, token: int, logprob: float) -> str | Exception | None:
    """Why the request ends here, if it does: its owner wants no more, or its owner's code failed."""
    try:
        return "stop" if on_token(token, logprob) else None
    except Exception as error:  # foreign code: it fails its own request
        return error


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
        prompt = _digest(tuple(prompt_ids))
        times = next(self._asked[prompt])
        digest = blake2b(prompt + times.to_bytes(8, "little"), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2


@lru_cache(RECENT)
def check_tokens(tokens: tuple[int, ...], vocabulary: int) -> tuple[int, ...]:
    """The same tokens as plain numbers; one that a model does not have is refused."""
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        stranger = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ValueError(f"there is no token {stranger}: the model has {vocabulary}")
    return tuple(map(int, tokens))


@lru_cache(RECENT)
def _as_array(tokens: tuple[int, ...]) -> np.ndarray:
    """Tokens to run, which nobody changes."""
    return np.array(tokens, np.int32)


@lru_cache(RECENT)
def _digest(prompt_ids: tuple[int, ...]) -> bytes:
    return blake2b(repr(list(prompt_ids)).encode(), digest_size=16).digest()
