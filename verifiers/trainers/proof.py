"""A model and a probe become a proof: that a packed row gives the numbers, and the gradients, of the plain layout."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiers.samples import Sample
from verifiers.trainers.agreement import agree
from verifiers.trainers.micro_batches import MicroBatch, Trained, micro_batches
from verifiers.trainers.shared_prompts import Row

if TYPE_CHECKING:
    from verifiers.trainers.logprobs import TokenScorer

logger = logging.getLogger("verifiers.trainers")

LENGTHS = ((6, 3), (6, 2), (4, 4), (6, 4))  # of the prompts and replies of the probe; prompts of a length are the same
ANY_LENGTH = 1 << 62
FEW = 6  # parameters whose gradients are compared: the smallest, each of which depends on all that comes after it


def proven_packing(scorer: TokenScorer) -> tuple[bool, int]:
    """Whether sequences are attended to in runs, and how long they may be; (False, 0) if packed rows are not for it."""
    base = scorer._base
    training = [module for module in base.modules() if module.training]
    for module in training:
        module.training = False
    try:
        plain, packed = _probe(base)
        theirs = _answers(scorer, plain, None)
        for in_runs in (True, False) if packed.ids_BT.is_cuda else (False,):
            longest = _longest(scorer, packed, theirs, in_runs)
            if longest:
                return in_runs, longest
    except Exception as error:  # foreign code, asked in a way it may not know
        logger.debug("%s computes no packed rows: %r", type(base).__name__, error)
    finally:
        for module in training:
            module.training = True
    return False, 0


def _longest(scorer: TokenScorer, packed: MicroBatch, theirs: Sequence[Tensor], in_runs: bool) -> int:
    if packed.packing is None:
        return 0
    row = Row(packed.packing, in_runs)
    layers = scorer._base.config.get_text_config().num_hidden_layers
    try:
        ours = _answers(scorer, packed, row)
    except Exception as error:  # foreign code, asked in a way it may not know
        logger.debug("%s computes no packed rows: %r", type(scorer._base).__name__, error)
        return 0
    if row.calls != layers or not agree(theirs, ours, rounds=layers):
        return 0
    return ANY_LENGTH if row.narrowest is None else row.narrowest


def _probe(base: Any) -> tuple[MicroBatch, MicroBatch]:
    vocabulary, device = base.config.get_text_config().vocab_size, next(base.parameters()).device
    trained = []
    for i, (prompt, reply) in enumerate(LENGTHS):
        ids = [(7 * prompt + 5 * t + (3 * i + 1) * (t >= prompt)) % vocabulary for t in range(prompt + reply)]
        sample = Sample(
            prompt_ids=ids[:prompt],
            completion_ids=ids[prompt:],
            completion_mask=[1] * reply,
            completion_logprobs=[0.0] * reply,
        )
        trained.append(Trained(sample=sample, advantage=1.0))
    (plain,) = micro_batches(trained, max_tokens=ANY_LENGTH)
    (packed,) = micro_batches(trained, max_tokens=ANY_LENGTH, longest_packed=ANY_LENGTH)
    return plain.to(device), packed.to(device)


def _answers(scorer: TokenScorer, batch: MicroBatch, row: Row | None) -> list[Tensor]:
    """What a model makes of a batch, and gradients of that; the plain layout is computed as transformers does."""
    learned = sorted((one for one in scorer.model.parameters() if one.requires_grad), key=torch.numel)[:FEW]
    with torch.set_grad_enabled(bool(learned)):
        out = scorer.outputs(batch, leanly=row is not None, row=row)
        order = torch.argsort(torch.tensor(batch.members, device=out.device)[batch.sequence_N], stable=True)
        out = out[order]
        generator = torch.Generator().manual_seed(0)  # the caller's random numbers are not ours to draw
        seed = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
        grads = torch.autograd.grad(out, learned, seed, allow_unused=True) if learned else ()
    return [out.detach(), *(one for one in grads if one is not None)]
