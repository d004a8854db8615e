"""Turns become token samples: every sampled token is trained on exactly once, and nothing else ever is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from verifiers.clients.protocol import Tokens
from verifiers.rollout import step_tokens
from verifiers.samples import Sample, batches, samples_of, tokenized
from verifiers.types import VersionSpan

ids = st.lists(st.integers(0, 9), max_size=6)


def turn(prompt: Sequence[int], reply: Sequence[int], base: float = 0.0, **extra: Any) -> dict[str, Any]:
    """One step; each token's logprob says which turn and which place it came from."""
    logprobs = [-(base + i / 100 + 0.001) for i in range(len(reply))]
    return {
        "tokens": {"prompt_ids": list(prompt), "completion_ids": list(reply), "completion_logprobs": logprobs, **extra}
    }


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Steps whose prompts sometimes repeat the tokens before them, and sometimes were rewritten."""
    steps: list[dict[str, Any]] = []
    context: list[int] = draw(ids)
    for number in range(draw(st.integers(1, 5))):
        if steps and draw(st.booleans()):
            context = draw(ids)
        reply = draw(ids)
        steps.append(turn(context, reply, base=number + 1))
        context = context + reply + draw(ids)
    return steps


def trained(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    return [
        (token, logprob)
        for s in samples
        for token, mask, logprob in zip(s.completion_ids, s.completion_mask, s.completion_logprobs, strict=True)
        if mask
    ]


def by_turn(pair: tuple[int, float]) -> float:
    return -pair[1]


@given(conversations())
def test_the_trained_tokens_are_the_sampled_ones_with_their_logprobs_in_order(steps: list[dict[str, Any]]) -> None:
    """In each sample; a turn that joins an earlier sample than the last has one of another between."""
    sampled = [
        pair
        for step in steps
        for pair in zip(step["tokens"]["completion_ids"], step["tokens"]["completion_logprobs"], strict=True)
    ]
    samples = samples_of(steps)
    assert sorted(trained(samples), key=by_turn) == sampled
    assert all(trained([one]) == sorted(trained([one]), key=by_turn) for one in samples)


@given(conversations())
def test_every_turn_was_conditioned_on_exactly_what_stands_before_it_in_its_sample(steps: list[dict[str, Any]]) -> None:
    samples = samples_of(steps)
    whole = [s.prompt_ids + s.completion_ids for s in samples]
    for step in steps:
        seen = step["tokens"]["prompt_ids"] + step["tokens"]["completion_ids"]
        assert any(ids[: len(seen)] == seen for ids in whole)


@given(conversations())
def test_lengths_agree_and_unsampled_tokens_have_no_logprob(steps: list[dict[str, Any]]) -> None:
    for s in samples_of(steps):
        assert len(s.completion_ids) == len(s.completion_mask) == len(s.completion_logprobs)
        assert all(p == 0.0 for p, m in zip(s.completion_logprobs, s.completion_mask, strict=True) if not m)


@given(ids, st.lists(st.tuples(ids, ids), min_size=1, max_size=5))
def test_a_conversation_that_only_grows_is_one_sample(
    prompt: list[int], turns: list[tuple[list[int], list[int]]]
) -> None:
    steps, context = [], list(prompt)
    for reply, said in turns:
        steps.append(turn(context, reply))
        context = context + reply + said
    (sample,) = samples_of(steps)
    last = steps[-1]["tokens"]
    assert sample.prompt_ids + sample.completion_ids == last["prompt_ids"] + last["completion_ids"]


def test_a_rewritten_history_begins_a_new_sample_and_says_nothing_twice() -> None:
    steps = [turn([1, 2], [3, 4]), turn([1, 2, 4, 9], [5]), turn([1, 2, 4, 9, 5, 8], [6])]
    first, second = samples_of(steps)
    assert (first.completion_ids, first.completion_mask) == ([3, 4], [1, 1])
    assert (second.prompt_ids, second.completion_ids, second.completion_mask) == ([1, 2, 4, 9], [5, 8, 6], [1, 0, 1])


def test_steps_without_tokens_or_with_a_prompt_that_did_not_fit_give_no_sample() -> None:
    assert samples_of([]) == samples_of([{"tokens": None}, {}]) == []
    assert samples_of([turn([1] * 9, [], overlong_prompt=True)]) == []


def test_truncation_of_any_turn_marks_the_sample() -> None:
    steps = [turn([1], [2], is_truncated=True), turn([1, 2, 3], [4], is_truncated=False)]
    assert [s.is_truncated for s in samples_of(steps)] == [True]


def test_a_sample_with_lengths_that_disagree_is_refused() -> None:
    with pytest.raises(ValueError, match="2 completion ids, 1 mask entries, 2 logprobs"):
        Sample(prompt_ids=[], completion_ids=[1, 2], completion_mask=[1], completion_logprobs=[0.0, 0.0])


# --- what a step keeps --------------------------------------------------------------------------------------------


@given(ids, ids, st.one_of(st.none(), st.integers(0, 15)))
def test_a_step_is_cut_to_the_longest_sequence_and_says_so(
    prompt: list[int], reply: list[int], limit: int | None
) -> None:
    logprobs = [-0.1 * (i + 1) for i in range(len(reply))]
    step = step_tokens(Tokens(prompt_ids=prompt, completion_ids=reply, logprobs=logprobs), limit)
    assert step is not None
    kept = len(step["prompt_ids"]) + len(step["completion_ids"])
    whole = len(prompt) + len(reply)
    assert kept == (whole if limit is None else min(whole, limit))
    assert prompt[: len(step["prompt_ids"])] == step["prompt_ids"]
    assert reply[: len(step["completion_ids"])] == step["completion_ids"]
    assert logprobs[: len(step["completion_ids"])] == step["completion_logprobs"]
    assert step["prompt_mask"] == [0] * len(step["prompt_ids"])
    assert step["completion_mask"] == [1] * len(step["completion_ids"])
    assert step["is_truncated"] == (kept < whole)
    assert step["overlong_prompt"] == (limit is not None and len(prompt) > limit)


@given(ids, st.lists(st.tuples(ids, ids), min_size=1, max_size=4), st.integers(0, 30))
def test_a_token_that_was_sampled_is_never_masked_even_when_steps_are_cut(
    prompt: list[int], turns: list[tuple[list[int], list[int]]], limit: int
) -> None:
    steps, origin, context = [], {}, list(prompt)
    for number, (reply, said) in enumerate(turns):
        for place in range(len(context), len(context) + len(reply)):
            origin[place] = number
        logprobs = [-0.5] * len(reply)
        steps.append(
            {"tokens": step_tokens(Tokens(prompt_ids=context, completion_ids=reply, logprobs=logprobs), limit)}
        )
        context = context + reply + said
    for sample in samples_of(steps):
        for i, mask in enumerate(sample.completion_mask):
            assert mask == (len(sample.prompt_ids) + i in origin)


def test_no_tokens_stay_no_tokens() -> None:
    assert step_tokens(None, 5) is None


def test_versions_of_a_reply_that_is_cut_are_those_of_the_tokens_that_are_left() -> None:
    spans = (VersionSpan("3", 0, 2), VersionSpan("4", 2, 5), VersionSpan("5", 5, 6))
    drawn = Tokens(prompt_ids=[1, 2], completion_ids=[3] * 6, logprobs=[-1.0] * 6, weight_versions=spans)
    whole, cut = step_tokens(drawn, None), step_tokens(drawn, 5)
    assert whole is not None
    assert cut is not None
    assert whole["weight_versions"] == list(spans)
    assert cut["weight_versions"] == [("3", 0, 2), ("4", 2, 3)]


# --- batches ------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer with a chat template: one number a word."""

    chat_template = "written below"
    eos_token_id = 3

    def __init__(self, drops_replies: bool = False) -> None:
        self.words: dict[str, int] = {"[": 2, "]": 3}
        self.drops_replies = drops_replies

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = [self.words.setdefault(w, len(self.words) + 10) for w in text.split()]
        return [1, *found] if add_special_tokens else found

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        named = {number: word for word, number in self.words.items()}
        return " ".join(named[i] for i in ids if not (skip_special_tokens and i < 10))

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, **_: Any) -> str:
        text = ""
        for i, m in enumerate(messages):
            if self.drops_replies and m["role"] == "assistant" and i < len(messages) - 1:
                continue
            text += f"[ {m['role']} {m['content']} ] "
        return text + "[ assistant " if add_generation_prompt else text


