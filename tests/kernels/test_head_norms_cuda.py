"""On a card: norms of each head of queries and keys (Qwen3), fused with what is around them, sampled and learned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import assert_exact, expected, prompt_of  # noqa: E402
from tests.engine.test_cuda import SHAPES, angles_of, blocks_of_sequences, copy_of, heads_of, mixed  # noqa: E402
from tests.engine.tiny import tokenizer  # noqa: E402
from tests.kernels.test_head_norms import check_autocast, check_gradients, qwen3  # noqa: E402
from tests.trainers import making  # noqa: E402
from tests.trainers.test_training_cuda import DTYPES, assert_as_good, plain_norm, randn  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.kernels import autograd, reference  # noqa: E402
from verifiers.kernels.norms import HeadNorms  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")]

EPSILON = 1e-5
WITHIN = 3e-5  # sums in another order than cuBLAS adds them up


@pytest.fixture(autouse=True)
def exact_matmuls() -> Iterator[None]:
    """TF32 would round the reference."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def norms_of(dim: int, dtype: Any) -> HeadNorms:
    q, k = ((randn(dim, seed=i).abs() + 0.5).to(dtype) for i in range(2))
    return HeadNorms(q, k, 1e-6, 0.1)


def on_card(**more: Any) -> Any:
    return qwen3(**{"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, **more}).cuda()


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_within_attention_are_norms_before_it(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    batch, heads, groups, dim = shape
    torch.manual_seed(0)
    q, k, v = (heads_of(batch, 1, n, dim, dtype) for n in (heads, groups, groups))
    length = torch.randint(0, 90, (batch,), device="cuda")
    _, tables, cache = blocks_of_sequences((length + 1).tolist(), groups, dim, dtype)
    other = copy_of(cache)
    rotary, norms = angles_of(batch, 1, dim, dtype), norms_of(dim, dtype)
    settings: Any = {"scale": 0.2, "window": None, "softcap": None, "rotary": rotary}
    one = decode.attend(q, k, v, *cache.layers[0], tables, length, norms=norms, **settings)
    two = decode.attend(*norms.of(q, k), v, *other.layers[0], tables, length, **settings)
    within = 1e-5 if dtype is torch.float32 else 4e-2  # the last bit of a normed number
    assert torch.allclose(one, two, rtol=within, atol=within)
    assert torch.allclose(cache.store, other.store, rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_with_rotation_in_place_are_norms_before_it(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    _, heads, groups, dim = shape
    norms = norms_of(dim, dtype)
    for batch, tokens in ((1, 700), (3, 5)):
        q, k = (heads_of(batch, tokens, n, dim, dtype) for n in (heads, groups))
        rotary = angles_of(1, tokens, dim, dtype)
        due = [reference.rotary(x, *rotary) for x in norms.of(q, k)]
        decode.rotate_(q, k, *rotary, norms)
        within = 1e-5 if dtype is torch.float32 else 4e-2
        for given, wanted in zip((q, k), due, strict=True):
            assert torch.allclose(given, wanted, atol=within, rtol=within)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 50, 9, 3, 64), (2, 33, 4, 2, 24), (2, 65, 6, 1, 128)], ids=str)
def test_norms_and_a_rotation_and_their_way_back(shape: Any, dtype: Any) -> None:
    batch, tokens, heads, groups, dim = shape
    angle = randn(1, tokens, dim, seed=9) * 3
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    inputs = [randn(batch, tokens, n, dim, seed=n) for n in (heads, groups)]
    inputs += [randn(dim, seed=i).abs() + 0.5 for i in range(2)]

    def plain(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        normed = plain_norm(q, q_weight), plain_norm(k, k_weight)
        return tuple(
            reference.rotary(x.transpose(1, 2), cos.to(x.dtype), sin.to(x.dtype)).transpose(1, 2) for x in normed
        )

    def ours(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        return autograd.rotated(q, k, cos, sin, HeadNorms(q_weight, k_weight, EPSILON, EPSILON))

    assert_as_good(ours, plain, inputs, [randn(*x.shape, seed=3) for x in inputs[:2]], dtype)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_the_logprobs_of_qwen3_sampled_on_a_card_are_those_of_transformers(start: Any) -> None:
    model = on_card()
    engine = start(model, rows=8, length=250)
    assert str(engine.backend) == "batched, by Triton kernels"
    requests = mixed(24)
    answers = [future.result(120) for future in [engine.submit(prompt, way)[0] for prompt, way in requests]]
    for answer, (_, way) in zip(answers, requests, strict=True):
        assert_exact(model, answer, way, within=WITHIN)


def test_half_precision_logprobs_are_those_of_transformers_to_rounding(start: Any) -> None:
    model = on_card(dtype=torch.bfloat16)
    engine = start(model, rows=8, length=250)
    way, gaps = Sampling(max_tokens=40, seed=1), []
    for answer in engine.generate([prompt_of(n, seed=n) for n in (1, 20, 90)], way, n=4):
        _, raw = expected(model, answer, way)
        gaps += [abs(a - b) for a, b in zip(answer.raw_logprobs, raw, strict=True)]
    gaps.sort()
    assert gaps[len(gaps) // 2] < 0.02
    assert gaps[-1] < 0.3


def test_a_hook_on_a_head_norm_is_heard_on_a_card_too(start: Any) -> None:
    model = on_card()
    engine, heard = start(model, rows=8, length=250), []
    model.model.layers[1].self_attn.q_norm.register_forward_hook(lambda _, __, out: heard.append(1) or out * 1.5)
    way = Sampling(max_tokens=10, seed=1)
    assert_exact(model, engine.generate([prompt_of(20)], way)[0], way, within=WITHIN)
    assert heard


# --- learning ---------------------------------------------------------------------------------------------------------


def test_the_gradients_of_qwen3_on_a_card_are_those_of_transformers() -> None:
    check_gradients(on_card())


def test_the_gradients_of_adapters_on_qwen3_on_a_card_are_those_of_transformers() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "down_proj"], init_lora_weights=False)
    check_gradients(peft.get_peft_model(on_card(), config))


def test_autocast_leaves_the_norms_of_heads_to_their_modules() -> None:
    check_autocast(on_card())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_of_grpo_at_a_rate_of_zero_has_ratios_of_one_on_a_card(tmp_path: Path, dtype: Any) -> None:
    words = tokenizer()
    model = on_card(vocab_size=len(words), eos_token_id=words.eos_token_id, dtype=dtype)
    report = making.trainer(tmp_path, model=model, learning_rate=0.0, max_steps=2).train()
    assert report.steps
    for step in report.steps:
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-4 if dtype is torch.float32 else 2e-2)
