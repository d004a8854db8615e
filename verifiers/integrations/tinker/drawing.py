"""Sampling requests → replies, each in its turn; the logprobs of those that were recorded can be found again."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verifiers.engine.ready_model import ReadyModel
from verifiers.errors import RequestRefusedError
from verifiers.integrations.tinker.adapters import Snapshot
from verifiers.integrations.tinker.data import Datum, Written
from verifiers.integrations.tinker.learner import Scoring
from verifiers.integrations.tinker.samples import SampleRequest, gathered, reply_logprobs, sample_response
from verifiers.integrations.tinker.turns import Turns, settle

MOST_RECORDED = 1 << 16  # sampled sequences whose logprobs can be found again


@dataclass(frozen=True, slots=True)
class Drawn:
    """Replies that will be: what they give, the names of their sequences, and how to want them no more."""

    future: Future[Any]
    names: list[str]
    cancel: Callable[[], None]


class Drawing:
    """Draws replies with the engine, from one snapshot at a time."""

    def __init__(self, ready: ReadyModel, scoring: Scoring, turns: Turns) -> None:
        self._ready, self._scoring, self._turns = ready, scoring, turns
        self._recorded: OrderedDict[str, Any] = OrderedDict()

    def draw(self, asked: SampleRequest, snapshot: Snapshot | None) -> Drawn:
        names = [uuid.uuid4().hex for _ in range(asked.n)]
        answers: list[Any] = []
        done: Future[Any] = Future()
        unwanted = False

        def start() -> Future[Any]:
            if unwanted:
                raise RequestRefusedError("the request was cancelled")
            scores = None if asked.targets is None else self._score(asked)
            answers.extend(asked.submit(self._ready))
            gathered(answers).add_done_callback(
                lambda drawn: settle(done, lambda: self._written(asked, drawn, names, scores))
            )
            return done

        def cancel() -> None:
            nonlocal unwanted
            unwanted = True
            for answer in answers:
                answer.cancel()

        return Drawn(self._turns.submit(start, key=(snapshot,)), names, cancel)

    def _score(self, asked: SampleRequest) -> Any:
        with self._ready.engine.lock, torch.no_grad():
            logprobs = self._scoring.logprobs([asked.target_datum])[0].cpu().numpy().reshape(asked.targets.shape)
        return np.where(asked.targets < 0, 0.0, logprobs)

    def _written(self, asked: SampleRequest, drawn: Future[Any], names: list[str], scores: Any) -> Written:
        found = drawn.result()
        if asked.records:
            for name, one in zip(names, found, strict=True):
                self._recorded[name] = np.array(reply_logprobs(asked, one), np.float32)
            while len(self._recorded) > MOST_RECORDED:
                self._recorded.popitem(last=False)
        return sample_response(asked, found, scores)

    def with_recorded(self, i: int, one: Datum) -> Datum:
        """A datum with the logprobs that its tokens were sampled with here, as its spans say."""
        if not one.spans:
            return one
        logprobs = np.zeros(len(one.ids_T), np.float32)
        at = 0
        for span in one.spans:
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
