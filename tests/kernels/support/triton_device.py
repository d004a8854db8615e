"""Where the tests of Triton kernels run: on a card, or by Triton's interpreter, which needs none.

The interpreter runs each program of a kernel on the CPU with NumPy: slowly, and in the order of the grid, but the same
loads, masks, sums and stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from verifiers.engine.block_manager import blocks_for
from verifiers.engine.kv_cache import KVCache, Shape
from verifiers.kernels.norms import HeadNorms

HAS_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
# Interpreted, NumPy warns of lanes that are masked and of numbers that are none.
MARKS = [pytest.mark.gpu if HAS_CARD else pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# The interpreter's tl.dot takes the bits of bfloat16 for integers, and a conversion to it cuts off instead of rounding.
HALF = torch.bfloat16 if HAS_CARD else torch.float16
DTYPES = [torch.float32, *([torch.bfloat16] if HAS_CARD else []), torch.float16]
WORSE = 1.5  # how much further from the truth than plain operations half precision may be
FLOOR = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # rounding itself, beside the largest number

SHAPES = [(3, 9, 3, 64), (2, 4, 2, 24), (5, 4, 4, 16)]
SHAPES += [(2, 6, 1, 128), (4, 12, 2, 256)] if HAS_CARD else []
"""Rows, heads, key heads, dimensions."""


@pytest.fixture(autouse=True)
def exact_matmuls() -> Iterator[None]:
    """TF32 would round the reference."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def randn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def apart(one: Any, other: Any) -> float:
    """The distance, as a share of the size: over the whole tensor, so that one unlucky rounding decides nothing."""
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


def through(function: Callable[..., Any], inputs: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
    """What a function gives, and the gradients of its inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(outs, inputs, [seed.to(one.dtype) for seed, one in zip(seeds, outs, strict=True)])
    return [*(one.detach() for one in outs), *grads]


def assert_as_good(ours: Callable[..., Any], plain: Callable[..., Any], inputs: Any, seeds: Any, dtype: Any) -> None:
    """Beside the same computed in float64, ours is no further off than plain operations are, or than rounding is."""
    inputs, seeds = [x.to(dtype) for x in inputs], [x.to(dtype) for x in seeds]
    truth = through(plain, [x.double() for x in inputs], seeds)
    for one, other, true in zip(
        through(ours, inputs, seeds), through(plain, inputs, seeds), truth, strict=True
    ):  # fmt: skip
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert apart(one, true) <= max(WORSE * apart(other, true), FLOOR[dtype])


def wide(x: Any) -> Any:
    return x if x.dtype == torch.float64 else x.float()


def plain_norm(x: Any, weight: Any) -> Any:
    y = wide(x)
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def heads_of(batch: int, tokens: int, heads: int, dim: int, dtype: Any) -> Any:
    """As a projection leaves them: tokens before heads in memory."""
    return torch.randn((batch, tokens, heads, dim), device=DEVICE).to(dtype).transpose(1, 2)


def angles_of(batch: int, tokens: int, dim: int, dtype: Any) -> tuple[Any, Any]:
    angle = torch.rand((batch, tokens, dim), device=DEVICE) * 6.0
    return angle.cos().to(dtype), angle.sin().to(dtype)


def blocks_of_sequences(lengths: list[int], groups: int, dim: int, dtype: Any) -> tuple[Any, Any, KVCache]:
    """Tables (on the host, and on the card) of sequences whose blocks lie anywhere, and a cache of one layer."""
    counts = [blocks_for(length) for length in lengths]
    order = torch.randperm(sum(counts)).add(1).int().split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    cache = KVCache(Shape(1, groups, dim), sum(counts) + 1, 0, dtype=dtype, device=DEVICE)
    cache.store.normal_()
    return tables.numpy(), tables.to(DEVICE), cache


def copy_of(cache: KVCache) -> KVCache:
    layers, _, blocks, groups, _, dim = cache.store.shape
    made = KVCache(Shape(layers, groups, dim), blocks, 0, dtype=cache.store.dtype, device=cache.store.device)
    made.store.copy_(cache.store)
    return made


def norms_of(dim: int, dtype: Any) -> HeadNorms:
    q, k = ((randn(dim, seed=i).abs() + 0.5).to(dtype) for i in range(2))
    return HeadNorms(q, k, 1e-6, 0.1)
