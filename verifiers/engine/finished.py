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
    is_stop_KN = is_stop_V[drawn.token_KB]
    is_last_KN = is_stop_KN | ~np.isfinite(drawn.raw_KB)
    some_M = (is_last_KN.any(0) | (left_N <= 0) | table.is_watched[rows_N]).nonzero()[0]
    found, rows, left = dict[int, Ended](), rows_N[some_M].tolist(), left_N[some_M].tolist()
    for k in range(steps if rows else 0):
        beyond, columns = steps - 1 - k, (one[k][some_M].tolist() for one in (*drawn, is_stop_KN))
        for row, room, token, logprob, raw, is_stop in zip(rows, left, *columns, strict=True):
            if row in found:
                continue
            reason = _reason(running[row], token, logprob, raw, is_stop, room + beyond <= 0)
            if reason is not None:
                found[row] = Ended(running[row], reason, beyond)
    return list(found.values())


def _reason(
    sequence: ActiveSequence, token: int, logprob: float, raw: float, is_stop: bool, is_full: bool
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
