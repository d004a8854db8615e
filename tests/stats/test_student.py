"""The quantiles and tails are those of scipy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.stats.student import beta_share, sign_test, t_quantile, t_tail, z_quantile, z_tail

reference = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("df", [1, 2, 3, 7, 30, 99, 1234, 99_999, 999_999, 1_000_001, 10**9])
@pytest.mark.parametrize("p", [0.0005, 0.025, 0.3, 0.5, 0.51, 0.9, 0.975, 0.9995, 0.9999999])
def test_t_quantiles_agree_with_scipy(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(reference.t.ppf(p, df), rel=1e-8, abs=1e-12)


@given(st.floats(0, 50), st.floats(0.5, 1e5))
def test_t_tails_agree_with_scipy(t: float, df: float) -> None:
    assert t_tail(t, df) == pytest.approx(2 * reference.t.sf(t, df), rel=1e-7, abs=1e-300)


@given(st.floats(0.001, 0.999))
def test_normal_quantile_and_tail_are_inverse(p: float) -> None:
    assert z_tail(z_quantile(p)) == pytest.approx(2 * min(p, 1 - p), rel=1e-9)


@given(st.integers(0, 400), st.integers(0, 400))
def test_the_sign_test_is_scipys_exact_binomial_test(won: int, lost: int) -> None:
    expected = reference.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert sign_test(won, lost) == pytest.approx(expected, rel=1e-9)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0.01, 300), st.floats(0.01, 300))
def test_the_incomplete_beta_function_is_scipys(x: float, a: float, b: float) -> None:
    assert beta_share(x, 1 - x, a, b) == pytest.approx(reference.beta.cdf(x, a, b), rel=1e-8, abs=1e-12)


@given(st.integers(0, 200), st.integers(0, 200))
def test_what_was_seen_may_count_in_part(won: int, lost: int) -> None:
    expected = 2 * reference.binom.cdf(min(won, lost), won + lost, 0.5) - reference.binom.pmf(won, won + lost, 0.5)
    assert sign_test(won, lost, seen=0.5) == pytest.approx(1.0 if won == lost else expected, rel=1e-7, abs=1e-14)


def test_the_sign_test_stays_exact_for_a_hundred_thousand_examples() -> None:
    assert sign_test(50_400, 49_600) == pytest.approx(reference.binomtest(50_400, 100_000).pvalue, rel=1e-8)
