"""Sequences with advantages become one update of the weights, and the figures that say how it went."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.fair_lock import steady
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.distributed.processes import all_gather, shortfall
from verifiers.trainers.learning.micro_batches import MicroBatch, Trained, check_tokens, idle_batch, micro_batches
from verifiers.trainers.learning.target_logprobs import Scored
from verifiers.trainers.learning.update_figures import UpdateFigures, combined
from verifiers.trainers.losses import FARTHEST, Loss, TokenLosses, sampler_correction, token_weights
from verifiers.trainers.memory.plan import MemoryPlan
from verifiers.trainers.reference import Reference
from verifiers.trainers.weights import Weights

logger = logging.getLogger("verifiers.trainers")


class PolicyUpdate:
    """How a policy learns from a batch: ``num_iterations`` passes, each one step of the optimizer."""

    def __init__(
        self,
        model: Any,
        weights: Weights,
        config: GRPOConfig,
        memory: MemoryPlan,
        *,
        lock: AbstractContextManager[Any],
        pad_id: int = 0,
        max_new_tokens: int | None = None,
        processes: Any = None,
        loss: Callable[..., Any] | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.weights, self.config = model, weights, config
        self.loss = Loss(config.objective, loss)
        with lock:  # both run the model, and a batch may be being sampled ahead
            self.scorer = weights.scorer()
            self.reference = Reference(model) if config.kl_coef > 0 else None
            others = [] if self.reference is None else [self.reference.scorer.layouts]
            self._limits = self.scorer.layouts.limits(*others)
        if (bounds := self._limits["rope_bounds"]) and self.loss.objective.is_of_sequences:
            logger.warning(
                "the rotary embedding of this model changes at %d tokens: a sequence that grows past it is learned "
                "from in two parts, and each has a ratio of its own",
                bounds[0],
            )
        self.device = weights.device
        self._lock, self._pad_id, self._processes = lock, pad_id, processes
        self._after_step = after_step
        self._are_logprobs_known = False
        self._max_new_tokens = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        self._tokens, self._recomputes = memory.micro_batch_tokens, memory.gradient_checkpointing
        self._last_pass: list[tuple[list[int | None], Tensor, Tensor]] = []

    def run(self, sequences: Sequence[Trained], learning_rate: float) -> dict[str, Any]:
        """Learn from these; returns loss, kl, clip_fraction, ratios, grad_norm."""
        trained, tokens = self._weighted(sequences)
        made = micro_batches(trained, max_tokens=self._tokens, pad_id=self._pad_id, **self._limits)
        batches = [_Prepared(check_tokens(batch, self.model.config), self.device) for batch in made]
        if self.weights.is_sharded:
            idle = shortfall(self._processes, len(batches))
            batches += [_Prepared(idle_batch(self._pad_id), self.device, is_idle=True) for _ in range(idle)]
        figures = UpdateFigures()
        with self._lock:
            self.weights.refresh()
        config = self.config
        drops = not config.disable_dropout
        with learning_mode(self.weights.module, lock=self._lock, drops=drops, recomputes=self._recomputes):
            for iteration in range(config.num_iterations):
                if config.top_entropy_quantile < 1.0:
                    tokens = self._keep_uncertain(batches)
                self._last_pass = []
                for i, batch in enumerate(batches, 1):
                    losses, loss, entropy_N = self._learn(batch, tokens, is_last=i == len(batches))
                    if batch.is_idle:
                        continue
                    figures.add(loss, losses, entropy_N, is_first=iteration == 0)
                    if not self._limits.get("rope_bounds"):  # sequences that are split there have no order of their own
                        owners = [trained[member].rollout for member in batch.batch.members]
                        self._last_pass.append((owners, batch.batch.sequence_N, losses.ratio_T))
                self.weights.collect()
                with self._lock:
                    figures.grad_norm = self.weights.step(learning_rate)
                    self._after_step()  # before anyone samples from the new weights
        return combined(all_gather(self._processes, figures.read()))

    def ratios_of(self, rollouts: int) -> dict[int, list[float]]:
        """The ratio of each trained token of the first rollouts of a batch, in the last pass over it."""
        found: dict[int, dict[tuple[int, int], list[float]]] = {}
        for part, (owners, sequence_N, ratio_N) in enumerate(self._last_pass):
            wanted = [i for i, owner in enumerate(owners) if owner is not None and owner < rollouts]
            if not wanted:
                continue
            is_wanted_N = torch.isin(sequence_N, torch.tensor(wanted, device=sequence_N.device))
            pairs = zip(sequence_N[is_wanted_N].tolist(), ratio_N[is_wanted_N].tolist(), strict=True)
            for sequence, ratio in pairs:
                found.setdefault(owners[sequence], {}).setdefault((part, sequence), []).append(ratio)
        # One that was split into several sequences has no single order of its tokens.
        return {owner: next(iter(parts.values())) for owner, parts in found.items() if len(parts) == 1}

    def _weighted(self, sequences: Sequence[Trained]) -> tuple[list[Trained], int]:
        """The sequences that have a gradient, each with what a token of it counts, and the tokens of all processes."""
        counts = torch.tensor([sum(one.sample.completion_mask) for one in sequences])
        parts = all_gather(self._processes, (len(sequences), int(counts.sum())))
        totals = (sum(n for n, _ in parts), sum(tokens for _, tokens in parts))
        kind, of_several = self.loss.objective.kind, None if len(parts) == 1 else totals
        shares = token_weights(kind, counts, self._max_new_tokens, of_several).tolist() if len(counts) else []
        trained = [
            one._replace(weight=share)
            for one, share in zip(sequences, shares, strict=True)
            if one.has_advantage or self._learns_without_advantage
        ]
        return trained, totals[1]

    @property
    def _learns_without_advantage(self) -> bool:
        uses_entropy = self.config.entropy_coef != 0.0 or self.config.top_entropy_quantile < 1.0
        return self.reference is not None or self.loss.is_own or uses_entropy

    def _keep_uncertain(self, batches: Sequence[_Prepared]) -> int:
        """Note which tokens have an entropy in the upper ``top_entropy_quantile`` of the step's, and count them."""
        with torch.no_grad(), self._lock:
            found = [self.scorer.score(one.batch, with_entropy=True).entropy_N for one in batches]
        found = [None if one.is_idle else entropy_N for one, entropy_N in zip(batches, found, strict=True)]
        measured = all_gather(self._processes, [value for one in found if one is not None for value in one.tolist()])
        everyone = [value for part in measured for value in part]
        share = 1.0 - self.config.top_entropy_quantile
        least = float(np.quantile(np.array(everyone, np.float32), share)) if everyone else 0.0
        for batch, entropy_N in zip(batches, found, strict=True):
            batch.is_uncertain_N = None if entropy_N is None else entropy_N >= least
        return sum(value >= least for value in everyone)

    def _learn(self, prepared: _Prepared, tokens: int, *, is_last: bool) -> tuple[TokenLosses, Tensor, Tensor | None]:
        with steady(self._lock):
            with self._lock:
                losses, scored = self._forward(prepared)
                loss = (losses.loss_T * prepared.batch.weight_N).sum()
                if self.config.entropy_coef and scored.entropy_N is not None and not prepared.is_idle:
                    bonus = prepared.counted(scored.entropy_N).sum() / max(tokens, 1)
                    loss = loss - self.config.entropy_coef * bonus
                recomputes = self._recomputes or scored.recomputes
                if recomputes:
                    self.weights.backward(loss, is_last=is_last)
            if not recomputes:  # then no module is run in the backward pass, and the sampler may go on meanwhile
                self.weights.backward(loss, is_last=is_last)
        return losses, loss.detach(), scored.entropy_N

    def _forward(self, prepared: _Prepared) -> tuple[TokenLosses, Scored]:
        batch = prepared.batch
        if self.reference is not None and prepared.reference_N is None:
            prepared.reference_N = self.reference.logprobs(batch)
        with_entropy = self.config.entropy_coef != 0.0 or self.loss.needs_entropies
        scored = self.scorer.score(batch, with_entropy=with_entropy)
        if not self._are_logprobs_known and (prepared.old_N is not None or self.weights.is_sharded):
            self._check_logprobs(batch, scored.logprob_N.detach(), prepared.old_N)
        if self.loss.objective.correction is not None and prepared.correction_N is None:
            prepared.old_N = scored.logprob_N.detach()
            prepared.log_ratio_N = prepared.old_N - batch.old_N
            prepared.correction_N, prepared.is_bounded_N = sampler_correction(
                self.loss.objective, prepared.log_ratio_N, batch.sequence_N
            )
        if prepared.old_N is None:  # of tokens without a logprob: before the first update, new and old are the same
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
        return prepared.as_of_sampler(losses), scored

    def _check_logprobs(self, batch: MicroBatch, new_N: Tensor, old_N: Tensor | None) -> None:
        """Refuse a server whose logprobs leave out the temperature; the first tokens of a training tell."""
        self._are_logprobs_known = True
        is_tempered = any(one.is_asked and one.temperature != 1.0 for one in batch.distributions)
        is_open = is_tempered and old_N is not None
        if not (any(all_gather(self._processes, is_open)) if self.weights.is_sharded else is_open):
            return  # of a sharded model all processes compute it, or none
        with torch.no_grad():
            raw_N = self.scorer.logprobs(batch, 1.0)
        if is_open and float((raw_N - old_N).abs().mean()) < float((new_N - old_N).abs().mean()):
            raise ValueError(
                "the logprobs that come with the replies are the model's own, without the temperature that was sampled "
                "at: have the server give those that it draws by (vLLM: --logprobs-mode processed_logprobs), or sample "
                "at temperature 1"
            )


