"""What compiled kernels compute, there and back, is what PyTorch does; and without a compiler all goes on as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from verifiers.kernels import autograd, reference  # noqa: E402
from verifiers.kernels.cpu import learning as cpu  # noqa: E402
from verifiers.kernels.cpu.binding import learn_functions  # noqa: E402
from verifiers.kernels.cpu.build import find_compiler, library  # noqa: E402
from verifiers.trainers.learning import target_logprobs  # noqa: E402
from verifiers.trainers.learning.packing import PackedForward, Packing  # noqa: E402

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
SHAPES = [(1, 1), (1, 64), (3, 20), (5, 128), (7, 33), (130, 48)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.setenv("VERIFIERS_COMPILE", "0")
    yield
    monkeypatch.undo()
    forget()


def forget() -> None:
    library.cache_clear()
    learn_functions.cache_clear()


def randn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_as(ours: Callable[..., Any], plain: Callable[..., Any], inputs: list[Any]) -> None:
    """Ours in float32 gives the numbers, and the gradients, that plain operations give in float64."""
    found = [numbers(run, inputs, dtype) for run, dtype in ((ours, torch.float32), (plain, torch.float64))]
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype is torch.float32
        assert torch.allclose(mine.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max() + 1.0))


def numbers(run: Callable[..., Any], inputs: list[Any], dtype: Any) -> list[Any]:
    inputs = [one.to(dtype).requires_grad_() for one in inputs]
    outs = run(*inputs)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    seeds = [randn(*one.shape, seed=90 + i).to(dtype) for i, one in enumerate(outs)]
    return [*(one.detach() for one in outs), *torch.autograd.grad(outs, inputs, seeds)]


# --- one kernel after the other ---------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_a_sum_and_its_norm(n: int, width: int) -> None:
    def plain(x: Any, more: Any, weight: Any) -> Any:
        return x + more, F.rms_norm(x + more, weight.shape, weight, 1e-5)

    x, more, weight = randn(n, width), randn(n, width, seed=1), randn(width, seed=2)
    assert autograd.kernels_for(x) is cpu
    assert_as(lambda x, more, weight: autograd.add_norm(x, more, weight, 1e-5), plain, [x, more, weight])
    assert_as(
        lambda x, weight: autograd.add_norm(x, None, weight, 1e-5)[1],
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
        [x, weight],
    )


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dim", [2, 8, 20, 64])
def test_a_rotation(rows: int, dim: int) -> None:
    angle = randn(rows, 5, dim, seed=2) * 3
    cos, sin = angle.cos(), angle.sin()

    def plain(q: Any, k: Any) -> Any:
        return tuple(
            reference.rotary(one.transpose(1, 2), cos.to(one.dtype), sin.to(one.dtype)).transpose(1, 2)
            for one in (q, k)
        )

    q, k = randn(2, 5, 4, dim), randn(2, 5, 1, dim, seed=1)
    assert_as(lambda q, k: autograd.rotated(q, k, cos, sin), plain, [q, k])


@needs_compiler
@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_gating(n: int, width: int) -> None:
    gate, up = randn(n, width) * 20, randn(n, width, seed=1)
    assert_as(autograd.gated, lambda gate, up: F.silu(gate) * up, [gate, up])


@needs_compiler
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("n", "words"), [(1, 2), (3, 20), (5, 128), (4, 5000)])
def test_the_logprobs_of_a_head(n: int, words: int, temperature: float) -> None:
    target = torch.arange(n) * 7 % words

    def plain(hidden: Any, weight: Any) -> Any:
        return -F.cross_entropy(F.linear(hidden, weight) / temperature, target, reduction="none")

    def ours(hidden: Any, weight: Any) -> Any:
        return target_logprobs.fused_logprobs(hidden, weight, None, target, temperature)

    assert_as(ours, plain, [randn(n, 8), randn(words, 8, seed=1) * 3])


@needs_compiler
def test_a_word_that_is_ruled_out_gets_no_gradient() -> None:
    logits, target = torch.tensor([[0.5, -torch.inf, 1.0]]), torch.tensor([0])
    logprob, mass = torch.empty(1), torch.empty(1)
    cpu.logprobs(logits, target, 1.0, logprob, mass)
    assert torch.allclose(logprob, logits.log_softmax(-1)[:, 0])
    cpu.logprobs_back_(logits, target, 1.0, mass, torch.ones(1))
    assert logits[0, 1] == 0.0


@needs_compiler
@pytest.mark.parametrize("wrong", [-1, 31])
def test_a_target_that_the_model_does_not_have_is_an_error(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"cannot train on token {wrong}: the model's vocabulary has 31 tokens"):
        target_logprobs.fused_logprobs(randn(2, 8), randn(31, 8), None, torch.tensor([3, wrong]))


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_so(bad: float) -> None:
    x, ones = randn(3, 40), torch.ones(40)
    x[1, 7] = bad
    assert cpu.norm(x, None, ones, 1e-5)[1].isnan().any(-1).tolist() == [False, True, False]
    logprob, mass = torch.empty(3), torch.empty(3)
    cpu.logprobs(x, torch.zeros(3, dtype=torch.int64), 1.0, logprob, mass)
    assert logprob.isfinite().tolist() == [True, False, True]
    x[1, 7] = torch.nan
    product = cpu.gated(x, torch.ones_like(x))
    assert torch.equal(product.isnan(), x.isnan())
    q = randn(4, 1, 8)
    q[2, 0, 3] = torch.nan
    packing = packed((0,), (4,), (0,))
    out = PackedForward(packing, varlen=False).attend(q, randn(4, 1, 8), randn(4, 1, 8), scale=1.0)
    assert out.isnan().any(-1)[:, 0].tolist() == [False, False, True, False]


# --- attention --------------------------------------------------------------------------------------------------------


def packed(prefix_G: tuple[int, ...], suffix_B: tuple[int, ...], prefix_of_B: tuple[int, ...]) -> Packing:
    positions = [torch.arange(n) for n in prefix_G]
    positions += [prefix_G[g] + torch.arange(n) for g, n in zip(prefix_of_B, suffix_B, strict=True)]
    divided = {"prefix_G": prefix_G, "suffix_B": suffix_B, "prefix_of_B": prefix_of_B}
    arrays = {name: np.array(one, np.int64) for name, one in divided.items()}
    return Packing(**arrays, position_T=torch.cat(positions))


def dense(packing: Packing, q: Any, k: Any, v: Any, scale: float) -> Any:
    """Attention of all tokens to all, with a mask of who sees whom."""
    runs = [(("head", g), n) for g, n in enumerate(packing.prefix_G)]
    runs += [(("tail", b), n) for b, n in enumerate(packing.suffix_B)]
    kinds = [(kind, i) for kind, n in runs for i in range(n)]
    seen = torch.zeros(len(kinds), len(kinds), dtype=torch.bool)
    for a, ((sort, which), i) in enumerate(kinds):
        for b, (other, j) in enumerate(kinds):
            is_own_head = sort == "tail" and other == ("head", packing.prefix_of_B[which])
            seen[a, b] = is_own_head or (other == (sort, which) and j <= i)
    share = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(one.repeat_interleave(share, 1).transpose(0, 1) for one in (k, v))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def assert_attends(packing: Packing, groups: int, share: int, dim: int, suffixes_only: bool = False) -> None:
    tokens, scale = len(packing.position_T), 0.3
    skipped = packing.prefix_tokens if suffixes_only else 0

    def ours(q: Any, k: Any, v: Any) -> Any:
        return PackedForward(packing, varlen=False).attend(q, k, v, scale=scale, suffixes_only=suffixes_only)

    inputs = [randn(tokens, heads, dim, seed=i) for i, heads in enumerate((groups * share, groups, groups))]
    assert_as(ours, lambda q, k, v: dense(packing, q, k, v, scale)[skipped:], inputs)


@needs_compiler
@pytest.mark.parametrize("dim", [1, 8, 20, 32, 64])
@pytest.mark.parametrize("share", [1, 2, 3, 4])
def test_packed_attention(share: int, dim: int) -> None:
    packing = packed((3, 0, 17), (5, 1, 19, 33), (2, 0, 1, 2))
    assert_attends(packing, 2, share, dim)
    assert_attends(packing, 2, share, dim, suffixes_only=True)


@needs_compiler
def test_a_single_token_attends_to_itself() -> None:
    assert_attends(packed((0,), (1,), (0,)), 1, 1, 8)


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    prefix_G = tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=3)))
    prefix_of_B = tuple(draw(st.lists(st.integers(0, len(prefix_G) - 1), min_size=1, max_size=5)))
    suffix_B = tuple(draw(st.integers(1, 20)) for _ in prefix_of_B)
    return packed(prefix_G, suffix_B, prefix_of_B)


@needs_compiler
@settings(max_examples=25, deadline=None)
@given(packings(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_packed_attention_is_attention_to_what_is_seen(
    packing: Packing, groups: int, share: int, dim: int, suffixes_only: bool
) -> None:
    assert_attends(packing, groups, share, dim, suffixes_only)


@needs_compiler
def test_tensors_that_are_views_are_attended_to_as_well() -> None:
    packing = packed((2,), (4, 3), (0, 0))
    whole = randn(3, 2, 9, 8)
    views = [one.transpose(0, 1) for one in whole]
    row = PackedForward(packing, varlen=False)
    found = [row.attend(*given, scale=0.5) for given in (views, [one.contiguous() for one in views])]
    assert torch.equal(*found)


@needs_compiler
def test_the_same_numbers_come_out_each_time() -> None:
    packing = packed((6, 9), (12, 30, 7), (0, 1, 1))
    inputs = [randn(len(packing.position_T), heads, 24, seed=heads) for heads in (6, 2, 2)]

    def run(*given: Any) -> Any:
        return PackedForward(packing, varlen=False).attend(*given, scale=0.3)

    first, again = (numbers(run, [one.clone() for one in inputs], torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, again))


# --- which kernels ----------------------------------------------------------------------------------------------------


def test_without_a_compiler_operations_are_plain(no_compiler: None) -> None:
    assert autograd.kernels_for(randn(2, 4)) is reference
    assert_attends(packed((3,), (5, 2), (0, 0)), 1, 2, 8)


@needs_compiler
def test_other_numbers_than_float32_are_left_to_the_reference() -> None:
    assert autograd.kernels_for(randn(2, 4)) is cpu
    assert autograd.kernels_for(randn(2, 4).double()) is reference


@needs_compiler
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_that_share_the_work_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    def results() -> list[Any]:
        x, more, weight, past = randn(37, 24), randn(37, 24, seed=1), randn(24, seed=2), randn(37, 24, seed=3)
        total, normed, scale = cpu.norm(x, more, weight, 1e-5)
        found = [total, normed, *cpu.norm_back(total, weight, scale, past, more, learns=True)]
        for batch, angles in ((1, 1), (5, 1), (5, 5)):
            cos, sin = randn(angles, 7, 8, seed=4).cos(), randn(angles, 7, 8, seed=4).sin()
            q, k = randn(batch, 7, 4, 8, seed=5), randn(batch, 7, 2, 8, seed=6)
            found += [*cpu.rotate(q, k, cos, sin), *cpu.rotate(q, k, cos, sin, back=True)]
        found += [cpu.gated(x, more), *cpu.gated_back(x, more, past)]
        logits, target, logprob, mass = randn(37, 50), torch.arange(37), torch.empty(37), torch.empty(37)
        cpu.logprobs(logits, target, 0.7, logprob, mass)
        cpu.logprobs_back_(logits, target, 0.7, mass, logprob)
        packing = packed((6, 9), (12, 30, 7), (0, 1, 1))
        inputs = [randn(64, heads, 24, seed=heads) for heads in (10, 5, 5)]
        attended = numbers(
            lambda *qkv: PackedForward(packing, varlen=False).attend(*qkv, scale=0.3), inputs, torch.float32
        )
        return [*found, logits, logprob, mass, *attended]

    alone = results()
    monkeypatch.setattr(cpu, "GRAIN", 1)
    torch.set_num_threads(threads)
    together = results()
    torch.set_num_threads(1)
    for i, (one, other) in enumerate(zip(alone, together, strict=True)):
        if i == 3:  # the gradient of the norm's weight: a sum by parts
            assert torch.allclose(one, other, atol=1e-5)
        else:
            assert torch.equal(one, other), i


@needs_compiler
def test_a_wrong_target_is_found_whichever_thread_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "GRAIN", 1)
    torch.set_num_threads(3)
    target = torch.arange(9)
    target[7] = 99
    with pytest.raises(IndexError, match="token 99"):
        target_logprobs.fused_logprobs(randn(9, 8), randn(31, 8), None, target)


@needs_compiler
def test_dropout_in_attention_is_left_to_plain_operations() -> None:
    inputs = [randn(6, 1, 8, seed=i) for i in range(3)]
    row = PackedForward(packed((2,), (4,), (0,)), varlen=False)
    torch.manual_seed(0)
    dropped = row.attend(*inputs, scale=0.3, dropout=0.5)
    assert not torch.allclose(dropped, row.attend(*inputs, scale=0.3))


@needs_compiler
def test_values_of_another_size_are_left_to_plain_operations() -> None:
    row = PackedForward(packed((2,), (4,), (0,)), varlen=False)
    q, k, v = randn(6, 2, 8), randn(6, 1, 8, seed=1), randn(6, 1, 4, seed=2)
    assert torch.allclose(row.attend(q, k, v, scale=0.3), dense(row.packing, q, k, v, 0.3), atol=1e-5)


@needs_compiler
def test_a_head_may_be_longer_than_all_that_has_a_tail() -> None:
    assert_attends(packed((70, 1), (3,), (1,)), 1, 2, 16)
