"""Subclasses of the trainer in the shapes that the documents promise, in our own words."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

import numpy as np  # noqa: E402

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.rubrics import Rubric, RubricGroup  # noqa: E402
from verifiers.trainers import GRPOConfig, GRPOTrainer  # noqa: E402


def test_the_first_dialect(tmp_path):
    tokenizer = tiny.tokenizer()
    config = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        learning_rate=1e-3,
        batch_size=8,
        group_size=4,
        num_epochs=1,
        gradient_accumulation_steps=2,
        temperature=0.7,
        kl_coef=0.1,
        max_new_tokens=6,
        top_p=0.9,
        warmup_ratio=0.1,
        weight_decay=0.01,
        gradient_checkpointing=True,
        logging_steps=10,
        eval_steps=100,
        save_steps=500,
    )
    trainer = GRPOTrainer(model=tiny.model(tokenizer), tokenizer=tokenizer, env=making.environment(), config=config)
    report = trainer.train()
    assert len(report.steps) == trainer.num_steps_per_epoch == 4  # 16 rows, 16 rollouts a step, groups of 4
    trainer.save_model(str(tmp_path / "final_model"))
    assert trainer.evaluate().mean_reward is not None


def test_the_second_dialect(tmp_path):
    tokenizer = tiny.tokenizer()
    args = vf.grpo_defaults(run_name="my-experiment")
    args.per_device_train_batch_size = 8
    args.num_generations = 4
    args.gradient_accumulation_steps = 2
    args.max_steps = 2
    args.num_iterations = 1
    args.max_prompt_length = 64
    args.max_completion_length = 6
    args.eval_strategy = "steps"
    args.eval_steps = 1
    args.save_strategy = "steps"
    args.save_steps = 2
    args.report_to = None
    args.output_dir = tmp_path / "run"
    trainer = vf.GRPOTrainer(
        model=tiny.model(tokenizer),
        processing_class=tokenizer,
        env=making.environment(),
        args=args,
        peft_config=vf.lora_defaults(),
    )
    report = trainer.train()
    assert [one["step"] for one in report.evals] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "adapter_model.safetensors").is_file()


def test_knobs_without_effect_are_accepted_with_a_warning():
    with pytest.warns(UserWarning, match="gamma has no effect"):
        config = GRPOConfig(gamma=1.0)
    with pytest.warns(UserWarning, match="gae_lambda has no effect"):
        config.gae_lambda = 0.95
    assert (config.gamma, config.gae_lambda) == (1.0, 0.95)  # to be read by whoever wrote it
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        config.temprature = 1.0


class OnlineTrainer(GRPOTrainer):
    """Makes its own rollouts, one after the other, and keeps nothing but their text and rewards."""

    def get_batch(self):
        prompts = self.env.sample_prompts(self.config.batch_size // self.config.group_size)
        all_completions, all_rewards = [], []
        for prompt in prompts:
            completions = []
            for _ in range(self.config.group_size):
                completion, _ = self.env.rollout(
                    client=self.client,
                    model=self.model,
                    prompt=prompt["prompt"],
                    answer=prompt["answer"],
                    temperature=self.config.temperature,
                )
                completions.append(completion)
            rewards = []
            for completion in completions:
                score = self.env.rubric.score_rollout_sync(
                    prompt=prompt["prompt"], completion=completion, answer=prompt["answer"], state={}
                )
                rewards.append(score["reward"])
            all_completions.extend(completions)
            all_rewards.extend(rewards)
        return prompts, all_completions, all_rewards


def test_online_generation_learns_from_the_very_tokens_that_were_sampled(tmp_path):
    env = making.environment(sampling_args={"max_tokens": 8})
    report = making.trainer(tmp_path, OnlineTrainer, env=env, max_steps=2).train()
    assert len(report.steps) == 2
    for step in report.steps:  # were they tokenized again, old and new policy would differ
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert sum(step["ratio_histogram"]["counts"]) > 0
        assert step["reward"] is not None


class CurriculumTrainer(GRPOTrainer):
    def __init__(self, *args, difficulty_schedule, **kwargs):
        super().__init__(*args, **kwargs)
        self.difficulty_schedule = difficulty_schedule
        self.asked = []

    def get_current_difficulty(self, epoch, step):
        progress = epoch + step / self.num_steps_per_epoch
        for threshold, difficulty in self.difficulty_schedule:
            if progress < threshold:
                return difficulty
        return self.difficulty_schedule[-1][1]

    def get_batch(self, epoch, step):
        difficulty = self.get_current_difficulty(epoch, step)
        filtered = [row for row in self.env.dataset if row.get("difficulty", "easy") == difficulty]
        batch = self.sample_batch(filtered)
        self.asked.append((difficulty, {int(answer) % 2 for answer in batch["answers"]}))
        return batch


def test_curriculum(tmp_path):
    extra = {"difficulty_schedule": [(0.5, "easy"), (2.0, "hard")]}
    trainer = making.trainer(tmp_path, CurriculumTrainer, extra=extra, max_steps=4)
    trainer.train()
    assert trainer.asked == [("easy", {1}), ("easy", {1}), ("hard", {0}), ("hard", {0})]


class AdaptiveTrainer(GRPOTrainer):
    def __init__(self, *args, rubric_weights_schedule, **kwargs):
        super().__init__(*args, **kwargs)
        self.rubric_weights_schedule = rubric_weights_schedule

    def compute_rewards(self, completions, prompts, epoch):
        weights = self.rubric_weights_schedule.get(epoch, self.rubric_weights_schedule["default"])
        original_weights = self.env.rubric.get_group_weights()
        self.env.rubric.set_group_weights(weights)
        rewards = super().compute_rewards(completions, prompts)
        self.env.rubric.set_group_weights(original_weights)
        return rewards


def test_adaptive_weights(tmp_path):
    def one(completion: Any) -> float:
        return 1.0

    rubric = RubricGroup([Rubric([making.share_of_e]), Rubric([one])])
    schedule = {0: [1.0, 0.0], "default": [1.0, 100.0]}
    trainer = making.trainer(
        tmp_path,
        AdaptiveTrainer,
        env=making.environment(8, rubric=rubric),
        extra={"rubric_weights_schedule": schedule},
        max_steps=4,
    )
    report = trainer.train()
    assert [step["reward"] > 50 for step in report.steps] == [False, False, True, True]
    assert rubric.get_group_weights() == [1.0, 1.0]


class EvaluatingTrainer(GRPOTrainer):
    def evaluate(self):
        self.model.eval()
        total_reward, num_samples = 0, 0
        with torch.no_grad():
            for batch in self.eval_dataloader:
                prompts, answers = batch["prompts"], batch["answers"]
                completions = self.generate(prompts)
                rewards = self.env.rubric.score_rollouts(
                    prompts=prompts, completions=completions, answers=answers, states=[{} for _ in prompts]
                )
                total_reward += sum(rewards["reward"])
                num_samples += len(prompts)
        self.model.train()
        self.num_samples = num_samples
        return total_reward / num_samples


def test_an_evaluation_of_ones_own(tmp_path):
    trainer = making.trainer(tmp_path, EvaluatingTrainer, eval_steps=1, max_steps=2)
    report = trainer.train()
    assert trainer.num_samples == 16
    assert [0 <= one["reward"] <= 1 for one in report.evals] == [True, True]


class DistributedTrainer(GRPOTrainer):
    def __init__(self, *args, **kwargs):
        from accelerate import Accelerator

        super().__init__(*args, **kwargs)
        self.accelerator = Accelerator()
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)


def test_a_model_and_optimizer_prepared_by_accelerate(tmp_path):
    report = making.trainer(tmp_path, DistributedTrainer, max_steps=20, batch_size=32, group_size=8).train()
    assert report.rewards[-1] > report.rewards[0] + 0.1


class UnfreezingTrainer(GRPOTrainer):
    def __init__(self, *args, unfreeze_schedule, **kwargs):
        super().__init__(*args, **kwargs)
        self.unfreeze_schedule = unfreeze_schedule
        self.trained = []
        self.freeze_all_but_last_n_layers(0)

    def freeze_all_but_last_n_layers(self, n):
        for param in self.model.parameters():
            param.requires_grad = False
        layers = self.model.transformer.h if hasattr(self.model, "transformer") else self.model.model.layers
        for layer in layers[len(layers) - n :]:
            for param in layer.parameters():
                param.requires_grad = True
        if hasattr(self.model, "lm_head"):
            for param in self.model.lm_head.parameters():
                param.requires_grad = True

    def on_epoch_begin(self, epoch):
        for epoch_threshold, n_layers in self.unfreeze_schedule:
            if epoch >= epoch_threshold:
                self.freeze_all_but_last_n_layers(n_layers)
        self.trained.append(sum(one.numel() for one in self.model.parameters() if one.requires_grad))


def test_progressive_unfreezing(tmp_path):
    tokenizer = tiny.tokenizer()
    model = tiny.model(tokenizer)
    first, last = (model.model.layers[i].mlp.up_proj.weight for i in (0, 1))
    before = first.detach().clone(), last.detach().clone()
    moved = []

    def look(trainer: Any, figures: Any) -> None:
        moved.append((not torch.equal(first, before[0]), not torch.equal(last, before[1])))

    extra = {"unfreeze_schedule": [(0, 1), (1, 2)]}
    env = making.environment(4)
    trainer = making.trainer(
        tmp_path, UnfreezingTrainer, env=env, model=model, extra=extra, callbacks=[look], max_steps=3
    )
    trainer.train()
    assert moved[0] == (False, True)
    assert moved[-1] == (True, True)
    assert trainer.trained[0] < trainer.trained[1]


class ExpertsTrainer(GRPOTrainer):
    """Each expert learns from the rollouts it is best at."""

    def __init__(self, expert_models, router_model, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.expert_models, self.router_model = expert_models, router_model
        self.trained, self.routed = defaultdict(int), []

    def evaluate_with_expert(self, expert, prompt, completion):
        return float(len(completion) % len(self.expert_models) == self.expert_models.index(expert))

    def train_expert(self, expert, batch):
        assert {len(values) for values in batch.values()} == {len(batch["prompts"])}
        self.trained[expert] += len(batch["prompts"])

    def train_router(self, inputs, labels):
        self.routed += labels

    def train_step(self, batch):
        prompts, completions = batch["prompts"], batch["completions"]
        expert_batches = defaultdict(list)
        labels = []
        for i, prompt in enumerate(prompts):
            with torch.no_grad():
                scores = [self.evaluate_with_expert(one, prompt, completions[i]) for one in self.expert_models]
            best = int(np.argmax(scores))
            expert_batches[best].append(i)
            labels.append(best)
        for index, places in expert_batches.items():
            if places:
                expert_batch = {name: [values[i] for i in places] for name, values in batch.items()}
                self.train_expert(self.expert_models[index], expert_batch)
        self.train_router(prompts, labels)


def test_mixture_of_experts(tmp_path):
    tokenizer = tiny.tokenizer()
    trainer = ExpertsTrainer(
        ["even", "odd"],
        "router",
        model=tiny.model(tokenizer),
        tokenizer=tokenizer,
        env=making.environment(),
        config=making.config(tmp_path, max_steps=2),
    )
    trainer.train()
    assert sum(trainer.trained.values()) == len(trainer.routed) == 32


class ConstrainedTrainer(GRPOTrainer):
    def __init__(self, *args, constraints, **kwargs):
        super().__init__(*args, **kwargs)
        self.constraints = constraints

    def compute_constraint_penalties(self, completions):
        penalties = []
        for completion in completions:
            penalty = 0.0
            for constraint in self.constraints:
                if constraint["type"] == "length" and len(completion) > constraint["max"]:
                    penalty += constraint["penalty"]
                elif constraint["type"] == "forbidden_words":
                    penalty += sum(
                        constraint["penalty"] for word in constraint["words"] if word.lower() in completion.lower()
                    )
                elif constraint["type"] == "required_format" and not constraint["check_func"](completion):
                    penalty += constraint["penalty"]
            penalties.append(penalty)
        return penalties

    def compute_rewards(self, completions, prompts):
        base_rewards = super().compute_rewards(completions, prompts)
        penalties = self.compute_constraint_penalties(completions)
        return [max(0, reward - penalty) for reward, penalty in zip(base_rewards, penalties, strict=True)]


def test_constraints(tmp_path):
    def one(completion: Any) -> float:
        return 1.0

    constraints = [
        {"type": "length", "max": 500, "penalty": 0.5},
        {"type": "forbidden_words", "words": ["e"], "penalty": 0.25},
        {"type": "required_format", "check_func": lambda text: "<answer>" in text, "penalty": 0.5},
    ]
    trainer = making.trainer(
        tmp_path, ConstrainedTrainer, env=making.environment(rubric=Rubric([one])), extra={"constraints": constraints}
    )
    batch = trainer.get_batch(0, 0)
    assert set(batch["rewards"]) <= {0.25, 0.5}
    assert len(trainer.train().steps) == 3


def test_a_rollout_that_could_not_be_scored_stays_out_whatever_an_override_makes_of_it(tmp_path):
    def brittle(completion: Any, answer: str) -> float:
        if answer == "3":
            raise ConnectionError("down")
        return making.share_of_e(completion)

    env = making.environment(8, rubric=Rubric([brittle]))
    trainer = making.trainer(tmp_path, ConstrainedTrainer, env=env, extra={"constraints": []}, batch_size=32)
    batch = trainer.get_batch(0, 0)
    assert len(batch.failed) == 4
    assert "3" not in batch["answers"]
    assert len(batch["rewards"]) == 28
