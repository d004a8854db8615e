"""What our functions compute, and what is learned through them, is what autograd finds by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

from verifiers.kernels import autograd, reference  # noqa: E402
from verifiers.trainers.learning import target_logprobs  # noqa: E402


def randn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def plain_norm(x: Any, weight: Any) -> Any:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def test_a_sum_and_its_norm() -> None:
    x, more, weight = randn(5, 6), randn(5, 6, seed=1), randn(6, seed=2)

    def ours(*given: Any) -> Any:
        return autograd.add_norm(*given, 1e-5)

    total, normed = ours(x, more, weight)
    assert torch.equal(total, x + more)
    assert torch.allclose(normed, plain_norm(x + more, weight))
    assert gradcheck(ours, (x, more, weight))
    assert gradcheck(lambda x, weight: autograd.add_norm(x, None, weight, 1e-5), (x, weight))
    assert gradcheck(lambda x: autograd.add_norm(x, None, weight.detach(), 1e-5)[1], (x,))
    assert gradcheck(lambda x: autograd.add_norm(x, None, weight, 1e-5)[0], (x,))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_rotation(rows: int) -> None:
    q, k, angle = randn(2, 5, 4, 6), randn(2, 5, 2, 6, seed=1), randn(rows, 5, 6, seed=2).detach() * 3
    cos, sin = angle.cos(), angle.sin()
    for one, given in zip(autograd.rotated(q, k, cos, sin), (q, k), strict=True):
        assert torch.allclose(one, reference.rotary(given.transpose(1, 2), cos, sin).transpose(1, 2))
    assert gradcheck(lambda q, k: autograd.rotated(q, k, cos, sin), (q, k))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_projections_of_one_input(bias: bool) -> None:
    linears = [torch.nn.Linear(4, n, bias=bias, dtype=torch.float64) for n in (3, 5, 2)]
    x = randn(2, 3, 4)
    for one, linear in zip(autograd.projected(x, linears), linears, strict=True):
        assert torch.equal(one, linear(x))
    assert gradcheck(lambda x: autograd.projected(x, linears), (x,))
    seeds = [randn(2, 3, n, seed=n).detach() for n in (3, 5, 2)]
    learned = [x, *(one for linear in linears for one in linear.parameters())]
    ours = torch.autograd.grad(autograd.projected(x, linears), learned, seeds)
    theirs = torch.autograd.grad([linear(x) for linear in linears], learned, seeds)
    assert all(torch.allclose(one, other) for one, other in zip(ours, theirs, strict=True))


def test_projections_that_are_frozen_or_watched() -> None:
    linears = [torch.nn.Linear(4, 3, dtype=torch.float64) for _ in range(2)]
    linears[0].weight.requires_grad_(False)
    sum(one.sum() for one in autograd.projected(randn(2, 4).detach(), linears)).backward()
    assert linears[0].weight.grad is None
    assert linears[1].weight.grad is not None
    heard: list[int] = []
    linears[0].register_forward_hook(lambda *_: heard.append(1))
    autograd.projected(randn(2, 4), linears)
    assert heard


@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj"), ("q_proj",)])
def test_projections_with_adapters(names: tuple[str, ...]) -> None:
    """As peft computes them, forward and backward, ranks and scales of each; and frozen layers below stay so."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)

    class Three(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, n, bias=n > 4) for n in (6, 4, 10))

    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=list(names), init_lora_weights=False, rank_pattern={"q_proj": 3}
    )
    model = peft.get_peft_model(Three().double(), config, autocast_adapter_dtype=False)
    linears = [getattr(model.base_model.model, name) for name in names]
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    learned = [one for one in model.parameters() if one.requires_grad]
    weights = [torch.randn(2, 5, one.out_features, dtype=torch.float64) for one in linears]

    def gradients(ys: Any) -> Any:
        return torch.autograd.grad(sum((y * w).sum() for y, w in zip(ys, weights, strict=True)), [x, *learned])

    found, due = autograd.projected(x, linears), [one(x) for one in linears]
    assert "Adapted" in type(found[0].grad_fn).__name__
    for one, other in zip([*found, *gradients(found)], [*due, *gradients(due)], strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    (frozen,) = torch.autograd.grad(autograd.projected(x.detach(), linears)[0].sum(), learned[:1])
    assert frozen.shape == learned[0].shape
    with torch.no_grad():
        assert torch.allclose(autograd.projected(x, linears)[0], due[0], atol=1e-12)


def test_adapters_in_another_precision_are_called_as_modules() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 6)).bfloat16(), config)
    (layer,) = model.base_model.model
    x = torch.randn(3, 8).bfloat16()
    assert layer.lora_A["default"].weight.dtype is torch.float32
    assert torch.equal(autograd.projected(x, [layer])[0], layer(x))


