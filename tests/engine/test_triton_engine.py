"""The kernels of a card within the engine, interpreted: logprobs through blocks, rows and steps stay exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from tests.engine.support.exact import assert_exact, prompt_of, random_model  # noqa: E402
from tests.engine.support.host_card import on_host_card, triton_card  # noqa: E402
from verifiers.engine import cuda_runner  # noqa: E402
from verifiers.engine.cuda_device import CudaDecode, CudaExtend  # noqa: E402
from verifiers.engine.engine import LEAST_SHARED_CUDA, Engine  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a card, tests/engine/test_cuda.py"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of lanes that are masked
]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    monkeypatch.setattr(cuda_runner, "FEW_ROWS", 0)  # as with many rows
    made: list[Engine] = []

    def start(model: Any, **settings: Any) -> Engine:
        made.append(on_host_card(model, card=triton_card(), **{"rows": 4, "length": 250, **settings}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "GPT2"])
def test_logprobs_by_the_kernels_are_those_of_the_forward_pass(
    start: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full and sliding attention, softcaps, norms of heads, rotary embedding or none; first and second turns."""
    ran: list[type] = []
    for kernel in (CudaDecode, CudaExtend):
        own = kernel.__call__
        noting = lambda self, *args, own=own, **more: (ran.append(type(self)), own(self, *args, **more))[1]  # noqa: E731
        monkeypatch.setattr(kernel, "__call__", noting)
    model = random_model(family)
    engine, ways = start(model), [Sampling(max_tokens=5 + 2 * i, seed=i, temperature=0.5 + i / 2) for i in range(3)]
    texts = [prompt_of(n, seed=n) for n in (1, 23, LEAST_SHARED_CUDA + 17)]
    for _ in range(2):
        futures = [engine.submit(text, way)[0] for text, way in zip(texts, ways, strict=True)]
        answers = [future.result(100) for future in futures]
        for i, (answer, way) in enumerate(zip(answers, ways, strict=True)):
            assert_exact(model, answer, way)
            texts[i] = [*texts[i], *answer.ids, *prompt_of(3, seed=i)]
    assert answers[-1].reused >= LEAST_SHARED_CUDA
    assert set(ran) == {CudaDecode, CudaExtend}


def test_angles_of_all_positions_follow_a_change_of_the_rotary_embedding(start: Any) -> None:
    model = random_model()
    engine, way = start(model), Sampling(max_tokens=9, seed=1)
    assert_exact(model, engine.generate([prompt_of(20)], way)[0], way)
    assert engine.scheduler.cuda._angles is not None
    with engine.lock:
        model.model.rotary_emb.inv_freq.mul_(0.5)
    assert_exact(model, engine.generate([prompt_of(20)], way)[0], way)
    hook = model.model.register_forward_hook(lambda *_: None)  # its modules are called from now on
    assert_exact(model, engine.generate([prompt_of(20)], way)[0], way)
    assert engine.scheduler.cuda._angles is None
    hook.remove()


def test_rows_that_move_and_requests_that_are_preempted_stay_exact(start: Any) -> None:
    model = random_model()
    engine = start(model, cache_tokens=96)
    asked = [(prompt_of(9 + i, seed=i), Sampling(max_tokens=8 + 5 * i, seed=i)) for i in range(6)]
    engine.gather(len(asked))
    answers = [future.result(100) for future in [engine.submit(prompt, way)[0] for prompt, way in asked]]
    for answer, (_, way) in zip(answers, asked, strict=True):
        assert len(answer.ids) == way.max_tokens
        assert_exact(model, answer, way)
    assert engine.scheduler.preempted > 0
    assert engine.scheduler.blocks.held == 0
