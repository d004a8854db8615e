"""On a card: captured graphs, our kernels and a host that is behind, and still every logprob is the model's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, assert_exact, expected, prompt_of, random_model  # noqa: E402
from verifiers.engine.engine import LEAST_SHARED_CUDA, Engine  # noqa: E402
from verifiers.engine.requests import Generated, Sampling  # noqa: E402
from verifiers.errors import ModelError  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")]


@pytest.fixture(autouse=True)
def exact_matmuls() -> Iterator[None]:
    """TF32 would round the reference."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(model: Any, **settings: Any) -> Engine:
        made.append(Engine(model, **{"rows": 8, "length": 250, **settings}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def on_card(family: str = "Llama", *, dtype: Any = torch.float32, **settings: Any) -> Any:
    return random_model(family, dtype=dtype, **settings).cuda()


def mixed(
    n: int, longest: int = 60, *, truncated: bool = False, biased: bool = False
) -> list[tuple[list[int], Sampling]]:
    draw = random.Random(n)
    requests = []
    for i in range(n):
        way = Sampling(
            max_tokens=draw.randint(1, longest), seed=i, temperature=draw.choice([0.0, 0.7, 1.0, 1.4]),
            top_p=draw.choice([1.0, 0.8]) if truncated else 1.0, top_k=draw.choice([0, 9]) if truncated else 0,
            logit_bias=draw.choice([{}, {9: 2.0, 10: -3.0}]) if biased else {},
        )  # fmt: skip
        requests.append((prompt_of(draw.randint(1, 80), seed=i), way))
    return requests


def answers_of(engine: Engine, requests: list[tuple[list[int], Sampling]]) -> list[Generated]:
    return [future.result(120) for future in [engine.submit(prompt, way)[0] for prompt, way in requests]]


# --- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logprobs_are_those_of_the_forward_pass(start: Any, family: str) -> None:
    model = on_card(family, head_dim=None, hidden_size=128)
    requests = mixed(24)
    for answer, (_, way) in zip(answers_of(start(model), requests), requests, strict=True):
        assert_exact(model, answer, way, within=5e-3)  # the kernel's dot products may be TF32


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Mistral", "GPT2"])
def test_bf16_logprobs_are_those_of_the_forward_pass_to_rounding(start: Any, family: str) -> None:
    model = on_card(family, dtype=torch.bfloat16, hidden_size=128, head_dim=None, initializer_range=0.08)
    requests = mixed(32)
    gaps = []
    for answer, (_, way) in zip(answers_of(start(model), requests), requests, strict=True):
        _, raw = expected(model, answer, way)
        gaps += [abs(a - b) for a, b in zip(answer.raw_logprobs, raw, strict=True)]
    gaps.sort()
    assert gaps[len(gaps) // 2] < 0.02
    assert gaps[-1] < 0.3


def test_greedy_tokens_are_those_of_generate(start: Any) -> None:
    model = on_card(dtype=torch.float32)
    prompt = prompt_of(30)
    ours = start(model).generate([prompt], Sampling(max_tokens=30, temperature=0.0))[0]
    ids = torch.tensor([prompt], device="cuda")
    theirs = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, min_new_tokens=30, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert ours.ids == theirs[0, 30:].tolist()


# --- load -----------------------------------------------------------------------------------------------------------


def test_rows_that_end_at_different_times_are_compacted_without_a_trace(start: Any) -> None:
    model = on_card()
    engine = start(model, rows=24)
    requests = mixed(300, longest=40)
    for answer, (prompt, way) in zip(answers_of(engine, requests), requests, strict=True):
        assert answer.prompt_ids == prompt
        assert len(answer.ids) == way.max_tokens
        assert_exact(model, answer, way, within=5e-3)
    assert not engine.live
    assert engine.tokens == sum(way.max_tokens for _, way in requests)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(start: Any) -> None:
    model = on_card()
    requests = mixed(40, longest=20)
    alone = start(model, rows=1)
    single = [answers_of(alone, [request])[0] for request in requests]
    together = answers_of(start(model, rows=16), requests)
    same = sum(one.ids == other.ids for one, other in zip(single, together, strict=True))
    assert same >= 36  # the last bits of a logit depend on the batch, and may tip a token once in a while


def test_n_completions_share_a_prefill_and_stop_ids_end_them(start: Any) -> None:
    model = on_card()
    engine = start(model)
    way = Sampling(max_tokens=30, seed=3, stop_ids=frozenset(range(0, 97, 7)))
    for answer in engine.generate([prompt_of(20), prompt_of(33, seed=1)], way, n=6):
        assert_exact(model, answer, way, within=5e-3)
        is_cut = answer.ids[-1] % 7 == 0
        assert answer.finish_reason == ("stop" if is_cut else "length")
        assert not [token for token in answer.ids[:-1] if token % 7 == 0]


def test_cancelled_requests_leave_and_the_others_stay_exact(start: Any) -> None:
    model = on_card()
    engine = start(model, rows=8)
    way = Sampling(max_tokens=200, seed=1)
    futures = [engine.submit(prompt_of(5 + i, seed=i), way)[0] for i in range(12)]
    while engine.tokens < 100:
        pass
    for future in futures[::2]:
        future.cancel()
    for answer in [future.result(60) for future in futures[1::2]]:
        assert_exact(model, answer, way, within=5e-3)


def test_the_context_end_is_kept_to_although_the_device_is_ahead(start: Any) -> None:
    model = on_card()
    engine = start(model, rows=4, length=64)
    answers = engine.generate([prompt_of(n, seed=n) for n in (63, 62, 60, 40, 1)], Sampling(max_tokens=500, seed=1))
    assert [len(answer.ids) for answer in answers] == [1, 2, 4, 24, 63]
    for answer in answers:
        assert_exact(model, answer, Sampling(), within=5e-3)


# --- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("vocabulary", [97, 5000])
def test_the_kernel_draws_tokens_as_often_as_they_are_likely(temperature: float, vocabulary: int) -> None:
    from scipy import stats

    from verifiers.engine import kernels

    n = 200_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)).cuda() * 1.5
    seeds, steps = torch.arange(n, device="cuda"), torch.zeros(n, dtype=torch.int64, device="cuda")
    heat = torch.full((n,), temperature, device="cuda")
    for seed, step in ((seeds, steps), (steps + 7, seeds)):
        token, logprob, raw = kernels.sample(logits[None].expand(n, -1), heat, seed, step)
        probs = torch.softmax(logits.double() / temperature, -1)
        counts = torch.bincount(token, minlength=vocabulary).double()
        common = probs * n >= 10  # chi-square wants a few of each; the rest is one class
        seen = torch.cat([counts[common], counts[~common].sum()[None]]).cpu().numpy()
        due = torch.cat([probs[common], probs[~common].sum()[None]]).cpu().numpy() * n
        if due[-1] < 5:
            seen, due = seen[:-1], due[:-1]
        assert stats.chisquare(seen, due * (seen.sum() / due.sum())).pvalue > 1e-4
        assert torch.allclose(logprob, torch.log_softmax(logits / temperature, -1)[token], atol=1e-4)
        assert torch.allclose(raw, torch.log_softmax(logits, -1)[token], atol=1e-4)


def test_the_kernel_is_greedy_at_zero_and_says_so_when_logits_are_not_numbers() -> None:
    from verifiers.engine import kernels

    logits = torch.randn(6, 5000, device="cuda")
    logits[2] = float("nan")
    logits[3, 17] = float("nan")
    zeros = torch.zeros(6, dtype=torch.int64, device="cuda")
    for heat in (torch.zeros(6, device="cuda"), torch.ones(6, device="cuda")):
        token, _, raw = kernels.sample(logits, heat, zeros, zeros)
        assert torch.isfinite(raw).tolist() == [True, True, False, False, True, True]
        assert ((token >= 0) & (token < 5000)).all()
        if not heat.any():
            assert torch.equal(token[[0, 1, 4, 5]], logits.argmax(-1)[[0, 1, 4, 5]])


@pytest.mark.parametrize(("truncated", "biased"), [(True, False), (False, True), (True, True)])
def test_truncated_and_biased_rows_are_exact_beside_plain_ones(start: Any, truncated: bool, biased: bool) -> None:
    model = on_card()
    requests = mixed(60, truncated=truncated, biased=biased)
    for answer, (_, way) in zip(answers_of(start(model), requests), requests, strict=True):
        _, raw = expected(model, answer, way)
        assert answer.raw_logprobs == pytest.approx(raw, abs=5e-3)
        if not way.truncates:
            assert_exact(model, answer, way, within=5e-3)
        else:  # a token at the very edge may fall on either side
            drawn, _ = expected(model, answer, way)
            close = [abs(a - b) < 5e-3 for a, b in zip(answer.logprobs, drawn, strict=True)]
            assert sum(close) >= len(close) - 1


# --- weights --------------------------------------------------------------------------------------------------------


def in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def elsewhere(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + torch.randn_like(parameter) * 0.1


@pytest.mark.parametrize("update", [in_place, elsewhere], ids=lambda update: update.__name__)
def test_graphs_read_the_new_weights(start: Any, update: Callable[[Any], None]) -> None:
    model = on_card()
    engine = start(model)
    way = Sampling(max_tokens=25, seed=1)
    for _ in range(3):
        for answer in engine.generate([prompt_of(20), prompt_of(9)], way, n=3):
            assert_exact(model, answer, way, within=5e-3)
        update(model)
        torch.cuda.synchronize()


def test_adapters_switched_off_are_not_in_the_graphs_either(start: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(random_model(), config).cuda().eval()
    engine = start(model)
    way = Sampling(max_tokens=25, seed=1)
    assert_exact(model, engine.generate([prompt_of(20)], way)[0], way, within=5e-3)
    with model.disable_adapter():
        answer = engine.generate([prompt_of(20)], way)[0]
        assert_exact(model, answer, way, within=5e-3)
    assert_exact(model, engine.generate([prompt_of(20)], way)[0], way, within=5e-3)


def test_sampling_leaves_a_module_that_can_be_trained(start: Any) -> None:
    model = on_card()
    start(model).generate([prompt_of(20)], Sampling(max_tokens=10), n=3)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    ids = torch.tensor([prompt_of(20)], device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- reuse and failure ----------------------------------------------------------------------------------------------


def test_a_long_history_is_reused_and_exact(start: Any) -> None:
    model = on_card(max_position_embeddings=2048)
    engine = start(model, rows=4, length=1800)
    way = Sampling(max_tokens=30, seed=1)
    text = prompt_of(LEAST_SHARED_CUDA + 200)
    for turn in range(3):
        answer = engine.generate([text], way)[0]
        assert (answer.reused >= LEAST_SHARED_CUDA) == (turn > 0)
        assert_exact(model, answer, way, within=2e-2)
        crowd = engine.generate([prompt_of(12, seed=turn)], Sampling(max_tokens=9, seed=0), n=2)
        for other in crowd:
            assert_exact(model, other, Sampling(), within=5e-3)
        text = [*text, *answer.ids, *prompt_of(40, seed=turn)]


def test_nan_logits_fail_their_request_only(start: Any) -> None:
    model = on_card()
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = float("nan")
    engine = start(model)
    way = Sampling(max_tokens=30, temperature=0.0)
    bad = engine.submit([*prompt_of(70, vocabulary=96), 96], way)[0]
    good = [engine.submit(prompt_of(9, seed=i, vocabulary=96), way)[0] for i in range(5)]
    with pytest.raises(ModelError, match="NaN"):
        bad.result(60)
    for future in good:
        ids = future.result(60).ids if future.exception(60) is None else []
        assert 96 in ids or len(ids) == 30 or not ids
    biased = Sampling(max_tokens=5, seed=1, logit_bias={96: -100.0})  # by plain operations, which read stale positions
    for answer in engine.generate([[5, 6], [7]], biased, n=3):
        assert_exact(model, answer, biased, within=5e-3)
