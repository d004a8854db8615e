"""One sequence at a time, each with a cache of the model's own making: exact for any causal model, and slower."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verifiers.engine.kv_cache import Segment
from verifiers.kernels.prove import rope_bounds

NO_CACHE = {"loss", "logits", "hidden_states", "attentions", "cross_attentions", "router_logits", "aux_loss"}


@dataclass(slots=True)
class _Sequence:
    """The tokens of a row so far, and the cache that the model made of all but the newest."""

    ids: list[int]
    cache: dict[str, Any] = field(default_factory=dict)


class SequentialCache:
    """The rows of an engine whose model keeps its own state: attention, convolutions, recurrences.

    It takes the place of the slot cache. A model whose cache does not give the numbers of its plain forward is run
    without one (``uses_cache=False``): every token then costs a forward over the whole sequence.
    """

    def __init__(self, module: Any, *, uses_cache: bool) -> None:
        self._module, self._uses_cache = module, uses_cache
        self._accepted = set(inspect.signature(_base(module).forward).parameters)
        self._more = {"logits_to_keep": 1} if "logits_to_keep" in self._accepted else {}
        self._resets = rope_bounds(module.config)
        self._rows: dict[int, _Sequence] = {}

    def prefill(self, ids: Sequence[int], segments: Sequence[Segment]) -> Tensor:
        """The logits behind each prompt, ``[N, vocabulary]``."""
        logits = []
        for segment in segments:
            row = self._rows[segment.slot] = _Sequence(list(ids[segment.start : segment.end]))
            logits.append(self._run(row, row.ids))
        return torch.cat(logits)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The logits behind each of these tokens, ``[T, vocabulary]``; no row is touched."""
        device = next(self._module.parameters()).device
        tensor = torch.tensor([list(ids)], device=device)
        logits: Tensor = self._module(input_ids=tensor, use_cache=False, return_dict=True).logits[0]
        return logits

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """The logits behind one new token for each of the first rows, which are the live ones."""
        logits = []
        for i, token in enumerate(tokens):
            row = self._rows[i]
            row.ids.append(int(token))
            if any(len(row.ids) == bound + 1 for bound in self._resets):
                row.cache = {}
            logits.append(self._run(row, row.ids[-1:] if row.cache else row.ids))
        return torch.cat(logits)

    def _run(self, row: _Sequence, ids: Sequence[int]) -> Tensor:
        device = next(self._module.parameters()).device
        tensor = torch.tensor([list(ids)], device=device)
        out = self._module(
            input_ids=tensor, use_cache=self._uses_cache, return_dict=True, **row.cache, **self._more
        )  # fmt: skip
        if self._uses_cache:
            made = {name: out[name] for name in out if name not in NO_CACHE and name in self._accepted}
            row.cache = {name: value for name, value in made.items() if value is not None}
        logits: Tensor = out.logits[:, -1]
        return logits

    # --- as the slot cache --------------------------------------------------------------------------------------------

    def move(self, source: int, target: int, n: int) -> None:
        if source != target and source in self._rows:
            self._rows[target] = self._rows.pop(source)

    def swap(self, one: int, other: int, n_one: int, n_other: int) -> None:
        here, there = self._rows.pop(one, None), self._rows.pop(other, None)
        self._rows |= {row: found for row, found in ((one, there), (other, here)) if found is not None}

    def clear(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def keep_first(self, n: int) -> None:
        """Let go of all rows but the first ones, which are live: a cache takes memory."""
        self._rows = {row: one for row, one in self._rows.items() if row < n}

    def spread(self, source: int, targets: Sequence[int], n: int) -> None:
        for target in targets:
            self._rows[target] = copy.deepcopy(self._rows[source])


def _base(module: Any) -> Any:
    return module.get_base_model() if hasattr(module, "get_base_model") else module
