"""Tokens that were just drawn become the requests for which they were the last, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verifiers.engine.batch_table import BatchTable
from verifiers.engine.sequence import ActiveSequence, tell
from verifiers.errors import ModelError
from verifiers.kernels.cpu.model import Drawn


class Ended(NamedTuple):
    """A sequence that has ended, why, and how many tokens were drawn for it beyond its last one."""

    sequence: ActiveSequence
    reason: str | Exception
    beyond: int = 0


def ends(
    running: Sequence[ActiveSequence], rows_N: np.ndarray, drawn: Drawn, table: BatchTable, is_stop_V: np.ndarray
) -> list[Ended]:
    """Who has ended: by a token that stops, by somebody who listens, for want of room, or because of bad numbers."""
    steps, left_N = len(drawn.token_KB), table.max_tokens[rows_N] - table.steps[rows_N]
    is_last_KN = is_stop_V[drawn.token_KB] | ~np.isfinite(drawn.raw_KB)
    some_M = (is_last_KN.any(0) | (left_N <= 0) | table.is_watched[rows_N]).nonzero()[0]
    found = list[Ended]()
    if not len(some_M):
        return found
    for row, left, *tokens in zip(
        rows_N[some_M].tolist(), left_N[some_M].tolist(), *(one[:, some_M].T.tolist() for one in drawn), strict=True
    ):
        sequence = running[row]
        for beyond, (token, logprob, raw) in zip(range(steps - 1, -1, -1), zip(*tokens, strict=True), strict=True):
            is_stop, is_full = bool(is_stop_V[token]), left + beyond <= 0
            if (reason := _reason(sequence, token, logprob, raw, is_stop=is_stop, is_full=is_full)) is not None:
                found.append(Ended(sequence, reason, beyond))
                break
    return found


def _reason(
    sequence: ActiveSequence, token: int, logprob: float, raw: float, *, is_stop: bool, is_full: bool
) -> str | Exception | None:
    if not math.isfinite(raw):
        return ModelError("the model gave logits that are not numbers (NaN); its weights are bad")
    if sequence.failure is not None:
        return sequence.failure
    if token in sequence.sampling.stop_ids or (is_stop and not sequence.sampling.ignore_eos):
        return "stop"
    if sequence.on_token is not None and (told := tell(sequence.on_token, token, logprob)):
        return told
    return "length" if is_full else None
