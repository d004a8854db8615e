"""What a step says of its rollouts: of those it learns from and of all that were sampled, clustered by example."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

import verifiers as vf  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.stats import mean_interval  # noqa: E402
from verifiers.trainers.batch import Batch, Reply  # noqa: E402
from verifiers.trainers.watch.audit import audit  # noqa: E402
from verifiers.trainers.watch.display import TrainingDisplay  # noqa: E402
from verifiers.trainers.watch.figures import batch_view, merge_views, rollout_figures  # noqa: E402
from verifiers.trainers.watch.plot import plot_svg  # noqa: E402
from verifiers.trainers.watch.tracking import flatten  # noqa: E402
from verifiers.types import State  # noqa: E402


def batch_of(rewards: list[float], examples: list[Any], groups: list[int]) -> Batch:
    states = [
        State(input={"prompt": "p", "answer": "", "example_id": example}, completion="c", reward=reward, metrics={})
        for reward, example in zip(rewards, examples, strict=True)
    ]
    return Batch.of_states(states, groups)


def test_a_row_drawn_twice_in_a_step_is_one_cluster():
    rewards = [0.0, 2.1, 1.2, 3.3, 9.4, 7.5, 10.6, 6.7]
    twice = rollout_figures(batch_view(batch_of(rewards, [1, 1, 1, 1, 2, 2, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3])))
    wanted = mean_interval(rewards, [1, 1, 1, 1, 2, 2, 2, 2])
    assert (twice["reward_low"], twice["reward_high"]) == (wanted.low, wanted.high)
    apart = rollout_figures(batch_view(batch_of(rewards, [1, 1, 3, 3, 2, 2, 4, 4], [0, 0, 1, 1, 2, 2, 3, 3])))
    assert twice["reward_high"] - twice["reward_low"] > apart["reward_high"] - apart["reward_low"]


def test_a_row_of_two_processes_is_one_cluster_and_their_groups_are_apart():
    views = [
        batch_view(batch_of([0.0, 1.0, 0.5, 0.5], [7, 7, 8, 8], [0, 0, 1, 1])),
        batch_view(batch_of([1.0, 1.0, 0.0, 0.5], [7, 7, 9, 9], [0, 0, 1, 1])),
    ]
    found = rollout_figures(merge_views(views))
    wanted = mean_interval([0.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.0, 0.5], [7, 7, 8, 8, 7, 7, 9, 9])
    assert (found["reward"], found["reward_low"]) == (pytest.approx(wanted.mean), pytest.approx(wanted.low))
    assert found["zero_variance"] == 0.5
    assert found["samples"] == found["sampled"] == 8


def test_replies_without_a_state_are_clustered_by_their_group():
    columns: dict[str, Any] = {
        "prompts": ["a"] * 4,
        "completions": [Reply("x")] * 4,
        "rewards": [0.0, 1.0, 0.5, 0.7],
        "groups": [0, 0, 1, 1],
    }
    found = rollout_figures(batch_view(Batch(columns)))
    assert found["reward_low"] == mean_interval(columns["rewards"], columns["groups"]).low


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: Any) -> Any:
    """A training that leaves out groups without variance; most rows have none, and a low reward."""

    def mostly_nothing(completion: Any, answer: str) -> float:
        return 0.4 + making.share_of_e(completion) if int(answer) % 4 == 0 else 0.0

    env = making.environment(32, rubric=vf.Rubric([mostly_nothing]))
    folder = tmp_path_factory.mktemp("filtered")
    trainer = making.trainer(folder, env=env, dynamic_sampling=True, max_resamples=6, batch_size=32, group_size=8)
    return trainer.train(), folder / "run"


def test_with_dynamic_sampling_a_step_tells_the_reward_of_all_that_was_sampled_too(filtered):
    report, folder = filtered
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    for step in steps:
        assert step["sampled"] > step["samples"]
        assert step["reward_sampled"] < 0.7 * step["reward"]
        assert step["reward_sampled_low"] <= step["reward_sampled"] <= step["reward_sampled_high"]
    assert report.rewards == [step["reward"] for step in steps]
    assert report.rewards_sampled == [step["reward_sampled"] for step in steps]
    assert f"of all sampled {report.rewards_sampled[0]:.3f}" in repr(report)


def test_both_rewards_are_shown_drawn_and_tracked(filtered):
    report, folder = filtered
    last = report.steps[-1]
    display = TrainingDisplay(show=False)
    display.update(last)
    assert f"of all sampled {last['reward_sampled']:.3f}" in display.line()
    assert "of all sampled" in {name for name, _, _ in display._curves()}
    assert 'class="sampled"' in plot_svg(report.steps)
    assert "of all sampled (dashes)" in (folder / "plot.svg").read_text()
    assert "of all sampled rollouts it went from" in audit(report.steps, [])
    flat = flatten(last)
    assert (flat["reward"], flat["reward_sampled"]) == (last["reward"], last["reward_sampled"])


def test_where_nothing_is_left_out_there_is_one_reward_to_show(tmp_path):
    report = making.trainer(tmp_path).train()
    for step in report.steps:
        assert step["reward_sampled"] == step["reward"]
        assert step["sampled"] == step["samples"] == 16
    display = TrainingDisplay(show=False)
    display.update(report.steps[-1])
    assert "sampled" not in display.line()
    assert 'class="sampled"' not in plot_svg(report.steps)
    assert not report.rewards_sampled
    assert "sampled" not in audit(report.steps, [])
