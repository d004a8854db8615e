"""A micro-batch and a model become the logprob of each trained token, without ever holding all logits at once."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from verifiers.engine.projections import is_plain
from verifiers.trainers.lean_training import LeanTraining
from verifiers.trainers.micro_batches import MicroBatch

CHUNK_LOGITS = 1 << 28  # float32 logits alive at once: 1 GiB
FREE_LOGITS = 1 << 24  # so few (64 MiB) are kept for the backward pass; more are computed again there


class TokenScorer:
    """Logprobs of given tokens under a live causal model, as the sampler computes them: float32 over its own logits.

    The body is run once for a rectangle; the head only where a token is trained, in chunks. A model whose head does
    more than multiply (scales or caps its logits) is recognised by its logits, and its own forward is used whole. On
    a card, what lies between the multiplications is done by kernels of our own, where they give the same numbers.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._body: Any = getattr(self._base, getattr(self._base, "base_model_prefix", ""), None)
        self._head: Any = self._base.get_output_embeddings()
        self._is_split = self._body is not None and self._head is not None and self._head_is_plain()
        self._lean: LeanTraining | None = None
        self.recomputes = False  # whether the way back of the last logprobs runs the head again

    def _head_is_plain(self) -> bool:
        base = self._base
        device = next(base.parameters()).device
        ids = torch.arange(1, 5, device=device)[None] % base.config.get_text_config().vocab_size
        was_training = base.training
        base.eval()
        try:
            with torch.no_grad():
                whole = base(input_ids=ids, use_cache=False).logits
                split = self._head(self._body(input_ids=ids, use_cache=False).last_hidden_state)
        finally:
            base.train(was_training)
        return whole.shape == split.shape and bool(torch.allclose(whole, split, rtol=1e-3, atol=1e-3))

    def logprobs(self, batch: MicroBatch, temperature: float = 1.0) -> Tensor:
        """The logprob of each of the batch's trained tokens, at the temperature at which they were sampled."""
        has_kernels = _has_kernels(batch.ids_BT)
        with self._leanly() if has_kernels else nullcontext():
            if not self._is_split:
                logits = self.model(input_ids=batch.ids_BT, use_cache=False).logits
                return _picked(logits.flatten(0, 1)[batch.place_N], batch.target_N, temperature)
            hidden = self._body(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        hidden_ND = hidden.flatten(0, 1)[batch.place_N]
        if has_kernels and is_plain(self._head) and self._head.weight.dtype == hidden_ND.dtype:
            from verifiers.trainers import fused_functions

            return fused_functions.picked(hidden_ND, self._head.weight, self._head.bias, batch.target_N, temperature)
        return self._in_chunks(hidden_ND, batch.target_N, temperature)

    def _leanly(self) -> AbstractContextManager[None]:
        if self._lean is None:  # not before the model is ours to run
            self._lean = LeanTraining(self._base)
        return self._lean

    def _in_chunks(self, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        n, vocabulary = len(hidden_ND), self._head.weight.shape[0]
        self.recomputes = n * vocabulary > FREE_LOGITS
        if not self.recomputes:
            return _picked(self._head(hidden_ND), target_N, temperature)
        step = max(1, CHUNK_LOGITS // vocabulary)
        parts = [self._chunk(hidden_ND[i : i + step], target_N[i : i + step], temperature) for i in range(0, n, step)]
        return torch.cat(parts)

    def _chunk(self, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        def run(hidden_ND: Tensor, target_N: Tensor) -> Tensor:
            return _picked(self._head(hidden_ND), target_N, temperature)

        if not torch.is_grad_enabled():
            return run(hidden_ND, target_N)
        result: Tensor = checkpoint(run, hidden_ND, target_N, use_reentrant=False)
        return result


def _has_kernels(x: Tensor) -> bool:
    """A card, and nobody who rounds in between (autocast)."""
    return x.is_cuda and not torch.is_autocast_enabled("cuda") and importlib.util.find_spec("triton") is not None


def _picked(logits_NV: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    scaled_NV = logits_NV.float() if temperature == 1.0 else logits_NV.float() / temperature
    return -functional.cross_entropy(scaled_NV, target_N, reduction="none")
