"""Computes the logprob of each trained token of a micro-batch, without ever holding all logits in memory."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiers.kernels import prove as probe
from verifiers.kernels.modules import base_model, is_plain_linear, replaced_forwards, without_dropout
from verifiers.trainers.learning.decoder_training import DecoderTraining
from verifiers.trainers.learning.micro_batches import MicroBatch
from verifiers.trainers.learning.packing import PackedForward
from verifiers.trainers.learning.target_logprobs import Scored, chunked_logprobs, fused_logprobs, score_logits
from verifiers.trainers.sampling import Distribution

if TYPE_CHECKING:
    from verifiers.trainers.learning.proof import Layouts

logger = logging.getLogger("verifiers.trainers")

LOGIT_SIZES = (1.0, 60.0)  # a head is probed with logits up to each of these magnitudes


class TokenScorer:
    """Logprobs of given tokens under a causal model, computed as in the sampler: in float32 from the logits.

    The body runs once for a micro-batch; the lm_head runs in chunks, only at positions that predict a trained token. A
    model that does more than multiply by its head (scales or caps its logits) is detected by its logits, and is run
    whole. The operations between projections run in fused kernels if these give the same numbers, unless
    ``may_fuse=False``.

    A model with sharded parameters cannot be probed. It needs ``layouts`` that were proven before sharding, and a
    ``run`` that calls a function within the model's forward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        may_fuse: bool = True,
        layouts: Layouts | None = None,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self.may_fuse = model, may_fuse
        self._run = run or (lambda function: function())
        self._base = base_model(model)
        self._body: Any = getattr(self._base, getattr(self._base, "base_model_prefix", ""), None)
        self._head: Any = self._base.get_output_embeddings()
        if layouts is None:
            self._is_split = self._body is not None and self._head is not None and self._head_is_plain()
        else:
            self._is_split, self.layouts = layouts.is_split, layouts

    @cached_property
    def _decoder(self) -> DecoderTraining:
        return DecoderTraining(self._base)  # lazily, because it must be created under the lock of the weights

    @cached_property
    def layouts(self) -> Layouts:
        """Layouts of micro-batches that are exact for this model; proven at the first access."""
        from verifiers.trainers.learning.proof import proven_layouts

        return proven_layouts(self)

    def _head_is_plain(self) -> bool:
        """Whether the logits are exactly the output of the head, for small and large logits.

        The model's own forward is run with a body that returns scaled hidden states, because the small logits of an
        untrained model would not reveal a cap on logits.
        """
        base, body = self._base, self._body
        try:
            with torch.no_grad(), probe.without_hooks(base), without_dropout(base):
                ids = torch.tensor(probe.prompts(base.config, [4]), device=next(base.parameters()).device)
                out = body(input_ids=ids, use_cache=False)
                hidden = out.last_hidden_state
                largest = self._head(hidden).abs().max().clamp(min=1e-6)
                pairs = []
                for size in LOGIT_SIZES:
                    out.last_hidden_state = hidden * (size / largest).to(hidden.dtype)
                    with replaced_forwards([(body, lambda *_, result=out, **__: result)]):
                        pairs.append((base(input_ids=ids, use_cache=False).logits, self._head(out.last_hidden_state)))
        except Exception as error:  # the model's own code may cast or project hidden states before its head
            logger.debug("%s is not run in two parts: %r", type(base).__name__, error)
            return False
        return all(whole.shape == split.shape and _same(whole, split) for whole, split in pairs)

    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """The logprob of each trained token, under the distribution it was sampled from or at this temperature."""
        return self.score(batch, temperature).logprob_N

    def score(self, batch: MicroBatch, temperature: float | None = None, *, with_entropy: bool = False) -> Scored:
        """The same as `logprobs`, with the entropies of the distributions that the tokens were sampled from."""
        # A plain tuple, because the hooks of a sharded model rebuild the return value of its forward pass.
        return Scored(*self._run(lambda: tuple(self._score_batch(batch, temperature, with_entropy))))

    def _score_batch(self, batch: MicroBatch, temperature: float | None, with_entropy: bool) -> Scored:
        out = self.outputs(batch)
        kinds = batch.distributions if temperature is None else (Distribution(temperature=temperature),)
        if len(kinds) == 1 or batch.drawn_from_N is None:
            return self.score_outputs(out, batch.target_N, kinds[0], with_entropy)
        indices = [(batch.drawn_from_N == i).nonzero()[:, 0] for i in range(len(kinds))]
        parts = [
            self.score_outputs(out[at], batch.target_N[at], kind, with_entropy)
            for at, kind in zip(indices, kinds, strict=True)
        ]
        order = torch.cat(indices)
        return Scored(
            _in_order([one.logprob_N for one in parts], order),
            _in_order([one.entropy_N for one in parts], order) if with_entropy else None,
            recomputes=any(one.recomputes for one in parts),
        )

    def score_outputs(
        self, out: Tensor, target_N: Tensor, drawn_from: Distribution, with_entropy: bool = False,
        rows: int | None = None,
    ) -> Scored:  # fmt: skip
        """The same as `score`, from `outputs`; there may be several targets at each position (target_NK).

        ``rows`` is the number of positions on which the head is run at a time (None: as many as memory allows).
        """
        if not self._is_split:
            return score_logits(out, target_N, drawn_from, with_entropy=with_entropy)
        head = self._head
        is_plain = _has_kernels(out) and is_plain_linear(head) and head.weight.dtype == out.dtype
        if is_plain and target_N.ndim == 1 and drawn_from.is_tempered and not with_entropy:
            return Scored(fused_logprobs(out, head.weight, head.bias, target_N, drawn_from.temperature, rows))
        return chunked_logprobs(head, out, target_N, drawn_from, with_entropy=with_entropy, rows=rows)

    def logits(self, out: Tensor) -> Tensor:
        """The logits of rows of `outputs`."""
        return self._head(out) if self._is_split else out

    def outputs(self, batch: MicroBatch, *, fused: bool | None = None, packed: PackedForward | None = None) -> Tensor:
        """Hidden states (or logits, if the model is run whole) at the positions that predict trained tokens."""
        packing = batch.packing
        fused = self.layouts.fused if fused is None else fused
        if packing is not None and packed is None:
            packed = PackedForward(packing, self.layouts.varlen)
        more = {} if packing is None else {"position_ids": packing.position_T[None]}
        with self._decoder.learning(packed, fused=fused and _has_kernels(batch.ids_BT)):
            if self._is_split:
                out = self._body(input_ids=batch.ids_BT, use_cache=False, **more).last_hidden_state
            else:
                out = self.model(input_ids=batch.ids_BT, use_cache=False, **more).logits
        found: Tensor = out.flatten(0, 1).index_select(0, batch.logit_index_N)
        return found


def _in_order(parts: list[Any], order: Tensor) -> Tensor:
    whole = torch.cat(parts)
    return torch.empty_like(whole).index_copy(0, order, whole)


def _same(whole: Tensor, split: Tensor) -> bool:
    within = 1e-3 if whole.dtype in (torch.float32, torch.float64) else 2e-2
    return bool((whole - split).abs().max() <= within * split.abs().max())


def _has_kernels(x: Tensor) -> bool:
    """Whether there are fused kernels for the device and dtype, and no autocast that these would bypass."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or torch.is_autocast_enabled(kind):
        return False
    if x.is_cuda:
        return importlib.util.find_spec("triton") is not None
    return not x.is_floating_point() or x.dtype is torch.float32
