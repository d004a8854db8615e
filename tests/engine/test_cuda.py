"""On a card: captured graphs, our kernels and a host that is behind, and still every logprob is the model's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, MIXTURES, assert_exact, expected, prompt_of, random_model  # noqa: E402
from tests.kernels.support.triton_device import exact_matmuls as exact_matmuls  # noqa: E402  # a fixture
from verifiers.engine import cuda_prefill  # noqa: E402
from verifiers.engine.engine import LEAST_SHARED_CUDA, Engine  # noqa: E402
from verifiers.engine.sequence import Generated, Sampling  # noqa: E402
from verifiers.errors import ModelError  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")]


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


def test_prompts_that_are_run_in_parts_give_the_logprobs_of_the_forward_pass(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(cuda_prefill, "TOKENS", (32, 64))
    model, requests = on_card(hidden_size=128), mixed(40)
    engine = start(model)
    engine.gather(len(requests))
    for answer, (_, way) in zip(answers_of(engine, requests), requests, strict=True):
        assert_exact(model, answer, way, within=5e-3)
    assert 64 in engine.scheduler.cuda._prefill._graphs


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


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_mixtures_of_experts_in_bf16_are_those_of_the_forward_pass_but_for_tokens_at_the_edge(
    start: Any, family: str
) -> None:
    model = on_card(family, dtype=torch.bfloat16, hidden_size=128, initializer_range=0.05)
    requests = mixed(32)
    gaps = []
    for answer, (_, way) in zip(answers_of(start(model), requests), requests, strict=True):
        _, raw = expected(model, answer, way)
        gaps += [abs(a - b) for a, b in zip(answer.raw_logprobs, raw, strict=True)]
    assert sorted(gaps)[len(gaps) // 2] < 0.02


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


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_quicker", [False, True], ids=["plain", "together"])
def test_whichever_way_projections_run_the_tokens_are_exact(start: Any, monkeypatch: Any, is_quicker: bool) -> None:
    from verifiers.kernels.cuda import projections

    monkeypatch.setattr(projections, "_choices", {})
    monkeypatch.setattr(projections, "_is_faster", lambda *_: is_quicker)
    settings = {"head_dim": None, "hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4}
    for family in ("Llama", "Qwen2"):
        model = on_card(family, dtype=torch.bfloat16, initializer_range=0.08, num_key_value_heads=1, **settings)
        requests = mixed(32)
        gaps = []
        for answer, (_, way) in zip(answers_of(start(model), requests), requests, strict=True):
            _, raw = expected(model, answer, way)
            gaps += [abs(a - b) for a, b in zip(answer.raw_logprobs, raw, strict=True)]
        gaps.sort()
        assert gaps[len(gaps) // 2] < 0.02
        assert gaps[-1] < 0.3
    assert set(projections._choices.values()) == {is_quicker}


def test_projections_are_timed_before_a_step_is_captured(start: Any, monkeypatch: Any) -> None:
    from verifiers.kernels.cuda import projections

    monkeypatch.setattr(projections, "_choices", {})
    model = on_card(
        dtype=torch.bfloat16, hidden_size=256, intermediate_size=320, num_attention_heads=4, num_key_value_heads=1
    )
    start(model).generate([prompt_of(20)], Sampling(max_tokens=10, seed=1), n=3)
    assert {key[0] for key in projections._choices} == {"project", "gated", "add"}


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_tokens_of_an_adapted_model_are_exact_and_its_adapters_run_by_kernels(
    start: Any, monkeypatch: Any, targets: Any
) -> None:
    peft = pytest.importorskip("peft")
    from verifiers.kernels.cuda import lora

    asked, add = list[int](), lora.add_adapted_
    monkeypatch.setattr(lora, "add_adapted_", lambda ys, x, loras: (asked.append(len(loras)), add(ys, x, loras)))
    settings = {"head_dim": None, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2}
    base = on_card("Qwen2", dtype=torch.bfloat16, initializer_range=0.08, num_key_value_heads=1, **settings)
    config = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    engine, gaps = start(model), list[float]()
    for _ in range(2):
        requests = mixed(32)
        for answer, (_, way) in zip(answers_of(engine, requests), requests, strict=True):
            _, raw = expected(model, answer, way)
            gaps += [abs(a - b) for a, b in zip(answer.raw_logprobs, raw, strict=True)]
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "lora_" in name:
                    one.mul_(0.9)  # in place, as an optimizer does
        torch.cuda.synchronize()
    gaps.sort()
    assert gaps[len(gaps) // 2] < 0.02
    assert gaps[-1] < 0.3
    assert set(asked) == ({1, 2, 3} if targets == "all-linear" else {2})


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_the_common_kind_are_recognised(start: Any, family: str, dtype: Any) -> None:
    model = on_card(family, dtype=dtype)
    assert len(start(model).runner.decoder.layers) == model.config.num_hidden_layers


def test_a_hook_on_a_layer_is_heard_and_the_tokens_stay_exact(start: Any) -> None:
    model = on_card()
    engine = start(model)
    heard = []
    handle = model.model.layers[1].self_attn.register_forward_hook(lambda *_: heard.append(1))
    way = Sampling(max_tokens=10, seed=1)
    assert_exact(model, engine.generate([prompt_of(20)], way)[0], way, within=5e-3)
    assert heard
    handle.remove()


def test_hooks_that_come_or_go_between_requests_are_part_of_what_is_captured(start: Any) -> None:
    model, requests = on_card(), mixed(8)
    engine = start(model)

    def assert_as_now() -> None:
        for _ in range(2):  # recorded, and replayed
            for answer, (_, way) in zip(answers_of(engine, requests), requests, strict=True):
                with engine.lock:
                    assert_exact(model, answer, way, within=5e-3)

    assert_as_now()
    for part in (model.model.layers[0].self_attn.q_proj, model.model.layers[1]):
        hook = part.register_forward_hook(lambda module, given, out: out * 1.5)
        assert_as_now()
        hook.remove()
        assert_as_now()


# --- load -----------------------------------------------------------------------------------------------------------


def test_rows_that_end_at_different_times_are_compacted_without_a_trace(start: Any) -> None:
    model = on_card()
    engine = start(model, rows=24)
    requests = mixed(300, longest=40)
    for answer, (prompt, way) in zip(answers_of(engine, requests), requests, strict=True):
        assert answer.prompt_ids == prompt
        assert len(answer.ids) == way.max_tokens
        assert_exact(model, answer, way, within=5e-3)
    assert not engine.running
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


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "GPT2", "Mistral"])
def test_conversations_side_by_side_reuse_what_they_said(start: Any, family: str) -> None:
    model = on_card(family, max_position_embeddings=1024)
    engine = start(model, rows=12, length=900)
    texts = [prompt_of(LEAST_SHARED_CUDA + 30 * i, seed=i) for i in range(6)]
    for turn in range(4):
        ways = [Sampling(max_tokens=10 + i, seed=i) for i in range(6)]
        answers = answers_of(engine, list(zip(texts, ways, strict=True)))
        for i, (answer, way) in enumerate(zip(answers, ways, strict=True)):
            assert (answer.reused >= LEAST_SHARED_CUDA) == (turn > 0)
            assert_exact(model, answer, way, within=2e-2)
            texts[i] = [*texts[i], *answer.ids, *prompt_of(5 + 20 * i, seed=turn)]


# In float32 experts are multiplied one after the other, by counts that the host has to know: no graph can hold that.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in MIXTURES])
def test_a_few_tokens_are_run_by_a_graph_and_exact(start: Any, family: str) -> None:
    model = on_card(family, max_position_embeddings=1024)
    engine = start(model, rows=8, length=900)
    way = Sampling(max_tokens=5, seed=1)
    for i in range(12):
        several = [prompt_of(3 + 5 * i + j, seed=10 * i + j) for j in range(1 + i % 3)]
        for answer in answers_of(engine, [(prompt, way) for prompt in several]):
            assert_exact(model, answer, way, within=5e-3)
    graphs = engine.scheduler.cuda._prefill._graphs
    assert graphs
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    text = prompt_of(300, seed=5)
    for turn in range(4):
        answer = engine.generate([text], way)[0]
        assert (answer.reused > 0) == (turn > 0)
        assert_exact(model, answer, way, within=2e-2)
        text = [*text, *answer.ids, *prompt_of(9, seed=turn)]
    assert graphs


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
    engine = start(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = float("nan")
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


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_when_blocks_run_out_the_youngest_is_run_again_and_every_token_is_exact(start: Any) -> None:
    model = on_card()
    engine = start(model, rows=12, cache_tokens=600)
    requests = [(prompt_of(20 + i, seed=i), Sampling(max_tokens=120, seed=i)) for i in range(30)]
    answers = answers_of(engine, requests)
    assert engine.scheduler.preempted > 0
    for answer, (_, way) in zip(answers, requests, strict=True):
        assert len(answer.ids) == way.max_tokens
        assert_exact(model, answer, way, within=5e-3)
    assert engine.scheduler.blocks.held == 0


def test_others_go_on_while_a_long_prompt_is_run_in_chunks(start: Any) -> None:
    model = on_card(max_position_embeddings=4096)
    engine = start(model, rows=4, length=4000, prefill_tokens=256)
    heard: list[int] = []
    told = engine.submit(prompt_of(9), Sampling(max_tokens=300, seed=1), on_token=lambda *_: heard.append(1) or False)
    while len(heard) < 5:
        pass
    before = len(heard)
    long = engine.submit(prompt_of(3500), Sampling(max_tokens=1, seed=1))[0]
    assert_exact(model, long.result(60), Sampling(), within=2e-2)
    assert len(heard) - before >= 10  # one for each chunk but those the host is behind
    assert_exact(model, told[0].result(60), Sampling(), within=5e-3)


def test_few_sequences_with_long_histories_are_exact_by_split_attention(start: Any) -> None:
    model = on_card(max_position_embeddings=4096)
    engine = start(model, rows=4, length=4000)
    way = Sampling(max_tokens=40, seed=1)
    for answer in answers_of(engine, [(prompt_of(n, seed=n), way) for n in (3000, 1500, 700)]):
        assert_exact(model, answer, way, within=2e-2)
