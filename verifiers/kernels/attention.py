"""Attention of a transformers model → a function of ours, on this thread, for as long as a block lasts.

The function here is registered with transformers under a name of its own, so any decoder that asks that registry for
its attention works: the model's forward is its own, only what is done with queries, keys and values is ours.
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
    """What one forward does with the queries, keys and values ``[B, heads, T, dim]`` of a layer.

    One that has a method ``rotated`` besides applies the norms of heads and the rotary embedding itself (see
    `attend_rotated`).
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor: ...


class _Current(threading.local):
    attend: Any = None


_current = _Current()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a layer asks of attention besides its queries, keys and values."""

    scale: float
    window: int | None
    softcap: float | None
    dropout: float
    mask: Tensor | None
    is_causal: bool


def as_called(
    attend: Callable[[Any, Tensor, Tensor, Tensor, Asked], Tensor],
) -> Callable[..., tuple[Tensor, None]]:
    """A function of a module and its queries, keys and values ``[B, heads, T, dim]`` → as transformers calls it."""

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
    """The attention function that transformers calls while a block of `attending` lasts."""
    out = _attend()(module.layer_idx, q, k, v, scale=asked.scale, window=asked.window, softcap=asked.softcap)
    return out.transpose(1, 2).contiguous()  # some models take a view of it


def attend_rotated(
    layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    *, norms: HeadNorms | None, scale: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention of queries and keys before their norms and rotary embedding, which a backend may fuse with it."""
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
        raise RuntimeError("the engine is sampling from this model just now: run it `with engine.lock:`")
    return attend


def current() -> Any:
    """What attends on this thread, if anything of ours does."""
    return _current.attend


def register(name: str = NAME, function: Callable[..., Any] = paged_attention) -> None:
    """Make an attention function known to transformers; doing it twice changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, function)


@contextmanager
def attending(configs: Sequence[Any], attend: Any, name: str = NAME) -> Iterator[None]:
    """While this lasts, the model that these configurations belong to attends by ``attend``, on this thread.

    It calls the function that is registered under this name, which asks for `current`.
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
