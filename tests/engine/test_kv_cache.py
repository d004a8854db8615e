"""Keys and values in blocks: copies, and attention that sees its own sequence and nothing else."""

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
from verifiers.engine.batch_table import BatchTable  # noqa: E402
from verifiers.engine.block_manager import BLOCK, blocks_for  # noqa: E402
from verifiers.engine.kv_cache import Decode, KVCache, Prefill, Segment, Shape  # noqa: E402
from verifiers.engine.sequence import ActiveSequence, Sampling  # noqa: E402
from verifiers.kernels.attention import paged_attention  # noqa: E402
from verifiers.kernels.reference import causal_attention  # noqa: E402

SHAPE = Shape(layers=2, kv_heads=2, head_dim=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def cache(blocks: int = 20, *, fill: bool = True) -> KVCache:
    made = KVCache(SHAPE, blocks, 64, dtype=torch.float64, device=torch.device("cpu"))
    if fill:
        made.store.normal_(generator=torch.Generator().manual_seed(0))
    return made


def tables_for(lengths: list[int], blocks: int = 20) -> Any:
    """Blocks for sequences of these lengths, in no order."""
    tables = np.zeros((len(lengths), 4), np.int32)
    order = iter((torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist())
    for table, length in zip(tables, lengths, strict=True):
        table[: blocks_for(length)] = [next(order) for _ in range(blocks_for(length))]
    return tables


def positions(stored: Any, table: Any, end: int) -> Any:
    """What a sequence's blocks hold up to a position, ``[heads, end, dim]``."""
    return torch.cat([stored[int(block)] for block in table], 1)[:, :end]


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


def test_copying_blocks_leaves_the_others() -> None:
    some = cache()
    before = some.store.clone()
    some.copy([1, 5], [3, 4])
    assert torch.equal(some.store[:, :, [3, 4]], before[:, :, [1, 5]])
    assert torch.equal(some.store[:, :, [0, 1, 2, 5]], before[:, :, [0, 1, 2, 5]])
    some.clear([2])
    assert not some.store[:, :, 2].any()
    assert some.store[:, :, 1].all()


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("past", [0, 5])
def test_attention_over_a_prompt_is_the_definition(window: int | None, softcap: float | None, past: int) -> None:
    q = torch.randn(1, 6, 7, 4, dtype=torch.float64)
    k, v = (torch.randn(1, 2, past + 7, 4, dtype=torch.float64) for _ in range(2))
    ours = causal_attention(q, k, v, past, 0.3, window, softcap)
    assert torch.allclose(ours[0], plainly(q[0], k[0], v[0], past, 0.3, window, softcap))


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=4), st.sampled_from([None, 4]))
@settings(max_examples=40)
def test_prompts_packed_side_by_side_do_not_see_one_another(sizes: list[tuple[int, int]], window: int | None) -> None:
    some = cache()
    tables = tables_for([n + past for n, past in sizes])
    segments, start = [], 0
    for table, (n, past) in enumerate(sizes):
        segments.append(Segment(start, start + n, table, past))
        start += n
    q = torch.randn(1, 4, start, 4, dtype=torch.float64)
    k, v = (torch.randn(1, 2, start, 4, dtype=torch.float64) for _ in range(2))
    out = Prefill(some, tables, segments)(1, q, k, v, scale=0.5, window=window, softcap=None)
    for one in segments:
        part, end = slice(one.start, one.end), one.past + one.end - one.start
        seen = [positions(stored, tables[one.table], end) for stored in some.layers[1]]
        assert torch.equal(seen[0][:, one.past :], k[0, :, part])
        assert torch.equal(seen[1][:, one.past :], v[0, :, part])
        assert torch.allclose(out[0, :, part], plainly(q[0, :, part], *seen, one.past, 0.5, window, None))


@pytest.mark.parametrize("softcap", [None, 2.0])
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4), window=st.sampled_from([None, 1, 5]))
@settings(max_examples=40)
def test_a_new_token_sees_its_own_sequence_and_no_nan_of_another(
    lengths: list[int], window: int | None, softcap: float | None
) -> None:
    some = cache()
    n = len(lengths)
    q = torch.randn(n, 4, 1, 4, dtype=torch.float64)
    k, v = (torch.randn(n, 2, 1, 4, dtype=torch.float64) for _ in range(2))
    tables = tables_for([length + 1 for length in lengths])
    some.store[:, :, [*sorted(set(range(20)) - set(tables.flat)), 0]] = torch.nan  # what is nobody's, or another's
    span = blocks_for(max(lengths) + 1) * BLOCK
    attend = Decode(some, tables, torch.tensor(lengths), span)
    out = attend(0, q, k, v, scale=0.5, window=window, softcap=softcap)
    for row, length in enumerate(lengths):
        seen = [positions(stored, tables[row], length + 1) for stored in some.layers[0]]
        assert torch.equal(seen[0][:, length], k[row, :, 0])
        assert torch.allclose(out[row], plainly(q[row], *seen, length, 0.5, window, softcap))


def test_attention_sinks_are_refused_rather_than_left_out() -> None:
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(NotImplementedError, match="sinks"):
        paged_attention(None, x, x, x, s_aux=torch.zeros(2))


# --- the table ------------------------------------------------------------------------------------------------------


def test_a_moved_row_takes_everything_with_it() -> None:
    table = BatchTable(4, 80)
    for row in range(4):
        sequence = ActiveSequence([row + 1] * (row + 20), Sampling(max_tokens=9 + row), row)
        sequence.row, sequence.blocks = row, list(range(1, 3 + row))
        sequence.sampled = ([row] * row, [-1.0 * row] * row, [-2.0 * row] * row)
        table.assign(sequence)
    kept = [(table.blocks[row].tolist(), table.sampled(row), int(table.max_tokens[row])) for row in range(4)]
    table.move(np.array([0, 1]), np.array([3, 2]))
    moved = [(table.blocks[row].tolist(), table.sampled(row), int(table.max_tokens[row])) for row in (0, 1)]
    assert moved == [kept[3], kept[2]]
    assert table.length[:2].tolist() == [23, 22]


def test_a_cache_for_many_long_conversations_takes_memory_only_as_they_grow() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is read from /proc")
    before = resident()
    shape = Shape(layers=8, kv_heads=4, head_dim=64)
    cache = KVCache(shape, 2048, 1024, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert cache.store.nbytes == 256 * 2**20
    assert resident() - before < 64 * 2**20
    assert not cache.store[3, 1, 5].any()
    cache.store[3, 1, 5] = 1.0
    cache.copy([5], [7])
    assert bool(cache.store[3, 1, 7].all())
    assert not cache.store[2].any()
