"""Logits become tokens: the right ones are left out, and the others are drawn as often as they should be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.engine.support.exact import kept_of  # noqa: E402
from verifiers.engine.sequence import NO_TOP_K, Sampling  # noqa: E402
from verifiers.kernels import sampling  # noqa: E402
from verifiers.kernels.cpu.binding import decode_functions  # noqa: E402
from verifiers.kernels.sampling import (  # noqa: E402
    SamplingColumns,
    _floor_among_likeliest,
    _floor_by_bisection,
    sample,
    truncate,
    uniforms,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module", params=["in C", "by PyTorch"])
def drawing(request: pytest.FixtureRequest) -> Iterator[None]:
    """With a compiler, and without one."""
    if request.param == "in C" and decode_functions() is None:
        pytest.skip("there is no C compiler here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "in C":
            patch.setattr(sampling, "decode_functions", lambda: None)
        yield


def columns(rows: int, way: Sampling | None = None, *, seed: Any = 0, step: Any = 0) -> SamplingColumns:
    way = way or Sampling()
    real = [torch.full((rows,), value) for value in (way.temperature, way.top_p)]
    top_k = torch.full((rows,), way.top_k or NO_TOP_K)
    whole = [torch.as_tensor(value).expand(rows) for value in (seed, step)]
    return SamplingColumns(real[0], real[1], top_k, torch.full((rows,), way.min_p), whole[0], whole[1])


def chi_square(counts: Any, probs: Any) -> float:
    """How unlikely counts are under probabilities: the p-value."""
    from scipy import stats

    expected = probs.double() * counts.sum()
    return float(stats.chisquare(counts.double().numpy(), (expected / expected.sum() * counts.sum()).numpy()).pvalue)


# --- truncation -----------------------------------------------------------------------------------------------------

# Weights out of 2**n, so that sums are exact whatever their order and a token is in or out for certain.
weights = st.lists(st.integers(0, 64), min_size=1, max_size=40).filter(any)
ways = st.builds(
    Sampling,
    top_p=st.integers(1, 256).map(lambda n: n / 256),
    top_k=st.integers(0, 12),
    min_p=st.sampled_from([0.0, 0.0, 1 / 64, 0.25, 0.5, 1.0]),
)


@given(weights, ways)
@settings(max_examples=300)
def test_what_is_kept_is_what_sorting_would_keep(parts: list[int], way: Sampling) -> None:
    rest = (1 << (sum(parts) - 1).bit_length()) - sum(parts)
    probs = torch.tensor([[*parts, *[64] * (rest // 64), rest % 64]], dtype=torch.float32)
    probs /= probs.sum()
    left = truncate(probs, columns(1, way))[0]
    kept = kept_of(probs[0].tolist(), way)
    assert {i for i, p in enumerate(left.tolist()) if p > 0} == {i for i in kept if probs[0, i] > 0}
    assert all(left[i] == probs[0, i] for i in kept)


@given(st.integers(0, 10_000), st.integers(1, 30), st.sampled_from([0.1, 1.0, 5.0, 20.0]))
@settings(max_examples=100)
def test_top_k_is_exact_however_small_the_probabilities(seed: int, k: int, spread: float) -> None:
    logits = torch.randn((4, 500), generator=torch.Generator().manual_seed(seed)) * spread
    probs = torch.softmax(logits, -1)
    left = truncate(probs, columns(4, Sampling(top_k=k)))
    floor = probs.topk(k).values[:, -1:]
    assert torch.equal(left, torch.where(probs >= floor, probs, torch.zeros(())))


@given(st.integers(0, 10_000), st.sampled_from([0.01, 1.0, 4.0]), ways)
@settings(max_examples=60)
def test_a_large_vocabulary_is_cut_where_bisection_cuts_it(seed: int, spread: float, way: Sampling) -> None:
    probs = torch.softmax(torch.randn((3, 3000), generator=torch.Generator().manual_seed(seed)) * spread, -1)
    some = columns(3, way)
    for row, (one, other) in enumerate(
        zip(_floor_among_likeliest(probs, some), _floor_by_bisection(probs, some), strict=True)
    ):
        # A share that falls between two tokens to the last bit may round either way; min-p may make both idle.
        least = way.min_p * probs[row].max()
        low, high = sorted(max(float(floor), float(least)) for floor in (one, other))
        assert ((probs[row] >= low) & (probs[row] < high)).sum() <= 1


def test_rows_are_truncated_each_in_its_own_way() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).expand(5, 4).contiguous()
    several = SamplingColumns(
        torch.ones(5), torch.tensor([1.0, 0.6, 1.0, 1.0, 0.75]), torch.tensor([NO_TOP_K, NO_TOP_K, 1, NO_TOP_K, 3]),
        torch.tensor([0.0, 0.0, 0.0, 0.3, 0.0]), torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64),
    )  # fmt: skip
    assert (truncate(probs, several) > 0).sum(-1).tolist() == [4, 2, 1, 2, 2]


def test_ties_with_the_last_one_kept_stay() -> None:
    probs = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert (truncate(probs, columns(1, Sampling(top_k=1))) > 0).sum() == 4
    assert (truncate(probs, columns(1, Sampling(top_p=0.3))) > 0).sum() == 4


def test_a_row_that_is_not_numbers_does_not_touch_the_others() -> None:
    logits = torch.randn(3, 50)
    bad = logits.clone()
    bad[1] = float("nan")
    some = columns(3, Sampling(top_k=5, top_p=0.9), seed=torch.tensor([1, 2, 3]))
    good, mixed = (sample(x, some, truncates=True) for x in (logits, bad))
    for one, other in zip(good, mixed, strict=True):
        assert torch.equal(one[[0, 2]], other[[0, 2]])
    assert torch.isnan(mixed[2][1])


# --- drawing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_p=0.7),
        Sampling(top_k=6),
        Sampling(min_p=0.1),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(way: Sampling) -> None:
    n = 60_000
    logits = torch.randn((1, 40), generator=torch.Generator().manual_seed(3)) * 1.5
    many = columns(n, way, seed=torch.arange(n))
    token, logprob, raw = sample(logits.expand(n, -1), many, truncates=way.truncates)
    probs = torch.softmax(logits / way.temperature, -1)
    if way.truncates:
        kept = sorted(kept_of(probs[0].tolist(), way))
        probs = torch.zeros_like(probs).index_copy_(1, torch.tensor(kept), probs[:, kept])
        probs /= probs.sum()
    counts = torch.bincount(token, minlength=40)
    possible = probs[0] > 0
    assert counts[~possible].sum() == 0
    assert chi_square(counts[possible], probs[0][possible]) > 1e-4
    assert torch.allclose(logprob, probs[0].log()[token], atol=1e-5)
    assert torch.allclose(raw, torch.log_softmax(logits, -1)[0][token], atol=1e-5)


def test_one_request_draws_well_along_its_steps() -> None:
    n = 60_000
    logits = torch.tensor([[1.0, 0.5, 0.0, -1.0]])
    token, _, _ = sample(logits.expand(n, -1), columns(n, seed=12345, step=torch.arange(n)), truncates=False)
    assert chi_square(torch.bincount(token, minlength=4), torch.softmax(logits, -1)[0]) > 1e-4
    pairs = token[:-1:2] * 4 + token[1::2]
    both = torch.softmax(logits, -1)[0]
    assert chi_square(torch.bincount(pairs, minlength=16), (both[:, None] * both).flatten()) > 1e-4


def test_greedy_takes_the_likeliest_and_gives_its_raw_logprob() -> None:
    logits = torch.randn(7, 30)
    token, logprob, raw = sample(logits, columns(7, Sampling(temperature=0.0)), truncates=False)
    assert torch.equal(token, logits.argmax(-1))
    assert torch.equal(logprob, raw)
    assert torch.allclose(raw, torch.log_softmax(logits, -1).amax(-1))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_no_draw_falls_on_a_token_that_cannot_be(seed: int, step: int) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    token, logprob, _ = sample(logits, columns(1, seed=torch.tensor(seed), step=step), truncates=False)
    assert token.item() in (1, 3)
    assert torch.isfinite(logprob).all()


# --- random numbers -------------------------------------------------------------------------------------------------


def splitmix64(seed: int, step: int) -> float:
    """The definition, in whole numbers that do not wrap by themselves."""
    wrap = (1 << 64) - 1
    z = (seed + (step + 1) * 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return ((z ^ (z >> 31)) >> 40) * 2.0**-24


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_uniforms_are_splitmix64(seed: int, step: int) -> None:
    assert uniforms(torch.tensor([seed]), torch.tensor([step])).item() == splitmix64(seed, step)


@pytest.mark.parametrize("axis", ["seed", "step"])
def test_uniforms_are_even_and_unrelated(axis: str) -> None:
    n = 1 << 17
    run, still = torch.arange(n), torch.full((n,), 41)
    u = uniforms(run, still) if axis == "seed" else uniforms(still, run)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert chi_square(torch.bincount((u * 256).long(), minlength=256), torch.full((256,), 1 / 256)) > 1e-4
    for lag in (1, 2, 7):
        correlation = torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(n)
    grid = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()
    assert chi_square(torch.bincount(grid[::2], minlength=256), torch.full((256,), 1 / 256)) > 1e-4


# --- what may be asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0},
        {"top_p": 1.1}, {"top_p": math.nan}, {"top_k": -1}, {"min_p": -0.1}, {"min_p": 1.5}, {"min_p": math.nan},
        {"logit_bias": {3: math.nan}}, {"logit_bias": {3: math.inf}},
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_the_largest_random_number_does_not_draw_a_token_that_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "decode_functions", lambda: None)
    monkeypatch.setattr(sampling, "uniforms", lambda seed_B, step_B: torch.ones(len(seed_B)))  # rounded up to the mass
    logits_BV = torch.tensor([[3.0, 2.0, 1.0, -4.0]]).repeat(3, 1)
    n = len(logits_BV)
    knobs = sampling.SamplingColumns(
        torch.ones(n), torch.tensor([0.5, 0.9, 1.0]), torch.tensor([1 << 30] * n), torch.zeros(n),
        torch.arange(n), torch.zeros(n, dtype=torch.int64),
    )  # fmt: skip
    token_B, logprob_B, _ = sampling.sample(logits_BV, knobs, truncates=True)
    assert token_B.tolist() == [0, 1, 3]
    assert torch.isfinite(logprob_B).all()


@pytest.mark.parametrize("top_k", [0, NO_TOP_K])
def test_a_top_k_of_0_is_no_limit(top_k: int) -> None:
    logits = torch.randn((64, 97), generator=torch.Generator().manual_seed(1))
    several = columns(64, seed=torch.arange(64))
    several.top_k_B = torch.full((64,), top_k)
    plain = sample(logits, columns(64, seed=torch.arange(64)), truncates=False)
    assert torch.equal(sample(logits, several, truncates=True)[0], plain[0])
    assert len(set(plain[0].tolist())) > 20


def test_columns_that_do_not_count_are_not_looked_at() -> None:
    """A caller who says that nothing is truncated may leave zeros in the columns, as the card's kernel has none."""
    logits = torch.randn((64, 97), generator=torch.Generator().manual_seed(1))
    several = columns(64, seed=torch.arange(64))
    plain = sample(logits, several, truncates=False)
    several.top_p_B, several.top_k_B, several.min_p_B = (
        torch.zeros(64),
        torch.ones(64, dtype=torch.int64),
        torch.ones(64),
    )
    assert torch.equal(sample(logits, several, truncates=False)[0], plain[0])
