"""What does not fit is refused before it is loaded, with the numbers and a way out; what is chosen fits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from verifiers.engine.kv_cache import Shape  # noqa: E402
from verifiers.engine.plan import Plan, WillNotFitError, free_memory, plan, weights_bytes  # noqa: E402

GB = 10**9
SMOLLM2 = transformers.LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
TINY = transformers.LlamaConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
PER_TOKEN = 2 * 30 * 3 * 64 * 4


def planned(config: Any = SMOLLM2, **options: Any) -> Plan:
    defaults = {"dtype": torch.float32, "device": "cpu", "weights_loaded": True, "free_bytes": 16 * GB}
    return plan(config, **(defaults | options))


def test_what_was_asked_for_is_planned_and_counted() -> None:
    made = planned(rows=4, length=1024)
    assert (made.rows, made.length, made.cache_tokens) == (4, 1024, 4 * 1024)
    assert planned(rows=4, length=1024, cache_tokens=2000).cache_tokens == 2000
    assert weights_bytes(SMOLLM2, torch.float32) == 134_515_008 * 4


def test_half_precision_takes_half() -> None:
    planned(rows=4, length=4096, cache_tokens=10_000, dtype=torch.bfloat16, free_bytes=GB // 2)
    with pytest.raises(WillNotFitError):
        planned(rows=4, length=4096, cache_tokens=10_000, free_bytes=GB // 2)
    assert weights_bytes(SMOLLM2, torch.bfloat16) * 2 == weights_bytes(SMOLLM2, torch.float32)


def test_a_model_that_unties_its_embeddings_counts_both() -> None:
    config = transformers.LlamaConfig(**{**SMOLLM2.to_dict(), "tie_word_embeddings": False})
    assert weights_bytes(config, torch.float32) == (134_515_008 + 49152 * 576) * 4


def test_a_model_that_says_minus_one_for_no_limit_of_its_positions_is_planned_without_one() -> None:
    unlimited = transformers.LlamaConfig(**{**TINY.to_dict(), "max_position_embeddings": -1})
    assert planned(unlimited).length == 8192
    assert planned(unlimited, length=20_000).length == 20_000


def test_the_cache_is_shared_so_that_many_long_rows_are_planned_where_few_would_fit_at_once() -> None:
    made = planned(rows=256, length=8192, free_bytes=6_100_000_000)
    assert (made.rows, made.length) == (256, 8192)
    assert 8192 <= made.cache_tokens < 8 * 8192
    assert made.cache_tokens * PER_TOKEN < 6_100_000_000


def test_what_will_not_fit_is_refused_with_numbers_and_a_suggestion_that_fits() -> None:
    with pytest.raises(WillNotFitError) as caught:
        planned(rows=128, length=8192, free_bytes=500_000_000)
    assert str(caught.value) == (
        "keys and values of 8,192 tokens need 0.4 GB, and the logits of 128 rows 0.1 GB; 0.5 GB are free on cpu: "
        "use rows=64 or length=4096"
    )
    planned(rows=64, length=8192, free_bytes=500_000_000)
    planned(rows=128, length=4096, free_bytes=500_000_000)


def test_weights_that_are_still_to_be_loaded_are_counted() -> None:
    planned(rows=1, length=128, free_bytes=GB // 10)
    short = r"weights need 0\.5 GB as float32, but 0\.1 GB are free.*smaller model.*dtype=\"bfloat16\""
    with pytest.raises(WillNotFitError, match=short):
        planned(rows=1, length=128, free_bytes=GB // 10, weights_loaded=False)
    with pytest.raises(WillNotFitError, match=r"in addition to 0\.5 GB of weights"):
        planned(rows=32, length=8192, free_bytes=GB, weights_loaded=False)


def test_left_to_itself_it_takes_a_share_and_leaves_the_rest() -> None:
    made = planned()
    assert (made.rows, made.length) == (32, 8192)
    assert made.length < made.cache_tokens < 32 * 8192
    assert made.cache_tokens * PER_TOKEN < 16 * GB / 2
    assert (planned(TINY).rows, planned(TINY).length, planned(TINY).cache_tokens) == (32, 512, 32 * 512)
    assert planned(free_bytes=64 * GB).cache_tokens == 32 * 8192


def test_one_number_given_the_others_are_chosen() -> None:
    assert (planned(rows=64).length, planned(length=512).rows) == (8192, 32)
    assert planned(rows=3, free_bytes=GB).rows == 3
    assert planned(length=8192, free_bytes=GB).rows == 32
    assert planned(free_bytes=GB // 2).length == 4096
    assert planned(free_bytes=GB // 10).rows == 4


@given(
    free=st.integers(10**7, 10**12),
    rows=st.none() | st.integers(1, 4096),
    length=st.none() | st.integers(1, 512),
    is_loaded=st.booleans(),
)
def test_no_plan_takes_more_than_there_is(free: int, rows: int | None, length: int | None, is_loaded: bool) -> None:
    try:
        made = planned(TINY, rows=rows, length=length, free_bytes=free, weights_loaded=is_loaded)
    except WillNotFitError:
        assert rows is not None  # what it chooses itself always fits a model so small
        return
    assert made.length <= made.cache_tokens <= made.rows * made.length
    assert made.rows == rows or rows is None
    assert made.length == length or length is None
    taken = made.cache_tokens * Shape.of(TINY).bytes_per_token(torch.float32)
    assert taken + (0 if is_loaded else weights_bytes(TINY, torch.float32)) <= free
    assert 1 <= made.length <= 512


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="rows must be at least 1"):
        planned(rows=0)
    with pytest.raises(ValueError, match="length must be at least 1"):
        planned(length=-5)
    with pytest.raises(ValueError, match="length=9,000 is more than the 8,192 positions"):
        planned(length=9000)


def test_memory_is_measured_where_nothing_is_said() -> None:
    assert 10**6 < free_memory("cpu") < 10**14
    assert planned(TINY, free_bytes=None).rows > 0


def test_other_families_are_laid_out_too() -> None:
    gpt2 = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=320, n_positions=64)
    neox = transformers.GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=320, intermediate_size=64
    )
    assert planned(gpt2).length == 64
    assert weights_bytes(neox, torch.float32) > 0
