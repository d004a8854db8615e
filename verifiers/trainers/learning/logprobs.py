"""A micro-batch and a model become the logprob of each trained token, without ever holding all logits at once."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiers.kernels import prove as probe
from verifiers.kernels.modules import base_model, is_plain_linear, replaced_forwards, without_dropout
from verifiers.trainers.learning.decoder_training import DecoderTraining
from verifiers.trainers.learning.micro_batches import MicroBatch
from verifiers.trainers.learning.packing import Row
from verifiers.trainers.learning.target_logprobs import Scored, chunked_logprobs, fused_logprobs, score_logits
from verifiers.trainers.sampling import Distribution

if TYPE_CHECKING:
    from verifiers.trainers.learning.proof import Layouts

logger = logging.getLogger("verifiers.trainers")

LOGIT_SIZES = (1.0, 60.0)  # the largest logits for which a head is proven


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """What a scorer found out about its model by numbers."""

    is_split: bool
    layouts: Layouts


class TokenScorer:
    """Logprobs of given tokens under a live causal model, as the sampler computes them: float32 over its own logits.

    The body is run once for a micro-batch; the head only where a token is trained, in chunks. A model whose head does
    more than multiply (scales or caps its logits) is recognised by its logits, and its own forward is used whole. What
    lies between the multiplications is done by kernels and functions of our own, where they give the same numbers.

    ``may_fuse=False``: by the model's own layers alone. A model whose parameters are sharded can not be tried out: what
    was ``proven`` of it before is passed on, and ``run`` calls a function within its forward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        may_fuse: bool = True,
        proven: Proven | None = None,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self.may_fuse = model, may_fuse
        self._run = run or (lambda function, *args: function(*args))
        self._is_split: bool
        self._base = base_model(model)
        self._body: Any = getattr(self._base, getattr(self._base, "base_model_prefix", ""), None)
        self._head: Any = self._base.get_output_embeddings()
        if proven is not None:
            self._is_split, self.layouts = proven.is_split, proven.layouts
            return
        self._is_split = self._body is not None and self._head is not None and self._head_is_plain()

    @cached_property
    def _decoder(self) -> DecoderTraining:
        return DecoderTraining(self._base)  # not before the model is ours to run

    @cached_property
    def layouts(self) -> Layouts:
        """How sequences may be computed together: found out by numbers, when it is first asked."""
        from verifiers.trainers.learning.proof import proven_layouts

        return proven_layouts(self)

    @property
    def proven(self) -> Proven:
        return Proven(is_split=self._is_split, layouts=self.layouts)

    def _head_is_plain(self) -> bool:
        """Are the logits the head's product and nothing else, for logits from small to large?

        The model's own forward is run on hidden states of a chosen size, which its body is made to return: a cap on
        logits does not show in those of a model that was never trained.
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
        except Exception as error:  # foreign code: it may cast or project hidden states before its head
            logger.debug("%s is not run in two parts: %r", type(base).__name__, error)
            return False
        return all(whole.shape == split.shape and _same(whole, split) for whole, split in pairs)

    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """The logprob of each of the batch's trained tokens, under what it was drawn from, or at this temperature."""
        return self.score(batch, temperature).logprob_N

    def score(self, batch: MicroBatch, temperature: float | None = None, *, with_entropy: bool = False) -> Scored:
        """The same, and the entropies of what the tokens were drawn from."""
        return Scored(*self._run(self._scored, batch, temperature, with_entropy))

    def _scored(
        self, batch: MicroBatch, temperature: float | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None, bool]:
        found = self._score_batch(batch, temperature, with_entropy)
        return found.logprob_N, found.entropy_N, found.recomputes

    def _score_batch(self, batch: MicroBatch, temperature: float | None, with_entropy: bool) -> Scored:
        out = self.outputs(batch)
        kinds = batch.distributions if temperature is None else (Distribution(temperature=temperature),)
        if len(kinds) == 1 or batch.drawn_from_N is None:
            return self.score_outputs(out, batch.target_N, kinds[0], with_entropy)
        places = [(batch.drawn_from_N == i).nonzero()[:, 0] for i in range(len(kinds))]
        parts = [
            self.score_outputs(out[at], batch.target_N[at], kind, with_entropy)
            for at, kind in zip(places, kinds, strict=True)
        ]
        order = torch.cat(places)
        return Scored(
            _in_order([one.logprob_N for one in parts], order),
            _in_order([one.entropy_N for one in parts], order) if with_entropy else None,
            recomputes=any(one.recomputes for one in parts),
        )

    def score_outputs(
        self, out: Tensor, target_N: Tensor, drawn_from: Distribution, with_entropy: bool = False,
        rows: int | None = None,
    ) -> Scored:  # fmt: skip
        """The same, of what the model made of the places: `outputs`. There may be several targets at each (target_NK).

        ``rows``: the head is run on so many places at a time, else on as many as is sensible.
        """
        if not self._is_split:
            return score_logits(out, target_N, drawn_from, with_entropy=with_entropy)
        head = self._head
        is_plain = _is_ours(out) and is_plain_linear(head) and head.weight.dtype == out.dtype
        is_plain = is_plain and target_N.ndim == 1
        if is_plain and drawn_from.is_tempered and not with_entropy:  # its backward pass needs the weights alone
            return Scored(fused_logprobs(out, head.weight, head.bias, target_N, drawn_from.temperature, rows))
        return chunked_logprobs(head, out, target_N, drawn_from, with_entropy=with_entropy, rows=rows)

    def logits(self, out: Tensor) -> Tensor:
        """The logits of some of `outputs`."""
        return self._head(out) if self._is_split else out

    def outputs(self, batch: MicroBatch, *, fused: bool | None = None, row: Row | None = None) -> Tensor:
        """What the model makes of the places that predict trained tokens: hidden states, or logits if it must be."""
        packing = batch.packing
        fused = self.layouts.fused if fused is None else fused
        if packing is not None and row is None:
            row = Row(packing, self.layouts.varlen)
        more = {} if packing is None else {"position_ids": packing.position_T[None]}
        with self._decoder.learning(row, fused=fused and _is_ours(batch.ids_BT)):
            if self._is_split:
                out = self._body(input_ids=batch.ids_BT, use_cache=False, **more).last_hidden_state
            else:
                out = self.model(input_ids=batch.ids_BT, use_cache=False, **more).logits
        found: Tensor = out.flatten(0, 1).index_select(0, batch.place_N)
        return found


def _in_order(parts: list[Any], order: Tensor) -> Tensor:
    whole = torch.cat(parts)
    return torch.empty_like(whole).index_copy(0, order, whole)


def _same(whole: Tensor, split: Tensor) -> bool:
    within = 1e-3 if whole.dtype in (torch.float32, torch.float64) else 2e-2
    return bool((whole - split).abs().max() <= within * split.abs().max())


def _is_ours(x: Tensor) -> bool:
    """Whether our kernels cover its device and dtype, and autocast does not round in between."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or torch.is_autocast_enabled(kind):
        return False
    if x.is_cuda:
        return importlib.util.find_spec("triton") is not None
    return not x.is_floating_point() or x.dtype is torch.float32