def test_text_is_tokenized_with_replies_trained_and_environment_turns_masked() -> None:
    words = Words()
    completion = [
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "sure ?"},
        {"role": "assistant", "content": "yes"},
    ]
    (sample,) = tokenized([{"role": "user", "content": "2+2"}], completion, words)
    named = {number: word for word, number in words.words.items()}
    pairs = list(zip(sample.completion_ids, sample.completion_mask, strict=True))
    assert [named[i] for i, m in pairs if m] == ["four", "]", "yes", "]"]
    assert [named[i] for i, m in pairs if not m] == ["[", "user", "sure", "?", "]", "[", "assistant"]
    assert all(math.isnan(p) for p, m in zip(sample.completion_logprobs, sample.completion_mask, strict=True) if m)
    assert tokenized("a b", "c", words)[0].completion_mask == [1]


def test_a_template_that_rewrites_history_gives_several_samples_and_masks_nothing() -> None:
    completion = [
        {"role": r, "content": text} for r, text in zip(["assistant", "user", "assistant"], "xyz", strict=True)
    ]
    words = Words(drops_replies=True)
    samples = tokenized("q", completion, words)
    assert [words.decode(s.completion_ids) for s in samples] == ["x ]", "z ]"]
    assert [set(s.completion_mask) for s in samples] == [{1}, {1}]
    assert "x" not in words.decode(samples[1].prompt_ids)