class _Prepared:
    """A micro-batch on the device, and what is found out about its tokens once."""

    def __init__(self, batch: MicroBatch, device: torch.device, *, is_idle: bool = False) -> None:
        self.is_idle = is_idle
        is_known = not bool(batch.old_N.isnan().any())  # logprobs that were not recorded are measured
        self.batch = batch.to(device)
        self.old_N: Tensor | None = self.batch.old_N if is_known else None
        self.reference_N: Tensor | None = None
        self.correction_N: Tensor | None = None
        self.log_ratio_N: Tensor | None = None  # of the policy before the update and the sampler; and if it was bounded
        self.is_bounded_N: Tensor | None = None
        self.is_uncertain_N: Tensor | None = None

    @property
    def factor_N(self) -> Tensor | None:
        """What the policy's part of each token's loss is multiplied with."""
        if self.correction_N is None:
            return None if self.is_uncertain_N is None else self.is_uncertain_N.float()
        return self.counted(self.correction_N)

    def as_of_sampler(self, losses: TokenLosses) -> TokenLosses:
        """For the figures: the ratio of the new policy to the one that sampled, and what either bound cut."""
        if self.log_ratio_N is None or self.is_bounded_N is None:
            return losses
        ratio_T = losses.ratio_T * self.log_ratio_N.nan_to_num(nan=0.0).clamp(-FARTHEST, FARTHEST).exp()
        return replace(losses, ratio_T=ratio_T, is_clipped_T=losses.is_clipped_T | self.is_bounded_N)

    def counted(self, values_N: Tensor) -> Tensor:
        """Values of tokens, 0 of those that are left out."""
        return values_N if self.is_uncertain_N is None else values_N * self.is_uncertain_N


@contextmanager
def learning_mode(
    model: Any, *, lock: AbstractContextManager[Any], drops: bool, recomputes: bool = False
) -> Iterator[None]:
    """While this lasts a model learns; afterwards it is as the sampler wants it. The lock is held to change it.

    The sampler knows no dropout, so with it (``drops``) the new policy's logprobs are not those of the old one even
    before the first update. Modules that compute their activations again in the backward pass (``recomputes``: gradient
    checkpointing) do so in training mode only: they are put into it with every dropout of their own at 0.
    """
    before: list[tuple[Any, str, Any]] = []
    with lock:
        model.train(drops)
        if recomputes and not drops:
            model.training = True
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    before += _without_dropout(module)
                    module.training = True
    try:
        yield
    finally:
        with lock:
            for module, name, value in before:
                setattr(module, name, value)
            model.eval()


def _without_dropout(module: Any) -> list[tuple[Any, str, Any]]:
    """Put the dropout of a module's own at 0; what it was."""
    found = [
        (module, name, value) for name, value in vars(module).items() if "drop" in name and isinstance(value, float)
    ]
    for _, name, _ in found:
        setattr(module, name, 0.0)
    return found
