"""Choose rows, length and KV cache size that fit into the free memory, before weights are loaded.

The KV cache takes tokens × bytes per token over all layers. Sequences share it block by block, so it needs room for
only one row at full length, not for all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verifiers.engine.kv_cache import Shape
from verifiers.kernels.prove import max_positions, rope_bounds, text_config

# Defaults if no size is requested: rows, length, the tokens that each row should have room for, and the share of the
# available memory to use.
ROWS, ROWS_CUDA = 32, 1024
LENGTH = 8192
SHORTEST = 128
SHARE, SHARE_CUDA = 0.5, 0.9
LEFT_FREE = 0.1  # share of the free memory left for activations, the allocator's overhead, and other programs
LOGIT_COPIES = 4  # float32 tensors [rows, vocabulary] that are alive at once during sampling
HALVED = ', or half the memory: dtype="bfloat16" (vf serve --dtype bfloat16)'


class WillNotFitError(ValueError):
    """A model with the requested rows, length and cache, or a training, needs more memory than is available."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``rows`` requests run at once, of at most ``length`` tokens each. They share a KV cache of ``cache_tokens``."""

    rows: int
    length: int
    cache_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """Free memory, and the size of the weights, a token and a row, in bytes."""

    free: int
    weights: int
    per_token: int
    per_row: int

    def room(self, share: float = 1.0) -> float:
        """Bytes left for the KV cache and logits, after the weights."""
        return (self.free * (1 - LEFT_FREE) - self.weights) * share

    def tokens_at(self, rows: int, share: float = 1.0) -> int:
        """How many tokens' keys and values fit in addition to the logits of ``rows`` rows."""
        return max(0, int((self.room(share) - rows * self.per_row) // self.per_token))


def plan(
    config: Any,
    *,
    rows: int | None = None,
    length: int | None = None,
    cache_tokens: int | None = None,
    dtype: torch.dtype,
    device: str | torch.device,
    weights_loaded: bool,
    free_bytes: int | None = None,
) -> Plan:
    """Choose the sizes that were not requested. Raises ``WillNotFitError`` if the requested ones do not fit.

    With ``weights_loaded`` the weights are not counted again. ``free_bytes`` is measured if not given.
    """
    device = torch.device(device)
    text = text_config(config)
    longest = max_positions(text)
    _check(longest, rows=rows, length=length, cache_tokens=cache_tokens)
    memory = _Memory(
        free=free_memory(device) if free_bytes is None else free_bytes,
        weights=0 if weights_loaded else weights_bytes(config, dtype),
        per_token=_bytes_per_token(config, dtype),
        per_row=text.vocab_size * 4 * LOGIT_COPIES,
    )
    if memory.room() <= 0:
        need = f"{_gb(memory.weights)} as {str(dtype).removeprefix('torch.')}"
        raise WillNotFitError(
            f"the weights need {need}, but {_gb(memory.free)} are free on {device}: "
            f"use a smaller model or another device{HALVED if dtype.itemsize == 4 else ''}"
        )
    # Beyond a bound of RoPE (longrope), sequences cannot be batched. Such a length is used only if requested.
    aim = min([LENGTH, *([] if longest is None else [longest]), *rope_bounds(config)])
    most_rows, share = (ROWS_CUDA, SHARE_CUDA) if device.type == "cuda" else (ROWS, SHARE)
    rows = rows or _choose_rows(memory, most_rows, share)
    fits = memory.tokens_at(rows, share) or memory.tokens_at(rows)
    length = length or min(aim, max(_power_of_two(fits), min(SHORTEST, aim)))
    tokens = min(cache_tokens or max(fits, length), rows * length)
    if tokens > memory.tokens_at(rows):
        raise WillNotFitError(_refusal(memory, rows, tokens, device))
    return Plan(rows=rows, length=length, cache_tokens=tokens)


def _bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    try:
        return Shape.of(config).bytes_per_token(dtype) or 1
    except Exception:  # foreign code: no attention, or a custom layout; such a model creates its own caches
        return 1


def _check(longest: int | None, **asked: int | None) -> None:
    for name, value in asked.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    length = asked["length"]
    if length is not None and longest is not None and length > longest:
        raise ValueError(f"length={length:,} is more than the {longest:,} positions that the model supports")


def _choose_rows(memory: _Memory, rows: int, share: float) -> int:
    """The largest number of rows, by halving, that have room for `SHORTEST` tokens each."""
    while rows > 1 and memory.tokens_at(rows, share) < rows * SHORTEST:
        rows //= 2
    return rows


def _refusal(memory: _Memory, rows: int, tokens: int, device: torch.device) -> str:
    fewer = next((n for n in (_power_of_two(rows) >> i for i in range(1, 64)) if memory.tokens_at(n) >= tokens), 0)
    shorter = _power_of_two(memory.tokens_at(rows))
    ways = [f"rows={fewer}"] if fewer else []
    ways += [f"length={shorter}"] if shorter >= SHORTEST else []
    advice = f"use {' or '.join(ways)}" if ways else "use a smaller model, or both fewer rows and a shorter length"
    weights = f", in addition to {_gb(memory.weights)} of weights" if memory.weights else ""
    return (
        f"keys and values of {tokens:,} tokens need {_gb(tokens * memory.per_token)}, and the logits of {rows:,} rows "
        f"{_gb(rows * memory.per_row)}{weights}; {_gb(memory.free)} are free on {device}: {advice}"
    )


def _power_of_two(n: int) -> int:
    """The largest power of two that is not above ``n``; 0 for 0.

    >>> [_power_of_two(n) for n in (0, 1, 7, 8)]
    [0, 1, 4, 8]
    """
    return 1 << (n.bit_length() - 1) if n > 0 else 0


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"


# --- measuring ----------------------------------------------------------------------------------------------------


def on_meta(config: Any, **options: Any) -> Any:
    """The model of a configuration on the meta device: no weights are allocated."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # foreign code, with values from a file
        raise ValueError(f"no model can be built from its configuration: {type(error).__name__}: {error}") from error


def weights_bytes(config: Any, dtype: torch.dtype) -> int:
    """The bytes of the parameters. Tied ones count once."""
    return sum(one.numel() * one.element_size() for one in on_meta(config, dtype=dtype).parameters())


def free_memory(device: str | torch.device) -> int:
    """Bytes that can still be allocated on the GPU, or on this machine within its container's limits."""
    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken = torch.cuda.memory_allocated(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)
        return int(max(0, min(free + torch.cuda.memory_reserved(device), share * total) - taken))
    within = _container_free()
    return min(_machine_free(), within) if within is not None else _machine_free()


def _machine_free() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # macOS: half is a safe guess


def _container_free() -> int | None:
    """Bytes left under the control group's limit, counting its file cache as free; None without a limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
        stats = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(stats.get("inactive_file", 0))) if limit.isdigit() else None