def rollout(n: int) -> tuple[str, str, dict[str, Any], float]:
    return "p", "c", {"trajectory": [turn([1], [n])]}, float(n)


def test_batches_hold_every_sample_once_with_its_reward() -> None:
    made = list(batches([rollout(i) for i in range(7)], None, batch_size=3))
    assert [len(b["rewards"]) for b in made] == [3, 3, 1]
    assert [r for b in made for r in b["rewards"]] == [float(i) for i in range(7)]
    assert [c for b in made for c in b["completion_ids"]] == [[i] for i in range(7)]
    for batch in made:
        assert len({len(column) for column in batch.values()}) == 1  # type: ignore[arg-type]


def test_a_rollout_that_splits_has_its_reward_on_each_sample() -> None:
    state = {"trajectory": [turn([1], [2]), turn([5], [6])]}
    (batch,) = batches([("p", "c", state, 0.5)], None, batch_size=8)
    assert batch["rewards"] == [0.5, 0.5]


def test_samples_are_cut_to_the_longest_sequence() -> None:
    state = {"trajectory": [turn([1, 1, 1], [2, 2, 2])]}
    (batch,) = batches([("p", "c", state, 0.0)], None, batch_size=8, max_seq_len=4)
    assert batch["completion_ids"] == [[2]]
    assert batch["is_truncated"] == [True]
    (batch,) = batches([("p", "c", state, 0.0)], None, batch_size=8, max_seq_len=2)
    assert (batch["prompt_ids"], batch["completion_ids"]) == ([[1, 1]], [[]])


def test_rollouts_without_tokens_need_a_tokenizer_and_say_that_logprobs_are_unknown() -> None:
    with pytest.raises(ValueError, match="processing_class"):
        list(batches([("p", "c", {}, 1.0)], None, batch_size=1))
    with pytest.warns(UserWarning, match="NaN"):
        (batch,) = batches([("p", "c d", {}, 1.0)], Words(), batch_size=1)
    assert len(batch["completion_ids"][0]) == 2


def test_tokens_of_a_real_rollout_train_what_the_model_said() -> None:
    class Echo(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> str:
            return "go on"

    env = Echo(dataset=[{"question": "hi"}], max_turns=3)
    results = env.generate(client=vf.FakeClient(["one", "two", "three"], tokens=True), model="m", use_tqdm=False)
    (batch,) = env.process_env_results(
        results["prompts"], results["completions"], results["states"], results["rewards"]
    )
    (said,), (mask,) = batch["completion_ids"], batch["completion_mask"]
    text = bytes(t for t, m in zip(said, mask, strict=True) if m and t < 256).decode()
    assert text == "onetwothree"
    assert b"go on" in bytes(t for t, m in zip(said, mask, strict=True) if not m and t < 256)