def test_gating() -> None:
    gate, up = randn(3, 5), randn(3, 5, seed=1)
    assert torch.allclose(autograd.gated(gate, up), F.silu(gate) * up)
    assert gradcheck(autograd.gated, (gate, up))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_queries_keys_and_values_in_one_go(bias: bool) -> None:
    linears = [torch.nn.Linear(6, n, bias=bias, dtype=torch.float64) for n in (8, 4, 4)]
    x, weight, angle = randn(2, 3, 6), randn(6, seed=1), randn(1, 3, 4, seed=2).detach() * 3
    rotary = (angle.cos(), angle.sin())

    def plain(x: Any, weight: Any) -> Any:
        q, k, v = (one(plain_norm(x, weight)).unflatten(-1, (-1, 4)) for one in linears)
        return x, *autograd.rotated(q, k, *rotary), v

    def ours(x: Any, weight: Any) -> Any:
        return autograd.projected_heads(x, weight, 1e-5, linears, 4, rotary)

    assert_as(ours, plain, [x, weight], [one for linear in linears for one in linear.parameters()])


def test_a_feed_forward_in_one_go() -> None:
    x, more, weight = randn(2, 3, 6), randn(2, 3, 6, seed=1), randn(6, seed=2)
    gate, up, down = randn(5, 6, seed=3), randn(5, 6, seed=4), randn(6, 5, seed=5)

    def plain(x: Any, more: Any, weight: Any, gate: Any, up: Any, down: Any) -> Any:
        normed = plain_norm(x + more, weight)
        return x + more + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)

    def ours(x: Any, more: Any, weight: Any, *weights: Any) -> Any:
        return autograd.fed_forward(x, more, weight, 1e-5, *weights)

    assert_as(ours, plain, [x, more, weight, gate, up, down])
    frozen = [one.detach() for one in (weight, gate, up, down)]
    assert_as(lambda x, more: ours(x, more, *frozen), lambda x, more: plain(x, more, *frozen), [x, more])


def assert_as(ours: Any, plain: Any, inputs: list[Any], weights: Sequence[Any] = ()) -> None:
    """The same numbers, and the same gradients of everything that can be learned."""
    mine, theirs = (one if isinstance(one, tuple) else (one,) for one in (ours(*inputs), plain(*inputs)))
    seeds = [randn(*one.shape, seed=i).detach() for i, one in enumerate(theirs)]
    learned = [*inputs, *weights]
    mine_back, their_back = (torch.autograd.grad(outs, learned, seeds) for outs in (mine, theirs))
    for one, other in zip((*mine, *mine_back), (*theirs, *their_back), strict=True):
        assert torch.allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_the_logprobs_of_a_head(monkeypatch: Any, temperature: float, chunks: int, bias: bool) -> None:
    n, vocabulary = 12, 31
    monkeypatch.setattr(target_logprobs, "CHUNK_BYTES_ELSEWHERE", vocabulary * 4 * n // chunks)
    hidden, weight = (
        randn(*shape, seed=i).detach().float().requires_grad_() for i, shape in enumerate([(n, 8), (vocabulary, 8)])
    )
    bias_V = randn(vocabulary, seed=3).detach().float().requires_grad_() if bias else None
    target = torch.arange(n) * 7 % vocabulary
    learned = [one for one in (hidden, weight, bias_V) if one is not None]
    seed = randn(n, seed=5).detach().float()
    ours = target_logprobs.fused_logprobs(hidden, weight, bias_V, target, temperature)
    theirs = -F.cross_entropy(F.linear(hidden, weight, bias_V) / temperature, target, reduction="none")
    assert torch.allclose(ours, theirs, atol=1e-5)
    first = torch.autograd.grad(ours, learned, seed, retain_graph=True)
    again = torch.autograd.grad(ours, learned, seed)  # the logits that were kept are gone by then
    for one, more, other in zip(first, again, torch.autograd.grad(theirs, learned, seed), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
        assert torch.allclose(more, other, atol=1e-5)


def test_a_head_that_is_not_learned_keeps_nothing() -> None:
    hidden, weight, target = torch.randn(4, 8), torch.randn(31, 8), torch.arange(4)
    with torch.no_grad():
        assert not target_logprobs.fused_logprobs(hidden, weight, None, target).requires_grad
    assert target_logprobs.fused_logprobs(hidden[:0], weight, None, target[:0]).shape == (0,)
