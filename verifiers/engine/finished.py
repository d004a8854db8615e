"""Tokens that were just sampled → the sequences that finish with them, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verifiers.engine.batch_table import BatchTable
from verifiers.engine.sequence import ActiveSequence
from verifiers.errors import ModelError
from verifiers.kernels.cpu.model import Drawn


class Finished(NamedTuple):
    """A sequence that has finished, why, and how many tokens were sampled for it beyond its last one."""

    sequence: ActiveSequence
    reason: str | Exception
    overrun: int = 0


def find_finished(
    running: Sequence[ActiveSequence], rows_N: np.ndarray, drawn: Drawn, table: BatchTable, is_stop_V: np.ndarray
) -> list[Finished]:
    """The sequences that finish: at a stop token, by their ``on_token``, at their length limit, or at a NaN."""
    steps, left_N = len(drawn.token_KB), table.max_tokens[rows_N] - table.steps[rows_N]
    is_stop_KN = is_stop_V[drawn.token_KB]
    is_last_KN = is_stop_KN | ~np.isfinite(drawn.raw_KB)
    some_M = (is_last_KN.any(0) | (left_N <= 0) | table.needs_token_check[rows_N]).nonzero()[0]
    found, rows, left = dict[int, Finished](), rows_N[some_M].tolist(), left_N[some_M].tolist()
    for k in range(steps if rows else 0):
        overrun, columns = steps - 1 - k, (one[k][some_M].tolist() for one in (*drawn, is_stop_KN))
        for row, room, token, logprob, raw, is_stop in zip(rows, left, *columns, strict=True):
            if row in found:
                continue
            reason = _reason(running[row], token, logprob, raw, is_stop, room + overrun <= 0)
            if reason is not None:
                found[row] = Finished(running[row], reason, overrun)
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
    try:
        if sequence.on_token is not None and sequence.on_token(token, logprob):
            return "stop"
    except Exception as error:  # foreign code: it fails its own request
        return error
    return "length" if is_full else None
