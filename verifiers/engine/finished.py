"""Tokens that were just drawn become the requests for which they were the last, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verifiers.engine.sequence import ActiveSequence, tell
from verifiers.errors import ModelError


def ends(
    running: Sequence[ActiveSequence],
    rows_N: np.ndarray,
    token_N: np.ndarray,
    logprob_N: np.ndarray,
    raw_N: np.ndarray,
    is_full_N: np.ndarray,
    is_stop_V: np.ndarray,
    is_watched_N: np.ndarray,
) -> list[tuple[ActiveSequence, str | Exception]]:
    """Who has ended: by a token that stops, by somebody who listens, for want of room, or because of bad numbers."""
    is_bad_N = ~np.isfinite(raw_N)
    is_stop_N = is_stop_V[token_N]
    found: list[tuple[ActiveSequence, str | Exception]] = []
    for i in np.flatnonzero(is_full_N | is_bad_N | is_stop_N | is_watched_N):
        sequence, token = running[rows_N[i]], int(token_N[i])
        if is_bad_N[i]:
            message = "the model gave logits that are not numbers (NaN); its weights are bad"
            found.append((sequence, ModelError(message)))
        elif sequence.failure is not None:
            found.append((sequence, sequence.failure))
        elif token in sequence.sampling.stop_ids or (is_stop_N[i] and not sequence.sampling.ignore_eos):
            found.append((sequence, "stop"))
        elif sequence.on_token is not None and (told := tell(sequence.on_token, token, float(logprob_N[i]))):
            found.append((sequence, told))
        elif is_full_N[i]:
            found.append((sequence, "length"))
    return found
