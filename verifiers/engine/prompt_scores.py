"""Logits behind a prompt's tokens → the logprob of each next one under the model, and the likeliest at its place."""

from __future__ import annotations

import torch
from torch import Tensor

from verifiers.engine.logits import likeliest
from verifiers.engine.sequence import ActiveSequence, Alternatives
from verifiers.kernels.sampling import log_softmax

CHUNK = 128  # tokens at a time: their logits, one for each token of the vocabulary, are what takes memory


def score_prompt(sequence: ActiveSequence, start: int, logits_TV: Tensor) -> None:
    """Note the logprobs of the prompt's tokens that come after ``start``."""
    count, scores = sequence.sampling.prompt_logprobs or 0, sequence.future.prompt_logprobs
    if start == 0:
        scores[:] = [None]
    following = sequence.prompt_ids[start + 1 : start + 1 + len(logits_TV)]
    logprobs_TV = log_softmax(logits_TV[: len(following)])
    next_T = torch.tensor(following, device=logprobs_TV.device, dtype=torch.int64)
    own_T = logprobs_TV.gather(1, next_T[:, None])[:, 0].tolist()
    tops: list[Alternatives] = likeliest(logprobs_TV, count) if count else [[] for _ in own_T]
    scores += zip(own_T, tops, strict=True)
