"""The simulator of large runs: against arithmetic that can be done by hand, and (slow) against real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.simulation import compare
from verifiers.cli.main import vf as program
from verifiers.trainers.distributed.simulation import Setup, simulate

PLAIN: dict[str, Any] = {
    "parameters": 0,
    "sampler_gpus": 2,
    "slots": 4,
    "tokens_per_s_alone": 50,
    "tokens_per_s_full": 100,
    "turns": 2,
    "tokens_a_turn": 100,
    "tokens_sigma": 0,
    "env_s": 3,
    "env_sigma": 0,
    "score_s": 0,
    "batch": 8,
    "trainer_gpus": 1,
    "train_s": 5,
    "sync_latency_s": 1,
    "max_staleness": 0,
}


def test_a_synchronous_step_is_its_turns_waits_update_and_exchange_one_after_the_other() -> None:
    # Four sequences share 100 tokens a second: 4 s a turn; 4 + 3 + 4 of sampling, 5 of learning, 1 for the weights.
    found = simulate(Setup(**PLAIN))
    assert found.step_s == pytest.approx(17.0)
    assert found.trainer_use == pytest.approx(5 / 17)
    assert found.sync_share == pytest.approx(1 / 17)
    assert found.sampler_use == pytest.approx(8 * 200 / (17 * 2 * 100))
    assert (found.mean_staleness, found.worst_staleness) == (0, 0)


def test_more_rollouts_than_slots_wait_for_one() -> None:
    found = simulate(Setup(**PLAIN | {"batch": 16, "turns": 1}))
    assert found.step_s == pytest.approx(4 + 4 + 5 + 1)


def test_asynchronous_training_hides_the_shorter_part() -> None:
    waits_less = simulate(Setup(**PLAIN | {"max_staleness": 1}))
    assert waits_less.step_s < 17.0
    assert waits_less.step_s >= 8 * 200 / 200 + 1  # no more than the samplers give, less the time they stop
    learns_long = simulate(Setup(**PLAIN | {"max_staleness": 1, "train_s": 50}))
    assert learns_long.step_s == pytest.approx(51.0)
    assert "trainer" in learns_long.bottleneck


def test_weights_take_their_bytes_over_the_bandwidth_and_updates_their_operations_over_the_peak() -> None:
    setup = Setup(parameters=8e9, sync_gb_per_s=16, sync_latency_s=0.5, trainer_gpus=8, peak_tflops=1000, mfu=0.4)
    assert setup.sync_s == pytest.approx(1.5)
    assert setup.update_s(1e6) == pytest.approx(8 * 8e9 * 1e6 / (8 * 1e15 * 0.4))


def test_slow_scoring_is_named_as_what_holds_a_run_up() -> None:
    found = simulate(Setup(**PLAIN | {"score_s": 10, "env_workers": 1, "max_staleness": 1}))
    assert found.step_s == pytest.approx(80, rel=0.05)
    assert "scoring" in found.bottleneck


def test_samplers_that_are_mostly_idle_are_not_named_as_what_holds_a_run_up() -> None:
    idle = Setup(**PLAIN | {"sampler_gpus": 8, "max_staleness": 1, "env_s": 30})
    assert simulate(idle).sampler_use < 0.5
    assert "the length of a rollout" in simulate(idle).bottleneck
    half = simulate(replace(idle, sampler_gpus=4))
    assert half.step_s < 1.2 * simulate(idle).step_s  # as it says
    assert "the samplers" in simulate(Setup(**PLAIN | {"max_staleness": 1, "env_s": 0, "train_s": 1})).bottleneck


def test_cards_that_sample_and_learn_in_turn_count_once() -> None:
    found = simulate(Setup(**PLAIN | {"sampler_gpus": 1, "colocated": True, "max_staleness": 0}))
    assert found.gpus == 1
    with pytest.raises(ValueError, match="colocated"):
        Setup(**PLAIN | {"colocated": True})


@settings(max_examples=25, deadline=None)
@example(staleness=2, replicas=4, sigma=1.0, train_s=0.0, seed=0)
@given(
    staleness=st.integers(0, 4),
    replicas=st.integers(1, 5),
    sigma=st.floats(0, 1.5),
    train_s=st.floats(0, 30),
    seed=st.integers(0, 100),
)
def test_no_rollout_is_staler_than_the_bound_and_nothing_is_busier_than_always(
    staleness: int, replicas: int, sigma: float, train_s: float, seed: int
) -> None:
    varied = {"max_staleness": staleness, "sampler_gpus": replicas, "train_s": train_s, "seed": seed}
    found = simulate(Setup(**PLAIN | varied | {"tokens_sigma": sigma, "env_sigma": sigma}))
    assert found.worst_staleness <= staleness
    assert 0 <= found.trainer_use <= 1.0 + 1e-9
    assert found.tokens_per_s > 0
    assert found.step_s >= train_s + 1 - 1e-6


def test_the_same_seed_gives_the_same_prediction() -> None:
    setup = Setup(**PLAIN | {"tokens_sigma": 1.0, "seed": 3})
    assert simulate(setup) == simulate(replace(setup))


def test_vf_simulate_prints_a_table_and_refuses_nonsense_in_one_sentence() -> None:
    small = ["--sampler-gpus", "4", "--trainer-gpus", "2", "--batch", "64", "--steps", "2"]
    done = CliRunner().invoke(program, ["simulate", *small])
    assert done.exit_code == 0, done.output
    assert "6: 4 samplers of 1, 2 that train" in done.output
    found = json.loads(CliRunner().invoke(program, ["simulate", *small, "--json"]).output)
    assert found["prediction"]["gpus"] == 6
    for wrong, said in (
        (["--mfu", "1.5"], "mfu=1.5"),
        (["--gpus-a-replica", "3"], "must be a multiple of gpus_a_replica=3"),
        (["--batch", "0"], "batch=0 must be a whole number, 1 to 1e+18"),
        (["--parameters", "1e308"], "parameters=1e+308 must be a number, 0 to 1e+18"),
        (["--tokens-sigma", "60"], "tokens_sigma=60.0 must be a number, 0 to 10"),
        (["--max-staleness", "1000000"], "turns are too many to simulate"),
    ):
        refused = CliRunner().invoke(program, ["simulate", *small, *wrong])
        assert refused.exit_code == 2
        assert said in refused.output


@pytest.mark.parametrize("wrong", [{"batch": 2.5}, {"max_staleness": 1.5}, {"seed": True}, {"turns": "4"}])
def test_a_count_that_is_no_whole_number_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        Setup(**PLAIN | wrong)


def test_figures_of_any_size_are_played_out_to_the_end() -> None:
    far = {"env_s": 1e15, "tokens_a_turn": 3e14, "tokens_per_s_alone": 7.0, "tokens_sigma": 1.0, "max_staleness": 1}
    assert simulate(Setup(**PLAIN | far)).step_s > 1e13
    drawn = {"tokens_per_s_alone": 1e-18, "tokens_per_s_full": 1.7e-17, "tokens_a_turn": 960825, "tokens_sigma": 8.17}
    lost = PLAIN | drawn | {"turns": 1, "slots": 2, "batch": 11, "max_staleness": 2, "steps": 2, "seed": 221}
    with pytest.raises(ValueError, match="with these figures a step takes no time, or less than the resolution"):
        simulate(Setup(**lost | {"train_s": 1e-9, "sync_latency_s": 1e-9}))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_prediction_is_within_20_percent_of_what_real_processes_do(processes: int) -> None:
    for row in compare(processes):
        assert row.measured_s == pytest.approx(row.predicted_s, rel=0.2), row
