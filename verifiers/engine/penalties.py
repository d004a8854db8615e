"""Tokens that were there already → less of them: presence, frequency and repetition penalties of one request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verifiers.engine.sequence import Sampling

HIGHEST = 1e30  # logit that can still be divided by a temperature: logprobs of infinite ones are not numbers


class Penalties:
    """Presence and frequency count the reply's tokens, as OpenAI's do; repetition those of the prompt too, as
    Hugging Face's does."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._repetition = sampling.repetition_penalty
        self._count_V = torch.zeros(vocabulary, device=device)
        self._is_seen_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._is_seen_V[torch.tensor(list(prompt_ids), device=device)] = True
        self._counted = 0

    def apply_(self, logits_V: Tensor, ids: Sequence[int]) -> None:
        """Change the logits behind the reply ``ids`` in place."""
        if len(ids) > self._counted:
            new = torch.tensor(list(ids[self._counted :]), device=logits_V.device)
            self._count_V.index_add_(0, new, torch.ones(len(new), device=logits_V.device))
            self._is_seen_V[new] = True
            self._counted = len(ids)
        if self._repetition != 1.0:
            weaker_V = torch.where(logits_V < 0, logits_V * self._repetition, logits_V / self._repetition)
            weaker_V.clamp_(max=HIGHEST)
            logits_V.copy_(torch.where(self._is_seen_V, weaker_V, logits_V))
        if self._presence or self._frequency:
            logits_V -= self._frequency * self._count_V + self._presence * (self._count_V > 0)
