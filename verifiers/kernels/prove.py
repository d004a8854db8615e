"""Check that two implementations of a model agree, on prompts longer than its windows and with realistic weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verifiers.kernels.modules import HOOKS, base_model
from verifiers.signatures import signature_of

SHORT, LONG = 11, 40  # lengths of the prompts that every model is tested on
PAST, BEFORE = 8, 4  # tokens by which one prompt exceeds a bound and another stays below it
PAD_EVERY = 3  # every third token of a prompt is padding
CONTEXT = 12  # tokens of the prompt whose order is changed in `_order_effect`

UNSTEADY = "its own forward is not deterministic, even in evaluation mode"

_BOUND = re.compile(r"window|chunk|local_attention")
_NO_BOUND = re.compile(r"layer|feed_forward")
_SELECTED = re.compile(r"index(er)?_(topk|budget)(_blocks)?$")  # keys that a sparse attention selects
_GROUPED = re.compile(r"compress_r(ate|atio)|index_block_size")  # tokens behind one selected key
_SPECIAL = re.compile(r"_token_(id|index)$")

SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the norms' weights
LEAST_MOVED = 0.3  # standard deviations of the logits by which reordering the context changes a trained model's logits
LEAST_LOGIT = 20.0  # trained models have a larger maximum logit; large enough to reveal caps and scales of logits

# Rounding errors relative to the largest number, in float32 and in half precision. Over layers they accumulate as a
# random walk.
WITHIN, WITHIN_HALF = 2e-3, 4e-2


def agree(theirs: Sequence[Tensor], ours: Sequence[Tensor], rounds: int = 1) -> bool:
    """Whether these tensors are equal up to rounding. Zeros agree with zeros: see `is_nonzero`."""
    if len(theirs) != len(ours):
        return False
    for one, other in zip(theirs, ours, strict=True):
        if not isinstance(one, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        within = (WITHIN if one.dtype is torch.float32 else WITHIN_HALF) * math.sqrt(rounds)
        size, apart = one.float().abs().max(), (one.float() - other.float()).abs().max()
        if not bool(apart <= within * size):
            return False
    return True


def is_nonzero(numbers: Sequence[Any]) -> bool:
    """Whether each of these tensors has a non-zero value. Comparing only zeros would prove nothing."""
    return all(isinstance(one, Tensor) and bool(one.abs().max() > 0) for one in numbers)


# --- prompts ----------------------------------------------------------------------------------------------------------


def text_config(model_config: Any) -> Any:
    return model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config


def max_positions(model_config: Any) -> int | None:
    """The maximum number of positions of a model; None without a limit (-1 in some configurations)."""
    longest = getattr(text_config(model_config), "max_position_embeddings", None)
    return longest if longest and longest > 0 else None


def bounds(config: Any, longest: int) -> list[int]:
    """Sequence lengths below ``longest`` beyond which attention changes: windows, chunks, sparse selection, RoPE.

    >>> from types import SimpleNamespace
    >>> rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    >>> config = SimpleNamespace(sliding_window=8, max_window_layers=3, rope_parameters=rope)
    >>> bounds(config, 128), bounds(config, 32)
    ([8, 64], [8])
    """
    found: set[int] = set(rope_bounds(config))
    selected, grouped = set(), {1}
    text = text_config(config)
    for name, value in _numbers(text.to_dict() if hasattr(text, "to_dict") else vars(text)):
        if _BOUND.search(name) and not _NO_BOUND.search(name):
            found.add(value)
        elif _SELECTED.search(name):
            selected.add(value)
        elif _GROUPED.search(name):
            grouped.add(value)
    found |= {count * size for count in selected for size in grouped}
    return sorted(value for value in found if 1 < value < longest)


def _numbers(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, int]]:
    """All integers in nested settings, with their dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{within}{name}.")
        elif type(value) is int:
            yield f"{within}{name}", value


def rope_bounds(config: Any) -> list[int]:
    """Lengths beyond which all rotary angles of a sequence change (longrope), so that cached keys become invalid."""
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, Mapping))]
    found = {
        one.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for one in kinds
        if "longrope" in (one.get("rope_type"), one.get("type"))
    }
    return sorted(value for value in found if isinstance(value, int))


def place_bounds(config: Any, row: int) -> list[int]:
    """Lengths that reach positions at which queries are scaled (Llama 4), for rows of ``row`` tokens."""
    bound = getattr(text_config(config), "floor_scale", None)
    return [int(bound) + PAST] if bound and bound < row else []


def prompt_lengths(config: Any, longest: int, new: int) -> list[int]:
    """Lengths of a long and a short prompt, and for each bound one prompt beyond it and one just below it.

    ``longest`` limits a prompt plus its ``new`` tokens. The new tokens cross a bound that is close to this limit.
    """
    wanted = [LONG, SHORT]
    for bound in bounds(config, longest):
        wanted += [bound + PAST, bound - BEFORE]
    return [max(1, min(length, longest - new)) for length in wanted]


