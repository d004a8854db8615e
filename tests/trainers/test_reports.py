"""What a training says of itself: the weights it counts with, its notices, its report after a resume."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import verifiers as vf
from tests.trainers import making


def vowels(completion: Any) -> float:
    return float(sum(completion[-1]["content"].count(one) for one in "aeiou"))


def rank(state: Any) -> float:
    state["rank"] = state.get("rank", next(COUNT))
    return float(state["rank"])


COUNT = itertools.count()


def test_gdpo_weighs_reward_functions_by_the_weights_of_their_rubrics_in_a_group(tmp_path: Path) -> None:
    rubrics = vf.RubricGroup([vf.Rubric([rank]), vf.Rubric([vowels])], weights=[1.0, 0.0])
    batches: list[Any] = []

    class Watched(vf.GRPOTrainer):
        def train_step(self, batch: Any) -> Any:
            figures = super().train_step(batch)
            batches.append(batch)
            return figures

    env = making.environment(rubric=rubrics)
    making.trainer(tmp_path, Watched, env=env, advantage="gdpo", max_steps=1).train()
    (batch,) = batches
    assert len({state["metrics"]["vowels"] for state in batch.states}) > 1
    for group in set(batch["groups"]):
        found = [
            (state["metrics"]["rank"], advantage)
            for state, advantage, own in zip(batch.states, batch["advantages"], batch["groups"], strict=True)
            if own == group
        ]
        assert [one for _, one in sorted(found)] == sorted(one for _, one in found)


def test_gdpo_refuses_a_group_of_environments_that_weigh_functions_of_one_name_differently(tmp_path: Path) -> None:
    members = [making.environment(rubric=vf.Rubric([vowels], weights=[weight])) for weight in (1.0, 0.2)]
    with pytest.raises(ValueError, match=r"'vowels' has the weights 0\.2, 1 in environments of this group"):
        making.trainer(tmp_path, env=vf.EnvGroup(members), advantage="gdpo")
    making.trainer(tmp_path, env=vf.EnvGroup(members))  # the others take the reward as it is


def saved() -> Any:
    draw = random.Random(0)
    client = vf.FakeClient(lambda messages: "e" * draw.randrange(1, 9))
    return making.environment(4).evaluate(client=client, model="fake", rollouts_per_example=4, use_tqdm=False)


@pytest.mark.parametrize("form", ["results", "rows"])
def test_gdpo_on_saved_rollouts_takes_their_metrics_and_says_that_it_needs_the_weights(
    tmp_path: Path, form: str
) -> None:
    results = saved()
    names = ("prompt", "completion", "reward", "metrics")
    data = results if form == "results" else [{name: one[name] for name in names} for one in results.rollouts]
    tokenizer = making.tiny.tokenizer()

    def make(folder: str, env: Any) -> Any:
        config = making.config(tmp_path / folder, advantage="gdpo", max_steps=1)
        model = making.tiny.model(tokenizer)
        return vf.GRPOTrainer(model=model, tokenizer=tokenizer, dataset=data, env=env, config=config)

    with pytest.raises(
        ValueError,
        match=r"gdpo weights each reward function, but none of the weights \{\} is for one of the metrics",
    ):
        make("without", None).train()
    assert make("with", making.environment()).train().last["grad_norm"] > 0


def test_rollouts_that_were_saved_without_tokens_have_no_length_rather_than_one_of_0(tmp_path: Path) -> None:
    tokenizer = making.tiny.tokenizer()
    config = making.config(tmp_path, max_steps=1)
    model = making.tiny.model(tokenizer)
    report = vf.GRPOTrainer(model=model, tokenizer=tokenizer, dataset=saved(), config=config).train()
    assert report.last["trained_tokens"] > 0
    assert report.last["completion_tokens"] is None
    assert report.last["completion_tokens_max"] is None


def test_tokens_are_counted_of_all_that_was_sampled_also_of_rollouts_that_failed_or_were_replaced(
    tmp_path: Path,
) -> None:
    sampled: list[int] = []
    draw = random.Random(0)

    def odd(state: Any, answer: str) -> float:
        sampled.append(len(state["trajectory"][0]["tokens"]["completion_ids"]))
        if draw.random() < 0.2:
            raise ConnectionError("the judge is down")
        return draw.random() if int(answer) % 2 else 0.5

    env = making.environment(rubric=vf.Rubric([odd]))
    report = making.trainer(tmp_path, env=env, dynamic_sampling=True, max_steps=3).train()
    assert sum(line["sampled"] for line in report.steps) == len(sampled)
    assert sum(line["samples"] for line in report.steps) < len(sampled)
    assert [line["sampled_tokens"] for line in report.steps][-1] > 0
    assert report.last["total_tokens"] == sum(line["sampled_tokens"] for line in report.steps) == sum(sampled)


def test_tokens_and_their_rate_are_of_the_step_that_sampled_them(tmp_path: Path) -> None:
    report = making.trainer(tmp_path, steps_per_generation=2, max_steps=4).train()
    is_sampled = [line["sampled_tokens"] > 0 for line in report.steps]
    assert is_sampled == [line["tokens_per_s"] is not None for line in report.steps] == [True, False, True, False]


def test_an_evaluation_whose_rollouts_failed_is_in_the_audit(tmp_path: Path) -> None:
    def brittle(completion: Any, answer: str) -> float:
        if answer == "99":
            raise ConnectionError("the judge is down")
        return vowels(completion)

    env = making.environment(rubric=vf.Rubric([brittle]), eval_dataset=[{"question": "say 99", "answer": "99"}])
    report = making.trainer(tmp_path, env=env, max_steps=2, eval_steps=2).train()
    assert "Evaluated after step 2: no reward; 1 of its rollouts failed." in (report.path / "audit.md").read_text()


# --- notices ------------------------------------------------------------------------------------------------------


class RewardedTurns(vf.MultiTurnEnv):
    """The reward of a rollout says nothing, those of its turns do."""

    def env_response(self, messages: Any, state: Any) -> Any:
        state["trajectory"][-1]["reward"] = vowels(messages[-1:])
        return [{"role": "user", "content": "more"}]


def test_a_training_that_learns_from_turns_is_not_told_that_equal_rewards_teach_nothing(tmp_path: Path) -> None:
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(8)]
    env = RewardedTurns(dataset=rows, rubric=vf.Rubric([lambda completion: 0.5]), max_turns=2)
    report = making.trainer(tmp_path, env=env, advantage="per_turn", max_steps=4).train()
    assert [line["zero_variance"] for line in report.steps] == [1.0] * 4
    assert all(line["grad_norm"] > 0 for line in report.steps)
    assert not any("nothing is learned" in one["notice"] for one in report.notices)


def test_failures_are_told_where_rollouts_are_sampled_for_several_updates(tmp_path: Path) -> None:
    def brittle(completion: Any, answer: str) -> float:
        if int(answer) % 2:
            raise ConnectionError("the judge is down")
        return vowels(completion)

    env = making.environment(rubric=vf.Rubric([brittle]))
    report = making.trainer(tmp_path, env=env, steps_per_generation=2, max_steps=4).train()
    assert sum(line["failed"] for line in report.steps) == 32
    assert [one["step"] for one in report.notices if "rollouts failed" in one["notice"]] == [3]


@pytest.mark.parametrize(("weight", "is_told"), [(1.0, True), (0.001, False)])
def test_the_scale_of_a_reward_function_is_judged_with_the_weight_of_its_rubric_in_a_group(
    tmp_path: Path, weight: float, is_told: bool
) -> None:
    def large(completion: Any) -> float:
        return 1000.0 * vowels(completion)

    rubric = vf.RubricGroup([vf.Rubric([large]), vf.Rubric([vowels])], weights=[weight, 1.0])
    report = making.trainer(tmp_path, env=making.environment(rubric=rubric), max_steps=11).train()
    assert any("'large' makes up" in one["notice"] for one in report.notices) == is_told


def test_evaluations_of_training_rows_are_said_to_be_that_once(tmp_path: Path) -> None:
    def told(folder: str, **given: Any) -> int:
        made = making.trainer(tmp_path / folder, max_steps=2, eval_steps=1, eval_examples=2, **given)
        return sum("evaluations use the training rows" in one["notice"] for one in made.train().notices)

    others = [{"question": "say 99", "answer": "99"}]
    assert told("none") == 1
    assert told("of the trainer", eval_dataset=others) == 0
    assert told("of the environment", env=making.environment(eval_dataset=others)) == 0


# --- after a resume -----------------------------------------------------------------------------------------------


def test_a_report_after_a_resume_has_evaluations_notices_and_the_last_step_as_before(tmp_path: Path) -> None:
    def make(steps: int) -> Any:
        env = making.environment(rubric=vf.Rubric([lambda completion: 0.5]))
        return making.trainer(tmp_path, env=env, max_steps=steps, save_steps=2, eval_steps=2, eval_examples=2)

    before = make(4).train()
    assert before.notices
    after = make(6).train(resume=True)
    assert after.evals[:2] == before.evals
    assert [sorted(one) for one in after.evals] == [sorted(before.evals[0])] * 3
    assert after.notices[: len(before.notices)] == before.notices
    again = make(6).train(resume=True)  # there is nothing left to do
    assert again.last["step"] == 6
    assert again.last["loss"] == after.last["loss"]


def test_a_trainer_that_was_stopped_by_a_callback_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    def stop(trainer: Any, figures: Any) -> None:
        trainer.should_stop = figures["step"] == 2

    made = making.trainer(tmp_path, max_steps=4, save_steps=1, callbacks=[stop])
    assert len(made.train().steps) == 2
    assert len(made.train(resume=True).steps) == 4


def test_a_resume_with_other_settings_or_rows_says_which(tmp_path: Path) -> None:
    making.trainer(tmp_path, max_steps=2, save_steps=2).train()
    other = making.trainer(
        tmp_path, env=making.environment(9), max_steps=3, save_steps=3, seed=5, run_name="another name"
    )
    report = other.train(resume=True)
    said = "resumed with changed settings: max_steps=3 (was 2), seed=5 (was 0), rows=9 (was 16)"
    assert {"step": 2, "notice": said} in report.notices
    same = making.trainer(tmp_path, env=making.environment(9), max_steps=3, save_steps=3, seed=5).train(resume=True)
    assert same.notices == report.notices


def test_a_resume_with_adapters_of_another_scale_says_so(tmp_path: Path) -> None:
    making.trainer(tmp_path, max_steps=1, save_steps=1, peft_config=vf.lora_defaults(alpha=16)).train()
    report = making.trainer(tmp_path, max_steps=1, peft_config=vf.lora_defaults(alpha=64)).train(resume=True)
    assert report.notices == [{"step": 1, "notice": "resumed with changed settings: lora_alpha=64 (was 16)"}]


def test_no_row_is_lost_by_a_resume_within_a_generation_some_of_whose_rollouts_failed(tmp_path: Path) -> None:
    order = [row["answer"] for row in making.trainer(tmp_path).rows.take(16)]
    is_down = True

    def brittle(completion: Any, answer: str) -> float:
        if is_down and answer in order[4:8]:
            raise ConnectionError("the judge is down")
        return vowels(completion)

    def crash(trainer: Any, figures: Any) -> None:
        if is_down:
            raise RuntimeError("crashed")

    def make() -> Any:
        env = making.environment(rubric=vf.Rubric([brittle]))
        how = {"steps_per_generation": 2, "max_steps": 5, "save_steps": 1, "log_rollouts": 64}
        return making.trainer(tmp_path, env=env, callbacks=[crash], **how)

    with pytest.raises(RuntimeError, match="crashed"):  # after the first of two updates
        make().train()
    is_down = False
    report = make().train(resume=True)
    records = map(json.loads, (report.path / "results.jsonl").read_text().splitlines())
    assert {one["answer"] for one in records if one["reward"] is not None} >= {*order[:4], *order[8:]}


# --- settings without effect --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon=0.1 has no effect: loss_type='sapo' does not use it"),
        ({"loss_type": "cispo", "delta": 2.0}, "delta=2.0 has no effect: loss_type='cispo' does not use it"),
        ({"sapo_temperature_pos": 2.0}, "loss_type='dr_grpo' does not use it"),
        ({"importance_sampling_clip_max": 2.0}, "it is used only with importance_sampling_mode"),
        ({"ref_model_mixup_alpha": 0.5, "kl_coef": 0.1}, "it is used only with sync_ref_model"),
        ({"max_resamples": 5}, "it is used only with dynamic_sampling"),
    ],
)
def test_a_setting_that_nothing_reads_is_warned_of(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said.replace("(", r"\(")):
        making.trainer(tmp_path, **settings)


def test_saved_rollouts_are_taken_as_they_are_and_settings_that_choose_among_rows_are_warned_of(tmp_path: Path) -> None:
    tokenizer = making.tiny.tokenizer()
    how = {"model": making.tiny.model(tokenizer), "tokenizer": tokenizer, "dataset": saved()}
    with pytest.warns(UserWarning, match="dynamic_sampling=True has no effect: saved rollouts are taken as they are"):
        vf.GRPOTrainer(**how, config=making.config(tmp_path, dynamic_sampling=True))


def test_a_loss_of_ones_own_may_read_any_setting(tmp_path: Path) -> None:
    def own(logprobs: Any, objective: Any) -> Any:
        return -logprobs * objective.epsilon

    making.trainer(tmp_path, loss_type="sapo", epsilon=0.3, extra={"loss": own})


def test_evaluations_without_anything_to_evaluate_on_are_refused(tmp_path: Path) -> None:
    tokenizer = making.tiny.tokenizer()
    config = vf.SFTConfig(eval_steps=2, output_dir=tmp_path / "run")
    rows = [{"prompt": "a", "completion": "b"}]
    with pytest.raises(ValueError, match="nothing to evaluate on: pass eval_dataset="):
        vf.SFTTrainer(model=making.tiny.model(tokenizer), tokenizer=tokenizer, dataset=rows, config=config)
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        vf.GRPOTrainer(
            model=making.tiny.model(tokenizer),
            tokenizer=tokenizer,
            dataset=saved(),
            config=making.config(tmp_path, eval_steps=1),
        )
