"""Sampling requests → replies. The logprobs of recorded sequences can be looked up later."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verifiers.engine.ready_model import ReadyModel
from verifiers.engine.sequence import Alternatives, Generated
from verifiers.errors import RequestRefusedError
from verifiers.integrations.tinker.adapters import Snapshot
from verifiers.integrations.tinker.data import Datum, Written
from verifiers.integrations.tinker.samples import SampleRequest, gathered, reply_logprobs, sample_response
from verifiers.integrations.tinker.scoring import Reply, Scoring
from verifiers.integrations.tinker.turns import Turns

MOST_RECORDED = 1 << 16  # sampled sequences whose logprobs are kept


@dataclass(frozen=True, slots=True)
class Drawn:
    """Pending replies: their future, the ids of their sequences, and a function that cancels them."""

    future: Future[Any]
    names: list[str]
    cancel: Callable[[], None]


class Drawing:
    """Samples replies with the engine, from one snapshot at a time."""

    def __init__(self, ready: ReadyModel, scoring: Scoring, turns: Turns) -> None:
        self._ready, self._scoring, self._turns = ready, scoring, turns
        self._recorded: OrderedDict[str, Any] = OrderedDict()

    def draw(self, asked: SampleRequest, snapshot: Snapshot | None) -> Drawn:
        names = [uuid.uuid4().hex for _ in range(asked.n)]
        answers: list[Any] = []
        is_cancelled = False

        def start() -> Future[Any]:
            if is_cancelled:
                raise RequestRefusedError("the request was cancelled")
            answers.extend(asked.submit(self._ready, scores_prompt=asked.topk_prompt > 0))  # else scored afterwards
            return gathered(answers)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            for answer in answers:
                answer.cancel()

        future = self._turns.submit(start, key=(snapshot,), finish=self._written, asked=(asked, names))
        return Drawn(future, names, cancel)

    def _written(self, done: Sequence[tuple[tuple[SampleRequest, list[str]], list[Generated]]]) -> list[Written]:
        """The results of finished requests, all of the active snapshot."""
        with self._ready.engine.lock:
            rescored = self._rescored([(asked, found) for (asked, _), found in done])
            scores = [None if asked.targets is None else self._score(asked) for (asked, _), _ in done]
        for ((asked, names), _), found in zip(done, rescored, strict=True):
            if asked.records:
                for name, one in zip(names, found, strict=True):
                    self._recorded[name] = np.array(reply_logprobs(asked, one), np.float32)
        while len(self._recorded) > MOST_RECORDED:
            self._recorded.popitem(last=False)
        return [
            sample_response(asked, found, score)
            for ((asked, _), _), found, score in zip(done, rescored, scores, strict=True)
        ]

    def _score(self, asked: SampleRequest) -> Any:
        with torch.no_grad():
            ((_, logprob_N, _),) = self._scoring.logprobs([asked.target_datum])
        return np.where(asked.targets < 0, 0.0, logprob_N.cpu().numpy().reshape(asked.targets.shape))

    def _rescored(self, done: Sequence[tuple[SampleRequest, list[Generated]]]) -> list[list[Generated]]:
        """The same replies with the logprobs that training computes, which sums in a different order."""
        replies = [Reply(asked.prompt, one.ids, asked.drawn_from) for asked, found in done for one in found]
        prompts = [Reply(asked.prompt[:1], asked.prompt[1:]) for asked, _ in done if asked.scores_prompt]
        logprobs = iter(self._scoring.replies([*replies, *prompts]))
        made = [
            [
                one._replace(logprobs=own, raw_logprobs=own, top_logprobs=self._alternatives(
                    [*asked.prompt, *one.ids], own, one.top_logprobs, 1 / asked.drawn_from.temperature
                ))
                for one, own in zip(found, logprobs, strict=False)
            ]
            for asked, found in done
        ]  # fmt: skip
        for (asked, found), some in zip(done, made, strict=True):
            if asked.scores_prompt:
                own = next(logprobs)
                known = [one[1] for one in found[0].prompt_logprobs or () if one is not None]
                tops = self._alternatives(asked.prompt, own, known) or [[]] * len(own)
                some[0] = some[0]._replace(prompt_logprobs=[None, *zip(own, tops, strict=True)])
        return made

    def _alternatives(
        self, ids: list[int], own: list[float], found: Sequence[Alternatives], by: float = 1.0
    ) -> Sequence[Alternatives]:
        """The alternatives ``found`` for the last tokens of ``ids``, rescored relative to their logprobs (``own``)."""
        if not any(found):
            return found
        tokens = [[token for token, _ in some] for some in found]
        gaps = self._scoring.beside(ids, tokens)
        made = [
            [(token, logprob + gap * by) for token, gap in zip(*both, strict=True)]
            for logprob, *both in zip(own, tokens, gaps, strict=True)
        ]
        return [sorted(some, key=lambda one: -one[1]) for some in made]

    def with_recorded(self, i: int, one: Datum) -> Datum:
        """A datum with the sampling logprobs of the sequences that its spans name."""
        if not one.spans:
            return one
        logprobs = np.zeros(len(one.ids_T), np.float32)
        at = 0
        for span in one.spans:
            if span.length < 0 or span.offset < 0:
                raise RequestRefusedError(f"datum {i}: invalid span of {span.length} tokens from {span.offset}")
            if span.sequence_id is not None:
                known = self._recorded.get(span.sequence_id)
                if known is None or span.offset + span.length > len(known):
                    raise RequestRefusedError(
                        f"datum {i}: {span.length} tokens of the sequence {span.sequence_id!r:.80} were not recorded; "
                        "sample with record_stability_info=True"
                    )
                logprobs[at : at + span.length] = known[span.offset : span.offset + span.length]
            at += span.length
        if at != len(logprobs):
            raise RequestRefusedError(f"datum {i}: its spans cover {at} of {len(logprobs)} tokens")
        return replace(one, inputs={**one.inputs, "logprobs": logprobs})
