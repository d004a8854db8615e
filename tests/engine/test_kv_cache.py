"""Keys and values in rows: copies, swaps, and attention that sees what it should and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.engine.support.exact import FAMILIES, random_model  # noqa: E402
from verifiers.engine.kv_cache import Decode, Prefill, Segment, Shape, SlotCache  # noqa: E402
from verifiers.engine.sequence import ActiveSequence, Sampling  # noqa: E402
from verifiers.engine.slot_table import SlotTable  # noqa: E402
from verifiers.kernels.attention import slot_attention  # noqa: E402
from verifiers.kernels.reference import causal_attention  # noqa: E402

SHAPE = Shape(layers=2, kv_heads=2, head_dim=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def cache(rows: int = 4, length: int = 20, *, fill: bool = True) -> SlotCache:
    made = SlotCache(SHAPE, rows, length, dtype=torch.float64, device=torch.device("cpu"))
    if fill:
        made.store.normal_(generator=torch.Generator().manual_seed(0))
    return made


def plainly(q: Any, k: Any, v: Any, past: int, scale: float, window: int | None, softcap: float | None) -> Any:
    """Causal attention by its definition, one query at a time; ``[heads, n, dim]``."""
    share = q.shape[0] // k.shape[0]
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        for i in range(q.shape[1]):
            first = 0 if window is None else max(0, past + i + 1 - window)
            keys, values = k[head // share, first : past + i + 1], v[head // share, first : past + i + 1]
            scores = keys @ q[head, i] * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            out[head, i] = torch.softmax(scores, 0) @ values
    return out


def test_a_shape_is_read_off_any_family() -> None:
    for family in FAMILIES:
        config = random_model(family).config
        heads = 4 if family.startswith("GPT") else 2
        wide = 16 if family in ("Qwen3", "Qwen3-MoE", "Gemma", "Gemma2", "Gemma3") else 8
        assert Shape.of(config) == Shape(layers=3, kv_heads=heads, head_dim=wide), family
    assert SHAPE.bytes_per_token(torch.float32) == 2 * 2 * 2 * 4 * 4


def test_move_copies_a_beginning_and_leaves_the_rest() -> None:
    some = cache()
    before = some.store.clone()
    some.move(1, 3, 7)
    assert torch.equal(some.store[:, :, 3, :, :7], before[:, :, 1, :, :7])
    assert torch.equal(some.store[:, :, 3, :, 7:], before[:, :, 3, :, 7:])
    assert torch.equal(some.store[:, :, :3], before[:, :, :3])


def test_swap_exchanges_as_much_as_the_longer_one_holds() -> None:
    some = cache()
    before = some.store.clone()
    some.swap(0, 2, 3, 9)
    assert torch.equal(some.store[:, :, 0, :, :9], before[:, :, 2, :, :9])
    assert torch.equal(some.store[:, :, 2, :, :9], before[:, :, 0, :, :9])
    some.swap(0, 2, 9, 3)
    some.swap(1, 1, 5, 5)
    assert torch.equal(some.store, before)


def test_spread_copies_one_row_to_several() -> None:
    some = cache()
    before = some.store.clone()
    some.spread(0, range(1, 4), 5)
    for row in (1, 2, 3):
        assert torch.equal(some.store[:, :, row, :, :5], before[:, :, 0, :, :5])
        assert torch.equal(some.store[:, :, row, :, 5:], before[:, :, row, :, 5:])


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("past", [0, 5])
def test_attention_over_a_prompt_is_the_definition(window: int | None, softcap: float | None, past: int) -> None:
    q = torch.randn(1, 6, 7, 4, dtype=torch.float64)
    k, v = (torch.randn(1, 2, past + 7, 4, dtype=torch.float64) for _ in range(2))
    ours = causal_attention(q, k, v, past, 0.3, window, softcap)
    assert torch.allclose(ours[0], plainly(q[0], k[0], v[0], past, 0.3, window, softcap))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=4), st.sampled_from([None, 4]))
@settings(max_examples=40)
def test_prompts_packed_side_by_side_do_not_see_one_another(sizes: list[tuple[int, int]], window: int | None) -> None:
    some = cache()
    segments, start = [], 0
    for row, (n, past) in enumerate(sizes):
        segments.append(Segment(start, start + n, row, past))
        start += n
    q = torch.randn(1, 4, start, 4, dtype=torch.float64)
    k, v = (torch.randn(1, 2, start, 4, dtype=torch.float64) for _ in range(2))
    out = Prefill(some, segments)(1, q, k, v, scale=0.5, window=window, softcap=None)
    keys, values = some.layers[1]
    for segment in segments:
        part = slice(segment.start, segment.end)
        end = segment.past + segment.end - segment.start
        assert torch.equal(keys[segment.slot, :, segment.past : end], k[0, :, part])
        assert torch.equal(values[segment.slot, :, segment.past : end], v[0, :, part])
        row_k, row_v = keys[segment.slot, :, :end], values[segment.slot, :, :end]
        assert torch.allclose(out[0, :, part], plainly(q[0, :, part], row_k, row_v, segment.past, 0.5, window, None))


@pytest.mark.parametrize("softcap", [None, 2.0])
@given(lengths=st.lists(st.integers(0, 18), min_size=1, max_size=4), window=st.sampled_from([None, 1, 5]))
@settings(max_examples=40)
def test_a_new_token_sees_its_own_row(lengths: list[int], window: int | None, softcap: float | None) -> None:
    some = cache()
    n = len(lengths)
    q = torch.randn(n, 4, 1, 4, dtype=torch.float64)
    k, v = (torch.randn(n, 2, 1, 4, dtype=torch.float64) for _ in range(2))
    attend = Decode(some, torch.arange(n), torch.tensor(lengths), max(lengths) + 1)
    out = attend(0, q, k, v, scale=0.5, window=window, softcap=softcap)
    keys, values = some.layers[0]
    for row, length in enumerate(lengths):
        assert torch.equal(keys[row, :, length], k[row, :, 0])
        seen = keys[row, :, : length + 1], values[row, :, : length + 1]
        assert torch.allclose(out[row], plainly(q[row], *seen, length, 0.5, window, softcap))


def test_attention_sinks_are_refused_rather_than_left_out() -> None:
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(NotImplementedError, match="sinks"):
        slot_attention(None, x, x, x, s_aux=torch.zeros(2))


# --- the table ------------------------------------------------------------------------------------------------------


def parked(table: SlotTable, row: int, tokens: list[int]) -> None:
    sequence = ActiveSequence(tokens, Sampling(), 0)
    sequence.slot = row
    table.assign(sequence)
    table.keep_prefix(sequence, keep=True)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(0, 5),
)
def test_the_best_match_is_the_longest_shared_beginning(rows: list[list[int]], prompt: list[int], first: int) -> None:
    table = SlotTable(6, 12, least_shared=2)
    for row, tokens in enumerate(rows):
        parked(table, row, tokens)

    def shared(tokens: list[int]) -> int:
        pairs = zip(tokens, prompt[:-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(prompt) - 1))

    most = max((shared(tokens) for tokens in rows[first:]), default=0)
    row, n = table.longest_prefix(prompt, first)
    assert n == (most if most >= 2 else 0)
    assert row >= first
    assert not n or shared(rows[row]) == n


def test_exchange_swaps_everything_a_row_has() -> None:
    table = SlotTable(4, 8, least_shared=1)
    for row in range(4):
        parked(table, row, [row + 1] * (row + 1))
    before = [column.copy() for column in table._columns]
    table.exchange(np.array([[0, 1], [3, 2]]))
    for column, old in zip(table._columns, before, strict=True):
        assert np.array_equal(column, old[[3, 2, 1, 0]])


def test_an_empty_row_is_taken_before_an_old_one() -> None:
    table = SlotTable(3, 8, least_shared=1)
    parked(table, 1, [1, 2])
    parked(table, 0, [3, 4])
    assert table.oldest(0) == 2
    parked(table, 2, [5, 6])
    assert table.oldest(0) == 1
    assert table.oldest(2) == 2


def test_a_cache_for_many_long_conversations_takes_memory_only_as_they_grow() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is read from /proc")
    before = resident()
    shape = Shape(layers=8, kv_heads=4, head_dim=64)
    cache = SlotCache(shape, 32, 1024, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert cache.store.nbytes == 256 * 2**20
    assert resident() - before < 64 * 2**20
    assert not cache.store[3, 1, 5].any()
    cache.store[3, 1, 5] = 1.0
    cache.move(5, 7, 1024)
    assert bool(cache.store[3, 1, 7].all())
    assert not cache.store[2].any()
