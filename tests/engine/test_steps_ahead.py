"""The steps of a card, played on the CPU: the host is behind, rows move, and every token is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import prompt_of, random_model  # noqa: E402
from tests.engine.support.host_card import on_host_card  # noqa: E402
from verifiers.engine import cuda_prefill, cuda_runner  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.sequence import Generated, Sampling  # noqa: E402

PRECISE = random_model(dtype=torch.float64, max_position_embeddings=512)  # no token turns on the last bits of a batch
Asked = list[tuple[list[int], Sampling]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    torch.set_num_threads(1)
    monkeypatch.setattr(cuda_runner, "FEW_ROWS", 0)  # as with many rows
    made: list[Engine] = []

    def start(make: Callable[..., Engine] = on_host_card, **settings: Any) -> Engine:
        made.append(make(PRECISE, **{"rows": 8, "length": 250, **settings}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def answers(engine: Engine, asked: Asked) -> list[Generated]:
    engine.gather(len(asked))
    return [future.result(120) for future in [engine.submit(prompt, way)[0] for prompt, way in asked]]


def assert_same(ours: list[Generated], theirs: list[Generated]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.prompt_ids, one.ids, one.finish_reason) == (other.prompt_ids, other.ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-5)


def mixed(n: int, longest: int = 60, **more: Any) -> Asked:
    draw = random.Random(n)
    return [
        (
            prompt_of(draw.randint(1, 80), seed=i // 2),  # each prompt twice
            Sampling(
                max_tokens=draw.randint(1, longest), seed=i, temperature=draw.choice([0.0, 0.7, 1.0, 1.4]), **more
            ),
        )
        for i in range(n)
    ]


def test_rows_that_end_at_different_times_give_the_tokens_that_they_give_one_step_at_a_time(start: Any) -> None:
    asked = mixed(40)
    card = start()
    assert_same(answers(card, asked), answers(start(Engine), asked))
    assert card.scheduler.cuda.card.captures > 4  # graphs of several sizes, of prompts too
    assert card.scheduler.blocks.held == 0
    assert not card.scheduler.cuda.in_flight


@pytest.mark.parametrize("more", [{}, {"prompt_logprobs": 0}], ids=["plain", "scored"])
def test_prompts_that_are_run_in_parts_give_the_same_tokens(start: Any, monkeypatch: Any, more: Any) -> None:
    monkeypatch.setattr(cuda_prefill, "TOKENS", (16, 32))
    asked, card = mixed(40, **more), start()
    ours, theirs = answers(card, asked), answers(start(Engine), asked)
    assert_same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert bool(one.prompt_logprobs) == bool(more)
        scored, due = ([score[0] for score in (of.prompt_logprobs or [None])[1:]] for of in (one, other))
        assert scored == pytest.approx(due, abs=1e-5)
    assert 32 in card.scheduler.cuda._prefill._graphs or more


@pytest.mark.parametrize(
    "more",
    [{"top_p": 0.8}, {"top_k": 9}, {"logit_bias": {9: 2.0}}, {"stop_ids": frozenset(range(0, 97, 7))}],
    ids=["top-p", "top-k", "biased", "stopped"],
)
def test_requests_that_want_more_than_a_draw_get_the_same_tokens(start: Any, more: Any) -> None:
    asked = [pair for pairs in zip(mixed(10, **more), mixed(10), strict=True) for pair in pairs]
    assert_same(answers(start(rows=5), asked), answers(start(Engine), asked))


def test_when_blocks_run_out_in_flight_the_youngest_is_run_again_and_nothing_changes(start: Any) -> None:
    asked = [(prompt_of(20 + i, seed=i), Sampling(max_tokens=90, seed=i)) for i in range(16)]
    card = start(cache_tokens=400)
    assert_same(answers(card, asked), answers(start(Engine), asked))
    assert card.scheduler.preempted > 0
    assert card.scheduler.blocks.held == 0


def test_blocks_are_taken_for_several_steps_at_once_and_memory_stays_near_the_tokens(start: Any) -> None:
    card = start(rows=16)
    ratios, step, reserved = list[float](), card._step, list[int]()
    reserve = card.scheduler.reserve

    def measured() -> None:
        step()
        lengths = card.table.length[: len(card.running)] + card.table.ahead[: len(card.running)]
        if len(lengths) == 16:
            ratios.append(card.scheduler.blocks.held * 16 / lengths.sum())

    card._step = measured
    card.scheduler.reserve = lambda *args: (reserved.append(1), reserve(*args))[1]
    answers(card, [(prompt_of(100, seed=i), Sampling(max_tokens=120, seed=i)) for i in range(16)])
    assert sum(ratios) / len(ratios) < 1.1
    assert len(reserved) < 40  # of 120 steps


def test_conversations_go_on_from_copies_of_half_filled_blocks(start: Any) -> None:
    card, plain = start(length=500), start(Engine, length=500)
    texts = [prompt_of(70 + 7 * i, seed=i) for i in range(6)]
    for turn in range(3):
        asked = [(text, Sampling(max_tokens=10 + i, seed=i)) for i, text in enumerate(texts)]
        got = answers(card, asked)
        assert_same(got, answers(plain, asked))
        assert all((answer.reused >= 64) == (turn > 0) for answer in got)
        texts = [[*text, *answer.ids, *prompt_of(5, seed=turn)] for text, answer in zip(texts, got, strict=True)]


def test_a_group_shares_its_prompt_and_cancelled_ones_leave_the_others_alone(start: Any) -> None:
    card = start(rows=12)
    card.gather(12)
    futures = [card.submit(prompt_of(50), Sampling(max_tokens=180, seed=i))[0] for i in range(12)]
    while card.tokens < 200:
        pass
    for future in futures[::3]:
        future.cancel()
    left = [future.result(60) for i, future in enumerate(futures) if i % 3]
    due = answers(start(Engine), [(prompt_of(50), Sampling(max_tokens=180, seed=i)) for i in range(12) if i % 3])
    assert_same(left, due)


def launches(card: Engine) -> list[int]:
    """The steps of each launch, from here on."""
    cuda: Any = card.scheduler.cuda
    launch, noted = cuda.launch, list[int]()
    cuda.launch = lambda n, steps: (noted.append(steps), launch(n, steps))[1]
    return noted


def test_few_rows_are_run_step_by_step(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner, "FEW_ROWS", 3)
    card = start()
    card.gather(4)
    noted = launches(card)
    answers(card, [(prompt_of(9, seed=i), Sampling(max_tokens=9 + 8 * (i > 0), seed=i)) for i in range(4)])
    assert noted == [1, 4, 4, 4, *[1] * 3]  # four rows, then three: that one has ended is read a launch later


def test_steps_are_launched_four_at_a_time_and_none_beyond_the_longest_reply(start: Any) -> None:
    card = start()
    noted = launches(card)
    answers(card, [(prompt_of(9, seed=i), Sampling(max_tokens=10 * i + 1, seed=i)) for i in range(1, 5)])
    assert noted == [1, *[4] * 9, 3]  # the first of the 41 tokens comes with the prompt, which others may follow


def test_whoever_listens_hears_each_token_before_the_next_ones_are_launched(start: Any) -> None:
    card, heard = start(), list[int]()
    noted = launches(card)

    def listen(token: int, logprob: float) -> bool:
        heard.append(token)
        return False

    card.submit(prompt_of(9), Sampling(max_tokens=20, seed=1), on_token=listen)[0].result(60)
    assert len(heard) == 20
    assert set(noted) == {1}


def test_a_row_may_run_on_beyond_its_end_while_the_longest_stops_before_its_time(start: Any) -> None:
    prompts = [prompt_of(12, seed=i) for i in range(4)]
    plain = answers(start(Engine), [(prompt, Sampling(max_tokens=60, seed=i)) for i, prompt in enumerate(prompts)])
    for at in range(1, 14):  # the longest ends by a token, at every place of a burst
        stop = frozenset(plain[0].ids[at : at + 1])
        asked = [(prompts[0], Sampling(max_tokens=60, seed=0, stop_ids=stop))]
        asked += [(prompt, Sampling(max_tokens=at + i, seed=i)) for i, prompt in enumerate(prompts[1:], start=1)]
        card = start()
        noted = launches(card)
        got = answers(card, asked)
        assert [len(one.ids) for one in got[1:]] == [at + 1, at + 2, at + 3]
        assert [one.ids for one in got] == [one.ids[: len(two.ids)] for one, two in zip(plain, got, strict=True)]
        assert got[0].finish_reason == "stop"
        assert card.tokens == sum(len(one.ids) for one in got)
        assert not card.scheduler.cuda.in_flight
        assert card.scheduler.blocks.held == 0
        assert all(steps > 0 for steps in noted)


@pytest.mark.parametrize("length", [64, 71])
def test_a_reply_that_fills_the_context_ends_there_though_the_device_runs_on(start: Any, length: int) -> None:
    asked = [(prompt_of(length - 1 - i, seed=i), Sampling(max_tokens=50, seed=i)) for i in range(20)]
    card = start(length=length)
    got = answers(card, asked)
    assert_same(got, answers(start(Engine, length=length), asked))
    assert [len(one.ids) for one in got] == [i + 1 for i in range(20)]
    assert card.scheduler.blocks.held == 0


def test_a_listener_that_ends_its_request_is_told_nothing_of_the_steps_in_flight(start: Any) -> None:
    card, heard = start(), list[int]()

    def listen(token: int, logprob: float) -> bool:
        heard.append(token)
        return len(heard) == 5

    told = card.submit(prompt_of(9), Sampling(max_tokens=50, seed=1), on_token=listen)[0]
    other = card.submit(prompt_of(30), Sampling(max_tokens=50, seed=2))[0]
    assert told.result(60).ids == heard
    assert len(heard) == 5
    assert len(other.result(60).ids) == 50
