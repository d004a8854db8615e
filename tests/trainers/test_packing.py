"""Packed rows compute a prompt once for its group; what is learned from them is what is learned without them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, WINDOW, random_model  # noqa: E402
from verifiers.kernels.cpu.binding import learn_functions  # noqa: E402
from verifiers.samples import Sample  # noqa: E402
from verifiers.trainers.learning import packing as packed_rows  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.learning.micro_batches import MicroBatch, TrainSample, micro_batches  # noqa: E402
from verifiers.trainers.learning.proof import ANY_LENGTH  # noqa: E402
from verifiers.trainers.reference import Reference  # noqa: E402
from verifiers.trainers.setup import recompute_activations  # noqa: E402

PACKED = (
    "Llama",
    "Llama-tied",
    "Qwen2",
    "Qwen3",
    "SmolLM3",
    "Gemma",
    "GPT2",
    "GPTNeoX",
    "Phi4-mini",
    "Olmo2",
    "Qwen3-MoE",
)
SHORT = (
    "Qwen2-window",
    "Gemma2",
    "Gemma3",
    "Mistral",
    "Phi3",
    "Mixtral",
)  # windows shorter than the probe, or capped scores


def sequences(*, is_even: bool = False) -> list[TrainSample]:
    """Groups of several sizes; some replies of two turns, and ends that are not trained."""
    draw, made = random.Random(1), []
    for prompt, size in ((7, 4), (7, 4)) if is_even else ((7, 4), (3, 3), (1, 2), (12, 1)):
        ids = [draw.randrange(3, 97) for _ in range(prompt)]
        for _ in range(size):
            reply = [draw.randrange(3, 97) for _ in range(5 if is_even else draw.randrange(1, 9))]
            mask = [1, *(int(is_even or draw.random() < 0.7) for _ in reply[1:])]
            sample = Sample(
                prompt_ids=list(ids),
                completion_ids=reply,
                completion_mask=mask,
                completion_logprobs=[0.0] * len(reply),
            )
            made.append(TrainSample(sample=sample, advantage=1.0))
    return made


def batch_of(longest_packed: int, *, is_even: bool = False) -> MicroBatch:
    (batch,) = micro_batches(sequences(is_even=is_even), max_tokens=10**6, longest_packed=longest_packed)
    return batch


def learned(scorer: TokenScorer, batch: MicroBatch) -> dict[str, Any]:
    """Logprobs in the order of the sequences, and the gradients of something that depends on all of them."""
    scorer.model.zero_grad(set_to_none=True)
    found = scorer.logprobs(batch, 0.9)
    found = found[torch.argsort(torch.tensor(batch.members)[batch.sequence_N], stable=True)]
    (found * torch.arange(1, len(found) + 1)).sum().backward()
    grads = {name: one.grad for name, one in scorer.model.named_parameters() if one.grad is not None}
    return {"logprobs": found.detach(), **grads}


def assert_learns_the_same(model: Any, *, is_even: bool = False) -> TokenScorer:
    scorer = TokenScorer(model)
    packed = batch_of(scorer.layouts.longest_packed, is_even=is_even)
    assert packed.packing is not None
    before = model.config._attn_implementation
    ours, theirs = learned(scorer, packed), learned(scorer, batch_of(0, is_even=is_even))
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert (ours[name] - one).abs().max() <= 2e-5 * one.abs().max() + 1e-6, name
    assert model.config._attn_implementation == before
    assert packed_rows.current() is None
    return scorer


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("is_even", [False, True], ids=["ragged", "even"])
@pytest.mark.parametrize("family", PACKED)
def test_families_learn_the_same(family: str, is_even: bool, implementation: str) -> None:
    model = random_model(family)
    model.config._attn_implementation = implementation
    scorer = assert_learns_the_same(model, is_even=is_even)
    assert scorer.layouts.longest_packed == ANY_LENGTH


@pytest.mark.parametrize("family", SHORT)
def test_what_rows_cannot_do_is_done_without_them(family: str) -> None:
    assert FAMILIES.keys() == {*PACKED, *SHORT}
    assert TokenScorer(random_model(family)).layouts.longest_packed == 0


def test_a_window_is_the_longest_that_is_packed() -> None:
    model = random_model("Mistral", sliding_window=3 * WINDOW)
    scorer = assert_learns_the_same(model)
    assert scorer.layouts.longest_packed == 3 * WINDOW
    model.config._attn_implementation = "sdpa"
    assert assert_learns_the_same(model).layouts.longest_packed == 3 * WINDOW


def test_a_model_that_attends_in_its_own_way_is_left_alone() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    assert TokenScorer(transformers.BloomForCausalLM(config).eval()).layouts.longest_packed == 0


def test_layers_that_look_both_ways_are_refused() -> None:
    model = random_model()
    model.config._attn_implementation = "sdpa"
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="is not causal"):
        _ = TokenScorer(model).layouts


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["kept", "reentrant"])
def test_layers_that_are_computed_again_are_packed_then_too(is_reentrant: bool, implementation: str) -> None:
    model = random_model().train()
    model.config._attn_implementation = implementation
    scorer = TokenScorer(model)
    kept = learned(scorer, batch_of(scorer.layouts.longest_packed))
    recompute_activations(model, use_reentrant=is_reentrant)
    if is_reentrant:
        model.enable_input_require_grads()
    again = learned(scorer, batch_of(scorer.layouts.longest_packed))
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert_learns_the_same(model)


def test_adapters_learn_the_same_and_the_reference_is_without_them() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False
    )
    base = random_model()
    base.config._attn_implementation = "sdpa"
    expected = TokenScorer(base).logprobs(batch_of(ANY_LENGTH)).detach()
    model = peft.get_peft_model(base, config)
    assert_learns_the_same(model)
    reference = Reference(model)
    assert reference.scorer.layouts.longest_packed == ANY_LENGTH
    assert torch.allclose(reference.logprobs(batch_of(ANY_LENGTH), 1.0), expected, atol=1e-5)
    assert not torch.allclose(TokenScorer(model).logprobs(batch_of(ANY_LENGTH)), expected, atol=1e-2)


def test_a_reference_that_is_a_copy_goes_the_same_way() -> None:
    model = random_model()
    reference = Reference(model)
    assert reference.scorer.layouts.longest_packed == ANY_LENGTH
    mine = TokenScorer(model).logprobs(batch_of(ANY_LENGTH), 0.7)
    assert torch.allclose(reference.logprobs(batch_of(ANY_LENGTH), 0.7), mine, atol=1e-5)


def test_a_head_that_caps_its_logits_is_asked_whole() -> None:
    model = random_model("Gemma2", final_logit_softcapping=3.0, sliding_window=64)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    scorer = assert_learns_the_same(model)
    assert not scorer._is_split


@pytest.mark.parametrize("suffixes_only", [False, True], ids=["all", "tails"])
@pytest.mark.parametrize("heads", [(4, 0, 7), (5, 5, 5)], ids=["ragged", "even"])
def test_runs_attend_as_rectangles_do(monkeypatch: Any, heads: tuple[int, ...], suffixes_only: bool) -> None:
    """The kernel for runs is a card's; what it is given is the same here."""

    def one_by_one(q: Any, k: Any, v: Any, query_ends: Any, key_ends: Any, *more: Any) -> Any:
        *_, scale, dropout = more
        out, ends = [], list(zip(query_ends.tolist(), key_ends.tolist(), strict=True))
        for (q_from, k_from), (q_to, k_to) in itertools.pairwise(ends):
            assert 0 < q_to - q_from <= more[0]
            assert 0 < k_to - k_from <= more[1]
            seen = torch.ones(q_to - q_from, k_to - k_from, dtype=torch.bool).tril(k_to - k_from - q_to + q_from)
            parts = (q[q_from:q_to], k[k_from:k_to], v[k_from:k_to])
            out.append(packed_rows.dense_attention(*(one[None] for one in parts), scale, dropout, seen)[0])
        return torch.cat(out)

    monkeypatch.setattr(packed_rows, "varlen_attention", one_by_one)
    tails = (3, 1, 6, 2, 5)
    positions = torch.zeros(sum(heads) + sum(tails), dtype=torch.int64)
    packing = packed_rows.Packing(
        prefix_G=np.array(heads), suffix_B=np.array(tails), prefix_of_B=np.array([0, 2, 0, 1, 2]), position_T=positions
    )
    inputs = [torch.randn(len(positions), n, 8).requires_grad_() for n in (4, 2, 2)]
    runs = (packing.suffix_segments if suffixes_only else packing.segments).attend(*inputs, 0.3, 0.0)
    rectangles = packing.padded.attend(*inputs, 0.3, 0.0, suffixes_only)
    assert torch.allclose(runs, rectangles, atol=1e-5)
    seed = torch.randn_like(runs)
    ours, theirs = (torch.autograd.grad(one, inputs, seed) for one in (runs, rectangles))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(ours, theirs, strict=True))


