"""A prompt → the logprob of each of its tokens under the model, and the likeliest tokens at its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifiers.engine.kv_cache import Segment
from verifiers.engine.logits import likeliest
from verifiers.engine.sequence import ActiveSequence, Alternatives, PromptLogprob
from verifiers.engine.sequential import SequentialCache

if TYPE_CHECKING:
    from verifiers.engine.engine import Engine

CHUNK = 128  # tokens at a time: their logits, one for each token of the vocabulary, are what takes memory


def score_prompt(engine: Engine, sequence: ActiveSequence) -> int:
    """Run a prompt for the logprobs of its tokens, which the request then has; how much of it its slot now holds."""
    prompt, count = sequence.prompt_ids, sequence.sampling.prompt_logprobs or 0
    scores: list[PromptLogprob] = [None]
    for start, logits_TV in _logits(engine, sequence):
        logprobs_TV = torch.log_softmax(logits_TV.float(), -1)
        next_T = torch.tensor(prompt[start + 1 : start + 1 + len(logprobs_TV)], device=logprobs_TV.device)
        own_T = logprobs_TV.gather(1, next_T[:, None])[:, 0].tolist()
        tops: list[Alternatives] = likeliest(logprobs_TV, count) if count else [[] for _ in own_T]
        scores += zip(own_T, tops, strict=True)
    sequence.future.prompt_logprobs = scores
    return 0 if isinstance(engine.cache, SequentialCache) else len(prompt) - 1


def _logits(engine: Engine, sequence: ActiveSequence) -> Iterator[tuple[int, Tensor]]:
    """Where in the prompt a chunk starts, and the logits behind each of its tokens but the prompt's last."""
    prompt = sequence.prompt_ids
    if isinstance(engine.cache, SequentialCache):
        if len(prompt) > 1:
            yield 0, engine.cache.logits(prompt[:-1])
        return
    for start in range(0, len(prompt) - 1, CHUNK):
        ids = prompt[start : min(start + CHUNK, len(prompt) - 1)]
        segments = [Segment(0, len(ids), sequence.slot, start)]
        positions = list(range(start, start + len(ids)))
        yield start, engine.run_prompts(ids, positions, list(range(len(ids))), segments)
