"""Matrix products of float32 on a CPU: oneDNN's are those of PyTorch, whatever lies how in memory."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.nn.functional import linear

from verifiers.kernels import autograd
from verifiers.kernels.cpu import matmul

K, N = 192, 256


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that MKL does not know."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    for module in (matmul, autograd):
        monkeypatch.setattr(module, "uses_onednn", lambda: True)


def close(found: Tensor, expected_f64: Tensor) -> None:
    torch.testing.assert_close(found, expected_f64.float(), atol=1e-4, rtol=1e-5)


def given(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


INPUTS = {
    "many rows": given(300, K),
    "one row": given(1, K),
    "no rows": given(0, K),
    "sequences": given(2, 30, K),
    "a part of each sequence": given(2, 30, K)[:, 7:],
    "columns of something wider": given(40, 3 * K)[:, K : 2 * K],
    "transposed": given(K, 40).t(),
    "the same row": given(1, K).expand(40, K),
}


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["weight", "transposed weight"])
def test_a_projection_is_what_float64_gives(name: str, is_transposed: bool) -> None:
    x, bias = INPUTS[name], given(N)
    weight = given(K, N).t() if is_transposed else given(N, K)
    with torch.no_grad():
        assert matmul.suits(x, weight)
        close(matmul.linear(x, weight), x.double() @ weight.double().t())
        close(matmul.linear(x, weight, bias), x.double() @ weight.double().t() + bias.double())


@pytest.mark.usefixtures("onednn")
def test_products_are_added_and_written_where_they_belong() -> None:
    a, b, total = given(300, K), given(K, N), given(300, N)
    before, place = total.clone(), torch.zeros(2, 300, N)
    with torch.no_grad():
        close(matmul.matmul(a, b), a.double() @ b.double())
        assert matmul.matmul(a, b, out=place[1]).data_ptr() == place[1].data_ptr()
        close(place[1], a.double() @ b.double())
        assert not place[0].any()
        close(matmul.add_matmul(total, a, b), before.double() + a.double() @ b.double())
        assert torch.equal(total, before)
        close(matmul.add_matmul(total, a, b, in_place=True), before.double() + a.double() @ b.double())
        close(total, before.double() + a.double() @ b.double())


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 300, 2725])
def test_the_gradient_of_a_weight_is_what_float64_gives(rows: int) -> None:
    grad, x = given(rows, N), given(rows, K)
    with torch.no_grad():
        torch.testing.assert_close(
            matmul.weight_gradient(grad, x), (grad.double().t() @ x.double()).float(), atol=1e-3, rtol=1e-4
        )


@pytest.mark.slow
@pytest.mark.usefixtures("onednn")
def test_products_of_ever_other_numbers_of_rows_do_not_fill_the_memory() -> None:
    weight, rows, draw = given(1536, 576), given(2300, 576), random.Random(0)

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def multiply(n: int) -> None:
        for _ in range(n):
            x = rows[: draw.randrange(300, 2300)]
            y = matmul.linear(x, weight)
            matmul.matmul(y, weight)
            matmul.weight_gradient(y, x)

    with torch.no_grad():
        multiply(100)
        before = held()
        multiply(400)
    assert held() - before < 200e6


@pytest.mark.usefixtures("onednn")
def test_where_gradients_are_recorded_pytorch_multiplies() -> None:
    x, weight = given(300, K).requires_grad_(), given(N, K).requires_grad_()
    assert not matmul.suits(x, weight)
    matmul.linear(x, weight).sum().backward()
    close(x.grad, weight.detach().double().sum(0).expand(300, K))
    assert weight.grad is not None


@pytest.mark.usefixtures("onednn")
def test_small_weights_and_other_types_are_left_to_pytorch() -> None:
    with torch.no_grad():
        assert not matmul.suits(given(300, 8), given(8, 8))
        assert not matmul.suits(given(300, K).bfloat16(), given(N, K).bfloat16())
        assert not matmul.suits(given(300, K).double(), given(N, K).double())


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [False, True])
def test_layers_learn_by_onednn_what_they_learn_by_autograd(bias: bool) -> None:
    for n in (1, 3):
        layers = [torch.nn.Linear(K, N, bias=bias) for _ in range(n)]
        weights = [parameter for layer in layers for parameter in layer.parameters()]
        found, expected = [], []
        for into, project in ((found, autograd.projected), (expected, lambda x, layers: [one(x) for one in layers])):
            x = given(2, 30, K).requires_grad_()
            ys = project(x, layers)
            sum((y * (i + 1)).square().sum() for i, y in enumerate(ys)).backward()
            into += [*ys, x.grad, *(one.grad.clone() for one in weights)]
            for one in weights:
                one.grad = None
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("onednn")
def test_a_row_has_the_same_product_beside_any_others() -> None:
    weight, rows = given(N, K), given(600, K)
    with torch.no_grad():
        expected = matmul.linear(rows, weight)[:8]
        for n in (12, 13, 31, 64, 100, 257, 599):
            assert torch.equal(matmul.linear(rows[:n], weight)[:8], expected), n


def test_the_choice_is_made_once_and_is_pytorch_where_mkl_knows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_is_unknown_to_mkl", lambda: False)
    matmul.uses_onednn.cache_clear()
    try:
        assert not matmul.uses_onednn()
        with torch.no_grad():
            assert torch.equal(matmul.linear(given(40, K), given(N, K)), linear(given(40, K), given(N, K)))
    finally:
        matmul.uses_onednn.cache_clear()
