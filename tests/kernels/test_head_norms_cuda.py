"""On a card: norms of each head of queries and keys (Qwen3), fused with what is around them, sampled and learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import assert_exact, expected, prompt_of  # noqa: E402
from tests.engine.test_cuda import mixed  # noqa: E402
from tests.engine.tiny import tokenizer  # noqa: E402
from tests.kernels.support.triton_device import exact_matmuls as exact_matmuls  # noqa: E402  # a fixture
from tests.kernels.test_head_norms import check_autocast, check_gradients, qwen3  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")]

EPSILON = 1e-5
WITHIN = 3e-5  # sums in another order than cuBLAS adds them up


def on_card(**more: Any) -> Any:
    return qwen3(**{"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, **more}).cuda()


# --- kernels ----------------------------------------------------------------------------------------------------------


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
