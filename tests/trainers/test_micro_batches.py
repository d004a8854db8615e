"""Whatever samples are cut into, every trained token is there once, predicted from what came before it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from verifiers.samples import Sample  # noqa: E402
from verifiers.trainers.learning.micro_batches import MicroBatch, TrainSample, balanced, micro_batches  # noqa: E402

ANY = 1 << 40


def trained(prompt: list[int], mask: list[int], number: int) -> TrainSample:
    reply = [100 * (number + 1) + t for t in range(len(mask))]
    sample = Sample(
        prompt_ids=prompt,
        completion_ids=reply,
        completion_mask=mask,
        completion_logprobs=[-float(token) for token in reply],
    )
    return TrainSample(sample=sample, advantage=number / 10, weight=number + 0.5)


@st.composite
def batches(draw: Any) -> list[TrainSample]:
    prompts = [[10 * p + t for t in range(draw(st.integers(0, 6)))] for p in range(3)]
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=7), max_size=12))
    return [trained(draw(st.sampled_from(prompts)), mask, i) for i, mask in enumerate(masks)]


def context(batch: MicroBatch, n: int) -> list[int]:
    """The tokens that the model has seen where it predicts trained token ``n``."""
    place, ids = int(batch.logit_index_N[n]), batch.ids_BT.flatten().tolist()
    if batch.packing is None:
        width = batch.ids_BT.shape[1]
        return ids[place // width * width : place + 1]
    packing, row = batch.packing, int(batch.sequence_N[n])
    head = packing.prefix_of_B[row]
    first = sum(packing.prefix_G[:head])
    start = packing.prefix_tokens + sum(packing.suffix_B[:row])
    seen = ids[first : first + packing.prefix_G[head]] + ids[start : place + 1]
    assert packing.position_T[place] == len(seen) - 1
    return seen


@settings(max_examples=150, deadline=None)
@given(sequences=batches(), max_tokens=st.integers(1, 60), longest_packed=st.sampled_from([0, ANY]))
def test_every_trained_token_is_there_once_after_what_came_before(
    sequences: list[TrainSample], max_tokens: int, longest_packed: int
) -> None:
    due = {}
    for i, one in enumerate(sequences):
        whole = one.sample.prompt_ids + one.sample.completion_ids
        for t, is_trained in enumerate(one.sample.completion_mask, len(one.sample.prompt_ids)):
            if is_trained and t:
                due[i, whole[t]] = whole[:t]
    found = {}
    for batch in micro_batches(sequences, max_tokens=max_tokens, longest_packed=longest_packed):
        for n, (row, token) in enumerate(zip(batch.sequence_N.tolist(), batch.target_N.tolist(), strict=True)):
            member = batch.members[row]
            assert (member, token) not in found
            found[member, token] = context(batch, n)
            assert batch.old_N[n] == -token
            assert batch.advantage_N[n] == pytest.approx(sequences[member].advantage)
            assert batch.weight_N[n] == sequences[member].weight
    assert found == due


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), max_tokens=st.integers(1, 200))
def test_rectangles_are_as_few_as_fit(lengths: list[int], max_tokens: int) -> None:
    sequences = [trained([1] * (length - 1) + [2], [1], i) for i, length in enumerate(lengths)]
    made = list(micro_batches(sequences, max_tokens=max_tokens))
    assert all(len(one.ids_BT) == 1 or one.ids_BT.numel() <= max_tokens for one in made)
    rest, fewest = sorted(lengths, reverse=True), 0
    while rest:
        rest = rest[max(1, max_tokens // rest[0]) :]
        fewest += 1
    assert len(made) == fewest


def test_no_micro_batch_is_a_leftover() -> None:
    sequences = [trained(list(range(64)), [1] * 128, i) for i in range(1024)]
    assert [one.ids_BT.shape[0] for one in micro_batches(sequences, max_tokens=65536)] == [342, 342, 340]
    packed = list(micro_batches(sequences, max_tokens=68000, longest_packed=ANY))
    assert [one.ids_BT.numel() for one in packed] == [63 + 512 * 128] * 2


def test_a_prompt_is_there_once_and_its_group_stays_together() -> None:
    prompts = [[10 * p + t for t in range(9)] for p in range(4)]
    sequences = [trained(prompts[i % 4], [1] * 5, i) for i in range(16)]  # groups are found wherever they are
    made = list(micro_batches(sequences, max_tokens=64, longest_packed=ANY))
    assert [one.ids_BT.shape for one in made] == [(1, 2 * (8 + 4 * 5))] * 2
    for one in made:
        assert sorted(i % 4 for i in one.members) == sorted([one.members[0] % 4, one.members[-1] % 4] * 4)
    (split, *_) = micro_batches(sequences, max_tokens=20, longest_packed=ANY)  # a group that is too large is cut
    assert split.packing is not None
    assert split.packing.prefix_G == (8,)
    assert len(split.members) < 4


def test_rows_are_packed_only_where_it_saves_tokens_and_nothing_is_too_long() -> None:
    alike = [trained(list(range(9)), [1] * 4, i) for i in range(4)]
    different = [trained([i, *range(9)], [1] * 4, i) for i in range(4)]
    ragged = [trained([i, 3, 4], [1] * (2 + 6 * i), i) for i in range(4)]

    def is_packed(sequences: list[TrainSample], longest: int = ANY) -> bool:
        (batch,) = micro_batches(sequences, max_tokens=ANY, longest_packed=longest)
        return batch.packing is not None

    assert is_packed(alike)
    assert not is_packed(different)
    assert is_packed(ragged)  # nothing is shared, and nothing is padding
    assert is_packed(alike, 12)
    assert not is_packed(alike, 11)


def test_nothing_to_train_on_makes_no_micro_batch() -> None:
    assert list(micro_batches([], max_tokens=10)) == []
    assert list(micro_batches([trained([1, 2], [0, 0], 0), trained([], [1], 1)], max_tokens=10)) == []


@given(n=st.integers(0, 50), most=st.integers(1, 60))
def test_parts_are_as_few_as_can_be_and_about_equal(n: int, most: int) -> None:
    parts = balanced(n, lambda i, cost: min(n, i + cost), most)
    assert len(parts) == -(-n // most)
    assert [i for part in parts for i in range(*part)] == list(range(n))
    sizes = [j - i for i, j in parts]
    assert not sizes or max(sizes) - min(sizes) <= len(sizes)
