"""Whatever decoder transformers has: the tokens' logprobs are those of its own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, WINDOW, assert_exact, prompt_of, random_model  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402

PROMPTS = [prompt_of(n, seed=n) for n in (1, 3, WINDOW, WINDOW + 1, 3 * WINDOW, 50)]
WAYS = [
    Sampling(max_tokens=24, seed=1),
    Sampling(max_tokens=24, seed=2, temperature=0.6),
    Sampling(max_tokens=24, seed=3, temperature=1.7, top_p=0.8),
    Sampling(max_tokens=24, seed=4, top_k=5, min_p=0.02, temperature=0.9),
    Sampling(max_tokens=24, seed=5, logit_bias={7: 3.0, 11: -50.0}),
    Sampling(max_tokens=24, temperature=0.0),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: Any) -> Any:
    return request.param, random_model(request.param)


@pytest.fixture
def engine(family: Any) -> Iterator[Engine]:
    made = Engine(family[1], rows=4, length=128)
    yield made
    made.close()


def test_the_logprobs_are_those_of_the_forward_pass(family: Any, engine: Engine) -> None:
    asked = [(way, engine.submit(prompt, way)[0]) for prompt in PROMPTS for way in WAYS]
    for way, answer in [(way, future.result(60)) for way, future in asked]:
        assert_exact(family[1], answer, way)


def test_a_second_turn_is_as_exact_as_the_first(family: Any, engine: Engine) -> None:
    way = Sampling(max_tokens=20, seed=1)
    first = engine.generate([PROMPTS[-1]], way)[0]
    turn = [*first.prompt_ids, *first.ids, *prompt_of(9, seed=9)]
    second = engine.generate([turn], way)[0]
    assert second.reused == len(PROMPTS[-1]) + 19
    assert_exact(family[1], second, way)
    engine.forget()
    afresh = engine.generate([turn], way)[0]
    assert afresh.reused == 0
    assert afresh.ids == second.ids
    assert afresh.logprobs == pytest.approx(second.logprobs, abs=2e-4)


def test_greedy_tokens_are_those_of_generate(family: Any, engine: Engine) -> None:
    model = family[1]
    prompt = PROMPTS[-2]
    ours = engine.generate([prompt], Sampling(max_tokens=24, temperature=0.0))[0]
    ids = torch.tensor([prompt])
    theirs = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert ours.ids == theirs[0, len(prompt) :].tolist()


def test_the_models_own_attention_is_back_after_every_step(family: Any, engine: Engine) -> None:
    before = family[1].config._attn_implementation
    engine.generate(PROMPTS[:2], WAYS[0])
    engine.close()
    assert family[1].config._attn_implementation == before == "eager"
