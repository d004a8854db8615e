"""Run in an environment with TRL: a rollout_func and an environment_factory under its real GRPO trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import trl
from trl import GRPOConfig, GRPOTrainer

import verifiers as vf
from verifiers.integrations.trl import Rollouts, ToolEnvironments

torch.set_num_threads(1)


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "more"}]


def digits(completion: Any) -> float:
    said = [char for message in completion if message["role"] == "assistant" for char in message["content"]]
    return sum(char.isdigit() for char in said) / 8


class Watched(GRPOTrainer):
    """Keeps what each batch was, and what the weights that sampled it say of its tokens."""

    worst = 0.0
    n_sampled = n_other = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        attention = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        with torch.no_grad():
            positions = (attention.cumsum(-1) - 1).clamp(min=0)
            logits = self.model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
        logits = logits[:, out["prompt_ids"].shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, out["completion_ids"][..., None])[..., 0]
        mask = out["tool_mask"] * out["completion_mask"]
        gap = ((logprobs - out["sampling_per_token_logps"]).abs() * mask).max().item()
        self.worst = max(self.worst, gap)
        self.n_sampled += int(mask.sum())
        self.n_other += int((out["completion_mask"] - mask).sum())
        return out


def config(folder: str, **kwargs: Any) -> GRPOConfig:
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 64,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "beta": 0.0,
        "seed": 1,
    }
    return GRPOConfig(**{**settings, **kwargs})


def learn(folder: str) -> None:
    """Two turns a rollout: the tokens are those that were sampled, and the reward rises."""
    env = Twice(dataset=[{"question": name, "answer": ""} for name in "abcd"], rubric=vf.Rubric([digits]), max_turns=2)
    model, tokenizer = vf.tiny_model(characters="abcdmore0123456789", hidden_size=64)
    rollouts = Rollouts(env, sampling_args={"max_tokens": 4})
    trainer = Watched(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rollouts.reward,
        rollout_func=rollouts,
        train_dataset=rollouts.dataset(),
        args=config(folder, max_steps=12),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert trainer.worst < 1e-4, f"TRL's logprobs and those of sampling are {trainer.worst} apart"
    assert trainer.n_sampled
    assert trainer.n_other, "there were two turns, with something said between them"
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.2, f"the reward did not rise: {rewards}"


def fail(folder: str) -> None:
    """A rollout that failed is no zero: TRL leaves it out of the baseline, and nothing is learned from it."""

    def flaky(completion: Any, state: vf.State) -> float:
        if state["example_id"] == 0:
            raise ValueError("the judge is down")
        return digits(completion)

    env = Twice(dataset=[{"question": name, "answer": ""} for name in "ab"], rubric=vf.Rubric([flaky]), max_turns=2)
    model, tokenizer = vf.tiny_model(characters="abmore0123456789", hidden_size=32)
    rollouts = Rollouts(env, sampling_args={"max_tokens": 4})
    trainer = Watched(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rollouts.reward,
        rollout_func=rollouts,
        train_dataset=rollouts.dataset(),
        args=config(folder, max_steps=1),
    )
    trainer.train()
    written = rollouts([row["prompt"] for row in rollouts.dataset()], trainer)
    assert written["vf_reward"][0] is None
    assert written["env_mask"][0] == [0]
    assert isinstance(written["vf_reward"][1], float)


class Scripted(GRPOTrainer):
    """The model's turns are given; everything else is TRL's: parsing, calling, joining tokens, scoring."""

    said: list[str] = []

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        text = self.said.pop(0)
        ids = self.processing_class.encode(text, add_special_tokens=False)
        return [list(ids) for _ in prompt_ids], None


def call_tools(folder: str) -> None:
    """TRL reads the tools' schemas, calls them, and the rubric scores the conversation that came of it."""

    def double(x: int) -> int:
        """Twice a number.

        Args:
            x: The number.
        """
        return 2 * x

    def right(completion: Any, answer: str, state: vf.State) -> float:
        called = any(message["role"] == "tool" and message["content"] == answer for message in completion)
        return float(called and len(state["tool_log"]) == 1)

    env = vf.ToolEnv(dataset=[{"question": "Double 21.", "answer": "42"}], tools=[double], rubric=vf.Rubric([right]))
    model, tokenizer = vf.tiny_model(hidden_size=32, context=4096)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    tools = ToolEnvironments(env)
    trainer = Scripted(
        model=model,
        processing_class=tokenizer,
        reward_funcs=tools.reward,
        environment_factory=tools,
        train_dataset=tools.dataset(),
        args=config(folder, max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=512),
    )
    Scripted.said = ['<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call>', "It is 42."]
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards == [1.0], rewards


if __name__ == "__main__":
    for check in (learn, fail, call_tools):
        check(sys.argv[1])
        sys.stdout.write(f"{check.__name__}: holds\n")
