"""Triton kernels of training give the numbers and gradients of plain operations, on a card or interpreted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import torch.nn.functional as F  # noqa: E402

from tests.kernels.support.triton_device import (  # noqa: E402
    DEVICE,
    DTYPES,
    HAS_CARD,
    MARKS,
    assert_as_good,
    plain_norm,
    randn,
    through,
    wide,
)
from tests.kernels.support.triton_device import exact_matmuls as exact_matmuls  # noqa: E402  # a fixture
from verifiers.kernels import autograd, reference  # noqa: E402
from verifiers.kernels.norms import HeadNorms  # noqa: E402
from verifiers.trainers.learning import target_logprobs  # noqa: E402

pytestmark = [
    *MARKS,
    # Told by whichever test is the first whose backward pass multiplies: autograd does it in a thread of its own.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

EPSILON = 1e-5


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU go through the kernels of a card, too."""
    from verifiers.kernels.cuda import learning

    for module in (autograd, target_logprobs):
        monkeypatch.setattr(module, "kernels_for", lambda _: learning)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 24), (777, 576), (5000, 64), (300, 2048), (33, 5120)], ids=str)
def test_a_sum_and_its_norm(shape: Any, dtype: Any) -> None:
    x, more, past, grad = (randn(*shape, seed=i) for i in range(4))
    weight = randn(shape[1], seed=5).abs() + 0.5
    assert_as_good(
        lambda x, more, weight: autograd.add_norm(x, more, weight, 1e-5),
        lambda x, more, weight: (x + more, plain_norm(x + more, weight)),
        (x, more, weight), (past, grad), dtype,
    )  # fmt: skip
    assert_as_good(
        lambda x, weight: autograd.add_norm(x, None, weight, 1e-5),
        lambda x, weight: (x + 0, plain_norm(x, weight)),
        (x, weight), (past, grad), dtype,
    )  # fmt: skip


