"""On a card: what our kernels compute, and what is learned through them, is what plain operations give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402

from tests.engine.support.exact import FAMILIES, random_model  # noqa: E402
from verifiers.engine import slots  # noqa: E402
from verifiers.trainers import logprobs as logprobs_module  # noqa: E402
from verifiers.trainers.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.micro_batches import MicroBatch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")]

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
    from verifiers.trainers.fused_functions import add_norm

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
    from verifiers.trainers.fused_functions import add_norm

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
    from verifiers.trainers.fused_functions import rotated

    batch, tokens, heads, groups, dim = shape
    angle = randn(1 if one_angle else batch, tokens, dim, seed=9) * 3
    inputs = [randn(batch, tokens, n, dim, seed=n) for n in (heads, groups)]

    def plain(*both: Any) -> Any:
        cos, sin = (x.to(both[0].dtype) for x in (angle.cos().to(dtype), angle.sin().to(dtype)))
        return tuple(slots.rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in both)

    assert_as_good(
        lambda q, k: rotated(q, k, angle.cos().to(dtype), angle.sin().to(dtype)),
        plain, inputs, [randn(*x.shape, seed=3) for x in inputs], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 1536), (501, 1000)], ids=str)
def test_gating_and_its_way_back(shape: Any, dtype: Any) -> None:
    from verifiers.trainers.fused_functions import gated

    gate, up, grad = (randn(*shape, seed=i) * 4 for i in range(3))
    assert_as_good(gated, lambda gate, up: F.silu(gate) * up, (gate, up), (grad,), dtype)


def test_gates_far_from_zero_have_gradients_that_are_numbers() -> None:
    from verifiers.trainers.fused_functions import gated

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
    from verifiers.trainers import fused_functions

    n, width = 70, 64
    monkeypatch.setattr(fused_functions, "CHUNK_BYTES", vocabulary * dtype.itemsize * 30)
    assert len(fused_functions.chunks_of(n, vocabulary * dtype.itemsize)) == 3
    hidden, weight, bias = randn(n, width), randn(vocabulary, width, seed=1) * 0.3, randn(vocabulary, seed=2)
    target = torch.arange(n, device="cuda") * 7919 % vocabulary
    target[0] = vocabulary - 1

    def plain(hidden: Any, weight: Any, bias: Any = None) -> Any:
        return -F.cross_entropy(wide(F.linear(hidden, weight, bias)) / temperature, target, reduction="none")

    def ours(hidden: Any, weight: Any, bias: Any = None) -> Any:
        return fused_functions.picked(hidden, weight, bias, target, temperature)

    for inputs in ((hidden, weight), (hidden, weight, bias)):
        assert_as_good(ours, plain, inputs, (randn(n, seed=3),), dtype)


def test_a_head_can_be_gone_back_through_twice_or_not_at_all() -> None:
    from verifiers.trainers.fused_functions import picked

    hidden, weight = randn(40, 32).requires_grad_(), randn(97, 32, seed=1)
    target = torch.arange(40, device="cuda")
    out = picked(hidden, weight, None, target).sum()
    first = torch.autograd.grad(out, hidden, retain_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(out, hidden)[0], first)
    with torch.no_grad():
        assert not picked(hidden, weight, None, target).requires_grad
    assert picked(hidden[:0], weight, None, target[:0]).shape == (0,)


def test_logits_that_are_not_numbers_are_not_hidden() -> None:
    from verifiers.trainers.fused_functions import picked

    hidden, weight = randn(4, 32), randn(97, 32, seed=1)
    hidden[1] = float("nan")
    found = picked(hidden, weight, None, torch.zeros(4, dtype=torch.int64, device="cuda"))
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
        ids_BT=ids, place_N=place, target_N=ids.flatten()[place + 1], sequence_N=place // tokens,
        old_N=zeros, advantage_N=zeros, weight_N=zeros + 1, members=tuple(range(rows)),
    )  # fmt: skip
    return batch.to(torch.device("cuda"))


def learned(model: Any, *, leanly: bool, temperature: float = 0.9) -> tuple[TokenScorer, dict[str, Any]]:
    """Logprobs of a batch, and the gradients of something that depends on all of them."""
    model.zero_grad(set_to_none=True)
    scorer = TokenScorer(model)
    with pytest.MonkeyPatch.context() as patch:
        if not leanly:
            patch.setattr(logprobs_module, "_has_kernels", lambda _: False)
        found = scorer.logprobs(batch_of(), temperature)
        (found * randn(len(found), seed=2)).sum().backward()
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return scorer, {"logprobs": found.detach(), **grads}


def assert_learns_the_same(model: Any) -> TokenScorer:
    _, plain = learned(model, leanly=False)
    scorer, lean = learned(model, leanly=True)
    assert plain.keys() == lean.keys()
    for name in plain:
        assert apart(lean[name], plain[name]) < 1e-4, name
    return scorer


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("Gemma2", "GPT2")])
def test_float32_gradients_are_those_of_the_plain_path(family: str) -> None:
    scorer = assert_learns_the_same(on_card(family, head_dim=16 if family.startswith("Gemma") else None))
    due = {"Llama": 3, "Llama-tied": 3, "Qwen2": 3, "Qwen3": 3, "Mistral": 3, "Gemma": 3}
    assert scorer._lean is not None
    assert len(scorer._lean.layers) >= due.get(family, 0)


@pytest.mark.parametrize("family", ["Llama", "Llama-tied", "Qwen2", "Qwen3", "Gemma"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_precision_is_as_near_to_float32_as_the_plain_path(family: str, dtype: Any) -> None:
    model = on_card(family, dtype=dtype, head_dim=16 if family == "Gemma" else None)
    exact = on_card(family, head_dim=16 if family == "Gemma" else None)
    with torch.no_grad():
        for mine, its in zip(exact.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
    _, truth = learned(exact, leanly=False)
    _, plain = learned(model, leanly=False)
    scorer, lean = learned(model, leanly=True)
    assert len(scorer._lean.layers) == model.config.num_hidden_layers  # type: ignore[union-attr]
    for name in truth:
        assert apart(lean[name], truth[name]) <= max(WORSE * apart(plain[name], truth[name]), FLOOR[dtype]), name


@pytest.mark.parametrize("is_reentrant", [False, True], ids=["kept", "reentrant"])
def test_layers_that_are_computed_again_are_lean_then_too(is_reentrant: bool, monkeypatch: Any) -> None:
    from verifiers.trainers import fused_functions

    model = on_card().train()
    _, plain = learned(model, leanly=False)
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    if is_reentrant:
        model.enable_input_require_grads()
    calls = []
    own = fused_functions.gated
    monkeypatch.setattr(fused_functions, "gated", lambda *given: calls.append(1) or own(*given))
    scorer, lean = learned(model, leanly=True)
    proofs = len(scorer._lean.layers)  # type: ignore[union-attr]
    assert len(calls) == proofs + 2 * model.config.num_hidden_layers
    for name in plain:
        assert apart(lean[name], plain[name]) < 1e-4, name


def test_adapters_learn_the_same() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(on_card(), config)
    scorer = assert_learns_the_same(model)
    assert len(scorer._lean.layers) == 3  # type: ignore[union-attr]
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
