"""Logits of running sequences → their next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from verifiers.engine.batch_table import BatchTable
from verifiers.engine.logits import note_alternatives, processed
from verifiers.engine.sequence import ActiveSequence
from verifiers.kernels.cpu.model import Drawn
from verifiers.kernels.sampling import log_softmax, sample

if TYPE_CHECKING:
    from verifiers.engine.cuda_runner import CudaDecoder


def draw(
    logits_NV: Tensor,
    sequences: Sequence[ActiveSequence],
    rows_N: np.ndarray,
    table: BatchTable,
    cuda: CudaDecoder | None = None,
) -> Drawn:
    """Sample a token for each sequence, by its own arguments and seed."""
    raw_NV = logits_NV
    needs_logits = bool(table.needs_logits[rows_N].any())
    if needs_logits:
        logits_NV = processed(
            logits_NV, sequences, [[] if one.processor is None else table.reply(one.row).tolist() for one in sequences]
        )
    columns = table.columns(rows_N, logits_NV.device)
    truncates = bool(table.truncates[rows_N].any())
    if cuda is not None and not truncates:
        token_N, logprob_N, raw_N = cuda.sample(logits_NV, columns)
    else:
        is_plain = not truncates and bool((table.temperature[rows_N] == 1.0).all())
        token_N, logprob_N, raw_N = sample(logits_NV, columns, truncates=truncates, is_plain=is_plain)
    if raw_NV is not logits_NV:
        raw_N = log_softmax(raw_NV).gather(1, token_N[:, None])[:, 0]
    if needs_logits:
        note_alternatives(logits_NV, sequences, columns)
    return Drawn(*(value.cpu().numpy()[None] for value in (token_N, logprob_N, raw_N)))
