"""Prompts on CUDA whose beginning a row holds already: only their new tokens are run, all such prompts at once.

A few tokens are run by captured graphs: starting the operations one by one takes several times as long as doing them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.kv_cache import Segment, SlotCache
from verifiers.kernels.cuda import decode
from verifiers.kernels.cuda.extend import SPLITS, extend, queries_at_once, store
from verifiers.kernels.devices import to_device
from verifiers.kernels.norms import HeadNorms

if TYPE_CHECKING:
    from verifiers.engine.cuda_runner import CudaDecoder

TOKENS = (32, 64, 128, 256)  # a graph for each: the new tokens it takes
MOST_PROMPTS = 16
CAPTURE_AT = 2  # a size of which there were so many is worth a graph


def blocks_of(segments: Sequence[Segment], share: int) -> np.ndarray:
    """Tokens that are attended for together: where they begin, how many, in which row, from which position on.

    >>> blocks_of([Segment(0, 40, slot=3, past=100)], share=2).tolist()
    [[0, 32], [32, 8], [3, 3], [100, 132]]
    """
    step = queries_at_once(share) // share
    found = [
        (start, min(step, segment.end - start), segment.slot, segment.past + start - segment.start)
        for segment in segments
        for start in range(segment.start, segment.end, step)
    ]
    return np.ascontiguousarray(np.array(found, np.int64).T)


class CudaExtend:
    """Several prompts packed; each attends to itself and to what its row holds."""

    def __init__(self, cache: SlotCache, row_T: Tensor, position_T: Tensor, blocks: Tensor, splits: int) -> None:
        self.cache, self.row_T, self.position_T, self.blocks, self.splits = cache, row_T, position_T, blocks, splits

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        keys, values = self.cache.layers[layer]
        store(k, v, keys, values, self.row_T, self.position_T)
        return extend(q, keys, values, self.blocks, splits=self.splits, **settings)

    def rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        decode.rotate_(q, k, cos, sin, norms)
        return self(layer, q, k, v, **settings)


class Extender:
    """Runs prompts of which rows hold the beginning, or which are short: small ones by graphs."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self._decoder, self._engine = decoder, decoder.engine
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._seen: Counter[int] = Counter()
        text = decoder.engine.runner.text_config
        self._share = text.num_attention_heads // decoder.cache.store.shape[3]

    def drop_graphs(self) -> None:
        self._graphs.clear()

    def run(self, ids: Sequence[int], positions: Sequence[int], last: Sequence[int], segments: list[Segment]) -> Tensor:
        """The logits at the places ``last``."""
        tokens = next((size for size in TOKENS if size >= len(ids)), len(ids))
        is_small = len(ids) <= TOKENS[-1] and len(last) <= MOST_PROMPTS
        inputs = self._inputs(ids, positions, last, segments, tokens if is_small else None)
        if is_small:
            self._seen[tokens] += 1
        if not is_small or self._seen[tokens] < CAPTURE_AT:
            logits = self._forward(*(to_device(one, self._engine.device) for one in inputs))
            return logits[: len(last)]
        graph, target, logits = self._graph(tokens, inputs)
        flat = np.concatenate([one.reshape(-1) for one in inputs])
        target.copy_(to_device(flat, self._engine.device))
        graph.replay()
        return logits[: len(last)]

    def _inputs(
        self, ids: Sequence[int], positions: Sequence[int], last: Sequence[int], segments: list[Segment],
        tokens: int | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
        """What a forward is told: (id, row, position) of each token, blocks, places; filled up to ``tokens``.

        Tokens that fill up are written to the spare position behind every end, and nobody attends for them.
        """
        rows = [segment.slot for segment in segments for _ in range(segment.start, segment.end)]
        token_T = np.array([ids, rows, positions], np.int64)
        block_B, place_N = blocks_of(segments, self._share), np.array(last, np.int64)
        if tokens is not None:
            filler = np.array([[0], [0], [self._engine.length]])
            token_T = np.concatenate([token_T, np.repeat(filler, tokens - len(ids), 1)], 1)
            most = MOST_PROMPTS + tokens // (queries_at_once(self._share) // self._share)
            block_B = np.pad(block_B, ((0, 0), (0, most - block_B.shape[1])))
            place_N = np.pad(place_N, (0, MOST_PROMPTS - len(last)))
        return token_T, block_B, place_N

    def _forward(self, token_T: Tensor, block_B: Tensor, place_N: Tensor) -> Tensor:
        engine = self._engine
        ids, rows, positions = token_T
        splits = SPLITS if len(ids) <= TOKENS[-1] else 1
        attend = CudaExtend(self._decoder.cache, rows, positions, block_B, splits)
        known = positions.clamp(max=engine.length - 1)
        return engine.runner.forward(ids[None], known[None], attend, place_N)[0]

    def _graph(self, tokens: int, like: Sequence[np.ndarray]) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        if tokens not in self._graphs:
            target = torch.zeros(sum(one.size for one in like), dtype=torch.int64, device=self._engine.device)
            parts = target.split([one.size for one in like])
            token_T, block_B, place_N = (part.view(one.shape) for part, one in zip(parts, like, strict=True))
            token_T[2] = self._engine.length  # practise on the spare position
            graph, logits = self._decoder.record(lambda: self._forward(token_T, block_B, place_N))
            self._graphs[tokens] = graph, target, logits
        return self._graphs[tokens]
