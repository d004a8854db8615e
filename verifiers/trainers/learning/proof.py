"""Which layouts of micro-batches are exact for a model: packed, padded to a rectangle, or one sequence at a time.

Probe sequences run one by one through the model's own forward, then in each layout through the code that training uses.
Hidden states (or logits) and gradients must agree. Weights are first scaled to a realistic range
(`verifiers.kernels.prove.realistic`). Some sequences are longer than the bounds at which a model's attention changes.
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
from verifiers.trainers.learning.micro_batches import ANY_LENGTH, MicroBatch, TrainSample, fully_trained, micro_batches
from verifiers.trainers.learning.packing import PackedForward

if TYPE_CHECKING:
    from verifiers.trainers.learning.logprobs import TokenScorer

logger = logging.getLogger("verifiers.trainers")

# (Prompt, reply) lengths of the probe; prompts of the same length are equal. The short ones are for narrow windows.
LENGTHS = ((24, 8), (24, 5), (11, 9), (24, 12))
SHORT_LENGTHS = ((6, 3), (6, 2), (4, 4), (6, 4))
LONGEST_PROBED = 2048  # bounds beyond this would take too long to probe: sequences that cross them are computed alone
NUM_GRADIENTS = 6  # to compare: those of the smallest parameters; each depends on all later layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Layouts:
    """The lengths up to which sequences may be packed or batched in a rectangle, and how they are computed."""

    longest_packed: int = 0
    longest_batched: int = 0
    varlen: bool = False  # packed batches use the variable-length attention kernel
    fused: bool = False  # layers and norms are replaced by fused functions
    is_split: bool = False  # body and head may be run separately
    rope_bounds: tuple[int, ...] = ()

    def limits(self, *others: Layouts) -> dict[str, Any]:
        """Keywords of `micro_batches` that suit both this model and others that compute the same sequences."""
        return {
            "longest_packed": min(one.longest_packed for one in (self, *others)),
            "longest_batched": min(one.longest_batched for one in (self, *others)),
            "rope_bounds": self.rope_bounds,
        }


def proven_layouts(scorer: TokenScorer) -> Layouts:
    """The fastest layouts whose numbers and gradients agree with the model's own forward."""
    base = scorer._base
    with without_dropout(base), probe.without_hooks(base), probe.realistic(base) as is_conclusive:
        _check_steady(base)
        found = _Proof(scorer).layouts() if is_conclusive else Layouts()
    if not found.longest_batched:
        why = "its numbers differ in a batch" if is_conclusive else "with these weights a test is inconclusive"
        logger.warning("%s is trained one sequence at a time: %s", type(base).__name__, why)
    return replace(found, is_split=scorer._is_split, rope_bounds=tuple(probe.rope_bounds(base.config)))


def _check_steady(base: Any) -> None:
    """Refuse a model whose forward pass is not deterministic."""
    text = probe.text_config(base.config)
    longest = min(probe.max_positions(text) or LONGEST_PROBED, LONGEST_PROBED)
    past = [bound + probe.PAST for bound in probe.bounds(text, longest - probe.PAST)[:1]]
    with torch.no_grad():
        if not probe.is_steady(base, max([sum(LENGTHS[0]), *past])):
            raise ValueError(f"{type(base).__name__} cannot be trained: {probe.UNSTEADY}")


