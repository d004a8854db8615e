"""Sequences with advantages → one update by Tinker (forward_backward and optim_step) and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.learning.micro_batches import TrainSample
from verifiers.trainers.learning.sequences import with_token_weights
from verifiers.trainers.learning.update_figures import UpdateFigures
from verifiers.trainers.losses import METHODS, Loss

# Settings of a trainer in this process that have no meaning for a model at Tinker.
NOT_HERE = (
    "bf16", "fp16", "optim", "load_in_4bit", "gradient_checkpointing", "micro_batch_tokens", "disable_dropout",
    "max_seq_length",
)  # fmt: skip


def check_config(config: GRPOConfig, num_processes: int) -> None:
    """Raise for settings that Tinker does not support, before any request."""
    if num_processes > 1:
        raise ValueError(f"each of {num_processes} processes would train its own model at Tinker; start one process")
    if said := [name for name in NOT_HERE if config.is_set(name)]:
        raise ValueError(f"{said[0]} has no effect with Tinker; leave it out")
    if config.kl_coef or config.sync_ref_model:
        raise ValueError("kl_coef needs a reference model, which --backend tinker does not have")
    if config.entropy_coef or config.top_entropy_quantile < 1.0:
        raise ValueError("entropy_coef and top_entropy_quantile need whole distributions; Tinker only gives logprobs")
    if config.importance_sampling_mode not in (None, "off"):
        raise ValueError("leave importance_sampling_mode out: Tinker's losses correct for the sampler")


class TinkerUpdate:
    """Updates a policy at Tinker from a batch: ``num_iterations`` passes with one optimizer step each."""

    reference = None

    def __init__(
        self, policy: Any, config: GRPOConfig, *, max_new_tokens: int, loss: Callable[..., Any] | None
    ) -> None:
        self.config, self._policy, self._max_new_tokens = config, policy, max_new_tokens
        self.loss = Loss(config.objective, loss)
        if self.loss.needs_entropies:
            raise ValueError(f"loss {self.loss.name!r} needs entropies, but Tinker only returns logprobs")
        self._ratios: dict[int, list[float]] = {}

    def run(self, sequences: Sequence[TrainSample], learning_rate: float) -> dict[str, Any]:
        """Train on these sequences; returns loss, clip_fraction, ratios, grad_norm."""
        weighted, _ = with_token_weights(sequences, self.loss.objective.kind, self._max_new_tokens)
        rows = [_Row(one) for one in weighted if one.has_advantage or self.loss.is_own]
        figures = UpdateFigures()
        for iteration in range(self.config.num_iterations if rows else 0):
            self._pass(rows, figures, learning_rate, is_first=iteration == 0)
        return figures.read()

    def ratios_of(self, rollouts: int) -> dict[int, list[float]]:
        """The ratio of each trained token in the last pass, for the first ``rollouts`` rollouts of the batch."""
        return {owner: ratios for owner, ratios in self._ratios.items() if owner < rollouts}

    def _pass(self, rows: Sequence[_Row], figures: UpdateFigures, learning_rate: float, *, is_first: bool) -> None:
        from tinker import types

        training, config = self._policy.training_client, self.config
        named = self._named()
        if named is None:
            learning = training.forward_backward_custom([row.datum() for row in rows], self._custom(rows))
        else:
            is_gspo = named[0] == "gspo"
            learning = training.forward_backward([row.datum(with_mask=is_gspo) for row in rows], *named)
        stepping = training.optim_step(
            types.AdamParams(
                learning_rate=learning_rate,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                eps=config.adam_epsilon,
                weight_decay=config.weight_decay,
                grad_clip_norm=config.max_grad_norm or 0.0,
            )
        )
        found = [one["logprobs"].to_torch() for one in learning.result().loss_fn_outputs]
        self._measure(rows, found, figures, is_first=is_first)
        told = stepping.result().metrics or {}
        figures.grad_norm = next((value for name, value in told.items() if "grad_norm" in name), float("nan"))

    def _named(self) -> tuple[str, dict[str, float]] | None:
        """The equivalent loss of Tinker and its settings; None: the loss is computed here from the logprobs."""
        objective = self.loss.objective
        method = METHODS[objective.kind]
        level = objective.level or method.level
        is_on_policy = self.config.num_iterations == self.config.updates_per_generation == 1
        is_plain = objective.delta is None and (
            objective.importance_cap is None or (is_on_policy and not self.config.num_batches_ahead)
        )
        if self.loss.is_own or not is_plain or objective.kind == "sapo":
            return None
        clip = {"clip_low_threshold": 1.0 - objective.epsilon, "clip_high_threshold": 1.0 + objective.epsilon_high}
        if objective.kind == "cispo":
            return ("cispo", {**clip, "clip_low_threshold": 0.0}) if level == "token" else None
        return ("gspo" if level == "sequence" else "ppo"), clip

    def _custom(self, rows: Sequence[_Row]) -> Callable[..., Any]:
        def compute(data: Any, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
            return self._losses(rows, logprobs)[0], {}

        return compute

    def _losses(self, rows: Sequence[_Row], logprobs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """The loss of all trained tokens, weighted as the method defines."""
        new_T = torch.cat([one[row.is_trained_T] for one, row in zip(logprobs, rows, strict=True)])
        counts = [int(row.is_trained_T.sum()) for row in rows]
        sequence_T = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        old_T = torch.cat([row.old_T[row.is_trained_T] for row in rows])
        losses = self.loss(
            new_T=new_T,
            old_T=torch.where(old_T.isnan(), new_T.detach(), old_T),
            advantage_T=torch.cat([row.advantage_T[row.is_trained_T] for row in rows]),
            sequence_T=sequence_T,
        )
        weight_T = torch.tensor([row.share for row in rows])[sequence_T]
        return (losses.loss_T * weight_T).sum(), losses

    def _measure(
        self, rows: Sequence[_Row], logprobs: Sequence[Tensor], figures: UpdateFigures, *, is_first: bool
    ) -> None:
        with torch.no_grad():
            loss, losses = self._losses(rows, logprobs)
        figures.add(loss, losses, None, is_first=is_first)
        parts = losses.ratio_T.split([int(row.is_trained_T.sum()) for row in rows])
        owners = [row.trained.rollout for row in rows]
        once = [owner for owner in owners if owner is not None and owners.count(owner) == 1]
        self._ratios = {
            owner: part.tolist()
            for owner, part in zip(owners, parts, strict=True)
            if owner is not None and owner in once
        }


class _Row:
    """One sequence in Tinker's format: each position with its target token."""

    def __init__(self, trained: TrainSample) -> None:
        self.trained, self.share = trained, trained.weight
        sample = trained.sample
        before = len(sample.prompt_ids) - 1
        self.ids = [*sample.prompt_ids, *sample.completion_ids]
        fill = [0.0] * before
        self.is_trained_T = torch.tensor([*fill, *sample.completion_mask]) != 0
        self.old_T = torch.tensor([*fill, *sample.completion_logprobs], dtype=torch.float32)
        own = trained.advantage
        each = [own] * len(sample.completion_ids) if isinstance(own, int | float) else list(own)
        self.advantage_T = torch.tensor([*fill, *each], dtype=torch.float32) * self.is_trained_T

    def datum(self, *, with_mask: bool = False) -> Any:
        from tinker import types

        inputs = {
            "target_tokens": torch.tensor(self.ids[1:]),
            "logprobs": torch.where(self.is_trained_T, self.old_T, 0.0),
            "advantages": self.advantage_T * self.share,
        }
        if with_mask:
            inputs["sequence_ratio_mask"] = self.is_trained_T.float()
        return types.Datum(model_input=types.ModelInput.from_ints(self.ids[:-1]), loss_fn_inputs=inputs)
