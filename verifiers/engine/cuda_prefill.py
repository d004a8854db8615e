"""Prompts on CUDA: their new tokens are run, all prompts at once, over what their blocks hold already.

A few tokens are run by captured graphs: starting the operations one by one takes several times as long as doing them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.kv_cache import KVCache, Segment
from verifiers.kernels.cuda import decode
from verifiers.kernels.cuda.extend import extend, queries_at_once, store
from verifiers.kernels.cuda.splits import multiprocessors, splits_for
from verifiers.kernels.devices import to_device
from verifiers.kernels.norms import HeadNorms

if TYPE_CHECKING:
    from verifiers.engine.cuda_runner import CudaDecoder

TOKENS = (32, 64, 128, 256, 512, 1024, 2048)  # a graph for each: the new tokens it takes
TOKENS_A_PROMPT, PROMPTS = 16, 16  # of which there may be so many: one for 16 tokens, and 16 at least
CAPTURE_AT = 2  # a size of which there were so many is worth a graph


def blocks_of(segments: Sequence[Segment], share: int) -> np.ndarray:
    """Tokens that are attended for together: where they begin, how many, by which table, from which position on.

    >>> blocks_of([Segment(0, 40, table=3, past=100)], share=2).tolist()
    [[0, 32], [32, 8], [3, 3], [100, 132]]
    """
    step = queries_at_once(share) // share
    found = [
        (start, min(step, segment.end - start), segment.table, segment.past + start - segment.start)
        for segment in segments
        for start in range(segment.start, segment.end, step)
    ]
    return np.ascontiguousarray(np.array(found, np.int32).T)


class CudaExtend:
    """Several prompts packed; each attends to itself and to what its blocks hold."""

    def __init__(self, cache: KVCache, tables: Tensor, row_T: Tensor, position_T: Tensor, blocks: Tensor) -> None:
        self.cache, self.tables, self.row_T, self.position_T, self.blocks = cache, tables, row_T, position_T, blocks
        programs = blocks.shape[1] * cache.store.shape[3]
        self.splits = splits_for(programs, multiprocessors(tables.device))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        keys, values = self.cache.layers[layer]
        store(k, v, keys, values, self.tables, self.row_T, self.position_T)
        return extend(q, keys, values, self.tables, self.blocks, splits=self.splits, **settings)

    def rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        decode.rotate_(q, k, cos, sin, norms)
        return self(layer, q, k, v, **settings)


class CudaPrefill:
    """Runs prompts: small ones by graphs."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self._decoder, self._engine = decoder, decoder.engine
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._seen: Counter[int] = Counter()
        text = decoder.engine.runner.text_config
        self._share = text.num_attention_heads // decoder.cache.store.shape[3]

    def drop_graphs(self) -> None:
        self._graphs.clear()

    def run(
        self, ids: Sequence[int], positions: Sequence[int], kept: Sequence[int], segments: list[Segment],
        tables: np.ndarray,
    ) -> Tensor:  # fmt: skip
        """The logits at the places ``kept``."""
        device = self._engine.device
        tokens = next((size for size in TOKENS if size >= len(ids)), 0)
        most = max(PROMPTS, tokens // TOKENS_A_PROMPT)
        is_small = tokens > 0 and len(kept) <= most and len(segments) <= most
        rows = np.repeat([segment.table for segment in segments], [one.end - one.start for one in segments])
        token_T = np.array([ids, rows, positions], np.int32)
        inputs = [token_T, blocks_of(segments, self._share), np.array(kept, np.int32), tables]
        if is_small:
            self._seen[tokens] += 1
        if not is_small or self._seen[tokens] < CAPTURE_AT:
            return self._forward(*(to_device(one, device) for one in inputs))
        inputs = self._padded(inputs, tokens, most)
        graph, target, logits = self._graph(tokens, inputs)
        target.copy_(to_device(np.concatenate([one.reshape(-1) for one in inputs]), device))
        graph.replay()
        return logits[: len(kept)]

    def _padded(self, inputs: Sequence[np.ndarray], tokens: int, most: int) -> list[np.ndarray]:
        """Filled up to sizes that depend on ``tokens`` alone. What fills up is written to nobody's block."""
        token_T, block_B, kept_N, tables = inputs
        filler = np.array([[0], [most], [0]], np.int32)  # the last table names no block
        blocks = most + tokens // (queries_at_once(self._share) // self._share)
        width = self._engine.table.blocks.shape[1]
        return [
            np.concatenate([token_T, np.repeat(filler, tokens - token_T.shape[1], 1)], 1),
            np.pad(block_B, ((0, 0), (0, blocks - block_B.shape[1]))),
            np.pad(kept_N, (0, most - len(kept_N))),
            np.pad(tables, ((0, most + 1 - len(tables)), (0, width - tables.shape[1]))),
        ]

    def _forward(self, token_T: Tensor, block_B: Tensor, kept_N: Tensor, tables: Tensor) -> Tensor:
        ids, rows, positions = token_T
        attend = CudaExtend(self._decoder.cache, tables, rows, positions, block_B)
        return self._engine.runner.forward(ids[None].long(), positions[None].long(), attend, kept_N.long())[0]

    def _graph(self, tokens: int, like: Sequence[np.ndarray]) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        if tokens not in self._graphs:
            target = torch.zeros(sum(one.size for one in like), dtype=torch.int32, device=self._engine.device)
            parts = target.split([one.size for one in like])
            views = [part.view(one.shape) for part, one in zip(parts, like, strict=True)]  # practised on nobody's block
            graph, logits = self._decoder.record(lambda: self._forward(*views))
            self._graphs[tokens] = graph, target, logits
        return self._graphs[tokens]
