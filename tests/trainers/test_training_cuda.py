"""On a card: what our kernels compute, and what is learned through them, is what plain operations give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402

from tests.engine.support.exact import FAMILIES, MIXTURES, random_model  # noqa: E402
from tests.trainers.test_packing import sequences  # noqa: E402
from verifiers.kernels import reference  # noqa: E402
from verifiers.kernels.autograd import projected  # noqa: E402
from verifiers.trainers.learning import logprobs as logprobs_module  # noqa: E402
from verifiers.trainers.learning import target_logprobs  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.learning.micro_batches import MicroBatch, micro_batches  # noqa: E402
from verifiers.trainers.learning.packing import PackedForward, Packing  # noqa: E402
from verifiers.trainers.learning.proof import ANY_LENGTH  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card"),
    # Told by whichever test is the first whose backward pass multiplies: autograd does it in a thread of its own.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WORSE = 1.5  # how much further from the truth than plain operations half precision may be
FLOOR = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # rounding itself, beside the largest number


@pytest.fixture(autouse=True)
def exact_matmuls() -> Iterator[None]:
    """TF32 would round the reference."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def randn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def apart(one: Any, other: Any) -> float:
    """The distance, as a share of the size: over the whole tensor, so that one unlucky rounding decides nothing."""
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


def through(function: Callable[..., Any], inputs: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
    """What a function gives, and the gradients of its inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(outs, inputs, [seed.to(one.dtype) for seed, one in zip(seeds, outs, strict=True)])
    return [*(one.detach() for one in outs), *grads]


def assert_as_good(ours: Callable[..., Any], plain: Callable[..., Any], inputs: Any, seeds: Any, dtype: Any) -> None:
    """Beside the same computed in float64, ours is no further off than plain operations are, or than rounding is."""
    inputs, seeds = [x.to(dtype) for x in inputs], [x.to(dtype) for x in seeds]
    truth = through(plain, [x.double() for x in inputs], seeds)
    for one, other, true in zip(
        through(ours, inputs, seeds), through(plain, inputs, seeds), truth, strict=True
    ):  # fmt: skip
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert apart(one, true) <= max(WORSE * apart(other, true), FLOOR[dtype])


def wide(x: Any) -> Any:
    return x if x.dtype == torch.float64 else x.float()


# --- kernels --------------------------------------------------------------------------------------------------------


def plain_norm(x: Any, weight: Any) -> Any:
    y = wide(x)
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 24), (777, 576), (5000, 64), (300, 2048), (33, 5120)], ids=str)
def test_a_sum_and_its_norm(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.autograd import add_norm

    x, more, past, grad = (randn(*shape, seed=i) for i in range(4))
    weight = randn(shape[1], seed=5).abs() + 0.5
    assert_as_good(
        lambda x, more, weight: add_norm(x, more, weight, 1e-5),
        lambda x, more, weight: (x + more, plain_norm(x + more, weight)),
        (x, more, weight), (past, grad), dtype,
    )  # fmt: skip
    assert_as_good(
        lambda x, weight: add_norm(x, None, weight, 1e-5),
        lambda x, weight: (x + 0, plain_norm(x, weight)),
        (x, weight), (past, grad), dtype,
    )  # fmt: skip


def test_a_norm_that_is_not_trained_or_not_followed() -> None:
    from verifiers.kernels.autograd import add_norm

    x, weight = randn(50, 576).requires_grad_(), randn(576, seed=1)
    _, normed = add_norm(x, None, weight, 1e-5)
    (mine,) = torch.autograd.grad(normed.sum(), x)
    (its,) = torch.autograd.grad(plain_norm(x, weight).sum(), x)
    assert torch.allclose(mine, its, atol=1e-5)
    total, _ = add_norm(x, x, weight, 1e-5)
    assert torch.equal(torch.autograd.grad(total.sum(), x)[0], torch.full_like(x, 2.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("one_angle", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize(
    "shape", [(3, 50, 9, 3, 64), (2, 33, 4, 2, 24), (1, 700, 4, 4, 16), (2, 65, 6, 1, 128), (4, 7, 12, 2, 256)], ids=str
)
def test_a_rotation_and_its_way_back(shape: Any, one_angle: bool, dtype: Any) -> None:
    from verifiers.kernels.autograd import rotated

    batch, tokens, heads, groups, dim = shape
    angle = randn(1 if one_angle else batch, tokens, dim, seed=9) * 3
    inputs = [randn(batch, tokens, n, dim, seed=n) for n in (heads, groups)]

    def plain(*both: Any) -> Any:
        cos, sin = (x.to(both[0].dtype) for x in (angle.cos().to(dtype), angle.sin().to(dtype)))
        return tuple(reference.rotary(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in both)

    assert_as_good(
        lambda q, k: rotated(q, k, angle.cos().to(dtype), angle.sin().to(dtype)),
        plain, inputs, [randn(*x.shape, seed=3) for x in inputs], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 1536), (501, 1000)], ids=str)
def test_gating_and_its_way_back(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.autograd import gated

    gate, up, grad = (randn(*shape, seed=i) * 4 for i in range(3))
    assert_as_good(gated, lambda gate, up: F.silu(gate) * up, (gate, up), (grad,), dtype)


def test_gates_far_from_zero_have_gradients_that_are_numbers() -> None:
    from verifiers.kernels.autograd import gated

    gate = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4], device="cuda")
    ones = torch.ones_like(gate)
    for one, other in zip(
        through(gated, (gate, ones), (ones,)), through(lambda x, up: F.silu(x) * up, (gate, ones), (ones,)), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocabulary", [97, 4096, 49152, 50257, 262144])
def test_the_logprobs_of_a_head(monkeypatch: Any, vocabulary: int, temperature: float, dtype: Any) -> None:
    n, width = 70, 64
    most = vocabulary * dtype.itemsize * 30
    monkeypatch.setitem(target_logprobs.CHUNK_BYTES, "cuda", most)
    assert len(target_logprobs.chunks_of(n, vocabulary * dtype.itemsize, torch.device("cuda"))) == 3
    hidden, weight, bias = randn(n, width), randn(vocabulary, width, seed=1) * 0.3, randn(vocabulary, seed=2)
    target = torch.arange(n, device="cuda") * 7919 % vocabulary
    target[0] = vocabulary - 1

    def plain(hidden: Any, weight: Any, bias: Any = None) -> Any:
        return -F.cross_entropy(wide(F.linear(hidden, weight, bias)) / temperature, target, reduction="none")

    def ours(hidden: Any, weight: Any, bias: Any = None) -> Any:
        return target_logprobs.fused_logprobs(hidden, weight, bias, target, temperature)

    for inputs in ((hidden, weight), (hidden, weight, bias)):
        assert_as_good(ours, plain, inputs, (randn(n, seed=3),), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_projections_of_one_input(bias: bool, dtype: Any) -> None:
    linears = [torch.nn.Linear(64, n, bias=bias, device="cuda", dtype=dtype) for n in (96, 32, 32)]

    def ours(x: Any) -> Any:
        return projected(x, linears) if x.dtype == dtype else plain(x)

    def plain(x: Any) -> Any:
        weights = [(one.weight.to(x.dtype), None if one.bias is None else one.bias.to(x.dtype)) for one in linears]
        return tuple(F.linear(x, *both) for both in weights)

    assert_as_good(ours, plain, (randn(3, 50, 64),), [randn(3, 50, n, seed=n) for n in (96, 32, 32)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_keys_and_values_in_one_go(dtype: Any) -> None:
    from verifiers.kernels.autograd import projected_heads

    angle = randn(1, 50, 32, seed=9) * 3
    shapes = [(3, 50, 64), (64,), (128, 64), (64, 64), (64, 64)]
    inputs = [randn(*shape, seed=i) * (1 if i < 2 else 0.1) for i, shape in enumerate(shapes)]
    seeds = [randn(*shape, seed=i + 5) for i, shape in enumerate([(3, 50, 64), (3, 50, 4, 32), *[(3, 50, 2, 32)] * 2])]

    def ours(x: Any, weight: Any, *weights: Any) -> Any:
        linears = [SimpleNamespace(weight=one, bias=None) for one in weights]
        return projected_heads(x, weight, 1e-5, linears, 32, (angle.cos().to(dtype), angle.sin().to(dtype)))

    def plain(x: Any, weight: Any, *weights: Any) -> Any:
        cos, sin = (one.to(dtype).to(x.dtype) for one in (angle.cos(), angle.sin()))
        q, k, v = (F.linear(plain_norm(x, weight), one).unflatten(-1, (-1, 32)) for one in weights)
        return x + 0, *(reference.rotary(one.transpose(1, 2), cos, sin).transpose(1, 2) for one in (q, k)), v

    assert_as_good(ours, plain, inputs, seeds, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_feed_forward_in_one_go(dtype: Any) -> None:
    from verifiers.kernels.autograd import fed_forward

    shapes = [(3, 50, 64), (3, 50, 64), (64,), (96, 64), (96, 64), (64, 96)]
    inputs = [randn(*shape, seed=i) * (1 if i < 3 else 0.1) for i, shape in enumerate(shapes)]

    def plain(x: Any, more: Any, weight: Any, gate: Any, up: Any, down: Any) -> Any:
        normed = plain_norm(x + more, weight)
        return x + more + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)

    def ours(x: Any, more: Any, weight: Any, *weights: Any) -> Any:
        return fed_forward(x, more, weight, 1e-5, *weights)

    assert_as_good(ours, plain, inputs, (randn(3, 50, 64, seed=8),), dtype)


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


def test_a_head_can_be_gone_back_through_twice_or_not_at_all() -> None:
    hidden, weight = randn(40, 32).requires_grad_(), randn(97, 32, seed=1)
    target = torch.arange(40, device="cuda")
    out = target_logprobs.fused_logprobs(hidden, weight, None, target).sum()
    first = torch.autograd.grad(out, hidden, retain_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(out, hidden)[0], first)
    with torch.no_grad():
        assert not target_logprobs.fused_logprobs(hidden, weight, None, target).requires_grad
    assert target_logprobs.fused_logprobs(hidden[:0], weight, None, target[:0]).shape == (0,)


def test_logits_that_are_not_numbers_are_not_hidden() -> None:
    hidden, weight = randn(4, 32), randn(97, 32, seed=1)
    hidden[1] = float("nan")
    found = target_logprobs.fused_logprobs(hidden, weight, None, torch.zeros(4, dtype=torch.int64, device="cuda"))
    assert torch.isfinite(found).tolist() == [True, False, True, True]


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
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
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
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
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