def prompts(config: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths with arbitrary tokens. The only special token is padding, because a model may sample it
    but not count it as a position."""
    text = text_config(config)
    settings = [vars(one) for one in (config, text) if hasattr(one, "__dict__")]
    special = {v for one in settings for k, v in one.items() if _SPECIAL.search(k) and type(v) is int}
    plain = [token for token in range(min(int(text.vocab_size), 4096)) if token not in special] or [0]
    generator = torch.Generator().manual_seed(0)  # leaves the global generator alone
    drawn = [torch.randint(len(plain), (length,), generator=generator).tolist() for length in lengths]
    made = [[plain[i] for i in one] for one in drawn]
    pad = pad_id(config)
    for one in made if pad is not None else ():
        one[PAD_EVERY:-1:PAD_EVERY] = [pad] * len(one[PAD_EVERY:-1:PAD_EVERY])
    return made


def pad_id(config: Any) -> int | None:
    """The padding token of a model, if it has one within its vocabulary."""
    text = text_config(config)
    found = getattr(text, "pad_token_id", None)
    found = getattr(config, "pad_token_id", None) if found is None else found
    return found if isinstance(found, int) and 0 <= found < int(text.vocab_size) else None


def is_steady(model: Any, length: int) -> bool:
    """Whether a model's own forward is deterministic. With random hashing, for example, it is not."""
    (ids,) = prompts(model.config, [length])
    one, other = (plain_logits(model, ids, 1) for _ in range(2))
    eps = torch.finfo(next(model.parameters()).dtype).eps
    return bool((one - other).abs().max() <= one.abs().max() * eps**0.5)


def plain_logits(model: Any, ids: Sequence[int], keep: int) -> Tensor:
    """The logits of the last ``keep`` positions of one sequence, from the model's own forward without a cache.

    If the sequence exceeds one of `rope_bounds`, positions before the bound are computed from the sequence cut at the
    bound, as they were when their tokens were sampled.
    """
    device = next(model.parameters()).device
    # The logits of all positions could take gigabytes.
    can_keep = "logits_to_keep" in signature_of(base_model(model).forward).parameters
    first, parts = len(ids) - keep, []
    for end in (*(bound for bound in rope_bounds(model.config) if first < bound < len(ids)), len(ids)):
        more = {"logits_to_keep": end - first} if can_keep else {}
        logits: Tensor = model(input_ids=torch.tensor([list(ids[:end])], device=device), use_cache=False, **more).logits
        parts.append(logits[0, first - end :].float())
        first = end
    return torch.cat(parts)


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """Remove all hooks of a model within the block, and ask for no router logits, which transformers takes by hooks."""
    configs = model.config, text_config(model.config)
    asking = [one for one in configs if getattr(one, "output_router_logits", False)]
    hooks = [vars(module)[name] for module in model.modules() for name in HOOKS if vars(module)[name]]
    before = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    for config in asking:
        config.output_router_logits = False
    try:
        yield
    finally:
        for config in asking:
            config.output_router_logits = True
        for one, kept in zip(hooks, before, strict=True):
            one.update(kept)


# --- a realistic scale ------------------------------------------------------------------------------------------------


@contextmanager
def realistic(model: Any) -> Iterator[bool]:
    """Within the block, an untrained model has attention scores and logits as large as a trained one's.

    Fresh weights are so small that attention is nearly uniform and logits are nearly zero, so a wrong position, mask or
    cap would hardly be visible. The weights of the norms, which are few, are scaled, then restored exactly. Yields
    whether the order of the context then changes the logits; if not, a test on this model would prove nothing.
    """
    inner, final = _norm_weights(model)
    saved = [(weight, weight.detach().clone()) for weight in (*inner, *final)]
    try:
        with torch.no_grad():
            moved = _scale_up(model, inner, final)
        yield moved >= LEAST_MOVED
    finally:
        with torch.no_grad():
            for weight, value in saved:
                weight.copy_(value)


def _scale_up(model: Any, inner: Sequence[Tensor], final: Sequence[Tensor]) -> float:
    before = 1.0
    for scale in SCALES:
        _add(inner, scale - before)
        before = scale
        moved, largest = _order_effect(model)
        if moved >= LEAST_MOVED:
            break
    if 0 < largest < LEAST_LOGIT:
        _add(final, LEAST_LOGIT / largest - 1)
    return moved


def _add(weights: Sequence[Tensor], amount: float) -> None:
    """Scale untrained norms by adding to their weights. Some norms multiply by the weight, others by 1 + weight."""
    for weight in weights if amount else ():
        weight.add_(amount)


def _norm_weights(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Weights of the norms within the layers, and of those after the layers."""
    inner: list[Tensor] = []
    final: list[Tensor] = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        is_norm = "norm" in type(module).__name__.lower()
        if is_norm and isinstance(weight, Tensor) and weight.dim() == 1 and weight.is_floating_point():
            (inner if re.search(r"(^|\.)\d+\.", name) else final).append(weight)
    return inner, final


def _order_effect(model: Any) -> tuple[float, float]:
    """The largest change of the next token's logits, in standard deviations, when the context is reversed, and the
    largest logit."""
    (ids,) = prompts(model.config, [CONTEXT])
    one, other = (plain_logits(model, context, 1)[0] for context in (ids, [*ids[-2::-1], ids[-1]]))
    deviation = float(one.std())
    centered = one - one.mean()
    return (float((one - other).abs().max()) / deviation if deviation else 0.0), float(centered.abs().max())
