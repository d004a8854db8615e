"""The watch says what goes wrong, with the figure and the knob, and is silent where nothing does."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest

from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.watch.doctor import PATIENCE, SILENCE, WINDOW, Notice, Watch


def healthy(step: int, seed: int = 0, steps: int = 200, rollouts: int = 32, group_size: int = 8) -> tuple[Any, Any]:
    """The figures and the rollouts of a step of a training that learns: noisy, rising, a little truncated."""
    draw = random.Random(f"{seed}/{step}")
    chance = 0.1 + 0.8 * step / steps
    correct = [float(draw.random() < min(max(draw.gauss(chance, 0.2), 0.0), 1.0)) for _ in range(rollouts)]
    form = [float(draw.random() < 0.9 + 0.1 * step / steps) for _ in range(rollouts)]
    rewards = [a + 0.2 * b for a, b in zip(correct, form, strict=True)]
    metrics = {
        "step": step,
        "loss": draw.gauss(0, 0.01),
        "grad_norm": 0.5 + draw.random(),
        "reward": sum(rewards) / rollouts,
        "kl": 0.1 * step / steps,
        "entropy": 1.4 * math.exp(-1.5 * step / steps) * draw.uniform(0.9, 1.1),
        "truncated": 0.1 * draw.random(),
        "clip_fraction": 0.05 * draw.random(),
        "zero_variance": 0.25 * draw.randrange(4),
        "failed": 0,
        "samples": rollouts,
        "ratio_mean": draw.gauss(1.0, 0.005),
        "ratio_max": 1 + 3 * draw.random(),
    }
    view = {
        "rewards": rewards,
        "groups": [i // group_size for i in range(rollouts)],
        "metrics": {"correct": correct, "format": form, "num_turns": [1.0] * rollouts},
        "is_truncated": [False] * rollouts,
        "lengths": [80] * rollouts,
    }
    return metrics, view


WEIGHTS = {"correct": 1.0, "format": 0.2, "num_turns": 0.0}


def watched(
    changes: Mapping[str, Any] | None = None,
    columns: Mapping[str, list[float | None]] | None = None,
    *,
    steps: int = 20,
    weights: Mapping[str, float] = WEIGHTS,
    **knobs: Any,
) -> list[Notice]:
    """All notices of a training that is healthy but for these figures and columns."""
    watch = Watch(GRPOConfig(**knobs), weights=weights)
    found: list[Notice] = []
    for step in range(1, steps + 1):
        metrics, view = healthy(step)
        view["metrics"] |= columns or {}
        found += watch.look({**metrics, **(changes or {})}, view)
    return found


def only(found: list[Notice], kind: str) -> Notice:
    assert [notice.kind for notice in found] == [kind]
    return found[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_training_is_watched_in_silence(seed: int) -> None:
    watch = Watch(GRPOConfig(), weights=WEIGHTS)
    assert [notice for step in range(1, 201) for notice in watch.look(*healthy(step, seed))] == []


def test_a_small_noisy_training_that_stays_where_it_is_is_no_falling_one() -> None:
    for seed in range(20):
        watch, draw = Watch(), random.Random(seed)
        for step in range(1, 400):
            rewards = [float(draw.random() < 0.5) for _ in range(8)]
            assert watch.look({"step": step, "reward": sum(rewards) / 8}, {"rewards": rewards}) == []


def test_a_training_that_ends_solved_has_low_entropy_and_flat_groups_and_hears_that_it_is_solved() -> None:
    watch, found = Watch(GRPOConfig()), []
    for step in range(1, 101):
        metrics, view = healthy(step, steps=50)
        if step > 60:
            view["rewards"] = [1.2] * 32
            metrics |= {"reward": 1.2, "entropy": 0.01, "zero_variance": 1.0}
        found += watch.look(metrics, view)
    notice = only(found, "no_variance")
    assert "these rows look solved" in notice.text


@pytest.mark.parametrize(
    ("reward", "advice"),
    [(1.2, "these rows look solved"), (0.0, "use easier rows"), (0.2, "use easier rows")],
    ids=["all right from the start", "all wrong", "the format and nothing else"],
)
def test_where_all_rewards_are_alike_the_advice_is_right_at_both_ends(reward: float, advice: str) -> None:
    watch, found = Watch(GRPOConfig(), weights={"correct": 1.0, "format": 0.2}), []
    for step in range(1, 6):
        view = {"rewards": [reward] * 8, "groups": [0] * 4 + [1] * 4}
        found += watch.look({"step": step, "reward": reward, "zero_variance": 1.0}, view)
    assert advice in only(found, "no_variance").text


def test_a_format_that_all_keep_is_not_yet_a_solved_task() -> None:
    watch, found = Watch(GRPOConfig(), weights={"correct": 1.0, "format": 0.2}), []
    for step in range(1, 12):
        rewards = [0.0, 0.2] * 4 if step < 4 else [0.2] * 8
        metrics = {"step": step, "reward": sum(rewards) / 8, "zero_variance": 0.0 if step < 4 else 1.0}
        found += watch.look(metrics, {"rewards": rewards, "groups": [0] * 4 + [1] * 4})
    assert "use easier rows" in only(found, "no_variance").text


def test_no_variance_in_any_group() -> None:
    notice = only(watched({"zero_variance": 1.0, "reward": 0.0}, temperature=0.7, group_size=4), "no_variance")
    assert notice.step == PATIENCE
    assert str(notice).startswith("no group had any variance in its rewards (mean 0.000) for 3 steps")
    for knob in ("temperature (now 0.7)", "group_size (now 4)", "dynamic_sampling (now False)"):
        assert knob in notice.text


def test_an_accident_of_one_step_is_not_worth_a_word() -> None:
    watch = Watch(GRPOConfig())
    bad = {"zero_variance": 1.0, "truncated": 1.0, "ratio_max": 1e6, "clip_fraction": 0.9, "kl": 30.0, "failed": 32}
    for step in range(1, 61):
        metrics, view = healthy(step)
        assert watch.look({**metrics, **(bad if step % PATIENCE == 0 else {})}, view) == []


def test_everything_truncated() -> None:
    notice = only(watched({"truncated": 0.97}, max_new_tokens=64), "truncated")
    assert "97% of completions were cut off" in notice.text
    assert "max_new_tokens (now 64)" in notice.text
    assert "with mask_truncated_completions" in notice.text
    masked = only(watched({"truncated": 1.0}, mask_truncated_completions=True), "truncated")
    assert "they are not trained on" in masked.text


def test_replies_that_are_cut_off_and_right_all_the_same_are_left_alone() -> None:
    watch = Watch()
    for step in range(1, 30):
        rewards = [0.0, 1.0] if step < 3 else [1.0, 1.0]
        metrics = {"step": step, "reward": sum(rewards) / 2, "truncated": float(step > 5)}
        assert watch.look(metrics, {"rewards": rewards}) == []


def test_failures() -> None:
    notice = only(watched({"failed": 16}), "failures")
    assert "33% of rollouts failed (16 of 48)" in notice.text
    watch = Watch()
    for step in range(1, 4):
        found = watch.look({"step": step, "failed": 1, "samples": 3}, {"rewards": [0.5, 1.0, 0.0]})
    assert "25% of rollouts failed (1 of 4)" in only(found, "failures").text


def test_collapsing_entropy() -> None:
    watch, found = Watch(GRPOConfig(learning_rate=1e-4)), []
    for step in range(1, 41):
        metrics, view = healthy(step)
        found += watch.look({**metrics, "entropy": 1.5 * 0.8**step}, view)
    notice = only(found, "entropy")
    assert "entropy fell from 0.98 to 0.0" in notice.text
    assert "learning_rate (now 0.0001)" in notice.text


def test_entropy_that_falls_while_rewards_still_rise_is_learning_and_is_told_once_they_do_not() -> None:
    watch, found = Watch(GRPOConfig()), []
    for step in range(1, 61):
        reward = min(0.02 * step, 0.8)
        rewards = [1.0] * round(50 * reward) + [0.0] * (50 - round(50 * reward))
        metrics = {"step": step, "reward": reward, "entropy": 1.5 * 0.8**step}
        found += watch.look(metrics, {"rewards": rewards})
    assert only(found, "entropy").step > 40


def test_entropy_that_was_always_low_has_not_collapsed() -> None:
    assert watched({"entropy": 0.05}) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ratio_max": 250.0}, "the largest ratio of new to old probabilities is 250"),
        ({"ratio_mean": 1.6}, "the mean ratio of new to old probabilities is 1.60"),
        ({"ratio_mean": 0.5}, "the mean ratio of new to old probabilities is 0.50"),
        ({"clip_fraction": 0.45}, "45% of tokens are clipped"),
    ],
    ids=["max", "mean above", "mean below", "clipped"],
)
def test_exploding_ratio(changes: dict[str, float], said: str) -> None:
    notice = only(watched(changes, num_iterations=4), "ratio")
    assert notice.text.startswith(said)
    for knob in ("learning_rate (now 1e-05)", "num_iterations (now 4)", "epsilon", "importance_cap (now 2)"):
        assert knob in notice.text


def test_large_divergence() -> None:
    notice = only(watched({"kl": 2.5}, kl_coef=0.01), "kl")
    assert "is 2.50 nats per token" in notice.text
    assert "kl_coef (now 0.01)" in notice.text


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_figures_that_are_no_numbers_any_more_are_told_at_once(name: str) -> None:
    notice = only(watched({name: math.nan}, steps=5), "not_finite")
    assert notice.step == 1
    assert notice.text.startswith(f"{name} is nan")


def test_a_falling_reward() -> None:
    watch, found = Watch(GRPOConfig()), []
    for step in range(1, 91):
        metrics, view = healthy(step if step <= 50 else max(100 - step, 20), steps=60)
        found += watch.look({**metrics, "step": step, "entropy": 1.0}, view)
    notice = only(found, "falling_reward")
    assert notice.step > 50
    assert "the reward fell from" in notice.text
    assert "learning_rate" in notice.text


def test_a_dead_reward_function() -> None:
    notice = only(watched(columns={"format": [0.0] * 32}), "dead:format")
    assert notice.step == WINDOW
    assert "'format' has returned 0 for every rollout so far: it has a weight (0.2)" in notice.text


def test_a_function_that_has_moved_once_is_not_dead_and_a_metric_without_weight_never() -> None:
    watch = Watch(GRPOConfig(), weights=WEIGHTS)
    for step in range(1, 60):
        metrics, view = healthy(step)
        view["metrics"]["format"] = [float(step > 3)] * 32
        assert watch.look(metrics, view) == []
    assert watched(columns={"format": [0.0] * 32}, weights={}) == []


def test_a_function_that_drowns_the_others_by_its_scale() -> None:
    lengths = [float(37 * i % 400) for i in range(32)]
    weights = {**WEIGHTS, "length": 1.0}
    notice = only(watched(columns={"length": lengths}, weights=weights), "dominance")
    assert "'length' makes up 100.0% of the rewards' variance" in notice.text
    assert "(now 1)" in notice.text
    assert watched(columns={"length": lengths}, weights={**WEIGHTS, "length": 0.002}) == []  # weighted to fit


def test_each_kind_speaks_once_in_a_while() -> None:
    found = watched({"truncated": 1.0}, steps=2 * SILENCE + PATIENCE)
    assert [notice.step for notice in found] == [PATIENCE, PATIENCE + SILENCE, PATIENCE + 2 * SILENCE]
    assert {notice.kind for notice in found} == {"truncated"}


def test_the_same_history_gives_the_same_notices_and_a_resume_goes_on_with_it() -> None:
    changes = {"truncated": 1.0, "kl": 3.0}
    assert watched(changes, steps=60) == watched(changes, steps=60)
    resumed = Watch(GRPOConfig())
    resumed.recall({**healthy(step)[0], **changes} for step in range(1, 41))
    metrics, view = healthy(41)
    assert resumed.look({**metrics, **changes}, view) == []


def test_it_takes_any_configuration_and_figures_with_holes() -> None:
    for config in (None, {}, {"temperature": 1.0}, object()):
        watch = Watch(config, weights={"absent": 1.0})
        for step in range(1, 30):
            holes = {"rewards": [], "groups": [], "metrics": {}, "is_truncated": []}
            assert watch.look({"step": step, "reward": None, "entropy": None, "kl": "x"}, holes) == []
            assert watch.look({}, {}) == []
