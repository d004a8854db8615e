"""Replace the attention of a transformers model by our own function, on this thread, within a context manager.

The function is registered in transformers' registry of attention functions, so it works for any decoder that uses the
registry. The model runs its own forward; only its attention over queries, keys and values is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from verifiers.kernels.norms import HeadNorms
from verifiers.kernels.reference import rotary

NAME = "verifiers_blocks"


class Attend(Protocol):
    """Attention of one layer over queries, keys and values ``[B, heads, T, dim]``.

    An implementation with a method ``rotated`` applies head norms and rotary embedding itself (see `attend_rotated`).
    One with ``angles`` (cosines and sines of all positions) looks up those of its tokens there.
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor: ...


class _Current(threading.local):
    attend: Any = None


_current = _Current()


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of attention besides queries, keys and values."""

    scale: float
    window: int | None
    softcap: float | None
    dropout: float
    mask: Tensor | None
    is_causal: bool


def as_called(
    attend: Callable[[Any, Tensor, Tensor, Tensor, Asked], Tensor],
) -> Callable[..., tuple[Tensor, None]]:
    """Adapt a function of a module, queries, keys and values ``[B, heads, T, dim]`` to transformers' signature."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
        softcap: float | None = None, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if more.get("s_aux") is not None:
            raise NotImplementedError("attention sinks are not supported")
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        is_causal = more.get("is_causal", getattr(module, "is_causal", True)) is not False
        asked = Asked(scale, sliding_window, softcap, dropout, attention_mask, is_causal)
        return attend(module, query, key, value, asked), None

    return attention


@as_called
def paged_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
    """The attention function that transformers calls within `attending`."""
    out = _attend()(module.layer_idx, q, k, v, scale=asked.scale, window=asked.window, softcap=asked.softcap)
    return out.transpose(1, 2).contiguous()  # some models call view() on the result


def attend_rotated(
    layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    *, norms: HeadNorms | None, scale: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Head norms, rotary embedding and attention, which a backend may fuse."""
    attend = _attend()
    rotated: Callable[..., Tensor] | None = getattr(attend, "rotated", None)
    if rotated is not None:
        return rotated(layer, q, k, v, cos, sin, norms=norms, scale=scale, window=window, softcap=softcap)
    q, k = (q, k) if norms is None else norms.of(q, k)
    q, k = rotary(q, cos, sin), rotary(k, cos, sin)
    return attend(layer, q, k, v, scale=scale, window=window, softcap=softcap)


def _attend() -> Attend:
    attend: Attend | None = _current.attend
    if attend is None:
        raise RuntimeError("the engine is sampling from this model; run the model within `with engine.lock:`")
    return attend


def current() -> Any:
    """This thread's attention within `attending`; otherwise None."""
    return _current.attend


def register(name: str = NAME, function: Callable[..., Any] = paged_attention) -> None:
    """Register an attention function with transformers. Idempotent."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, function)


@contextmanager
def attending(configs: Sequence[Any], attend: Any, name: str = NAME) -> Iterator[None]:
    """Within the block, the model with these configurations uses ``attend`` as its attention on this thread.

    The model calls the function registered as ``name``, which looks up `current`.
    """
    before, implementations = _current.attend, [config._attn_implementation for config in configs]
    _current.attend = attend
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        _current.attend = before
        for config, own in zip(configs, implementations, strict=True):
            config._attn_implementation = own
