"""On a card: what our kernels compute, and what is learned through them, is what plain operations give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


from tests.engine.support.exact import FAMILIES, MIXTURES, random_model  # noqa: E402
from tests.kernels.support.triton_device import DTYPES, FLOOR, WORSE, apart, assert_as_good, randn  # noqa: E402
from tests.kernels.support.triton_device import exact_matmuls as exact_matmuls  # noqa: E402  # a fixture
from tests.trainers.test_packing import sequences  # noqa: E402
from verifiers.trainers.learning import logprobs as logprobs_module  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.learning.micro_batches import MicroBatch, micro_batches  # noqa: E402
from verifiers.trainers.learning.packing import PackedForward, Packing  # noqa: E402
from verifiers.trainers.learning.proof import ANY_LENGTH  # noqa: E402
from verifiers.trainers.setup import recompute_activations  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card"),
    # Told by whichever test is the first whose backward pass multiplies: autograd does it in a thread of its own.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

# --- kernels --------------------------------------------------------------------------------------------------------


def test_more_numbers_than_31_bits_count() -> None:
    """Rows at the far end of tensors of over two thousand million numbers are computed as the first ones are."""
    from verifiers.kernels import autograd
    from verifiers.kernels.cuda import learning

    rows, width = 131_072, 16_640
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of free memory")
    few, last = randn(64, width).bfloat16(), slice(rows - 64, rows)
    x = torch.zeros((rows, width), dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[last] = few
    weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(autograd.gated(x, x)[last], autograd.gated(few, few))
    for one, other in zip(learning.gated_back(x, x, x), learning.gated_back(few, few, few), strict=True):
        assert torch.equal(one[last], other)
    del one
    _, normed, scale = learning.norm(x, None, weight, 1e-5)
    assert torch.equal(normed[last], learning.norm(few, None, weight, 1e-5)[1])
    back, _ = learning.norm_back(x, weight, scale, None, x, learns=False)
    assert torch.equal(back[last], learning.norm_back(few, weight, scale[last], None, few, learns=False)[0])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("suffixes_only", [False, True], ids=["all", "tails"])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 128), (8, 1, 72), (2, 2, 256)], ids=str)
@pytest.mark.parametrize("heads", [(40, 0, 130), (64, 64, 64)], ids=["ragged", "even"])
def test_runs_attend_as_rectangles_do(heads: Any, shape: Any, suffixes_only: bool, dtype: Any) -> None:
    tails = (70, 1, 33, 200, 128, 5)
    packing = Packing(
        prefix_G=np.array(heads),
        suffix_B=np.array(tails),
        prefix_of_B=np.array((0, 0, 0, 1, 2, 2)),
        position_T=torch.zeros(sum(heads) + sum(tails), dtype=torch.int64, device="cuda"),
    )
    n, groups, dim = shape
    inputs = [randn(sum(heads) + sum(tails), one, dim, seed=i) for i, one in enumerate((n, groups, groups))]
    seed = randn(sum(tails) + (0 if suffixes_only else sum(heads)), n, dim, seed=7)

    def attend(varlen: bool) -> Callable[..., Any]:
        return lambda q, k, v: PackedForward(packing, varlen).attend(q, k, v, scale=0.1, suffixes_only=suffixes_only)

    assert_as_good(attend(True), attend(False), inputs, (seed,), dtype)


# --- models ---------------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": None, "initializer_range": 0.08}


def on_card(family: str = "Llama", *, dtype: Any = torch.float32, **more: Any) -> Any:
    model = random_model(family, dtype=dtype, **{**WIDE, **more}).cuda()
    model.config._attn_implementation = "sdpa"
    return model


def batch_of(rows: int = 6, tokens: int = 40, vocabulary: int = 97) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (rows, tokens), generator=generator)
    place = torch.nonzero(torch.rand((rows, tokens), generator=generator).flatten() < 0.5).flatten()
    place = place[place % tokens < tokens - 1]
    zeros = torch.zeros(len(place))
    batch = MicroBatch(
        ids_BT=ids, logit_index_N=place, target_N=ids.flatten()[place + 1], sequence_N=place // tokens,
        old_N=zeros, advantage_N=zeros, weight_N=zeros + 1, members=tuple(range(rows)),
    )  # fmt: skip
    return batch.to(torch.device("cuda"))


def learned(
    model: Any, *, fused: bool, temperature: float = 0.9, calls: list[int] | None = None
) -> tuple[TokenScorer, dict[str, Any]]:
    """Logprobs of a batch, and the gradients of something that depends on all of them."""
    model.zero_grad(set_to_none=True)
    scorer = TokenScorer(model)
    assert scorer.layouts.fused
    if calls is not None:
        calls.clear()  # those of the proof
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(logprobs_module, "_has_kernels", lambda _: False)
        found = scorer.logprobs(batch_of(), temperature)
        (found * randn(len(found), seed=2)).sum().backward()
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return scorer, {"logprobs": found.detach(), **grads}


def assert_learns_the_same(model: Any) -> TokenScorer:
    _, plain = learned(model, fused=False)
    scorer, lean = learned(model, fused=True)
    assert plain.keys() == lean.keys()
    for name in plain:
        assert apart(lean[name], plain[name]) < 1e-4, name
    return scorer


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("Gemma2", "GPT2")])
def test_float32_gradients_are_those_of_the_plain_path(family: str) -> None:
    scorer = assert_learns_the_same(on_card(family, head_dim=16 if family.startswith("Gemma") else None))
    due = {"Llama": 3, "Llama-tied": 3, "Qwen2": 3, "Qwen3": 3, "SmolLM3": 3, "Mistral": 3, "Gemma": 3}
    assert len(scorer._decoder.layers) >= due.get(family, 0)


@pytest.mark.parametrize("family", ["Llama", "Llama-tied", "Qwen2", "Qwen3", "Gemma"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_precision_is_as_near_to_float32_as_the_plain_path(family: str, dtype: Any) -> None:
    model = on_card(family, dtype=dtype, head_dim=16 if family == "Gemma" else None)
    exact = on_card(family, head_dim=16 if family == "Gemma" else None)
    with torch.no_grad():
        for mine, its in zip(exact.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
    _, truth = learned(exact, fused=False)
    _, plain = learned(model, fused=False)
    scorer, lean = learned(model, fused=True)
    assert len(scorer._decoder.layers) == model.config.num_hidden_layers
    for name in truth:
        assert apart(lean[name], truth[name]) <= max(WORSE * apart(plain[name], truth[name]), FLOOR[dtype]), name


@pytest.mark.parametrize("is_reentrant", [False, True], ids=["kept", "reentrant"])
def test_layers_that_are_computed_again_are_lean_then_too(is_reentrant: bool, monkeypatch: Any) -> None:
    from verifiers.kernels import autograd

    model = on_card().train()
    _, plain = learned(model, fused=False)
    recompute_activations(model, use_reentrant=is_reentrant)
    if is_reentrant:
        model.enable_input_require_grads()
    calls: list[int] = []
    own = autograd.fed_forward
    monkeypatch.setattr(autograd, "fed_forward", lambda *given: calls.append(1) or own(*given))
    _, lean = learned(model, fused=True, calls=calls)
    assert len(calls) == 2 * model.config.num_hidden_layers
    for name in plain:
        assert apart(lean[name], plain[name]) < 1e-4, name


def test_adapters_learn_the_same() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(on_card(), config)
    scorer = assert_learns_the_same(model)
    assert len(scorer._decoder.layers) == 3
    with torch.no_grad(), model.disable_adapter():
        without = scorer.logprobs(batch_of())
    assert torch.allclose(without, TokenScorer(on_card()).logprobs(batch_of()), atol=1e-4)


@pytest.mark.parametrize("part", ["", "self_attn", "mlp", "mlp.act_fn", "input_layernorm", "mlp.up_proj"])
def test_a_hook_is_heard_and_the_gradients_stay(part: str) -> None:
    model = on_card()
    scorer = assert_learns_the_same(model)
    heard = []
    handle = model.model.layers[1].get_submodule(part).register_forward_hook(lambda *_: heard.append(1))
    before = scorer.logprobs(batch_of())
    assert heard
    handle.remove()
    assert torch.allclose(scorer.logprobs(batch_of()), before, atol=1e-4)


def test_a_head_with_a_hook_is_called() -> None:
    model = on_card()
    scorer = TokenScorer(model)
    expected = scorer.logprobs(batch_of())
    handle = model.lm_head.register_forward_hook(lambda module, given, out: out * 2)
    assert not torch.allclose(scorer.logprobs(batch_of()), expected, atol=1e-2)
    handle.remove()


def test_autocast_rounds_as_it_always_did() -> None:
    model = on_card()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_learns_the_same(model)


def test_eager_attention_and_masks_are_left_to_the_layer() -> None:
    model = on_card()
    model.config._attn_implementation = "eager"
    assert_learns_the_same(model)


# --- packed rows ----------------------------------------------------------------------------------------------------


def packed_or_not(longest: int) -> MicroBatch:
    (batch,) = micro_batches(sequences(), max_tokens=10**6, longest_packed=longest)
    return batch.to(torch.device("cuda"))


def learned_in(scorer: TokenScorer, batch: MicroBatch) -> dict[str, Any]:
    """Logprobs in the order of the sequences, and the gradients of something that depends on all of them."""
    scorer.model.zero_grad(set_to_none=True)
    found = scorer.logprobs(batch, 0.9)
    found = found[torch.argsort(torch.tensor(batch.members).cuda()[batch.sequence_N], stable=True)]
    (found * randn(len(found), seed=2)).sum().backward()
    grads = {name: one.grad for name, one in scorer.model.named_parameters() if one.grad is not None}
    return {"logprobs": found.detach(), **grads}


PACKED = [
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
]


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_learn_the_same_in_float32(family: str) -> None:
    scorer = TokenScorer(on_card(family, head_dim=16 if family == "Gemma" else None))
    assert scorer.layouts.longest_packed == ANY_LENGTH
    ours, theirs = (learned_in(scorer, packed_or_not(longest)) for longest in (ANY_LENGTH, 0))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert apart(ours[name], theirs[name]) < 1e-4, name


@pytest.mark.parametrize("family", [name for name in PACKED if name not in MIXTURES])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_packed_rows_are_as_near_to_float32_as_rectangles(family: str, dtype: Any) -> None:
    head_dim = 16 if family == "Gemma" else None
    model, exact = on_card(family, dtype=dtype, head_dim=head_dim), on_card(family, head_dim=head_dim)
    with torch.no_grad():
        for mine, its in zip(exact.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
    truth, scorer = learned_in(TokenScorer(exact), packed_or_not(0)), TokenScorer(model)
    assert scorer.layouts.longest_packed == ANY_LENGTH
    assert scorer.layouts.varlen
    packed, plain = (learned_in(scorer, packed_or_not(longest)) for longest in (ANY_LENGTH, 0))
    for name in truth:
        assert apart(packed[name], truth[name]) <= max(WORSE * apart(plain[name], truth[name]), FLOOR[dtype]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["kept", "reentrant"])
def test_packed_rows_that_are_computed_again(is_reentrant: bool, dtype: Any) -> None:
    model = on_card(dtype=dtype).train()
    scorer = TokenScorer(model)
    kept = learned_in(scorer, packed_or_not(scorer.layouts.longest_packed))
    recompute_activations(model, use_reentrant=is_reentrant)
    if is_reentrant:
        model.enable_input_require_grads()
    again = learned_in(scorer, packed_or_not(scorer.layouts.longest_packed))
    for name in kept:
        assert apart(again[name], kept[name]) < max(1e-4, FLOOR[dtype]), name


def test_packed_rows_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False
    )
    scorer = TokenScorer(peft.get_peft_model(on_card(), config))
    assert scorer.layouts.longest_packed == ANY_LENGTH
    ours, theirs = (learned_in(scorer, packed_or_not(longest)) for longest in (ANY_LENGTH, 0))
    for name in theirs:
        assert apart(ours[name], theirs[name]) < 1e-4, name


def test_a_micro_batch_arrives_as_it_was() -> None:
    (here,) = micro_batches(sequences(), max_tokens=10**6, longest_packed=ANY_LENGTH)
    there = here.to(torch.device("cuda"))
    assert here.packing is not None
    assert there.packing is not None
    assert torch.equal(there.packing.position_T.cpu(), here.packing.position_T)
    for name in ("ids_BT", "logit_index_N", "target_N", "sequence_N", "old_N", "advantage_N", "weight_N"):
        one, other = getattr(there, name), getattr(here, name)
        assert one.is_cuda
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)
