"""The decode batch as NumPy columns, one row per running sequence: block table, lengths, sampling arguments, reply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from verifiers.engine.block_manager import BLOCK, blocks_for
from verifiers.engine.sequence import GREEDY_BELOW, NO_TOP_K, ActiveSequence, Generated
from verifiers.kernels.cpu.model import Drawn
from verifiers.kernels.devices import to_device
from verifiers.kernels.sampling import SamplingColumns

OVERRUN = BLOCK  # on CUDA, the most tokens a row may sample past its last one before the host has read that token


class BatchTable:
    """One row per running sequence. Running sequences use the first rows, without gaps."""

    def __init__(self, rows: int, length: int) -> None:
        self._length = length
        self.blocks = np.zeros((rows, blocks_for(length + OVERRUN)), np.int32)  # past the context: the null block
        self._columns = (np.zeros((8, rows), np.int64), np.zeros((3, rows), np.float32), np.zeros((4, rows), bool))
        # Number of blocks; positions with keys and values; steps in flight on the device.
        self.n_blocks, self.length, self.ahead, *more = self._columns[0]
        # Last token; tokens of the reply so far; maximum tokens of the reply.
        self.token, self.steps, self.max_tokens, self.seed, self.top_k = more
        self.temperature, self.top_p, self.min_p = self._columns[1]
        self.truncates, self.needs_logits, self.needs_token_check, self.has_callback = self._columns[2]
        words = np.zeros((3, rows, length + OVERRUN), np.int32)  # of the replies: ids, logprobs, raw logprobs
        self._words, self._ids, self._logprobs = words, words[0], words[1:].view(np.float32)
        self._outputs = (self._ids.reshape(-1), *self._logprobs.reshape(2, -1))

    def assign(self, sequence: ActiveSequence) -> None:
        """Fill in the row of a sequence whose prefill is complete, including tokens sampled before a preemption."""
        row, sampling = sequence.row, sequence.sampling
        self.blocks[row] = 0
        self.blocks[row, : len(sequence.blocks)] = sequence.blocks
        self.n_blocks[row] = len(sequence.blocks)
        self.length[row] = len(sequence.tokens)
        self.ahead[row] = 0
        self.steps[row] = n = len(sequence.sampled[0])
        if n:
            self._ids[row, :n], self._logprobs[:, row, :n] = sequence.sampled[0], sequence.sampled[1:]
        self.max_tokens[row] = min(sampling.max_tokens, self._length - len(sequence.prompt_ids))
        self.seed[row] = sequence.seed
        self.top_k[row] = min(sampling.top_k or NO_TOP_K, NO_TOP_K)
        self.temperature[row] = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.truncates[row] = sampling.truncates
        self.needs_logits[row] = sampling.needs_logits
        self.has_callback[row] = sequence.on_token is not None
        self.needs_token_check[row] = sequence.on_token is not None or sampling.needs_token_check

    def blocks_of(self, row: int) -> list[int]:
        blocks: list[int] = self.blocks[row, : self.n_blocks[row]].tolist()
        return blocks

    def add_blocks(self, missing_N: np.ndarray, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Add ``missing_N`` blocks to the first rows; returns the row and the column of each block."""
        n = len(missing_N)
        rows_M = np.repeat(np.arange(n), missing_N)
        column_M = np.arange(len(rows_M)) + np.repeat(self.n_blocks[:n] + missing_N - missing_N.cumsum(), missing_N)
        self.blocks[rows_M, column_M] = blocks
        self.n_blocks[:n] += missing_N
        return rows_M, column_M

    def missing_blocks(self, n: int, steps: int) -> np.ndarray:
        """How many more blocks each of the first ``n`` rows needs for ``steps`` more tokens."""
        position = np.minimum(self.length[:n] + self.ahead[:n] + steps, self._length)
        missing: np.ndarray = np.maximum((position + (BLOCK - 1)) // BLOCK - self.n_blocks[:n], 0)
        return missing

    def rows_with_spare_blocks(self, n: int) -> np.ndarray:
        """Which of the first ``n`` rows have blocks beyond the one of their next token."""
        return np.flatnonzero(self.n_blocks[:n] > self.length[:n] // BLOCK + 1)

    def columns(self, rows_N: np.ndarray, device: torch.device) -> SamplingColumns:
        """The sampling arguments of these rows on the device, copied without synchronizing."""
        floats = np.stack([column[rows_N] for column in (self.temperature, self.top_p, self.min_p)])
        ints = np.stack([column[rows_N] for column in (self.top_k, self.seed, self.steps)])
        temperature, top_p, min_p = to_device(floats, device)
        top_k, seed, steps = to_device(ints, device)
        return SamplingColumns(temperature, top_p, top_k, min_p, seed, steps)

    def record(self, rows_N: np.ndarray, drawn: Drawn, *, is_first: bool = False) -> None:
        """Append sampled tokens to the replies of these rows. The first token of a reply adds no position."""
        steps, steps_N = len(drawn.token_KB), self.steps[rows_N]
        at_KN = rows_N * self._words.shape[2] + steps_N + np.arange(steps)[:, None]
        for column, drawn_KN in zip(self._outputs, drawn, strict=True):
            column[at_KN] = drawn_KN
        self.token[rows_N] = drawn.token_KB[-1]
        self.steps[rows_N] = steps_N + steps
        if not is_first:
            self.length[rows_N] += steps

    def drop_last(self, row: int, tokens: int) -> None:
        """Drop the last tokens of a row, which were sampled after its sequence had finished."""
        self.steps[row] -= tokens
        self.length[row] -= tokens

    def reply(self, row: int) -> np.ndarray:
        """The ids that a row's sequence has sampled so far."""
        reply: np.ndarray = self._ids[row, : self.steps[row]]
        return reply

    def sampled(self, row: int) -> tuple[list[int], list[float], list[float]]:
        """The ids that a row's sequence has sampled so far, their logprobs, and their raw logprobs."""
        logprobs, raw = self._logprobs[:, row, : self.steps[row]].tolist()
        return self.reply(row).tolist(), logprobs, raw

    def tokens_left(self, n: int) -> np.ndarray:
        """How many more tokens each of the first ``n`` rows may sample. Tokens in flight count as sampled."""
        left: np.ndarray = self.max_tokens[:n] - self.steps[:n] - self.ahead[:n]
        return left

    def output(self, sequence: ActiveSequence, finish_reason: str, weight_changes: int) -> Generated:
        """The result of a finished sequence."""
        ids, logprobs, raw = self.sampled(sequence.row)
        return Generated(
            prompt_ids=sequence.prompt_ids,
            ids=ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            finish_reason=finish_reason,
            reused=sequence.reused,
            weights=(sequence.weights, weight_changes),
            weight_versions=sequence.version_spans(len(ids)),
            top_logprobs=sequence.future.top_logprobs,
            prompt_logprobs=sequence.future.prompt_logprobs or None,
        )

    def move(self, holes: np.ndarray, movers: np.ndarray) -> None:
        """Move the rows ``movers`` to ``holes``, with their block tables. The KV cache does not move."""
        for columns in self._columns:
            columns[:, holes] = columns[:, movers]
        self.blocks[holes] = self.blocks[movers]
        most = int(self.steps[movers].max(initial=0))
        self._words[:, holes, :most] = self._words[:, movers, :most]
