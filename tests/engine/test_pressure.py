"""Requests under way while blocks run out, weights change and the engine pauses: none is lost, none sees the others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import prompt_of, random_model  # noqa: E402
from verifiers.engine.engine import Engine, EngineFullError  # noqa: E402
from verifiers.engine.sequence import ActiveSequence, Sampling  # noqa: E402

PRECISE = random_model(dtype=torch.float64)  # the last bits of float32 depend on the batch: they may tip a token


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Engines that are closed when the test is over."""
    torch.set_num_threads(1)
    made: list[Engine] = []

    def make(model: Any = PRECISE, **settings: Any) -> Engine:
        made.append(Engine(model, **{"rows": 4, "length": 200, **settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def wait_for(claim: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def test_the_only_one_that_decodes_makes_room_for_a_long_prompt_that_came_before_it(make: Any) -> None:
    model = random_model(dtype=torch.float64, max_position_embeddings=4096)
    engine = make(model, rows=2, length=2528, cache_tokens=2528, prefill_tokens=4096)
    long = Sampling(max_tokens=2, seed=1, prompt_logprobs=0)  # scored 128 tokens at a time: the short one decodes first
    asked = [(prompt_of(2500, seed=1), long), (prompt_of(15), Sampling(max_tokens=40, seed=2))]
    engine.pause()
    futures = [engine.submit(*one)[0] for one in asked]
    engine.resume()
    answers = [future.result(60) for future in futures]
    assert engine.scheduler.preempted > 0
    alone = make(model, rows=1, length=2528)
    for answer, (prompt, way) in zip(answers, asked, strict=True):
        assert answer.ids == alone.submit(prompt, way)[0].result(60).ids
    assert engine.scheduler.blocks.held == 0


def test_a_request_after_an_update_does_not_join_a_prompt_that_was_begun_before_it(make: Any) -> None:
    model = random_model(dtype=torch.float64, seed=3)
    engine = make(model, rows=4, prefill_tokens=8)
    prompt, way = prompt_of(150), Sampling(max_tokens=10, seed=1)
    after, step = list[Any](), engine._step

    def stepped() -> None:
        step()
        if not after and any(group.first.computed > 16 for group in engine.scheduler.prefilling):
            with torch.inference_mode(False), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            after.extend(engine.submit(prompt, way))

    engine._step = stepped
    assert engine.submit(prompt, way)[0].result(60)
    answer = after[0].result(60)
    due = make(model, rows=1).submit(prompt, way)[0].result(60)
    assert answer.ids == due.ids
    assert answer.logprobs == pytest.approx(due.logprobs, abs=1e-6)


def test_a_pause_that_waits_lets_a_prompt_end_that_is_being_run(make: Any) -> None:
    engine = make(prefill_tokens=4)
    future = engine.submit(prompt_of(150), Sampling(max_tokens=3, seed=1))[0]
    engine.pause("wait")
    assert len(future.result(5).ids) == 3


def test_a_pause_that_waits_does_not_wait_for_what_is_paused(make: Any) -> None:
    engine = make()
    engine.pause("keep")
    future = engine.submit(prompt_of(10), Sampling(max_tokens=3, seed=1))[0]
    pausing = threading.Thread(target=engine.pause, args=("wait",), daemon=True)
    pausing.start()
    pausing.join(20)
    assert not pausing.is_alive()
    engine.resume()
    assert len(future.result(20).ids) == 3


def test_requests_that_wait_for_the_end_of_a_pause_are_no_more_than_may_wait(make: Any) -> None:
    engine = make(max_waiting=2)
    engine.pause("wait")
    futures = engine.submit(prompt_of(5), Sampling(max_tokens=2, seed=1), n=2)
    with pytest.raises(EngineFullError, match="2 requests are already waiting"):
        engine.submit(prompt_of(5))
    engine.resume()
    assert all(future.result(20) for future in futures)


def test_where_a_request_cannot_be_begun_it_and_its_copies_fail_and_no_block_is_lost(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def start(self) -> Any:
            raise MemoryError("no room for the grammar's state")

    engine = make()
    broken: Any = Broken()
    for future in engine.submit(prompt_of(20), Sampling(max_tokens=3, seed=1, constraint=broken), n=3):
        with pytest.raises(MemoryError, match="no room"):
            future.result(20)
    assert "the engine's step failed" in caplog.text
    wait_for(lambda: engine.scheduler.blocks.held == 0)
    assert engine.submit(prompt_of(20), Sampling(max_tokens=3, seed=1))[0].result(20)


def test_where_there_was_no_memory_for_the_cache_the_next_request_tries_again(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    due = engine.submit(prompt_of(20), Sampling(max_tokens=5, seed=1))[0].result(20)
    cache = type(engine.scheduler.cache)
    wait_for(lambda: not engine.running)
    engine.release_cache()

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError("the memory is full")

    with monkeypatch.context() as patch:
        patch.setattr("verifiers.engine.engine.KVCache", full)
        with pytest.raises(MemoryError, match="is full"):
            engine.submit(prompt_of(20), Sampling(max_tokens=5, seed=1))[0].result(20)
    assert engine.submit(prompt_of(20), Sampling(max_tokens=5, seed=1))[0].result(20).ids == due.ids
    assert isinstance(engine.scheduler.cache, cache)
    assert "the engine's step failed" in caplog.text


def test_a_prompt_equal_to_what_another_has_sampled_is_scored_for_itself(make: Any) -> None:
    engine = make(rows=2, length=100, cache_tokens=100)
    way = Sampling(max_tokens=30, seed=1, prompt_logprobs=1)
    first = ActiveSequence(prompt_of(20), way, 1)
    first.future.prompt_logprobs = [None] * 20  # it was scored, sampled five tokens, and was preempted
    first.sampled = ([7, 8, 9, 7, 8], [0.0] * 5, [0.0] * 5)
    first.tokens = np.array([*first.prompt_ids, 7, 8, 9, 7, 8], np.int32)
    other = ActiveSequence(first.tokens.tolist(), way, 2)
    engine.pause()
    engine.waiting.extend([first, other])
    engine.submit(prompt_of(3), Sampling(max_tokens=1))
    engine.resume()
    assert len(other.future.result(20).prompt_logprobs or ()) == 25
    assert len(first.future.result(20).prompt_logprobs or ()) == 20


def test_a_preempted_reply_of_one_version_of_the_weights_has_one_span(make: Any) -> None:
    engine = make(rows=4, length=90, cache_tokens=100)
    futures = [engine.submit(prompt_of(20, seed=i), Sampling(max_tokens=50, seed=i))[0] for i in range(4)]
    for future in futures:
        (span,) = future.result(60).weight_versions
        assert (span.start, span.end) == (0, 50)
    assert engine.scheduler.preempted > 0


# --- all of it at once ----------------------------------------------------------------------------------------------


def some_request(draw: random.Random, shared: list[list[int]], length: int) -> tuple[list[int], Sampling]:
    prompt = draw.choice(shared)[: draw.randint(1, length - 8)] + prompt_of(draw.choice([0, 0, 5, 20]))
    way = Sampling(max_tokens=draw.randint(1, 60), seed=draw.randint(0, 999), temperature=draw.choice([0.0, 1.0]))
    changes: dict[str, Any] = draw.choice(
        [
            {}, {}, {"prompt_logprobs": 1}, {"top_logprobs": 2}, {"stop_ids": frozenset([3, 4, 5])},
            {"presence_penalty": 0.5, "repetition_penalty": 1.2}, {"logit_bias": {9: 2.0}, "min_tokens": 1},
        ]
    )  # fmt: skip
    return prompt[: length - 2], replace(way, **changes)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_around_them_requests_get_the_tokens_they_get_alone(make: Any, seed: int) -> None:
    draw = random.Random(seed)
    length = draw.choice([64, 100, 130])
    tight = {"cache_tokens": length + draw.choice([0, 16, 60]), "prefill_tokens": draw.choice([4, 16, 200])}
    engine, plenty = make(rows=draw.choice([2, 4, 8]), length=length, **tight), make(rows=8)
    shared = [prompt_of(length, seed=i) for i in range(3)]
    asked = []
    for _ in range(10):
        prompt, way = some_request(draw, shared, length)
        futures = engine.submit(prompt, way, n=draw.choice([1, 1, 2, 4]))
        asked += [(prompt, replace(way, seed=(way.seed or 0) + i), future) for i, future in enumerate(futures)]
        if draw.random() < 0.3:
            draw.choice(asked)[2].cancel()
        event = draw.choice([lambda: time.sleep(0.01), engine.release_cache, engine.forget, engine.pause, str])
        event()
        engine.resume()
    for prompt, way, future in asked:
        try:
            answer = future.result(60)
        except CancelledError:
            continue
        due = plenty.submit(prompt, way)[0].result(60)
        assert answer.ids == due.ids[: length - len(prompt)]
        assert answer.logprobs == pytest.approx(due.logprobs[: len(answer.ids)], abs=1e-5)
        assert len(answer.prompt_logprobs or ()) == len(due.prompt_logprobs or ())
        assert len(answer.top_logprobs) == (len(answer.ids) if way.top_logprobs else 0)
    wait_for(
        lambda: not (engine.scheduler.blocks.held or engine.running or engine.scheduler.prefilling or engine.waiting)
    )
    assert not any(engine.scheduler.blocks._references)