class _Proof:
    def __init__(self, scorer: TokenScorer) -> None:
        self._scorer, self._base = scorer, scorer._base
        text = probe.text_config(self._base.config)
        self._layers = text.num_hidden_layers
        self._most_positions = probe.max_positions(text) or ANY_LENGTH
        self._bounds = probe.bounds(text, self._most_positions)
        is_narrow = min(self._bounds, default=ANY_LENGTH) < max(map(sum, LENGTHS))
        self._trained = _trained(self._base, SHORT_LENGTHS if is_narrow else LENGTHS)
        self._device = next(self._base.parameters()).device
        alone = [self._numbers(self._batch([one]), None, fused=False) for one in self._trained]
        grads = zip(*(one[1:] for one in alone), strict=True)
        self._expected = [torch.cat([one[0] for one in alone]), *(torch.stack(list(one)).sum(0) for one in grads)]

    def layouts(self) -> Layouts:
        if not self._is_causal():
            raise ValueError(
                f"{type(self._base).__name__} is not causal: later tokens change the numbers of earlier ones, so that "
                "it cannot be trained to predict the next token"
            )
        ways = (True, False) if self._scorer.may_fuse else (False,)
        fused = next((one for one in ways if self._agrees(self._batch(self._trained), None, one)), None)
        if fused is None:
            return Layouts()
        batched = next((bound for bound in self._bounds if not self._agrees_past(bound, fused)), ANY_LENGTH)
        packed = self._batch(self._trained, longest_packed=ANY_LENGTH)
        for varlen in (True, False) if packed.ids_BT.is_cuda else (False,):
            if longest := self._longest_packed(packed, varlen, fused):
                longest = min([longest, *self._bounds])  # the probe does not cross any bound
                return Layouts(longest_packed=longest, longest_batched=batched, varlen=varlen, fused=fused)
        return Layouts(longest_batched=batched, fused=fused)

    def _is_causal(self) -> bool:
        """Whether truncating a sequence leaves its numbers unchanged, also beyond the bounds of attention.

        Beyond the bounds of the rotary embedding they do change; sequences are split there.
        """
        rope_bounds = probe.rope_bounds(self._base.config)
        longest = min(LONGEST_PROBED, self._most_positions - 5 * probe.PAST)
        bounds = [one for one in self._bounds if one <= longest and one not in rope_bounds]
        longer = [_trained(self._base, ((2, bound + 4 * probe.PAST),))[0] for bound in bounds]
        return all(self._is_same_truncated(one) for one in (self._trained[-1], *longer))

    def _is_same_truncated(self, one: TrainSample) -> bool:
        count = len(one.sample.completion_ids)
        n = count - min(count // 2, 2 * probe.PAST)
        part = one._replace(sample=one.sample.first(n))
        with torch.no_grad():
            whole, start = (self._numbers(self._batch([each]), None, fused=False)[0] for each in (one, part))
        return agree([whole[:n]], [start], rounds=self._layers)

    def _longest_packed(self, batch: MicroBatch, varlen: bool, fused: bool) -> int:
        """The length up to which sequences may be packed; 0 if they may not be."""
        if batch.packing is None:
            return 0
        packed = PackedForward(batch.packing, varlen)
        if not self._agrees(batch, packed, fused) or packed.calls != self._layers:
            return 0
        return ANY_LENGTH if packed.narrowest is None else packed.narrowest

    def _agrees_past(self, bound: int, fused: bool) -> bool:
        """Whether a sequence beyond a bound and a short one have the same numbers in one batch as on their own."""
        if bound > LONGEST_PROBED:
            return False
        trained = _trained(self._base, ((bound, probe.PAST), SHORT_LENGTHS[0]))
        with torch.no_grad():
            alone = [self._numbers(self._batch([one]), None, fused=False)[0] for one in trained]
            found = self._try(self._batch(trained), None, fused)
        return found is not None and agree([torch.cat(alone)], found, rounds=self._layers)

    def _agrees(self, batch: MicroBatch, packed: PackedForward | None, fused: bool) -> bool:
        """Whether the probe has the expected numbers and gradients in this layout."""
        found, expected = self._try(batch, packed, fused), self._expected
        if found is None or len(found) != len(expected):
            return False
        return agree(_significant(expected, expected), _significant(expected, found), rounds=self._layers)

    def _try(self, batch: MicroBatch, packed: PackedForward | None, fused: bool) -> list[Tensor] | None:
        try:
            return self._numbers(batch, packed, fused=fused)
        except Exception as error:  # the model's own code may not support this layout
            logger.debug("%s does not run in this layout: %r", type(self._base).__name__, error)
            return None

    def _batch(self, trained: Sequence[TrainSample], *, longest_packed: int = 0) -> MicroBatch:
        (made,) = micro_batches(trained, max_tokens=ANY_LENGTH, longest_packed=longest_packed)
        return made.to(self._device)

    def _numbers(self, batch: MicroBatch, packed: PackedForward | None, *, fused: bool) -> list[Tensor]:
        """Outputs of the model for a batch, in the order of the probe's sequences, and some of their gradients."""
        trainable = [one for one in self._scorer.model.parameters() if one.requires_grad]
        learned = sorted(trainable, key=torch.numel)[:NUM_GRADIENTS]
        has_grad = bool(learned) and torch.is_grad_enabled()
        with torch.set_grad_enabled(has_grad):
            out = self._scorer.outputs(batch, fused=fused, packed=packed)
            out = out[torch.argsort(torch.tensor(batch.members, device=out.device)[batch.sequence_N], stable=True)]
            grads = torch.autograd.grad(out, learned, _direction(out), allow_unused=True) if has_grad else ()
        return [out.detach(), *(one for one in grads if one is not None)]


def _significant(expected: Sequence[Tensor], found: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and gradients that exceed rounding errors (the gradient of a bias on keys, for instance, is zero)."""
    sizes = [float(one.abs().max()) for one in expected[1:]]
    least = math.sqrt(torch.finfo(expected[0].dtype).eps) * max(sizes, default=0.0)
    return [found[0], *(one for one, size in zip(found[1:], sizes, strict=True) if size >= least)]


def _direction(out: Tensor) -> Tensor:
    """The gradient at the outputs, the same for every token in every layout."""
    width = torch.arange(out.shape[-1], device=out.device, dtype=torch.float32)
    return torch.cos(width * 12.9898).to(out.dtype).expand_as(out)


def _trained(base: Any, lengths: Sequence[tuple[int, int]]) -> list[TrainSample]:
    """Probe sequences with these (prompt, reply) lengths."""
    prompts = {n: probe.prompts(base.config, [n])[0] for n in {prompt for prompt, _ in lengths}}
    replies = probe.prompts(base.config, [reply for _, reply in lengths])
    return [fully_trained(prompts[n], reply) for (n, _), reply in zip(lengths, replies, strict=True)]
