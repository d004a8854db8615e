"""Requests come and go between steps, and none of them notices the others."""

from __future__ import annotations

import concurrent.futures
import gc
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import VOCABULARY, assert_exact, logits_of, prompt_of, random_model  # noqa: E402
from verifiers.engine.engine import Engine, EngineFullError  # noqa: E402
from verifiers.engine.sequence import Generated, Sampling  # noqa: E402
from verifiers.errors import InfraError, ModelError, OverlongPromptError  # noqa: E402

MODEL = random_model()
PRECISE = random_model(dtype=torch.float64)  # the last bits of float32 depend on the batch: they may tip a token


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Engines that are closed when the test is over."""
    made: list[Engine] = []

    def make(model: Any = MODEL, **settings: Any) -> Engine:
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


class Slow:
    """Holds a model up before every forward until it is let go, so that a test can act in the middle."""

    def __init__(self, model: Any) -> None:
        self.go = threading.Event()
        self.calls = 0
        self._handle = model.register_forward_pre_hook(self._wait)

    def _wait(self, module: Any, args: Any) -> None:
        self.calls += 1
        assert self.go.wait(30)

    def remove(self) -> None:
        self.go.set()
        self._handle.remove()


@pytest.fixture
def slow() -> Iterator[Slow]:
    held = Slow(MODEL)
    yield held
    held.remove()


def some_requests(n: int, seed: int = 0) -> list[tuple[list[int], Sampling]]:
    """Mixed lengths and mixed ways of sampling, some of them with a shared beginning."""
    draw = random.Random(seed)
    shared = prompt_of(40, seed=99)
    requests = []
    for i in range(n):
        prompt = (shared[: draw.randint(10, 40)] if i % 3 == 0 else []) + prompt_of(draw.randint(1, 40), seed=i)
        way = Sampling(
            max_tokens=draw.randint(1, 40), seed=i, temperature=draw.choice([0.0, 0.7, 1.0, 1.5]),
            top_p=draw.choice([1.0, 0.9]), top_k=draw.choice([0, 10]), min_p=draw.choice([0.0, 0.05]),
            stop_ids=frozenset(draw.choice([[], [5, 6, 7]])), logit_bias=draw.choice([{}, {}, {9: 2.0}]),
        )  # fmt: skip
        requests.append((prompt, way))
    return requests


# --- batches --------------------------------------------------------------------------------------------------------


def test_a_request_gets_the_same_tokens_alone_and_in_a_crowd(make: Any) -> None:
    requests = some_requests(40)
    alone = make(PRECISE, rows=1)
    single = [alone.generate([prompt], way)[0] for prompt, way in requests]
    crowd = make(PRECISE, rows=7)
    together = [f.result(60) for f in [crowd.submit(prompt, way)[0] for prompt, way in requests]]
    for one, other in zip(single, together, strict=True):
        assert one.ids == other.ids
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_more_requests_than_rows_are_all_exact(make: Any) -> None:
    requests = some_requests(60, seed=1)
    engine = make(rows=5)
    answers = [f.result(60) for f in [engine.submit(prompt, way)[0] for prompt, way in requests]]
    for answer, (prompt, way) in zip(answers, requests, strict=True):
        assert answer.prompt_ids == prompt
        assert_exact(MODEL, answer, way)
    assert engine.tokens == sum(len(answer.ids) for answer in answers)
    assert not engine.running
    assert not engine.waiting


def test_requests_that_join_while_others_decode_are_exact(make: Any) -> None:
    engine = make(rows=6)
    requests = some_requests(30, seed=2)
    futures = []
    for prompt, way in requests:
        futures.append(engine.submit(prompt, way)[0])
        time.sleep(random.Random(len(futures)).choice([0, 0.001, 0.004]))
    answers = [future.result(60) for future in futures]
    for answer, (_, way) in zip(answers, requests, strict=True):
        assert_exact(MODEL, answer, way)


def test_prompts_beyond_the_prefill_budget_still_come_in(make: Any) -> None:
    engine = make(rows=8, prefill_tokens=16)
    way = Sampling(max_tokens=5, seed=0)
    answers = engine.generate([prompt_of(n, seed=n) for n in (50, 3, 60, 2, 16, 17, 1, 1)], way)
    for answer in answers:
        assert_exact(MODEL, answer, way)


@pytest.mark.parametrize("n", [2, 4, 9])
def test_n_completions_share_one_prefill(make: Any, n: int) -> None:
    engine = make(PRECISE, rows=4)
    prompt = prompt_of(30)
    answers = engine.generate([prompt], Sampling(max_tokens=12, seed=5), n=n)
    lone = make(PRECISE, rows=1)
    for i, answer in enumerate(answers):
        assert answer.ids == lone.generate([prompt], Sampling(max_tokens=12, seed=5 + i))[0].ids
        assert_exact(PRECISE, answer, Sampling(max_tokens=12), within=1e-5)
    assert [answer.reused for answer in answers[:4]] == [0, *[30] * (min(n, 4) - 1)]
    assert len({tuple(answer.ids) for answer in answers}) > 1


def test_without_a_seed_every_request_draws_its_own(make: Any) -> None:
    engine = make()
    answers = engine.generate([prompt_of(5)] * 4, Sampling(max_tokens=20, temperature=2.0))
    assert len({tuple(answer.ids) for answer in answers}) == 4


def test_many_threads_submit_at_once(make: Any) -> None:
    engine = make(rows=6)
    requests = some_requests(64, seed=3)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda request: engine.submit(*request)[0].result(60), requests))
    for answer, (_, way) in zip(answers, requests, strict=True):
        assert_exact(MODEL, answer, way)


def test_two_engines_over_one_model_do_not_get_into_each_others_way(make: Any) -> None:
    engines = [make(rows=3), make(rows=2)]
    requests = some_requests(40, seed=4)
    futures = [engines[i % 2].submit(*request)[0] for i, request in enumerate(requests)]
    for answer, (_, way) in zip([future.result(60) for future in futures], requests, strict=True):
        assert_exact(MODEL, answer, way)


def test_the_model_can_be_run_beside_the_engine_under_its_lock(make: Any) -> None:
    engine = make(rows=2)
    future = engine.submit(prompt_of(5), Sampling(max_tokens=150, seed=0))[0]
    ids = torch.tensor([prompt_of(30)])
    with torch.no_grad():
        alone = PRECISE(input_ids=ids).logits
        while not future.done():
            with engine.lock:
                assert torch.allclose(MODEL(input_ids=ids).logits.double(), alone, atol=1e-3)
    assert_exact(MODEL, future.result(), Sampling(max_tokens=150))


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_reply_and_is_part_of_it(make: Any) -> None:
    engine = make()
    prompt = prompt_of(6)
    whole = engine.generate([prompt], Sampling(max_tokens=20, seed=1))[0]
    assert whole.finish_reason == "length"
    stop = whole.ids[7]
    cut = engine.generate([prompt], Sampling(max_tokens=20, seed=1, stop_ids=frozenset([stop])))[0]
    assert cut.finish_reason == "stop"
    assert cut.ids == whole.ids[: whole.ids.index(stop) + 1]
    always = make(stop_ids=[stop])
    assert always.generate([prompt], Sampling(max_tokens=20, seed=1))[0].ids == cut.ids


def test_the_first_token_may_be_the_last(make: Any) -> None:
    engine = make()
    answers = engine.generate([prompt_of(n) for n in range(1, 12)], Sampling(max_tokens=1, seed=0))
    assert [len(answer.ids) for answer in answers] == [1] * 11
    everything = Sampling(max_tokens=9, stop_ids=frozenset(range(VOCABULARY)))
    assert [answer.finish_reason for answer in engine.generate([prompt_of(3)], everything, n=5)] == ["stop"] * 5


@pytest.mark.parametrize("room", [1, 2, 9])
def test_the_context_ends_a_reply_so_that_a_trainer_can_run_it_whole(make: Any, room: int) -> None:
    model = random_model("GPT2", max_position_embeddings=48)
    engine = make(model, length=None)
    assert engine.length == 48
    way = Sampling(max_tokens=100, seed=1)
    answer = engine.generate([prompt_of(48 - room)], way)[0]
    assert answer.finish_reason == "length"
    assert len(answer.ids) == room
    assert_exact(model, answer, way)


def test_on_token_hears_every_token_and_can_end_the_reply(make: Any) -> None:
    heard: list[tuple[int, float]] = []

    def enough(token: int, logprob: float) -> bool:
        heard.append((token, logprob))
        return len(heard) == 6

    answer = make().submit(prompt_of(4), Sampling(max_tokens=30, seed=0), on_token=enough)[0].result(20)
    assert answer.finish_reason == "stop"
    assert [token for token, _ in heard] == answer.ids
    assert [logprob for _, logprob in heard] == pytest.approx(answer.logprobs)


def test_an_on_token_that_raises_fails_its_own_request_only(make: Any) -> None:
    def bad(token: int, logprob: float) -> bool:
        raise KeyError("mine")

    engine = make()
    others = [engine.submit(prompt_of(5, seed=i), Sampling(max_tokens=30, seed=i))[0] for i in range(3)]
    mine = engine.submit(prompt_of(5), Sampling(max_tokens=30), on_token=bad)[0]
    with pytest.raises(KeyError, match="mine"):
        mine.result(20)
    assert all(len(other.result(20).ids) == 30 for other in others)


def test_logit_bias_moves_the_draw_and_not_the_raw_logprobs(make: Any) -> None:
    engine = make()
    forced = Sampling(max_tokens=8, seed=0, logit_bias={42: 100.0})
    answer = engine.generate([prompt_of(5)], forced)[0]
    assert answer.ids == [42] * 8
    assert answer.logprobs == pytest.approx([0.0] * 8, abs=1e-4)
    assert_exact(MODEL, answer, forced, within=1e-3)
    assert max(answer.raw_logprobs) < -0.1
    free = engine.generate([prompt_of(5)], Sampling(max_tokens=8, temperature=0.0))[0]
    banned = Sampling(max_tokens=8, temperature=0.0, logit_bias={free.ids[0]: -100.0})
    assert engine.generate([prompt_of(5)], banned)[0].ids[0] != free.ids[0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e-4])
def test_a_temperature_next_to_nothing_is_greedy(make: Any, temperature: float) -> None:
    engine = make()
    greedy = engine.generate([prompt_of(5)], Sampling(max_tokens=9, temperature=0.0))[0]
    cold = engine.generate([prompt_of(5)], Sampling(max_tokens=9, temperature=temperature))[0]
    assert cold.ids == greedy.ids
    assert all(logprob <= 0 for logprob in cold.logprobs)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, 2**64 + 5, -(2**70)])
def test_any_whole_number_is_a_seed(make: Any, seed: int) -> None:
    engine = make()
    answers = [engine.generate([prompt_of(4)], Sampling(max_tokens=6, seed=seed), n=2) for _ in range(2)]
    assert [one.ids for one in answers[0]] == [one.ids for one in answers[1]]


def test_of_equally_likely_tokens_the_lowest_is_taken_and_comes_first_among_the_alternatives(make: Any) -> None:
    model = random_model("Llama")
    half = VOCABULARY // 2
    with torch.no_grad():
        model.lm_head.weight[half : 2 * half] = model.lm_head.weight[:half]  # every token has an equal one
    engine = make(model)
    for kept in ({}, {"top_k": 3}):
        for prompt in (prompt_of(n, seed=n) for n in (1, 20, 40)):
            way = Sampling(max_tokens=20, temperature=0.0, top_logprobs=4, prompt_logprobs=1, **kept)
            (answer,) = engine.generate([prompt], way)
            assert [top[0][0] for top in answer.top_logprobs] == answer.ids
            for top in answer.top_logprobs:
                assert top == sorted(top, key=lambda one: (-one[1], one[0]))
                assert [one for one, _ in top[:4:2]] == [one - half for one, _ in top[1:4:2]]
            expected = logits_of(model, prompt[:1], [*prompt[1:], *answer.ids]).argmax(-1).tolist()
            assert [one[1][0][0] for one in answer.prompt_logprobs[1:]] == expected[: len(prompt) - 1]
            assert answer.ids == expected[len(prompt) - 1 :]


def test_numbers_beyond_any_use_are_taken_for_no_limit(make: Any) -> None:
    answer = make(length=30).generate([prompt_of(4)], Sampling(max_tokens=10**30, top_k=10**30, seed=0))[0]
    assert len(answer.ids) == 26


@pytest.mark.parametrize(
    ("prompt", "way", "error"),
    [
        ([], {}, ValueError),
        ([VOCABULARY], {}, ValueError),
        ([3, -1], {}, ValueError),
        ([2**40], {}, ValueError),
        ([3], {"logit_bias": {VOCABULARY: 1.0}}, ValueError),
        ([3], {"logit_bias": {5.5: 1.0}}, TypeError),
        ([3], {"logit_bias": {5: 1e300}}, ValueError),
        ([3], {"presence_penalty": -math.inf}, ValueError),
        ([3], {"top_logprobs": 1.5}, ValueError),
        ([3], {"prompt_logprobs": -1}, ValueError),
        ([3], {"max_tokens": 2.5}, ValueError),
        ([3], {"seed": 1.5}, ValueError),
        ([3], {"stop_ids": None}, TypeError),
        ([1.5, 2.7], {}, TypeError),
        ([3] * 200, {}, OverlongPromptError),
    ],
)
def test_what_cannot_be_run_is_refused_when_asked(make: Any, prompt: Any, way: Any, error: Any) -> None:
    engine = make()
    beside = engine.submit(prompt_of(4), Sampling(max_tokens=100))[0]
    with pytest.raises(error):
        engine.submit(prompt, Sampling(**way))
    assert len(engine.generate([[3] * 199], Sampling(max_tokens=5))[0].ids) == 1
    assert len(beside.result(30).ids) == 100


def test_where_no_token_is_left_the_request_fails_and_those_beside_it_do_not(make: Any) -> None:
    engine = make()
    beside = engine.submit(prompt_of(4), Sampling(max_tokens=100))[0]
    none = Sampling(max_tokens=4, logit_bias=dict.fromkeys(range(VOCABULARY), -math.inf))
    with pytest.raises(ModelError, match="no token is left to sample"):
        engine.submit(prompt_of(4), none)[0].result(30)
    assert len(beside.result(30).ids) == 100


def test_a_full_queue_refuses_and_takes_more_once_there_is_room(make: Any, slow: Slow) -> None:
    engine = make(rows=1, max_waiting=3)
    first = engine.submit([3], Sampling(max_tokens=3))[0]
    wait_for(lambda: slow.calls > 0)
    queued = engine.submit([4], Sampling(max_tokens=3), n=3)
    with pytest.raises(EngineFullError, match="3 requests are already waiting"):
        engine.submit([5])
    slow.go.set()
    assert all(len(future.result(20).ids) == 3 for future in [first, *queued])
    assert len(engine.submit([5], Sampling(max_tokens=2))[0].result(20).ids) == 2


# --- leaving --------------------------------------------------------------------------------------------------------


def test_cancelling_a_running_request_frees_its_row(make: Any, slow: Slow) -> None:
    engine = make(rows=2)
    doomed = engine.submit(prompt_of(5), Sampling(max_tokens=190), n=2)
    slow.go.set()
    wait_for(lambda: engine.tokens > 4)
    waiting = engine.submit(prompt_of(7), Sampling(max_tokens=4, seed=3))[0]
    for future in doomed:
        future.cancel()
    answer = waiting.result(20)
    for future in doomed:
        with pytest.raises(CancelledError):
            future.result(20)
    wait_for(lambda: not engine.running)
    assert_exact(MODEL, answer, Sampling(max_tokens=4))
    assert engine.tokens < 250


def test_cancelling_a_waiting_request_tells_whoever_waits_for_it_and_frees_its_place(make: Any, slow: Slow) -> None:
    engine = make(rows=1, max_waiting=4)
    running = engine.submit([3], Sampling(max_tokens=190))[0]
    wait_for(lambda: slow.calls > 0)
    queued = engine.submit([4], n=4)
    assert all(future.cancel() for future in queued)
    slow.go.set()
    done, pending = concurrent.futures.wait(queued, timeout=20)  # these wait on a notice, not on the state
    assert (len(done), len(pending)) == (4, 0)
    wait_for(lambda: not engine.waiting)
    engine.submit([5], Sampling(max_tokens=1), n=4)
    running.cancel()


def test_cancelling_one_of_many_leaves_the_others_exact(make: Any) -> None:
    engine = make(rows=8)
    futures = [engine.submit(prompt_of(5 + i, seed=i), Sampling(max_tokens=60, seed=i))[0] for i in range(8)]
    wait_for(lambda: engine.tokens > 40)
    for future in futures[::3]:
        future.cancel()
    stay = [future.result(30) for i, future in enumerate(futures) if i % 3]
    for answer in stay:
        assert_exact(MODEL, answer, Sampling(max_tokens=60))


def test_a_storm_of_cancellations_leaves_nothing_behind(make: Any) -> None:
    engine = make(rows=3)
    draw = random.Random(0)
    futures: list[Future[Generated]] = []
    for i in range(150):
        futures += engine.submit(prompt_of(draw.randint(1, 20), seed=i), Sampling(max_tokens=draw.randint(1, 20)), n=2)
        if draw.random() < 0.5:
            futures[draw.randrange(len(futures))].cancel()
    assert not concurrent.futures.wait(futures, timeout=60).not_done
    assert not engine.running
    answer = engine.generate([prompt_of(9)], Sampling(max_tokens=9, seed=0))[0]
    assert_exact(MODEL, answer, Sampling())


def test_close_fails_what_is_under_way_and_what_waits(slow: Slow) -> None:
    engine = Engine(MODEL, rows=1, length=100)
    futures = engine.submit([3], Sampling(max_tokens=90), n=3)
    wait_for(lambda: slow.calls > 0)
    closing = threading.Thread(target=engine.close)
    closing.start()
    slow.go.set()
    closing.join(20)
    for future in futures:
        with pytest.raises(InfraError, match="closed"):
            future.result(20)
    with pytest.raises(InfraError, match="closed"):
        engine.submit([3])
    engine.close()


def test_an_engine_that_was_never_asked_closes() -> None:
    engine = Engine(MODEL, rows=1, length=10)
    engine.close()
    with pytest.raises(InfraError, match="closed"):
        engine.submit([3])


def test_the_tokens_of_replies_under_way_are_counted_as_they_come(make: Any) -> None:
    engine = make()
    seen: list[int] = []

    def see(token: int, logprob: float) -> bool:
        seen.append(engine.tokens_under_way())
        return False

    engine.submit([3, 4], Sampling(max_tokens=6, ignore_eos=True), on_token=see)[0].result(60)
    assert seen == [1, 2, 3, 4, 5, 6]
    wait_for(lambda: engine.tokens_under_way() == 0)


# --- a model that misbehaves ----------------------------------------------------------------------------------------


def test_nan_logits_fail_the_request_and_not_those_beside_it(make: Any) -> None:
    model = random_model()
    poison = VOCABULARY - 1
    engine = make(model, rows=3)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    way = Sampling(max_tokens=30, seed=0, logit_bias={poison: -100.0})
    good = [engine.submit(prompt_of(40, seed=i, vocabulary=poison), way)[0] for i in range(2)]
    bad = engine.submit([3] * 60 + [poison], way)[0]
    with pytest.raises(ModelError, match="NaN"):
        bad.result(20)
    for answer in [future.result(20) for future in good]:
        assert_exact(model, answer, way)


def test_a_row_that_held_nan_is_as_good_as_new(make: Any) -> None:
    model = random_model()
    poison = VOCABULARY - 1
    engine = make(model, rows=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    way = Sampling(max_tokens=60, seed=0, logit_bias={poison: -100.0})
    with pytest.raises(ModelError, match="NaN"):
        engine.generate([[3] * 60 + [poison]], way)
    answer = engine.generate([[5, 6, 7]], way)[0]  # its steps read on beyond its own end, with a weight of zero
    assert_exact(model, answer, way)


def test_a_forward_that_raises_fails_its_requests_and_the_engine_goes_on(make: Any, caplog: Any) -> None:
    model = random_model()
    engine = make(model, rows=2)
    raises = [False]

    def explode(module: Any, args: Any, output: Any) -> None:
        if raises[0]:
            raises[0] = False
            raise RuntimeError("out of luck")

    model.model.layers[1].register_forward_hook(explode)
    running = engine.submit(prompt_of(4), Sampling(max_tokens=150), n=2)
    waiting = engine.submit(prompt_of(5), Sampling(max_tokens=5, seed=1))[0]
    wait_for(lambda: engine.tokens > 10)
    raises[0] = True
    for future in running:
        with pytest.raises(RuntimeError, match="out of luck"):
            future.result(20)
    assert_exact(model, waiting.result(20), Sampling(max_tokens=5))
    raises[0] = True
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.generate([prompt_of(4)], Sampling(max_tokens=5), n=3)
    assert len(engine.generate([prompt_of(4)], Sampling(max_tokens=5), n=3)) == 3
    assert "step failed" in caplog.text


# --- reuse ----------------------------------------------------------------------------------------------------------


def test_a_conversation_reuses_its_turns(make: Any) -> None:
    engine = make(PRECISE, rows=2, length=256)
    afresh = make(PRECISE, rows=1, length=256)
    text, way = prompt_of(20), Sampling(max_tokens=10, seed=4)
    for turn in range(6):
        answer = engine.generate([text], way)[0]
        afresh.forget()
        plain = afresh.generate([text], way)[0]
        assert plain.reused == 0
        assert answer.reused == (len(text) - 6 if turn else 0)
        assert answer.ids == plain.ids
        assert answer.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
        text = [*text, *answer.ids, *prompt_of(5, seed=turn)]


def test_prompts_that_share_only_a_beginning_reuse_only_that(make: Any) -> None:
    engine = make(PRECISE)
    shared, way = prompt_of(50), Sampling(max_tokens=10, seed=0)
    engine.generate([[*shared, *prompt_of(30, seed=1)]], way)
    for cut in (50, 33, 16):
        other = [*shared[:cut], 96 if shared[min(cut, 49)] != 96 else 95, *prompt_of(10, seed=cut)]
        answer = engine.generate([other], way)[0]
        assert answer.reused == cut
        assert_exact(PRECISE, answer, way, within=1e-5)
    answer = engine.generate([[*shared[:15], 1, 2, 3]], way)[0]
    assert answer.reused == 0  # not worth it
    assert_exact(PRECISE, answer, way, within=1e-5)


def test_the_same_prompt_again_runs_its_last_token_only(make: Any) -> None:
    engine = make(PRECISE)
    prompt, way = prompt_of(40), Sampling(max_tokens=6, seed=0)
    first, second = (engine.generate([prompt], way)[0] for _ in range(2))
    assert (first.reused, second.reused) == (0, 39)
    assert first.ids == second.ids


def test_requests_that_share_a_prefill_do_not_drive_out_a_conversation_while_rows_are_free(make: Any) -> None:
    engine = make(PRECISE, rows=4, length=256)
    text, way = prompt_of(60), Sampling(max_tokens=5, seed=1)
    answer = engine.generate([text], way)[0]
    engine.generate([prompt_of(12, seed=9)], Sampling(max_tokens=5, seed=0), n=3)
    again = [*text, *answer.ids, *prompt_of(8, seed=3)]
    turn = engine.generate([again], way)[0]
    assert turn.reused >= 60
    assert_exact(PRECISE, turn, way, within=1e-5)


def test_the_conversation_longest_unused_gives_way(make: Any) -> None:
    engine = make(rows=3, length=33, cache_tokens=96)  # room for three
    way = Sampling(max_tokens=2, seed=0)
    talks = [prompt_of(30, seed=i) for i in range(5)]
    for talk in (talks[0], talks[1], talks[2], talks[0], talks[3]):  # 1 is the oldest when 3 comes
        engine.generate([talk], way)
    assert [bool(engine.generate([talks[i]], way)[0].reused) for i in (0, 2, 3)] == [True] * 3
    engine.generate([talks[4]], way)
    assert engine.generate([talks[1]], way)[0].reused == 0


def test_a_prompt_is_shared_with_one_that_is_still_running(make: Any) -> None:
    engine = make(PRECISE)
    prompt, heard = prompt_of(40), list[int]()
    first = engine.submit(prompt, Sampling(max_tokens=150, seed=1), on_token=lambda *_: bool(heard.append(1)))[0]
    wait_for(lambda: len(heard) > 2)
    second = engine.generate([prompt], Sampling(max_tokens=5, seed=2))[0]
    assert second.reused == 32  # its full blocks
    for answer in (first.result(20), second):
        assert_exact(PRECISE, answer, Sampling(), within=1e-5)


def test_rows_overwritten_by_others_are_never_reused(make: Any) -> None:
    engine = make(rows=3)
    draw = random.Random(5)
    trunks = [prompt_of(40, seed=i) for i in range(5)]
    pending, reused = [], 0
    for i in range(80):
        prompt = trunks[draw.randrange(5)][: draw.randint(17, 40)] + prompt_of(draw.randint(0, 12), seed=i)
        way = Sampling(max_tokens=draw.randint(1, 25), seed=i)
        pending.append(engine.submit(prompt, way, n=draw.choice([1, 1, 2, 3])))
        if draw.random() < 0.3:
            time.sleep(0.005)
    answers = [future.result(60) for futures in pending for future in futures]
    for answer in answers:
        reused += answer.reused > 0
        assert_exact(MODEL, answer, Sampling())
    assert reused > 20


# --- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_tokens", [130, 160, 220])
def test_when_blocks_run_out_the_youngest_is_run_again_and_every_token_stays_the_same(
    make: Any, cache_tokens: int
) -> None:
    requests = [
        (prompt, replace(way, max_tokens=30 + i, stop_ids=frozenset()))
        for i, (prompt, way) in enumerate(some_requests(20, seed=6))
    ]
    plenty = make(PRECISE, rows=8)
    due = [future.result(60) for future in [plenty.submit(*request)[0] for request in requests]]
    engine = make(PRECISE, rows=8, length=130, cache_tokens=cache_tokens)
    futures = [engine.submit(*request)[0] for request in requests]
    for future, wanted in zip(futures, due, strict=True):
        answer = future.result(60)
        assert answer.ids == wanted.ids
        assert answer.finish_reason == wanted.finish_reason
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert answer.raw_logprobs == pytest.approx(wanted.raw_logprobs, abs=1e-5)
    assert engine.scheduler.preempted > 0
    assert engine.scheduler.blocks.held == 0


def test_a_request_that_was_preempted_hears_each_token_once_and_keeps_its_alternatives(make: Any) -> None:
    engine = make(PRECISE, rows=4, length=90, cache_tokens=100)
    heard: list[list[int]] = [[] for _ in range(4)]
    ways = [
        Sampling(max_tokens=50, seed=1),
        Sampling(max_tokens=50, seed=2, top_logprobs=2),
        Sampling(max_tokens=50, seed=3, presence_penalty=0.5, frequency_penalty=0.5),
        Sampling(max_tokens=50, seed=4, prompt_logprobs=1, repetition_penalty=1.3),
    ]
    futures = [
        engine.submit(prompt_of(20, seed=i), way, on_token=lambda token, _, i=i: bool(heard[i].append(token)))[0]
        for i, way in enumerate(ways)
    ]
    answers = [future.result(60) for future in futures]
    assert engine.scheduler.preempted > 0
    alone = make(PRECISE, rows=1)
    for i, (answer, way) in enumerate(zip(answers, ways, strict=True)):
        assert heard[i] == answer.ids
        due = alone.generate([prompt_of(20, seed=i)], way)[0]
        assert answer.ids == due.ids
        assert len(answer.top_logprobs) == len(due.top_logprobs)
        assert len(answer.prompt_logprobs or ()) == len(due.prompt_logprobs or ())


def test_the_oldest_request_is_never_preempted(make: Any, slow: Slow) -> None:
    engine = make(rows=3, length=80, cache_tokens=90)
    futures = [engine.submit(prompt_of(20, seed=i), Sampling(max_tokens=55, seed=i))[0] for i in range(3)]
    ended: list[int] = []
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: ended.append(i))
    slow.go.set()
    assert [len(future.result(60).ids) for future in futures] == [55] * 3
    wait_for(lambda: len(ended) == 3)
    assert ended == [0, 1, 2]
    assert engine.scheduler.preempted > 0


def test_a_prompt_longer_than_the_whole_cache_is_refused_in_a_sentence(make: Any) -> None:
    engine = make(rows=4, length=200, cache_tokens=64)
    with pytest.raises(OverlongPromptError, match=r"has 70 tokens, but the context is 64, the size of the KV cache"):
        engine.submit(prompt_of(70))
    answer = engine.generate([prompt_of(50)], Sampling(max_tokens=100, seed=0))[0]
    assert (len(answer.ids), answer.finish_reason) == (14, "length")
    assert_exact(MODEL, answer, Sampling())


def test_memory_held_is_at_most_a_tenth_more_than_the_tokens_that_are_there(make: Any) -> None:
    engine = make(rows=8, length=250)
    ratios, step = list[float](), engine._step

    def measured() -> None:
        step()
        lengths = engine.table.length[: len(engine.running)]
        if len(lengths) == 8 and lengths.min() >= 150:
            ratios.append(engine.scheduler.blocks.held * 16 / lengths.sum())

    engine._step = measured
    futures = [
        engine.submit(prompt_of(100 + 5 * i, seed=i), Sampling(max_tokens=100, seed=i), on_token=lambda *_: False)[0]
        for i in range(8)
    ]
    assert all(future.result(60) for future in futures)
    assert len(ratios) > 20
    assert 1.0 <= max(ratios) <= 1.1
    assert engine.scheduler.blocks.held == 0


def test_a_group_holds_its_prompt_once(make: Any, slow: Slow) -> None:
    engine = make(rows=8, length=250)
    futures = engine.submit(prompt_of(200), Sampling(max_tokens=20, seed=0), n=8)
    slow.go.set()
    most = 0
    while not all(future.done() for future in futures):
        most = max(most, engine.scheduler.blocks.held)
    assert most <= 200 // 16 + 8 * 3
    for future in futures:
        assert_exact(MODEL, future.result(), Sampling())


def test_others_get_a_token_for_each_chunk_of_a_long_prompt(make: Any) -> None:
    model = random_model(max_position_embeddings=2048)
    engine = make(model, rows=3, length=2000, prefill_tokens=64)
    heard: list[int] = []

    def hear(*_: Any) -> bool:
        heard.append(len(engine.scheduler.prefilling))
        return False

    short = engine.submit(prompt_of(5), Sampling(max_tokens=150, seed=1), on_token=hear)[0]
    wait_for(lambda: len(heard) > 3)
    long = engine.submit(prompt_of(1600), Sampling(max_tokens=3, seed=2))[0]
    assert_exact(model, long.result(60), Sampling())
    assert sum(heard) >= 1600 // 64 - 1  # while the long one was being run
    assert_exact(model, short.result(60), Sampling())


def test_a_long_prompt_that_is_cancelled_half_way_leaves_nothing(make: Any, slow: Slow) -> None:
    engine = make(rows=3, length=200, prefill_tokens=8)
    started = engine.submit(prompt_of(150), Sampling(max_tokens=5, seed=1), n=2)
    wait_for(lambda: slow.calls > 0)
    assert engine.scheduler.prefilling
    for future in started:
        future.cancel()
    slow.go.set()
    for future in started:
        with pytest.raises(CancelledError):
            future.result(20)
    wait_for(lambda: not engine.scheduler.prefilling)
    assert engine.scheduler.blocks.held == 0
    answer = engine.generate([prompt_of(150)], Sampling(max_tokens=5, seed=1))[0]
    assert_exact(MODEL, answer, Sampling())


# --- what it costs --------------------------------------------------------------------------------------------------


def test_nothing_grows_over_many_requests(make: Any) -> None:
    engine = make(rows=4, length=64)

    def serve(n: int) -> None:
        for i in range(n):
            engine.generate([prompt_of(1 + i % 30, seed=i)], Sampling(max_tokens=3), n=2)

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    serve(40)
    before = count()
    serve(150)
    assert count() - before < 300


def test_the_model_is_in_training_again_when_the_answer_arrives(make: Any) -> None:
    model = random_model("GPT2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model.train()
    model.transformer.h[1].eval()  # a frozen part
    modes = {name: module.training for name, module in model.named_modules()}
    engine = make(model)
    for _ in range(20):
        answer = engine.generate([prompt_of(10)], Sampling(max_tokens=3, seed=0))[0]
        assert {name: module.training for name, module in model.named_modules()} == modes
    model.eval()
    assert_exact(model, answer, Sampling(max_tokens=3))


def test_a_second_engine_over_a_model_leaves_the_first_what_it_keeps(start: Any) -> None:
    model, way = random_model(), Sampling(max_tokens=3, seed=1)
    first = start(model)
    first.generate([prompt_of(50)], way)
    start(model, rows=2).generate([prompt_of(9)], way)
    (again,) = first.generate([prompt_of(50)], way)
    assert again.reused >= 48
    with torch.no_grad():
        next(model.parameters()).mul_(1.0)
    assert first.generate([prompt_of(50)], way)[0].reused == 0
