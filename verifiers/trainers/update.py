"""Sequences with advantages become an update of the policy: loss, backward pass, optimizer step, and its figures."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.fair_lock import steady
from verifiers.trainers.distributed.processes import all_gather
from verifiers.trainers.learning.micro_batches import MicroBatch, TrainSample
from verifiers.trainers.learning.sequences import with_token_weights
from verifiers.trainers.learning.target_logprobs import Scored
from verifiers.trainers.learning.update_figures import UpdateFigures, combined
from verifiers.trainers.losses import MAX_LOG_RATIO, Loss, TokenLosses, sampler_correction
from verifiers.trainers.reference import Reference
from verifiers.trainers.sampler import weights_lock
from verifiers.trainers.sampling import max_new_tokens

if TYPE_CHECKING:
    from verifiers.trainers.grpo_trainer import GRPOTrainer

logger = logging.getLogger("verifiers.trainers")


class PolicyUpdate:
    """Trains a policy on a batch: ``num_iterations`` passes over its micro-batches, with one optimizer step each."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer, self.weights, self.config = trainer, trainer.weights, trainer.config
        self._processes = trainer.accelerator
        self.loss = Loss(self.config.objective, trainer._own_loss)
        self._max_new_tokens = max_new_tokens(self.config, trainer.env)
        self._lock = weights_lock(trainer.client)
        with self._lock:  # both scorers run the model, which may be sampling ahead
            self.scorer = self.weights.scorer()
            self.reference = Reference(trainer.unwrapped_model) if self.config.kl_coef > 0 else None
            others = [] if self.reference is None else [self.reference.scorer.layouts]
            self._limits = self.scorer.layouts.limits(*others)
        if (bounds := self._limits["rope_bounds"]) and self.loss.objective.has_sequence_ratios:
            logger.warning(
                "the rotary embedding of this model changes at %d tokens: a longer sequence is trained on in two "
                "parts, each with its own sequence-level ratio",
                bounds[0],
            )
        self._has_checked_logprobs = False
        self._recomputes = trainer.memory.gradient_checkpointing
        # For each micro-batch: the rollout of each sequence; the sequence of each token; the ratio of each token.
        self._last_pass: list[tuple[list[int | None], Tensor, Tensor]] = []

    def run(self, sequences: Sequence[TrainSample], learning_rate: float) -> dict[str, Any]:
        """Update the policy; returns loss, kl, clip_fraction, ratios, grad_norm."""
        config, pad_id = self.config, self._trainer.tokenizer.pad_token_id
        trained, tokens = self._weighted(sequences)
        most = self._trainer.memory.micro_batch_tokens
        made = self.weights.micro_batches(trained, pad_id, max_tokens=most, **self._limits)
        batches = [_Prepared(batch, self.weights.device) for batch in made]
        figures = UpdateFigures()
        with self._lock:
            self.weights.refresh()
        dropout = not config.disable_dropout
        with training_mode(self.weights.module, lock=self._lock, dropout=dropout, recomputes=self._recomputes):
            for iteration in range(config.num_iterations):
                if config.top_entropy_quantile < 1.0:
                    tokens = self._select_high_entropy(batches)
                self._last_pass = []
                for i, batch in enumerate(batches, 1):
                    losses, loss, entropy_N = self._accumulate(batch, tokens, is_last=i == len(batches))
                    if batch.batch.is_idle:
                        continue
                    figures.add(loss, losses, entropy_N, is_first=iteration == 0)
                    if not self._limits["rope_bounds"]:  # otherwise a rollout may be split into several sequences
                        owners = [trained[member].rollout for member in batch.batch.members]
                        self._last_pass.append((owners, batch.batch.sequence_N, losses.ratio_T))
                self.weights.collect()
                with self._lock:
                    figures.grad_norm = self.weights.step(learning_rate)
                    self._trainer._name_weights(self._trainer.step + 1)  # before the new weights are sampled from
        return combined(all_gather(self._processes, figures.read()))

    def ratios_of(self, rollouts: int) -> dict[int, list[float]]:
        """The ratios of the trained tokens of the first ``rollouts`` rollouts, from the last pass over the batch."""
        found: dict[int, list[Tensor]] = {}
        for owners, sequence_N, ratio_N in self._last_pass:
            for owner, ratios in zip(owners, ratio_N.split(sequence_N.bincount().tolist()), strict=True):
                if owner is not None and owner < rollouts:
                    found.setdefault(owner, []).append(ratios)
        # The order of tokens is known only if a rollout is a single sequence.
        return {owner: parts[0].tolist() for owner, parts in found.items() if len(parts) == 1}

    def _weighted(self, sequences: Sequence[TrainSample]) -> tuple[list[TrainSample], int]:
        """The sequences that have a gradient, with token weights; and the number of tokens over all processes."""
        kind, gather = self.loss.objective.kind, partial(all_gather, self._processes)
        weighted, tokens = with_token_weights(sequences, kind, self._max_new_tokens, gather=gather)
        uses_entropy = self.config.entropy_coef != 0.0 or self.config.top_entropy_quantile < 1.0
        uses_all = self.reference is not None or self.loss.is_own or uses_entropy
        return [one for one in weighted if uses_all or one.has_advantage], tokens

    def _select_high_entropy(self, batches: Sequence[_Prepared]) -> int:
        """Mark the tokens of the step's ``top_entropy_quantile`` of highest entropy; returns how many there are."""
        with torch.no_grad(), self._lock:
            found = [self.scorer.score(one.batch, with_entropy=True).entropy_N for one in batches]
        found = [None if one.batch.is_idle else entropy_N for one, entropy_N in zip(batches, found, strict=True)]
        measured = all_gather(self._processes, [value for one in found if one is not None for value in one.tolist()])
        everyone = [value for part in measured for value in part]
        share = 1.0 - self.config.top_entropy_quantile
        least = float(np.quantile(np.array(everyone, np.float32), share)) if everyone else 0.0
        for batch, entropy_N in zip(batches, found, strict=True):
            batch.is_high_entropy_N = None if entropy_N is None else entropy_N >= least
        return sum(value >= least for value in everyone)

    def _accumulate(
        self, prepared: _Prepared, tokens: int, *, is_last: bool
    ) -> tuple[TokenLosses, Tensor, Tensor | None]:
        """Forward and backward of one micro-batch: its gradients are added to those of the step."""
        with steady(self._lock):
            with self._lock:
                losses, scored = self._forward(prepared)
                loss = (losses.loss_T * prepared.batch.weight_N).sum()
                if self.config.entropy_coef and scored.entropy_N is not None and not prepared.batch.is_idle:
                    bonus = prepared.masked(scored.entropy_N).sum() / max(tokens, 1)
                    loss = loss - self.config.entropy_coef * bonus
                recomputes = self._recomputes or scored.recomputes
                if recomputes:
                    self.weights.backward(loss, is_last=is_last)
            if not recomputes:  # this backward pass runs no module, so the model may sample meanwhile
                self.weights.backward(loss, is_last=is_last)
        return losses, loss.detach(), scored.entropy_N

    def _forward(self, prepared: _Prepared) -> tuple[TokenLosses, Scored]:
        batch = prepared.batch
        if self.reference is not None and prepared.reference_N is None:
            prepared.reference_N = self.reference.logprobs(batch)
        with_entropy = self.config.entropy_coef != 0.0 or self.loss.needs_entropies
        scored = self.scorer.score(batch, with_entropy=with_entropy)
        if not self._has_checked_logprobs and (prepared.old_N is not None or self.weights.is_sharded):
            self._check_logprobs(batch, scored.logprob_N.detach(), prepared.old_N)
        if self.loss.objective.correction is not None and prepared.correction_N is None:
            prepared.old_N = scored.logprob_N.detach()
            prepared.log_ratio_N = prepared.old_N - batch.old_N
            prepared.correction_N, prepared.is_out_of_bounds_N = sampler_correction(
                self.loss.objective, prepared.log_ratio_N, batch.sequence_N
            )
        if prepared.old_N is None:  # some tokens have no recorded logprob; before the first update, new and old agree
            prepared.old_N = batch.old_N.where(~batch.old_N.isnan(), scored.logprob_N.detach())
        losses = self.loss(
            new_T=scored.logprob_N,
            old_T=prepared.old_N,
            advantage_T=batch.advantage_N,
            sequence_T=batch.sequence_N,
            reference_T=prepared.reference_N,
            entropy_T=scored.entropy_N,
            factor_T=prepared.factor_N,
        )
        return prepared.relative_to_sampler(losses), scored

    def _check_logprobs(self, batch: MicroBatch, new_N: Tensor, old_N: Tensor | None) -> None:
        """Refuse a server whose logprobs ignore the temperature; checked on the first micro-batch of a training."""
        self._has_checked_logprobs = True
        is_tempered = any(one.is_requested and one.temperature != 1.0 for one in batch.distributions)
        is_doubtful = is_tempered and old_N is not None
        if not (any(all_gather(self._processes, is_doubtful)) if self.weights.is_sharded else is_doubtful):
            return  # with a sharded model, all processes must take part in the forward pass below, or none
        with torch.no_grad():
            raw_N = self.scorer.logprobs(batch, 1.0)
        if is_doubtful and float((raw_N - old_N).abs().mean()) < float((new_N - old_N).abs().mean()):
            raise ValueError(
                "the server returned the model's raw logprobs, without the sampling temperature. Configure it to "
                "return processed logprobs (vLLM: --logprobs-mode processed_logprobs), or sample at temperature 1"
            )


