"""Prefill on CUDA: the new tokens of many packed prompts attend to themselves and to cached positions.

Prompts run as CUDA graphs, split into parts that fit the largest graph. Launching the kernels one by one would take
longer than running them, especially while other threads hold the GIL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.kv_cache import Segment, tables_and_positions
from verifiers.kernels.devices import to_device

if TYPE_CHECKING:
    from verifiers.engine.cuda_runner import CudaDecoder

TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # sizes of graphs, in new tokens
TOKENS_A_PROMPT, PROMPTS = 16, 16  # a graph has room for one prompt per 16 tokens, and for at least 16 prompts
CAPTURE_AT, CAPTURE_AT_LAST = 2, 4  # the use of a size that captures its graph; the latter if a larger graph can serve


def blocks_of(segments: Sequence[Segment], step: int) -> np.ndarray:
    """Split segments into blocks of at most ``step`` queries: first token, token count, block table, first position.

    >>> blocks_of([Segment(0, 40, table=3, past=100)], step=32).tolist()
    [[0, 32], [32, 8], [3, 3], [100, 132]]
    """
    start, end, table, past = np.array(segments, np.int32).T
    counts = -(-(end - start) // step)
    index = np.repeat(np.arange(len(counts)), counts)
    offset = (np.arange(len(index)) - np.repeat(counts.cumsum() - counts, counts)) * step
    first = start[index] + offset
    blocks: np.ndarray = np.array([first, np.minimum(step, end[index] - first), table[index], past[index] + offset])
    return blocks.astype(np.int32)


def parts_of(segments: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """Segments in order, cut into parts of ``most`` tokens.

    >>> [[tuple(one) for one in part] for part in parts_of([Segment(0, 5, 0, 0), Segment(5, 9, 1, 16)], most=6)]
    [[(0, 5, 0, 0), (5, 6, 1, 16)], [(0, 3, 1, 17)]]
    """
    part, begin = list[Segment](), 0
    for start, end, table, past in segments:
        at = start
        while at < end:
            stop = min(end, begin + most)
            part.append(Segment(at - begin, stop - begin, table, past + at - start))
            at = stop
            if at == begin + most:
                yield part
                part, begin = [], at
    if part:
        yield part


def most_prompts(tokens: int) -> int:
    """How many prompts a graph of that many tokens has room for."""
    return max(PROMPTS, tokens // TOKENS_A_PROMPT)


def graph_size(tokens: int, prompts: int, captured: Collection[int], seen: Counter[int]) -> int:
    """The size of the graph to run or capture; 0 to run without a graph. ``seen`` counts the uses of each size.

    >>> seen = Counter()
    >>> [graph_size(100, 3, {512}, seen) for _ in range(4)], [graph_size(3000, 9, {512}, seen) for _ in range(2)]
    ([512, 512, 512, 128], [0, 4096])
    """
    fitting = [size for size in TOKENS if size >= tokens and most_prompts(size) >= prompts]
    if not fitting:
        return 0
    least = fitting[0]
    seen[least] += 1
    larger = next((size for size in fitting if size in captured), 0)
    is_due = seen[least] >= (CAPTURE_AT_LAST if larger else CAPTURE_AT)
    return least if is_due else larger


class CudaPrefill:
    """Runs packed prompts as CUDA graphs, in parts if they are too long for the largest graph."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self._decoder, self._card = decoder, decoder.card
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._seen: Counter[int] = Counter()
        share = decoder.runner.text_config.num_attention_heads // decoder.cache.store.shape[3]
        self._step = self._card.tokens_at_once(share)  # queries of a block

    def drop_graphs(self) -> None:
        self._graphs.clear()

    def run(self, ids_T: np.ndarray, keep_N: np.ndarray, segments: list[Segment], tables: np.ndarray) -> Tensor:
        """The logits after the tokens at ``keep_N``, which must be sorted."""
        if len(ids_T) <= TOKENS[-1]:
            return self._run(ids_T, keep_N, segments, tables)
        logits, begin = list[Tensor](), 0
        for part in parts_of(segments, TOKENS[-1]):
            end, first, last = begin + part[-1].end, part[0].table, part[-1].table
            keep = keep_N[slice(*np.searchsorted(keep_N, (begin, end)))] - begin
            own = [Segment(start, stop, table - first, past) for start, stop, table, past in part]
            logits.append(self._run(ids_T[begin:end], keep, own, tables[first : last + 1]).clone())
            begin = end
        return torch.cat(logits)

    def _run(self, ids_T: np.ndarray, keep_N: np.ndarray, segments: list[Segment], tables: np.ndarray) -> Tensor:
        device = self._decoder.blocks.device
        token_T = np.stack([ids_T, *tables_and_positions(segments)]).astype(np.int32)
        inputs = [token_T, blocks_of(segments, self._step), keep_N.astype(np.int32), tables]
        tokens = graph_size(len(ids_T), max(len(keep_N), len(segments)), self._graphs, self._seen)
        if not tokens:
            return self._forward(*(to_device(one, device) for one in inputs))
        inputs = self._padded(inputs, tokens, most_prompts(tokens))
        graph, target, logits = self._graph(tokens, inputs)
        target.copy_(to_device(np.concatenate([one.reshape(-1) for one in inputs]), device))
        graph.replay()
        return logits[: len(keep_N)]

    def _padded(self, inputs: Sequence[np.ndarray], tokens: int, most: int) -> list[np.ndarray]:
        """Pad to sizes that depend only on ``tokens``. Keys and values of padding go to the null block."""
        token_T, block_B, keep_N, tables = inputs
        padding = np.array([[0], [most], [0]], np.int32)  # id, table, position: the last table has null blocks only
        blocks = most + tokens // self._step
        width = self._decoder.blocks.shape[1]
        return [
            np.concatenate([token_T, np.repeat(padding, tokens - token_T.shape[1], 1)], 1),
            np.pad(block_B, ((0, 0), (0, blocks - block_B.shape[1]))),
            np.pad(keep_N, (0, most - len(keep_N))),
            np.pad(tables, ((0, most + 1 - len(tables)), (0, width - tables.shape[1]))),
        ]

    def _forward(self, token_T: Tensor, block_B: Tensor, keep_N: Tensor, tables: Tensor) -> Tensor:
        ids, rows, positions = token_T
        attend = self._card.extend_attention(self._decoder.cache, tables, rows, positions, block_B)
        return self._decoder.runner.forward(ids[None].long(), positions[None].long(), attend, keep_N.long())[0]

    def _graph(self, tokens: int, like: Sequence[np.ndarray]) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        if tokens not in self._graphs:
            target = torch.zeros(sum(one.size for one in like), dtype=torch.int32, device=self._decoder.blocks.device)
            parts = target.split([one.size for one in like])
            views = [part.view(one.shape) for part, one in zip(parts, like, strict=True)]  # zeros: the null block
            graph, logits = self._card.capture(lambda: self._forward(*views))
            self._graphs[tokens] = graph, target, logits
        return self._graphs[tokens]
