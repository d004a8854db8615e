"""Sequences with advantages become one update of the weights, and the figures that say how it went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from verifiers.engine.plan import free_memory
from verifiers.engine.turns import steady
from verifiers.trainers.config import GRPOConfig, LearningKnobs
from verifiers.trainers.learning_mode import learning_mode
from verifiers.trainers.logprobs import TokenScorer
from verifiers.trainers.losses import Objective, TokenLosses, token_losses, token_weights
from verifiers.trainers.micro_batches import MicroBatch, Trained, micro_batches
from verifiers.trainers.processes import gathered, sum_gradients
from verifiers.trainers.reference import Reference
from verifiers.trainers.weights import Weights

RATIO_EDGES = [0.0, 0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0, 4.0, 100.0]
MOST_TOKENS = {"cpu": 4096, "cuda": 131072}
# What a pass there and back has alive of each token in each layer, in numbers of the weights' type: so many for each
# unit of the layer's width, and for each of the feed-forward's.
ALIVE_OF_WIDTH, ALIVE_OF_INNER = 12.0, 4.5


class PolicyUpdate:
    """How a policy learns from a batch: ``num_iterations`` passes, each one step of the optimizer."""

    def __init__(
        self,
        model: Any,
        weights: Weights,
        config: GRPOConfig,
        *,
        lock: AbstractContextManager[Any],
        pad_id: int = 0,
        max_new_tokens: int | None = None,
        processes: Any = None,
    ) -> None:
        self.model, self.weights, self.config = model, weights, config
        with lock:  # both run the model, and a batch may be being sampled ahead
            self.scorer = TokenScorer(model)
            self.reference = Reference(model) if config.kl_coef > 0 else None
            scorers = [self.scorer] if self.reference is None else [self.scorer, self.reference.scorer]
            self._limits = scorers[0].layouts.limits(*(one.layouts for one in scorers[1:]))
        self.device = weights.live[0].device
        self._lock, self._pad_id, self._processes = lock, pad_id, processes
        self._are_logprobs_known = False
        self._max_new_tokens = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        low, high = config.clip
        self.objective = Objective(
            kind=config.loss_type,  # type: ignore[arg-type]
            epsilon=low,
            epsilon_high=high,
            delta=config.delta,
            importance_cap=config.cap,
            kl_coef=config.kl_coef,
        )
        self._tokens = micro_batch_tokens(config, model)
        self._last_pass: list[tuple[list[int | None], Tensor, Tensor]] = []

    def run(self, sequences: Sequence[Trained], learning_rate: float) -> dict[str, Any]:
        """Learn from these; returns loss, kl, clip_fraction, ratios, grad_norm."""
        matter = self._weighed(sequences)
        made = micro_batches(matter, max_tokens=self._tokens, pad_id=self._pad_id, **self._limits)
        batches = [_Prepared(batch, self.device) for batch in made]
        figures = _Figures()
        with self._lock:
            self.weights.refresh()
        config = self.config
        drops, recomputes = not config.disable_dropout, config.gradient_checkpointing
        with learning_mode(self.model, lock=self._lock, drops=drops, recomputes=recomputes):
            for iteration in range(config.num_iterations):
                self._last_pass = []
                for batch in batches:
                    ratio_N = self._learn(batch, figures, is_first=iteration == 0)
                    if not self._limits.get("rope_bounds"):  # sequences that are split there have no order of their own
                        owners = [matter[member].rollout for member in batch.batch.members]
                        self._last_pass.append((owners, batch.batch.sequence_N, ratio_N))
                sum_gradients(self._processes, self.weights.masters)
                with self._lock:
                    figures.grad_norm = self.weights.step(learning_rate)
        return together(gathered(self._processes, figures.read()))

    def ratios_of(self, rollouts: int) -> dict[int, list[float]]:
        """The ratio of each trained token of the first rollouts of a batch, in the last pass over it."""
        found: dict[int, dict[int, list[float]]] = {}
        for part, (owners, sequence_N, ratio_N) in enumerate(self._last_pass):
            if not any(owner is not None and owner < rollouts for owner in owners):
                continue
            for sequence, ratio in zip(sequence_N.tolist(), ratio_N.tolist(), strict=True):
                owner = owners[sequence]
                if owner is not None and owner < rollouts:
                    found.setdefault(owner, {}).setdefault((part << 32) + sequence, []).append(ratio)
        # One that was split into several sequences has no single order of its tokens.
        return {owner: next(iter(parts.values())) for owner, parts in found.items() if len(parts) == 1}

    def _weighed(self, sequences: Sequence[Trained]) -> list[Trained]:
        """The sequences that have a gradient, each with what a token of it counts among those of all processes."""
        counts = torch.tensor([sum(one.sample.completion_mask) for one in sequences])
        parts = gathered(self._processes, (len(sequences), int(counts.sum())))
        totals = None if len(parts) == 1 else (sum(n for n, _ in parts), sum(tokens for _, tokens in parts))
        shares = (
            token_weights(self.objective.kind, counts, self._max_new_tokens, totals).tolist() if len(counts) else []
        )
        return [
            replace(one, weight=share)
            for one, share in zip(sequences, shares, strict=True)
            if one.advantage or self.reference is not None  # the others would have no gradient
        ]

    def _learn(self, prepared: _Prepared, figures: _Figures, *, is_first: bool) -> Tensor:
        with steady(self._lock):
            with self._lock:
                losses, loss = self._forward(prepared)
                if self._recomputes:
                    self.weights.backward(loss)
            if not self._recomputes:  # then no module is run on the way back, and the sampler may go on meanwhile
                self.weights.backward(loss)
        figures.add(loss.detach(), losses.ratio_T, losses.is_clipped_T, losses.kl_T, is_first=is_first)
        return losses.ratio_T

    @property
    def _recomputes(self) -> bool:
        return self.config.gradient_checkpointing or self.scorer.recomputes

    def _forward(self, prepared: _Prepared) -> tuple[TokenLosses, Tensor]:
        batch = prepared.batch
        if self.reference is not None and prepared.reference_N is None:
            prepared.reference_N = self.reference.logprobs(batch)
        new_N = self.scorer.logprobs(batch)
        if prepared.old_N is None:  # nobody else knows what the old policy thought of these tokens
            prepared.old_N = new_N.detach()
        elif not self._are_logprobs_known:
            self._check_logprobs(batch, new_N.detach(), prepared.old_N)
        losses = token_losses(
            self.objective,
            new_T=new_N,
            old_T=prepared.old_N,
            advantage_T=batch.advantage_N,
            sequence_T=batch.sequence_N,
            reference_T=prepared.reference_N,
        )
        return losses, (losses.loss_T * batch.weight_N).sum()

    def _check_logprobs(self, batch: MicroBatch, new_N: Tensor, old_N: Tensor) -> None:
        """Refuse a server whose logprobs leave out the temperature; the first tokens of a training tell."""
        self._are_logprobs_known = True
        if not any(one.is_asked and one.temperature != 1.0 for one in batch.distributions):
            return
        with torch.no_grad():
            raw_N = self.scorer.logprobs(batch, 1.0)
        if float((raw_N - old_N).abs().mean()) < float((new_N - old_N).abs().mean()):
            raise ValueError(
                "the logprobs that come with the replies are the model's own, without the temperature that was sampled "
                "at: have the server give those that it draws by (vLLM: --logprobs-mode processed_logprobs), or sample "
                "at temperature 1"
            )


class _Prepared:
    """A micro-batch on the device, and what is found out about its tokens once."""

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        is_known = not bool(batch.old_N.isnan().any())  # what nobody recorded is measured
        self.batch = batch.to(device)
        self.old_N: Tensor | None = self.batch.old_N if is_known else None
        self.reference_N: Tensor | None = None


@dataclass
class _Figures:
    """What is measured on the way, left on the device until the end."""

    losses: list[Tensor] = field(default_factory=list)
    ratios: list[Tensor] = field(default_factory=list)
    first_ratios: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    kls: list[Tensor] = field(default_factory=list)
    grad_norm: float = 0.0

    def add(self, loss: Tensor, ratio_N: Tensor, clipped_N: Tensor, kl_N: Tensor | None, *, is_first: bool) -> None:
        self.losses.append(loss)
        self.ratios.append(ratio_N)
        self.clipped.append(clipped_N)
        if is_first:
            self.first_ratios.append(ratio_N)
        if kl_N is not None:
            self.kls.append(kl_N)

    def read(self) -> dict[str, Any]:
        if not self.ratios:
            return {"loss": 0.0, "grad_norm": self.grad_norm, "clip_fraction": 0.0, "kl": None, "trained_tokens": 0}
        ratio_N, first_N = torch.cat(self.ratios).float(), torch.cat(self.first_ratios).float()
        edges = torch.tensor(RATIO_EDGES, device=first_N.device)
        place_N = torch.bucketize(first_N, edges[1:-1], right=True)
        numbers = [
            torch.stack(self.losses).sum(),
            torch.cat(self.clipped).float().mean(),
            ratio_N.mean(),
            ratio_N.max(),
            *((torch.cat(self.kls).mean(),) if self.kls else ()),
        ]
        counts = torch.bincount(place_N, minlength=len(RATIO_EDGES) - 1).float()
        loss, clipped, mean, most, *rest = torch.cat((torch.stack(numbers), counts)).tolist()  # one transfer
        kls, counted = (rest[:1], rest[1:]) if self.kls else ([None], rest)
        return {
            "loss": loss / max(1, len(self.losses) // max(1, len(self.first_ratios))),
            "grad_norm": self.grad_norm,
            "clip_fraction": clipped,
            "kl": kls[0],
            "ratio_mean": mean,
            "ratio_max": most,
            "ratio_histogram": {"edges": RATIO_EDGES, "counts": [int(count) for count in counted]},
            "trained_tokens": len(first_N),
        }


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of an update from those of each process; the gradient is the same in all.

    >>> halves = [{"loss": 1.0, "kl": None, "trained_tokens": 1, "ratio_mean": 1.0, "ratio_max": 1.0},
    ...           {"loss": 2.0, "kl": None, "trained_tokens": 3, "ratio_mean": 2.0, "ratio_max": 4.0}]
    >>> found = together(halves)
    >>> found["loss"], found["ratio_mean"], found["ratio_max"], found["trained_tokens"]
    (3.0, 1.75, 4.0, 4)
    """
    learned = [part for part in parts if part["trained_tokens"]]
    if len(parts) == 1 or not learned:
        return dict(parts[0])
    tokens = sum(part["trained_tokens"] for part in learned)
    whole = {**learned[0], "loss": math.fsum(part["loss"] for part in learned), "trained_tokens": tokens}
    for name in ("clip_fraction", "ratio_mean", "kl"):
        if whole.get(name) is not None:
            whole[name] = math.fsum(part[name] * part["trained_tokens"] for part in learned) / tokens
    whole["ratio_max"] = max(part["ratio_max"] for part in learned)
    if "ratio_histogram" in whole:
        counts = zip(*(part["ratio_histogram"]["counts"] for part in learned), strict=True)
        whole["ratio_histogram"] = {"edges": RATIO_EDGES, "counts": [sum(column) for column in counts]}
    return whole


def micro_batch_tokens(config: LearningKnobs, model: Any) -> int:
    """How many tokens one forward pass takes: as configured, or as half of the free memory can hold."""
    if config.micro_batch_tokens is not None:
        return config.micro_batch_tokens
    parameter = next(model.parameters())
    text = model.config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    alive = text.num_hidden_layers * (ALIVE_OF_WIDTH * text.hidden_size + ALIVE_OF_INNER * inner)
    token_bytes = alive * parameter.element_size() / (8 if config.gradient_checkpointing else 1)
    most = MOST_TOKENS.get(parameter.device.type, 8192)
    return int(max(256, min(most, free_memory(parameter.device) / 2 / token_bytes)))
