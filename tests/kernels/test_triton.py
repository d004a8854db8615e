"""Triton kernels of a decode step and of prefill give the numbers of plain operations, on a card or interpreted."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from tests.kernels.support.triton_device import (  # noqa: E402
    DEVICE,
    FLOOR,
    HALF,
    HAS_CARD,
    MARKS,
    SHAPES,
    angles_of,
    apart,
    blocks_of_sequences,
    copy_of,
    heads_of,
    norms_of,
    randn,
)
from tests.kernels.support.triton_device import exact_matmuls as exact_matmuls  # noqa: E402  # a fixture
from verifiers.engine.block_manager import BLOCK  # noqa: E402
from verifiers.engine.kv_cache import Decode, Prefill, Segment  # noqa: E402
from verifiers.kernels import reference  # noqa: E402
from verifiers.kernels.sampling import SamplingColumns, sample  # noqa: E402

pytestmark = MARKS


@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_within_attention_is_rotation_before_it(shape: Any, dtype: Any, splits: int) -> None:
    from verifiers.kernels.cuda import decode

    batch, heads, groups, dim = shape
    torch.manual_seed(0)
    q, k, v = (heads_of(batch, 1, n, dim, dtype) for n in (heads, groups, groups))
    length = torch.randint(0, 900, (batch,), device=DEVICE)
    length[0] = 0
    tables, tables_there, cache = blocks_of_sequences((length + 1).tolist(), groups, dim, dtype)
    other, third = copy_of(cache), copy_of(cache)
    cos, sin = (x[0] for x in angles_of(1, 901, dim, dtype))
    rotary = cos[length][:, None], sin[length][:, None]
    settings: Any = {"scale": 0.2, "window": None, "softcap": None}
    one = decode.attend(q, k, v, *cache.layers[0], tables_there, length, splits, rotary=rotary, **settings)
    found = decode.attend(q, k, v, *third.layers[0], tables_there, length, splits, rotary=(cos, sin), **settings)
    assert torch.equal(found, one)  # the angles of each row are found by its position
    assert torch.equal(third.store, cache.store)
    rotated = [reference.rotary(x, *rotary) for x in (q, k)]
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
    rows = 40 if HAS_CARD else 4
    q, k, v = (heads_of(rows, 1, n, 64, HALF) for n in (9, 3, 3))
    length = torch.randint(0, 3000, (rows,), device=DEVICE)
    _, tables, cache = blocks_of_sequences((length + 1).tolist(), 3, 64, HALF)
    stored = counters(rows * 3, length.device)
    settings: Any = {"scale": 0.2, "window": None, "softcap": None, "stored": stored}
    found = [
        decode.attend(q, k, v, *cache.layers[0], tables, length, 32, **settings) for _ in range(20 if HAS_CARD else 2)
    ]
    assert not stored.any()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
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
        torch.cat([torch.full((n,), table) for table, _, n in sizes]).to(DEVICE),
        torch.cat([torch.arange(past, past + n) for _, past, n in sizes]).to(DEVICE),
    )
    store(k, v, *cache.layers[0], tables_there, table_T, position_T)
    blocks = torch.from_numpy(blocks_of(segments, CudaDevice().tokens_at_once(heads // groups))).to(DEVICE)
    way: Any = {"scale": 0.2, "window": window, "softcap": softcap}
    out = extend(q, *cache.layers[0], tables_there, blocks, splits=splits, **way)
    due = Prefill(other, tables, segments)(0, q, k, v, **way)
    assert torch.equal(cache.store, other.store)
    within = 5e-3 if dtype is torch.float32 else 3e-2
    assert torch.allclose(out.float(), due.float(), rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("width", [40, 576, 2048])
def test_the_norm_of_a_module_is_its_norm(width: int, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    module = torch.nn.RMSNorm(width, eps=1e-5, dtype=dtype, device=DEVICE)
    torch.nn.init.normal_(module.weight)
    for shape in ((1, width), (7, 3, width), (width, 5)):
        x = torch.randn(shape, dtype=dtype, device=DEVICE) * 3
        x = x.t().expand(2, 5, width) if shape[-1] == 5 else x  # one that is not laid out as the kernel reads
        within = 1e-5 if dtype is torch.float32 else 2e-2
        assert torch.allclose(decode.rms_norm(module, 1e-5, x), module(x), rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_in_place_is_rotation(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    _, heads, groups, dim = shape
    for batch, tokens in ((1, 700 if HAS_CARD else 70), (3, 5)):
        q, k = (heads_of(batch, tokens, n, dim, dtype) for n in (heads, groups))
        rotary = angles_of(1, tokens, dim, dtype)
        due = [reference.rotary(x, *rotary) for x in (q, k)]
        decode.rotate_(q, k, *rotary)
        for given, wanted in zip((q, k), due, strict=True):
            within = 1e-5 if dtype is torch.float32 else 2e-2  # rounded once, not after each product
            assert torch.allclose(given, wanted, atol=within, rtol=within)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 1, 1536), (1, 501, 1000)], ids=str)
def test_gating_is_silu_times_up(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    gate, up = (torch.randn(shape, device=DEVICE).to(dtype) * 4 for _ in range(2))
    due = torch.nn.functional.silu(gate) * up
    assert torch.allclose(decode.gated(gate, up), due, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("rows", [1, 20, *([300, 1024] if HAS_CARD else [100])])
def test_projections_in_one_launch_are_the_projections(rows: int, has_bias: bool) -> None:
    from verifiers.kernels.cuda import linear

    torch.manual_seed(0)
    x = torch.randn((rows, 1, 576), device=DEVICE, dtype=HALF)
    linears = [torch.nn.Linear(576, n, bias=has_bias, device=DEVICE, dtype=HALF) for n in (576, 192, 192)]
    with torch.no_grad():
        due = [one(x).float() for one in linears]
        given = linear.project(x, [one.weight for one in linears], [one.bias for one in linears])
        gated = linear.project_gated(x, linears[1].weight, linears[2].weight)
        by_hand = [torch.nn.functional.linear(x, one.weight) for one in linears[1:]]
    for one, other in zip(given, due, strict=True):
        assert torch.allclose(one.float(), other, rtol=2e-2, atol=2e-2)
    assert torch.allclose(gated, torch.nn.functional.silu(by_hand[0]) * by_hand[1], rtol=4e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_embeddings_and_their_norms_in_one_launch(dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    table, weight = randn(50, 72).to(dtype), randn(72, seed=1).to(dtype)
    ids = torch.randint(0, 50, (7, 3), device=DEVICE)[:, 1]  # a column of others
    out, normed = decode.embed_and_norm(ids, table, weight, 1e-5)
    assert torch.equal(out, table[ids])
    due = torch.nn.functional.rms_norm(table[ids].double(), (72,), weight.double(), 1e-5)
    assert apart(normed, due) <= FLOOR[dtype]


@pytest.mark.parametrize(("size", "depth"), [(576, 576), (128, 1536), *([(1536, 8960)] if HAS_CARD else [])])
@pytest.mark.parametrize("rows", [1, 20, *([64, 129, 256] if HAS_CARD else [70])])
def test_a_projection_that_is_added_and_normed_in_two_launches(rows: int, size: int, depth: int) -> None:
    from verifiers.kernels.cuda import linear

    hidden, x = randn(rows, size).to(HALF), randn(rows, depth, seed=1).to(HALF)
    weight, norm = (randn(size, depth, seed=2) / depth**0.5).to(HALF), randn(size, seed=3).to(HALF)
    total, normed = linear.add_projected_and_norm(hidden, x, weight, norm, 1e-5)
    due = hidden.double() + x.double() @ weight.double().t()
    assert apart(total, due) <= FLOOR[HALF]
    assert apart(normed, torch.nn.functional.rms_norm(total.double(), (size,), norm.double(), 1e-5)) <= FLOOR[HALF]


@pytest.mark.parametrize("rank", [4, 16, 40])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 576), (33, 576), (33, 2048), *([(256, 576), (256, 4992)] if HAS_CARD else [])]
)
def test_what_adapters_add_in_two_launches_is_what_they_add(rows: int, width: int, rank: int) -> None:
    from verifiers.kernels.cuda import lora
    from verifiers.kernels.modules import Lora

    torch.manual_seed(0)
    x = torch.randn((rows, width), device=DEVICE, dtype=HALF)
    for sizes in ((576,), (576, 192), (576, 192, 192), (512, 128, 128)):
        whole = torch.randn((rows, sum(sizes)), device=DEVICE, dtype=HALF)
        loras = [
            Lora(None, torch.randn(rank, width).to(x) * 0.02, torch.randn(size, rank).to(x) * 0.05, 0.5 + i)
            for i, size in enumerate(sizes)
        ]
        pairs = zip(whole.split(list(sizes), 1), loras, strict=True)
        due = [y + one.scale * (x.float() @ one.a_RK.t().float()) @ one.b_NR.t().float() for y, one in pairs]
        lora.add_adapted_(whole.split(list(sizes), 1), x, loras)
        assert torch.allclose(whole.float(), torch.cat(due, 1), rtol=2e-2, atol=2e-2)


def test_the_card_draws_the_tokens_that_the_cpu_draws() -> None:
    from verifiers.kernels.cuda import sampling as cuda_sampling

    n = 512 if HAS_CARD else 64
    zeros = torch.zeros(n, dtype=torch.int64)
    for vocabulary in (97, 49152):
        logits = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(1)) * 2
        heat = torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(n // 4)
        columns = SamplingColumns(heat, torch.ones(n), zeros, torch.zeros(n), torch.arange(n), zeros + 3)
        there = cuda_sampling.sample(
            logits.to(DEVICE), heat.to(DEVICE), columns.seed_B.to(DEVICE), columns.step_B.to(DEVICE)
        )
        here = sample(logits, columns, truncates=False)
        same = there[0].cpu() == here[0]
        assert same.float().mean() > 0.98  # a number at the very edge may fall on either side
        for one, other in zip(there[1:], here[1:], strict=True):
            assert torch.allclose(one.cpu()[same], other[same], atol=1e-3)


@pytest.mark.skipif(not HAS_CARD, reason="so many draws take the interpreter minutes")
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("vocabulary", [97, 5000])
def test_the_kernel_draws_tokens_as_often_as_they_are_likely(temperature: float, vocabulary: int) -> None:
    from scipy import stats

    from verifiers.kernels.cuda import sampling as cuda_sampling

    n = 200_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 1.5
    seeds, steps = torch.arange(n, device=DEVICE), torch.zeros(n, dtype=torch.int64, device=DEVICE)
    heat = torch.full((n,), temperature, device=DEVICE)
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

    logits = torch.randn(6, 5000, device=DEVICE)
    logits[2] = float("nan")
    logits[3, 17] = float("nan")
    zeros = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    for heat in (torch.zeros(6, device=DEVICE), torch.ones(6, device=DEVICE)):
        token, _, raw = cuda_sampling.sample(logits, heat, zeros, zeros)
        assert torch.isfinite(raw).tolist() == [True, True, False, False, True, True]
        assert ((token >= 0) & (token < 5000)).all()
        if not heat.any():
            assert torch.equal(token[[0, 1, 4, 5]], logits.argmax(-1)[[0, 1, 4, 5]])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_within_attention_are_norms_before_it(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    batch, heads, groups, dim = shape
    torch.manual_seed(0)
    q, k, v = (heads_of(batch, 1, n, dim, dtype) for n in (heads, groups, groups))
    length = torch.randint(0, 90, (batch,), device=DEVICE)
    _, tables, cache = blocks_of_sequences((length + 1).tolist(), groups, dim, dtype)
    other = copy_of(cache)
    rotary, norms = angles_of(batch, 1, dim, dtype), norms_of(dim, dtype)
    settings: Any = {"scale": 0.2, "window": None, "softcap": None, "rotary": rotary}
    one = decode.attend(q, k, v, *cache.layers[0], tables, length, norms=norms, **settings)
    two = decode.attend(*norms.of(q, k), v, *other.layers[0], tables, length, **settings)
    within = 1e-5 if dtype is torch.float32 else 4e-2  # the last bit of a normed number
    assert torch.allclose(one, two, rtol=within, atol=within)
    assert torch.allclose(cache.store, other.store, rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_with_rotation_in_place_are_norms_before_it(shape: Any, dtype: Any) -> None:
    from verifiers.kernels.cuda import decode

    _, heads, groups, dim = shape
    norms = norms_of(dim, dtype)
    for batch, tokens in ((1, 700 if HAS_CARD else 70), (3, 5)):
        q, k = (heads_of(batch, tokens, n, dim, dtype) for n in (heads, groups))
        rotary = angles_of(1, tokens, dim, dtype)
        due = [reference.rotary(x, *rotary) for x in norms.of(q, k)]
        decode.rotate_(q, k, *rotary, norms)
        within = 1e-5 if dtype is torch.float32 else 4e-2
        for given, wanted in zip((q, k), due, strict=True):
            assert torch.allclose(given, wanted, atol=within, rtol=within)


@pytest.mark.parametrize("name", ["decode", "learning", "splits"])
def test_the_examples_in_the_kernels_modules_run(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(f"verifiers.kernels.cuda.{name}"))
    assert ran.attempted > 0
    assert ran.failed == 0


def kernels_in(folder: Path) -> set[str]:
    """The names of all kernels: functions of Triton's that the host launches, `name[grid](...)`."""
    texts = [path.read_text() for path in folder.glob("*.py")]
    return {name for text in texts for name in re.findall(r"^ *(_\w+)\[", text, re.MULTILINE)}


@pytest.mark.parametrize("capability", [90, *(pytest.param(one, marks=pytest.mark.slow) for one in (80, 89, 100, 120))])
def test_every_kernel_compiles_for_cards_that_are_not_here(capability: int, repo: Path, tmp_path: Path) -> None:
    script = repo / "tests/kernels/support/compile_kernels.py"
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(repo)}
    ran = subprocess.run(
        [sys.executable, script, str(capability)], env=os.environ | own, capture_output=True, text=True, timeout=110
    )
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == kernels_in(repo / "verifiers/kernels/cuda")
