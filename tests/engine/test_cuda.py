"""On a card: captured graphs, our kernels and a host that is behind, and still every logprob is the model's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, MIXTURES, assert_exact, expected, prompt_of, random_model  # noqa: E402
from verifiers.engine import cuda_prefill  # noqa: E402
from verifiers.engine.block_manager import BLOCK, blocks_for  # noqa: E402
from verifiers.engine.engine import LEAST_SHARED_CUDA, Engine  # noqa: E402
from verifiers.engine.kv_cache import Decode, KVCache, Prefill, Segment, Shape  # noqa: E402
from verifiers.engine.sequence import Generated, Sampling  # noqa: E402
from verifiers.errors import ModelError  # noqa: E402
from verifiers.kernels.reference import rotary as plain_rotary  # noqa: E402
from verifiers.kernels.sampling import SamplingColumns, sample  # noqa: E402

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

SHAPES = [(3, 9, 3, 64), (2, 4, 2, 24), (5, 4, 4, 16), (2, 6, 1, 128), (4, 12, 2, 256)]
"""Rows, heads, key heads, dimensions."""


def heads_of(batch: int, tokens: int, heads: int, dim: int, dtype: Any) -> Any:
    """As a projection leaves them: tokens before heads in memory."""
    return torch.randn((batch, tokens, heads, dim), device="cuda").to(dtype).transpose(1, 2)


def angles_of(batch: int, tokens: int, dim: int, dtype: Any) -> tuple[Any, Any]:
    angle = torch.rand((batch, tokens, dim), device="cuda") * 6.0
    return angle.cos().to(dtype), angle.sin().to(dtype)


def blocks_of_sequences(lengths: list[int], groups: int, dim: int, dtype: Any) -> tuple[Any, Any, KVCache]:
    """Tables (on the host, and on the card) of sequences whose blocks lie anywhere, and a cache of one layer."""
    counts = [blocks_for(length) for length in lengths]
    order = torch.randperm(sum(counts)).add(1).int().split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    cache = KVCache(Shape(1, groups, dim), sum(counts) + 1, 0, dtype=dtype, device=torch.device("cuda"))
    cache.store.normal_()
    return tables.numpy(), tables.cuda(), cache


def copy_of(cache: KVCache) -> KVCache:
    layers, _, blocks, groups, _, dim = cache.store.shape
    made = KVCache(Shape(layers, groups, dim), blocks, 0, dtype=cache.store.dtype, device=cache.store.device)
    made.store.copy_(cache.store)
    return made


@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_within_attention_is_rotation_before_it(shape: Any, dtype: Any, splits: int) -> None:
    from verifiers.kernels.cuda import decode

    batch, heads, groups, dim = shape
    torch.manual_seed(0)
    q, k, v = (heads_of(batch, 1, n, dim, dtype) for n in (heads, groups, groups))
    length = torch.randint(0, 900, (batch,), device="cuda")
    length[0] = 0
    tables, tables_there, cache = blocks_of_sequences((length + 1).tolist(), groups, dim, dtype)
    other = copy_of(cache)
    rotary = angles_of(batch, 1, dim, dtype)
    settings: Any = {"scale": 0.2, "window": None, "softcap": None}
    one = decode.attend(q, k, v, *cache.layers[0], tables_there, length, splits, rotary=rotary, **settings)
    rotated = [plain_rotary(x, *rotary) for x in (q, k)]
    two = decode.attend(*rotated, v, *other.layers[0], tables_there, length, splits, **settings)
    within = 1e-5 if dtype is torch.float32 else 2e-2  # the last bit of a rotated number
    assert torch.allclose(one, two, rtol=within, atol=within)
    assert torch.allclose(cache.store, other.store, rtol=within, atol=within)
    plain = Decode(other, tables, length, tables.shape[1] * BLOCK)
    three = plain(0, *rotated, v, **settings)
    within = 5e-3 if dtype is torch.float32 else 3e-2
    assert torch.allclose(one, three, rtol=within, atol=within)


def test_parts_of_a_history_are_merged_in_their_order_whoever_ends_last() -> None:
    from verifiers.kernels.cuda import decode
    from verifiers.kernels.cuda.splits import counters

    torch.manual_seed(0)
    q, k, v = (heads_of(40, 1, n, 64, torch.bfloat16) for n in (9, 3, 3))
    length = torch.randint(0, 3000, (40,), device="cuda")
    _, tables, cache = blocks_of_sequences((length + 1).tolist(), 3, 64, torch.bfloat16)
    stored = counters(40 * 3, length.device)
    settings: Any = {"scale": 0.2, "window": None, "softcap": None, "stored": stored}
    found = [decode.attend(q, k, v, *cache.layers[0], tables, length, 32, **settings) for _ in range(20)]
    assert not stored.any()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 576, 2048])
def test_the_norm_of_a_module_is_its_norm(width: int, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    module = torch.nn.RMSNorm(width, eps=1e-5, dtype=dtype, device="cuda")
    torch.nn.init.normal_(module.weight)
    for shape in ((1, width), (7, 3, width), (width, 5)):
        x = torch.randn(shape, dtype=dtype, device="cuda") * 3
        x = x.t().expand(2, 5, width) if shape[-1] == 5 else x  # one that is not laid out as the kernel reads
        within = 1e-5 if dtype is torch.float32 else 2e-2
        assert torch.allclose(decode.rms_norm(module, 1e-5, x), module(x), rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_in_place_is_rotation(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    _, heads, groups, dim = shape
    for batch, tokens in ((1, 700), (3, 5)):
        q, k = (heads_of(batch, tokens, n, dim, dtype) for n in (heads, groups))
        rotary = angles_of(1, tokens, dim, dtype)
        due = [plain_rotary(x, *rotary) for x in (q, k)]
        decode.rotate_(q, k, *rotary)
        for given, wanted in zip((q, k), due, strict=True):
            within = 1e-5 if dtype is torch.float32 else 2e-2  # rounded once, not after each product
            assert torch.allclose(given, wanted, atol=within, rtol=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 1, 1536), (1, 501, 1000)], ids=str)
def test_gating_is_silu_times_up(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    gate, up = (torch.randn(shape, device="cuda").to(dtype) * 4 for _ in range(2))
    due = torch.nn.functional.silu(gate) * up
    assert torch.allclose(decode.gated(gate, up), due, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("rows", [1, 20, 300, 1024])
def test_projections_in_one_launch_are_the_projections(rows: int, has_bias: bool) -> None:
    from verifiers.kernels.cuda import linear

    torch.manual_seed(0)
    x = torch.randn((rows, 1, 576), device="cuda", dtype=torch.bfloat16)
    linears = [torch.nn.Linear(576, n, bias=has_bias, device="cuda", dtype=torch.bfloat16) for n in (576, 192, 192)]
    with torch.no_grad():
        due = [one(x).float() for one in linears]
        given = linear.project(x, [one.weight for one in linears], [one.bias for one in linears])
        gated = linear.project_gated(x, linears[1].weight, linears[2].weight)
        by_hand = [torch.nn.functional.linear(x, one.weight) for one in linears[1:]]
    for one, other in zip(given, due, strict=True):
        assert torch.allclose(one.float(), other, rtol=2e-2, atol=2e-2)
    assert torch.allclose(gated, torch.nn.functional.silu(by_hand[0]) * by_hand[1], rtol=4e-2, atol=2e-2)


@pytest.mark.parametrize("is_quicker", [False, True], ids=["plain", "together"])
def test_whichever_way_projections_run_the_tokens_are_exact(start: Any, monkeypatch: Any, is_quicker: bool) -> None:
    from verifiers.kernels.cuda import projections

    monkeypatch.setattr(projections, "_choices", {})
    monkeypatch.setattr(projections, "_is_faster", lambda *_: is_quicker)
    settings = {"head_dim": None, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2}
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
        dtype=torch.bfloat16, hidden_size=128, intermediate_size=192, num_attention_heads=2, num_key_value_heads=1
    )
    start(model).generate([prompt_of(20)], Sampling(max_tokens=10, seed=1), n=3)
    assert {key[0] for key in projections._choices} == {"project", "gated"}


@pytest.mark.parametrize("rank", [4, 16, 40])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (33, 576), (256, 576), (33, 2048), (256, 4992)])
def test_what_adapters_add_in_two_launches_is_what_they_add(rows: int, width: int, rank: int) -> None:
    from verifiers.kernels.cuda import lora
    from verifiers.kernels.modules import Lora

    torch.manual_seed(0)
    x = torch.randn((rows, width), device="cuda", dtype=torch.bfloat16)
    for sizes in ((576,), (576, 192), (576, 192, 192), (512, 128, 128)):
        whole = torch.randn((rows, sum(sizes)), device="cuda", dtype=torch.bfloat16)
        loras = [
            Lora(None, torch.randn(rank, width).to(x) * 0.02, torch.randn(size, rank).to(x) * 0.05, 0.5 + i)
            for i, size in enumerate(sizes)
        ]
        pairs = zip(whole.split(list(sizes), 1), loras, strict=True)
        due = [y + one.scale * (x.float() @ one.a_RK.t().float()) @ one.b_NR.t().float() for y, one in pairs]
        lora.add_adapted_(whole.split(list(sizes), 1), x, loras)
        assert torch.allclose(whole.float(), torch.cat(due, 1), rtol=2e-2, atol=2e-2)


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


def test_the_card_draws_the_tokens_that_the_cpu_draws() -> None:
    from verifiers.kernels.cuda import sampling as cuda_sampling

    n, zeros = 512, torch.zeros(512, dtype=torch.int64)
    for vocabulary in (97, 49152):
        logits = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(1)) * 2
        heat = torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(n // 4)
        columns = SamplingColumns(heat, torch.ones(n), zeros, torch.zeros(n), torch.arange(n), zeros + 3)
        there = cuda_sampling.sample(logits.cuda(), heat.cuda(), columns.seed_B.cuda(), columns.step_B.cuda())
        here = sample(logits, columns, truncates=False)
        same = there[0].cpu() == here[0]
        assert same.float().mean() > 0.98  # a number at the very edge may fall on either side
        for one, other in zip(there[1:], here[1:], strict=True):
            assert torch.allclose(one.cpu()[same], other[same], atol=1e-3)


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


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("vocabulary", [97, 5000])
def test_the_kernel_draws_tokens_as_often_as_they_are_likely(temperature: float, vocabulary: int) -> None:
    from scipy import stats

    from verifiers.kernels.cuda import sampling as cuda_sampling

    n = 200_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)).cuda() * 1.5
    seeds, steps = torch.arange(n, device="cuda"), torch.zeros(n, dtype=torch.int64, device="cuda")
    heat = torch.full((n,), temperature, device="cuda")
    for seed, step in ((seeds, steps), (steps + 7, seeds)):
        token, logprob, raw = cuda_sampling.sample(logits[None].expand(n, -1), heat, seed, step)
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
    from verifiers.kernels.cuda import sampling as cuda_sampling

    logits = torch.randn(6, 5000, device="cuda")
    logits[2] = float("nan")
    logits[3, 17] = float("nan")
    zeros = torch.zeros(6, dtype=torch.int64, device="cuda")
    for heat in (torch.zeros(6, device="cuda"), torch.ones(6, device="cuda")):
        token, _, raw = cuda_sampling.sample(logits, heat, zeros, zeros)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "splits"), [(None, None, 1), (None, None, 8), (40, None, 8), (None, 2.0, 3)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_tokens_see_their_sequence_up_to_themselves(
    shape: Any, window: Any, softcap: Any, splits: int, dtype: Any
) -> None:
    from verifiers.engine.cuda_device import CudaDevice
    from verifiers.engine.cuda_prefill import blocks_of
    from verifiers.kernels.cuda.extend import extend, store

    _, heads, groups, dim = shape
    torch.manual_seed(0)
    sizes = [(2, 50, 30), (0, 0, 170), (3, 299, 1), (1, 64, 7)]
    ends = [sum(n for *_, n in sizes[: i + 1]) for i in range(4)]
    segments = [Segment(end - n, end, table, past) for (table, past, n), end in zip(sizes, ends, strict=True)]
    lengths = [past + n for _, past, n in sorted(sizes)]
    tables, tables_there, cache = blocks_of_sequences(lengths, groups, dim, dtype)
    other = copy_of(cache)
    q, k, v = (heads_of(1, ends[-1], n, dim, dtype) for n in (heads, groups, groups))
    table_T, position_T = (
        torch.cat([torch.full((n,), table) for table, _, n in sizes]).cuda(),
        torch.cat([torch.arange(past, past + n) for _, past, n in sizes]).cuda(),
    )
    store(k, v, *cache.layers[0], tables_there, table_T, position_T)
    blocks = torch.from_numpy(blocks_of(segments, CudaDevice().tokens_at_once(heads // groups))).cuda()
    way: Any = {"scale": 0.2, "window": window, "softcap": softcap}
    out = extend(q, *cache.layers[0], tables_there, blocks, splits=splits, **way)
    due = Prefill(other, tables, segments)(0, q, k, v, **way)
    assert torch.equal(cache.store, other.store)
    within = 5e-3 if dtype is torch.float32 else 3e-2
    assert torch.allclose(out.float(), due.float(), rtol=within, atol=within)


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
