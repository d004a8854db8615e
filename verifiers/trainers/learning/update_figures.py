"""Losses, ratios and entropies of micro-batches become the figures of an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verifiers.trainers.losses import TokenLosses

RATIO_EDGES = [0.0, 0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0, 4.0, 100.0]


@dataclass
class UpdateFigures:
    """Collects the tensors of each micro-batch on the device, to read them in one transfer."""

    losses: list[Tensor] = field(default_factory=list)
    ratios: list[Tensor] = field(default_factory=list)
    first_ratios: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    kls: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    grad_norm: float = 0.0

    def add(self, loss: Tensor, losses: TokenLosses, entropy_N: Tensor | None, *, is_first: bool) -> None:
        self.losses.append(loss)
        self.ratios.append(losses.ratio_T)
        self.clipped.append(losses.is_clipped_T)
        if is_first:
            self.first_ratios.append(losses.ratio_T)
        if losses.kl_T is not None:
            self.kls.append(losses.kl_T)
        if entropy_N is not None:
            self.entropies.append(entropy_N.detach())

    def read(self) -> dict[str, Any]:
        if not self.ratios:
            return {"loss": 0.0, "grad_norm": self.grad_norm, "clip_fraction": 0.0, "kl": None, "trained_tokens": 0}
        ratio_N, first_N = torch.cat(self.ratios).float(), torch.cat(self.first_ratios).float()
        edges = torch.tensor(RATIO_EDGES, device=first_N.device)
        bucket_N = torch.bucketize(first_N, edges[1:-1], right=True)
        numbers = [
            torch.stack(self.losses).sum(),
            torch.cat(self.clipped).float().mean(),
            ratio_N.mean(),
            ratio_N.max(),
            *((torch.cat(self.kls).mean(),) if self.kls else ()),
        ]
        counts = torch.bincount(bucket_N, minlength=len(RATIO_EDGES) - 1).float()
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
            **({"entropy": float(torch.cat(self.entropies).mean())} if self.entropies else {}),
        }


def combined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of an update, combined from those of all processes, which have the same gradient.

    >>> halves = [{"loss": 1.0, "kl": None, "trained_tokens": 1, "ratio_mean": 1.0, "ratio_max": 1.0},
    ...           {"loss": 2.0, "kl": None, "trained_tokens": 3, "ratio_mean": 2.0, "ratio_max": 4.0}]
    >>> found = combined(halves)
    >>> found["loss"], found["ratio_mean"], found["ratio_max"], found["trained_tokens"]
    (3.0, 1.75, 4.0, 4)
    """
    learned = [part for part in parts if part["trained_tokens"]]
    if len(parts) == 1 or not learned:
        return dict(parts[0])
    tokens = sum(part["trained_tokens"] for part in learned)
    whole = {**learned[0], "loss": math.fsum(part["loss"] for part in learned), "trained_tokens": tokens}
    for name in ("clip_fraction", "ratio_mean", "kl", "entropy"):
        if whole.get(name) is not None:
            whole[name] = math.fsum(part[name] * part["trained_tokens"] for part in learned) / tokens
    whole["ratio_max"] = max(part["ratio_max"] for part in learned)
    if "ratio_histogram" in whole:
        counts = zip(*(part["ratio_histogram"]["counts"] for part in learned), strict=True)
        whole["ratio_histogram"] = {"edges": RATIO_EDGES, "counts": [sum(column) for column in counts]}
    return whole