class _Prepared:
    """A micro-batch on the device, with per-token values that are computed once, in the first pass."""

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        is_known = not bool(batch.old_N.isnan().any())
        self.batch = batch.to(device)
        self.old_N: Tensor | None = self.batch.old_N if is_known else None  # None: computed in the first pass
        self.reference_N: Tensor | None = None
        self.log_ratio_N: Tensor | None = None  # log of the policy before the update over the sampler
        self.correction_N: Tensor | None = None  # importance weights from this ratio
        self.is_out_of_bounds_N: Tensor | None = None
        self.is_high_entropy_N: Tensor | None = None

    @property
    def factor_N(self) -> Tensor | None:
        """The factor of the policy term of each token's loss."""
        if self.correction_N is None:
            return None if self.is_high_entropy_N is None else self.is_high_entropy_N.float()
        return self.masked(self.correction_N)

    def relative_to_sampler(self, losses: TokenLosses) -> TokenLosses:
        """For the figures: ratios relative to the sampler, and the tokens that the clip or the correction bounded."""
        if self.log_ratio_N is None or self.is_out_of_bounds_N is None:
            return losses
        ratio_T = losses.ratio_T * self.log_ratio_N.nan_to_num(nan=0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return replace(losses, ratio_T=ratio_T, is_clipped_T=losses.is_clipped_T | self.is_out_of_bounds_N)

    def masked(self, values_N: Tensor) -> Tensor:
        """Token values, set to 0 where the entropy is too low for the token to be trained on."""
        return values_N if self.is_high_entropy_N is None else values_N * self.is_high_entropy_N


@contextmanager
def training_mode(model: Any, *, lock: AbstractContextManager[Any], dropout: bool, recomputes: bool) -> Iterator[None]:
    """Training mode during the block, eval mode afterwards; the mode is switched under the lock.

    Without ``dropout`` the model is trained in eval mode. With it, ratios differ from 1 even before the first update,
    because the sampler has no dropout. Gradient checkpointing (``recomputes``) works in training mode only: without
    ``dropout``, the checkpointed modules are put into training mode with their own dropout set to 0.
    """
    before: list[tuple[Any, str, float]] = []
    with lock:
        model.train(dropout)
        if recomputes and not dropout:
            model.training = True
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    own = [(name, value) for name, value in vars(module).items() if isinstance(value, float)]
                    before += [(module, name, value) for name, value in own if "drop" in name]
                    module.training = True
        for module, name, _ in before:
            setattr(module, name, 0.0)
    try:
        yield
    finally:
        with lock:
            for module, name, value in before:
                setattr(module, name, value)
            model.eval()
