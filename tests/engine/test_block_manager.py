"""Blocks are shared by content, given away longest-unused first, and neither lost nor given twice."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.engine.block_manager import BLOCK, BlockManager, OutOfBlocksError, blocks_for

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * BLOCK)


def kept(manager: BlockManager, ids: list[int]) -> list[int]:
    """A sequence that has come and gone."""
    blocks = manager.allocate(blocks_for(len(ids)))
    manager.keep(blocks, ids)
    manager.release(blocks)
    return blocks


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.lists(TOKENS, min_size=1, max_size=6), TOKENS)
@settings(max_examples=200)
def test_the_longest_beginning_among_all_that_is_kept_is_found(texts: list[list[int]], prompt: list[int]) -> None:
    manager = BlockManager(64)
    for text in texts:
        kept(manager, text)
    found = manager.longest_prefix(prompt)
    assert found.tokens == max(shared(text, prompt[:-1]) for text in texts)
    for block in (*found.blocks, *([found.source] if found.rest else [])):
        assert block > 0


def test_equal_tokens_after_another_beginning_are_not_the_same_keys() -> None:
    manager = BlockManager(16)
    kept(manager, [1] * BLOCK + [7] * BLOCK)
    assert manager.longest_prefix([2] * BLOCK + [7] * BLOCK + [7]).tokens == 0
    assert manager.longest_prefix([7] * BLOCK + [7]).tokens == 0
    assert manager.longest_prefix([1] * BLOCK + [7] * BLOCK + [7]).tokens == 2 * BLOCK


def test_the_longest_unused_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    manager = BlockManager(7)
    texts = [[i] * 2 * BLOCK for i in range(3)]
    for text in texts:
        kept(manager, text)
    manager.release((touched := manager.longest_prefix([*texts[0], 9]).blocks) and (manager.hold(touched) or touched))
    manager.allocate(1)
    assert [manager.longest_prefix([*text, 9]).tokens for text in texts] == [2 * BLOCK, BLOCK, 2 * BLOCK]
    manager.allocate(2)
    assert [manager.longest_prefix([*text, 9]).tokens for text in texts] == [2 * BLOCK, 0, BLOCK]


def test_a_block_that_somebody_holds_is_not_given_away() -> None:
    manager = BlockManager(5)
    blocks = kept(manager, [1] * 2 * BLOCK)
    manager.hold(blocks)
    mine = manager.allocate(2)
    assert not set(mine) & set(blocks)
    with pytest.raises(OutOfBlocksError, match="1 blocks are needed, but only 0 are free"):
        manager.allocate(1)
    assert manager.longest_prefix([1] * 2 * BLOCK + [1]).blocks == blocks


def test_what_is_forgotten_is_not_found_and_its_blocks_can_be_had() -> None:
    manager = BlockManager(5)
    blocks = kept(manager, [1] * 2 * BLOCK)
    manager.hold(blocks[:1])
    manager.forget()
    assert manager.longest_prefix([1] * 2 * BLOCK + [1]).tokens == 0
    assert manager.available == 3
    assert manager.release(blocks[:1]) == blocks[:1]
    assert (manager.available, manager.held) == (4, 0)


def test_a_prefix_that_is_too_short_is_not_worth_its_while() -> None:
    manager = BlockManager(5, least_shared=20)
    kept(manager, [1] * 30)
    assert manager.longest_prefix([1] * 20).tokens == 0
    assert manager.longest_prefix([1] * 21).tokens == 20
    nothing = BlockManager(5, least_shared=None)
    kept(nothing, [1] * 30)
    assert nothing.longest_prefix([1] * 30).tokens == 0


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_are_neither_lost_nor_given_twice(data: st.DataObject) -> None:
    manager, held = BlockManager(9), list[list[int]]()
    for _ in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(["take", "take", "leave", "forget"]))
        if act == "forget":
            manager.forget()
        elif act == "leave" and held:
            blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            manager.keep(blocks, [data.draw(st.integers(0, 1))] * (len(blocks) * BLOCK - 3))
            manager.release(blocks)
        elif act == "take":
            prefix = manager.longest_prefix([data.draw(st.integers(0, 1))] * 60)
            manager.hold(prefix.blocks)
            n = data.draw(st.integers(1, 3))
            if n > manager.available:
                manager.release(prefix.blocks)
                continue
            own = manager.allocate(n)
            assert not {block for blocks in held for block in blocks} & set(own)
            held.append([*prefix.blocks, *own])
        in_use = {block for blocks in held for block in blocks}
        assert 0 not in in_use
        assert manager.held == len(in_use)
        assert manager.available == manager.total - len(in_use)
