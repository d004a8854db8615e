"""Run one sequence at a time, each with a cache that the model creates. Exact for any causal model, but slower."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verifiers.engine.sequence import ActiveSequence
from verifiers.kernels.modules import base_model
from verifiers.kernels.prove import rope_bounds
from verifiers.signatures import signature_of

NO_CACHE = {"loss", "logits", "hidden_states", "attentions", "cross_attentions", "router_logits", "aux_loss"}


class SequentialCache:
    """Replaces the KV cache for models that manage their own state: custom attention, convolutions, recurrences.

    Each sequence holds its state: the model's cache of all its tokens except the newest. A model whose cache does not
    reproduce its plain forward runs without one (``uses_cache=False``). Every token then costs a forward over the
    whole sequence.
    """

    def __init__(self, module: Any, *, uses_cache: bool) -> None:
        self._module, self._uses_cache = module, uses_cache
        self._accepted = set(signature_of(base_model(module).forward).parameters)
        self._more = {"logits_to_keep": 1} if "logits_to_keep" in self._accepted else {}
        self._resets = rope_bounds(module.config)
        self._shifted = [vars(one) for one in module.modules() if "rope_deltas" in vars(one)]

    def prefill(self, sequences: Sequence[ActiveSequence]) -> Tensor:
        """The logits after each sequence's tokens, ``[N, vocabulary]``."""
        logits = []
        for sequence in sequences:
            sequence.ids, sequence.state = list(sequence.tokens), {}
            logits.append(self._run(sequence, sequence.ids))
        return torch.cat(logits)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits after each of these tokens, ``[T, vocabulary]``. Changes no state."""
        logits: Tensor = self._forward(ids, use_cache=False).logits[0]
        return logits[-len(ids) :]  # skips the logits of virtual tokens (prompt tuning)

    def _forward(self, ids: Sequence[int], **settings: Any) -> Any:
        ids_1T = torch.tensor([list(ids)], device=next(self._module.parameters()).device)
        with _unshifted(self._shifted):
            return self._module(input_ids=ids_1T, return_dict=True, **settings)

    def decode(self, sequences: Sequence[ActiveSequence], tokens: Sequence[int]) -> Tensor:
        """The logits after one new token per sequence, ``[N, vocabulary]``."""
        logits = []
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.ids.append(int(token))
            if any(len(sequence.ids) == bound + 1 for bound in self._resets):  # longrope: the cached angles are stale
                sequence.state = {}
            logits.append(self._run(sequence, sequence.ids[-1:] if sequence.state else sequence.ids))
        return torch.cat(logits)

    def _run(self, sequence: ActiveSequence, ids: Sequence[int]) -> Tensor:
        out = self._forward(ids, use_cache=self._uses_cache, **sequence.state, **self._more)
        if self._uses_cache:
            made = {name: out[name] for name in out if name not in NO_CACHE and name in self._accepted}
            sequence.state = {name: value for name, value in made.items() if value is not None}
        logits: Tensor = out.logits[:, -1]
        return logits

    def fork(self, source: ActiveSequence, targets: Sequence[ActiveSequence]) -> None:
        for target in targets:
            target.ids, target.state = list(source.ids), copy.deepcopy(source.state)


@contextmanager
def _unshifted(modules: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Within the block, positions are not shifted by the images of the owner's own last forward (Qwen3.5)."""
    before = [own["rope_deltas"] for own in modules]
    for own in modules:
        own["rope_deltas"] = None
    try:
        yield
    finally:
        for own, delta in zip(modules, before, strict=True):
            own["rope_deltas"] = delta
