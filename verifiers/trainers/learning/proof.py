"""A model becomes the layouts in which it learns exactly: packed rows, rectangles, or one sequence at a time.

Sequences are computed alone by the model's own forward, then in each layout on the path that training takes; hidden
states (or logits) and gradients must agree. All is done at a realistic scale (`verifiers.kernels.prove.realistic`), and
past the bounds at which a model attends in another way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiers.kernels import prove as probe
from verifiers.kernels.modules import without_dropout
from verifiers.kernels.prove import agree
from verifiers.samples import Sample
from verifiers.trainers.learning.micro_batches import ANY_LENGTH, MicroBatch, Trained, micro_batches
from verifiers.trainers.learning.packing import Row

if TYPE_CHECKING:
    from verifiers.trainers.learning.logprobs import TokenScorer

logger = logging.getLogger("verifiers.trainers")

# Lengths of the probe's prompts and replies; prompts of a length are the same. The second are for narrow windows.
LENGTHS = ((24, 8), (24, 5), (11, 9), (24, 12))
SHORT_LENGTHS = ((6, 3), (6, 2), (4, 4), (6, 4))
LONGEST_TRIED = 2048  # bounds past this are not tried out, which takes a while: longer sequences learn alone
FEW = 6  # parameters whose gradients are compared: the smallest, each of which depends on all that comes after it


@dataclass(frozen=True, kw_only=True, slots=True)
class Layouts:
    """How sequences may be computed together: those up to a length packed in one row, or side by side."""

    longest_packed: int = 0
    longest_batched: int = 0
    varlen: bool = False  # packed rows: the variable-length kernel
    fused: bool = False  # whether our own functions take the place of layers and norms
    rope_bounds: tuple[int, ...] = ()

    def limits(self, *others: Layouts) -> dict[str, Any]:
        """As `micro_batches` takes them: what suits this model and others that compute the same sequences."""
        all_of_them = (self, *others)
        return {
            "longest_packed": min(one.longest_packed for one in all_of_them),
            "longest_batched": min(one.longest_batched for one in all_of_them),
            "rope_bounds": self.rope_bounds,
        }


def proven_layouts(scorer: TokenScorer) -> Layouts:
    """The quickest layouts in which the model gives the numbers and gradients of its own forward."""
    base = scorer._base
    with without_dropout(base), probe.without_hooks(base), probe.realistic(base) as is_conclusive:
        _check_steady(base)
        found = _Proof(scorer).layouts() if is_conclusive else Layouts()
    if not found.longest_batched:
        why = "side by side its numbers differ" if is_conclusive else "its weights say too little yet to prove more"
        logger.warning("%s learns one sequence at a time: %s", type(base).__name__, why)
    return replace(found, rope_bounds=tuple(probe.rope_bounds(base.config)))


def _check_steady(base: Any) -> None:
    text = probe.text_config(base.config)
    longest = min(getattr(text, "max_position_embeddings", None) or LONGEST_TRIED, LONGEST_TRIED)
    past = [bound + probe.PAST for bound in probe.bounds(text, longest - probe.PAST)[:1]]
    with torch.no_grad():
        if not probe.is_steady(base, max([sum(LENGTHS[0]), *past])):
            raise ValueError(f"{type(base).__name__} cannot learn: {probe.UNSTEADY}")


class _Proof:
    def __init__(self, scorer: TokenScorer) -> None:
        self._scorer, self._base = scorer, scorer._base
        text = probe.text_config(self._base.config)
        self._layers = text.num_hidden_layers
        self._most_positions = getattr(text, "max_position_embeddings", None) or ANY_LENGTH
        self._bounds = probe.bounds(text, self._most_positions)
        is_narrow = min(self._bounds, default=ANY_LENGTH) < max(map(sum, LENGTHS))
        self._trained = _trained(self._base, SHORT_LENGTHS if is_narrow else LENGTHS)
        self._device = next(self._base.parameters()).device
        alone = [self._answers(self._batch([one]), None, fused=False) for one in self._trained]
        self._theirs = [torch.cat([one[0] for one in alone]), *map(_sum, zip(*(one[1:] for one in alone), strict=True))]

    def layouts(self) -> Layouts:
        if not self._is_causal():
            raise ValueError(
                f"{type(self._base).__name__} is not causal: what comes later changes the numbers of tokens before it, "
                "so it cannot learn to predict them"
            )
        ways = (True, False) if self._scorer.may_fuse else (False,)
        fused = next((one for one in ways if self._agrees(self._batch(self._trained), None, one)), None)
        if fused is None:
            return Layouts()
        batched = next((bound for bound in self._bounds if not self._agrees_past(bound, fused)), ANY_LENGTH)
        packed = self._batch(self._trained, longest_packed=ANY_LENGTH)
        for varlen in (True, False) if packed.ids_BT.is_cuda else (False,):
            if longest := self._longest_packed(packed, varlen, fused):
                longest = min([longest, *self._bounds])  # shorter than any bound is what was tried
                return Layouts(longest_packed=longest, longest_batched=batched, varlen=varlen, fused=fused)
        return Layouts(longest_batched=batched, fused=fused)

    def _is_causal(self) -> bool:
        """Do sequences that end earlier have the same numbers up to there, also past the bounds of attention?

        Past those of the rotary embedding they have others: there a sequence is learned from in parts.
        """
        others = set(probe.rope_bounds(self._base.config))
        longest = min(LONGEST_TRIED, self._most_positions - 5 * probe.PAST)
        bounds = [one for one in self._bounds if one <= longest and one not in others]
        longer = [_trained(self._base, ((2, bound + 4 * probe.PAST),))[0] for bound in bounds]
        return all(self._is_same_without_its_end(one) for one in (self._trained[-1], *longer))

    def _is_same_without_its_end(self, one: Trained) -> bool:
        count = len(one.sample.completion_ids)
        n = count - min(count // 2, 2 * probe.PAST)
        part = one._replace(sample=one.sample.first(n))
        with torch.no_grad():
            all_of_it, start = (self._answers(self._batch([each]), None, fused=False)[0] for each in (one, part))
        return agree([all_of_it[:n]], [start], rounds=self._layers)

    def _longest_packed(self, packed: MicroBatch, varlen: bool, fused: bool) -> int:
        """How long sequences may be that are packed; 0 if they must not be."""
        if packed.packing is None:
            return 0
        row = Row(packed.packing, varlen)
        if not self._agrees(packed, row, fused) or row.calls != self._layers:
            return 0
        return ANY_LENGTH if row.narrowest is None else row.narrowest

    def _agrees_past(self, bound: int, fused: bool) -> bool:
        """Does a sequence past a bound give its numbers beside a short one, and the short one beside it?"""
        if bound > LONGEST_TRIED:
            return False
        trained = _trained(self._base, ((bound, probe.PAST), SHORT_LENGTHS[0]))
        with torch.no_grad():
            alone = [self._answers(self._batch([one]), None, fused=False)[0] for one in trained]
            return self._agrees(self._batch(trained), None, fused, theirs=[torch.cat(alone)])

    def _agrees(self, batch: MicroBatch, row: Row | None, fused: bool, theirs: Sequence[Tensor] | None = None) -> bool:
        try:
            ours = self._answers(batch, row, fused=fused)
        except Exception as error:  # foreign code, asked in a way it may not know
            logger.debug("%s does not learn in this layout: %r", type(self._base).__name__, error)
            return False
        if theirs is not None:
            return agree(theirs, ours, rounds=self._layers)
        if len(ours) != len(self._theirs):
            return False
        return agree(_significant(self._theirs, self._theirs), _significant(self._theirs, ours), rounds=self._layers)

    def _batch(self, trained: Sequence[Trained], *, longest_packed: int = 0) -> MicroBatch:
        (made,) = micro_batches(trained, max_tokens=ANY_LENGTH, longest_packed=longest_packed)
        return made.to(self._device)

    def _answers(self, batch: MicroBatch, row: Row | None, *, fused: bool) -> list[Tensor]:
        """What the model makes of a batch in the order of its sequences, and gradients of that."""
        learned = sorted((one for one in self._scorer.model.parameters() if one.requires_grad), key=torch.numel)[:FEW]
        has_grad = bool(learned) and torch.is_grad_enabled()
        with torch.set_grad_enabled(has_grad):
            out = self._scorer.outputs(batch, fused=fused, row=row)
            out = out[torch.argsort(torch.tensor(batch.members, device=out.device)[batch.sequence_N], stable=True)]
            grads = torch.autograd.grad(out, learned, _direction(out), allow_unused=True) if has_grad else ()
        return [out.detach(), *(one for one in grads if one is not None)]


def _significant(theirs: Sequence[Tensor], of: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients that are more than rounding: that of a bias on keys, say, is zero by definition."""
    sizes = [float(one.abs().max()) for one in theirs[1:]]
    least = math.sqrt(torch.finfo(theirs[0].dtype).eps) * max(sizes, default=0.0)
    return [of[0], *(one for one, size in zip(of[1:], sizes, strict=True) if size >= least)]


def _direction(out: Tensor) -> Tensor:
    """Where gradients are taken: the same for a token wherever it is computed."""
    width = torch.arange(out.shape[-1], device=out.device, dtype=torch.float32)
    return torch.cos(width * 12.9898).to(out.dtype).expand_as(out)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _trained(base: Any, lengths: Sequence[tuple[int, int]]) -> list[Trained]:
    config = base.config
    by_length = {n: probe.prompts(config, [n])[0] for n in {prompt for prompt, _ in lengths}}
    replies = probe.prompts(config, [reply for _, reply in lengths])
    made = []
    for (prompt, count), reply in zip(lengths, replies, strict=True):
        sample = Sample(
            prompt_ids=by_length[prompt],
            completion_ids=reply,
            completion_mask=[1] * count,
            completion_logprobs=[0.0] * count,
        )
        made.append(Trained(sample=sample, advantage=1.0))
    return made