def test_the_same_row_gives_the_same_bits() -> None:
    model = random_model()
    model.config._attn_implementation = "sdpa"
    first, second = (learned(TokenScorer(model), batch_of(ANY_LENGTH)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_error_on_the_way_leaves_the_model_as_it_was() -> None:
    model = random_model()
    scorer = TokenScorer(model)
    packed = batch_of(scorer.layouts.longest_packed)
    handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.logprobs(packed)
    handle.remove()
    assert packed_rows.current() is None
    assert model.config._attn_implementation == "eager"
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    scorer.logprobs(packed)


@pytest.mark.skipif(learn_functions() is None, reason="no C compiler")
def test_a_token_attends_alike_to_the_bit_alone_in_a_rectangle_and_in_a_packed_row() -> None:
    generator = torch.Generator().manual_seed(0)
    prefix, suffix = 9, (12, 5)
    shared = [torch.randn((prefix, heads, 8), generator=generator) for heads in (4, 2, 2)]
    own = [[torch.randn((n, heads, 8), generator=generator) for heads in (4, 2, 2)] for n in suffix]
    whole = [[torch.cat(both)[None] for both in zip(shared, one, strict=True)] for one in own]
    alone = [packed_rows.dense_attention(*one, 0.3)[0, prefix:] for one in whole]
    width = prefix + max(suffix)
    padded = [
        torch.cat([torch.nn.functional.pad(one[i], (0, 0, 0, 0, 0, width - one[i].shape[1])) for one in whole])
        for i in range(3)
    ]
    beside = packed_rows.dense_attention(*padded, 0.3)
    packing = packed_rows.Packing(
        prefix_G=np.array([prefix]),
        suffix_B=np.array(suffix),
        prefix_of_B=np.array([0, 0]),
        position_T=torch.arange(prefix + sum(suffix)),
    )
    row = [torch.cat([shared[i], *(one[i] for one in own)]) for i in range(3)]
    packed = packed_rows.PackedForward(packing, varlen=False).attend(*row, scale=0.3, suffixes_only=True).split(suffix)
    for i, n in enumerate(suffix):
        assert torch.equal(alone[i], beside[i, prefix : prefix + n])
        assert torch.equal(alone[i], packed[i])