def test_a_norm_that_is_not_trained_or_not_followed() -> None:
    x, weight = randn(50, 576).requires_grad_(), randn(576, seed=1)
    _, normed = autograd.add_norm(x, None, weight, 1e-5)
    (mine,) = torch.autograd.grad(normed.sum(), x)
    (its,) = torch.autograd.grad(plain_norm(x, weight).sum(), x)
    assert torch.allclose(mine, its, atol=1e-5)
    total, _ = autograd.add_norm(x, x, weight, 1e-5)
    assert torch.equal(torch.autograd.grad(total.sum(), x)[0], torch.full_like(x, 2.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("one_angle", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize(
    "shape", [(3, 50, 9, 3, 64), (2, 33, 4, 2, 24), (1, 700, 4, 4, 16), (2, 65, 6, 1, 128), (4, 7, 12, 2, 256)], ids=str
)
def test_a_rotation_and_its_way_back(shape: Any, one_angle: bool, dtype: Any) -> None:
    batch, tokens, heads, groups, dim = shape
    angle = randn(1 if one_angle else batch, tokens, dim, seed=9) * 3
    inputs = [randn(batch, tokens, n, dim, seed=n) for n in (heads, groups)]

    def plain(*both: Any) -> Any:
        cos, sin = (x.to(both[0].dtype) for x in (angle.cos().to(dtype), angle.sin().to(dtype)))
        return tuple(reference.rotary(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in both)

    assert_as_good(
        lambda q, k: autograd.rotated(q, k, angle.cos().to(dtype), angle.sin().to(dtype)),
        plain, inputs, [randn(*x.shape, seed=3) for x in inputs], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 1536), (501, 1000)], ids=str)
def test_gating_and_its_way_back(shape: Any, dtype: Any) -> None:
    gate, up, grad = (randn(*shape, seed=i) * 4 for i in range(3))
    assert_as_good(autograd.gated, lambda gate, up: F.silu(gate) * up, (gate, up), (grad,), dtype)


def test_gates_far_from_zero_have_gradients_that_are_numbers() -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4], device=DEVICE)
    ones = torch.ones_like(gate)
    for one, other in zip(
        through(autograd.gated, (gate, ones), (ones,)),
        through(lambda x, up: F.silu(x) * up, (gate, ones), (ones,)),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocabulary", [97, 9000, *([4096, 49152, 50257, 262144] if HAS_CARD else [])])
def test_the_logprobs_of_a_head(monkeypatch: Any, vocabulary: int, temperature: float, dtype: Any) -> None:
    n, width = 70, 64
    most = vocabulary * dtype.itemsize * 30
    monkeypatch.setitem(target_logprobs.CHUNK_BYTES, DEVICE.type, most)
    assert len(target_logprobs.chunks_of(n, vocabulary * dtype.itemsize, DEVICE)) == 3
    hidden, weight, bias = randn(n, width), randn(vocabulary, width, seed=1) * 0.3, randn(vocabulary, seed=2)
    target = torch.arange(n, device=DEVICE) * 7919 % vocabulary
    target[0] = vocabulary - 1

    def plain(hidden: Any, weight: Any, bias: Any = None) -> Any:
        return -F.cross_entropy(wide(F.linear(hidden, weight, bias)) / temperature, target, reduction="none")

    def ours(hidden: Any, weight: Any, bias: Any = None) -> Any:
        return target_logprobs.fused_logprobs(hidden, weight, bias, target, temperature)

    for inputs in ((hidden, weight), (hidden, weight, bias)):
        assert_as_good(ours, plain, inputs, (randn(n, seed=3),), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_projections_of_one_input(bias: bool, dtype: Any) -> None:
    linears = [torch.nn.Linear(64, n, bias=bias, device=DEVICE, dtype=dtype) for n in (96, 32, 32)]

    def ours(x: Any) -> Any:
        return autograd.projected(x, linears) if x.dtype == dtype else plain(x)

    def plain(x: Any) -> Any:
        weights = [(one.weight.to(x.dtype), None if one.bias is None else one.bias.to(x.dtype)) for one in linears]
        return tuple(F.linear(x, *both) for both in weights)

    assert_as_good(ours, plain, (randn(3, 50, 64),), [randn(3, 50, n, seed=n) for n in (96, 32, 32)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_keys_and_values_in_one_go(dtype: Any) -> None:
    angle = randn(1, 50, 32, seed=9) * 3
    shapes = [(3, 50, 64), (64,), (128, 64), (64, 64), (64, 64)]
    inputs = [randn(*shape, seed=i) * (1 if i < 2 else 0.1) for i, shape in enumerate(shapes)]
    seeds = [randn(*shape, seed=i + 5) for i, shape in enumerate([(3, 50, 64), (3, 50, 4, 32), *[(3, 50, 2, 32)] * 2])]

    def ours(x: Any, weight: Any, *weights: Any) -> Any:
        linears = [SimpleNamespace(weight=one, bias=None) for one in weights]
        return autograd.projected_heads(x, weight, 1e-5, linears, 32, (angle.cos().to(dtype), angle.sin().to(dtype)))

    def plain(x: Any, weight: Any, *weights: Any) -> Any:
        cos, sin = (one.to(dtype).to(x.dtype) for one in (angle.cos(), angle.sin()))
        q, k, v = (F.linear(plain_norm(x, weight), one).unflatten(-1, (-1, 32)) for one in weights)
        return x + 0, *(reference.rotary(one.transpose(1, 2), cos, sin).transpose(1, 2) for one in (q, k)), v

    assert_as_good(ours, plain, inputs, seeds, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_feed_forward_in_one_go(dtype: Any) -> None:
    shapes = [(3, 50, 64), (3, 50, 64), (64,), (96, 64), (96, 64), (64, 96)]
    inputs = [randn(*shape, seed=i) * (1 if i < 3 else 0.1) for i, shape in enumerate(shapes)]

    def plain(x: Any, more: Any, weight: Any, gate: Any, up: Any, down: Any) -> Any:
        normed = plain_norm(x + more, weight)
        return x + more + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)

    def ours(x: Any, more: Any, weight: Any, *weights: Any) -> Any:
        return autograd.fed_forward(x, more, weight, 1e-5, *weights)

    assert_as_good(ours, plain, inputs, (randn(3, 50, 64, seed=8),), dtype)


def test_a_head_can_be_gone_back_through_twice_or_not_at_all() -> None:
    hidden, weight = randn(40, 32).requires_grad_(), randn(97, 32, seed=1)
    target = torch.arange(40, device=DEVICE)
    out = target_logprobs.fused_logprobs(hidden, weight, None, target).sum()
    first = torch.autograd.grad(out, hidden, retain_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(out, hidden)[0], first)
    with torch.no_grad():
        assert not target_logprobs.fused_logprobs(hidden, weight, None, target).requires_grad
    assert target_logprobs.fused_logprobs(hidden[:0], weight, None, target[:0]).shape == (0,)


def test_logits_that_are_not_numbers_are_not_hidden() -> None:
    hidden, weight = randn(4, 32), randn(97, 32, seed=1)
    hidden[1] = float("nan")
    found = target_logprobs.fused_logprobs(hidden, weight, None, torch.zeros(4, dtype=torch.int64, device=DEVICE))
    assert torch.isfinite(found).tolist() == [True, False, True, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 50, 9, 3, 64), (2, 33, 4, 2, 24), (2, 65, 6, 1, 128)], ids=str)
def test_norms_and_a_rotation_and_their_way_back(shape: Any, dtype: Any) -> None:
    batch, tokens, heads, groups, dim = shape
    angle = randn(1, tokens, dim, seed=9) * 3
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    inputs = [randn(batch, tokens, n, dim, seed=n) for n in (heads, groups)]
    inputs += [randn(dim, seed=i).abs() + 0.5 for i in range(2)]

    def plain(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        normed = plain_norm(q, q_weight), plain_norm(k, k_weight)
        return tuple(
            reference.rotary(x.transpose(1, 2), cos.to(x.dtype), sin.to(x.dtype)).transpose(1, 2) for x in normed
        )

    def ours(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        return autograd.rotated(q, k, cos, sin, HeadNorms(q_weight, k_weight, EPSILON, EPSILON))

    assert_as_good(ours, plain, inputs, [randn(*x.shape, seed=3) for x in inputs[:2]], dtype)
