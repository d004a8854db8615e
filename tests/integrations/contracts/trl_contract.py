"""Run in an environment with TRL: a rollout_func and an environment_factory under its real GRPO trainer."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from trl import GRPOConfig, GRPOTrainer

import verifiers as vf
from tests.support.doc_blocks import unrun_blocks
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.learned: list[dict[str, Any]] = []

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
        self.learned.append(out)
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
    calls, given = itertools.count(), []

    def flaky(completion: Any, state: vf.State) -> float:
        if state["example_id"] == 0 or next(calls) % 2:  # all of one group, and half of the other
            raise ValueError("the judge is down")
        return digits(completion)

    env = Twice(dataset=[{"question": name, "answer": ""} for name in "ab"], rubric=vf.Rubric([flaky]), max_turns=2)
    model, tokenizer = vf.tiny_model(characters="abmore0123456789", hidden_size=32)
    rollouts = Rollouts(env, sampling_args={"max_tokens": 4})

    def reward(**columns: Any) -> list[Any]:
        given.extend(rollouts.reward(**columns))
        return given

    trainer = Watched(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        rollout_func=rollouts,
        train_dataset=rollouts.dataset(),
        args=config(folder, max_steps=1),
    )
    trainer.train()
    (batch,) = trainer.learned
    failed = torch.tensor([one is None for one in given])
    assert failed.sum() == 12
    assert batch["advantages"][failed].tolist() == [0.0] * 12
    assert (batch["tool_mask"] * batch["completion_mask"])[failed].sum() == 0
    assert abs(float(batch["advantages"][~failed].sum())) < 1e-4, "the others are around their own mean"
    assert any(given), "a mean of zeros would say nothing"
    written = rollouts([row["prompt"] for row in rollouts.dataset()], trainer)
    assert written["vf_reward"][0] is None
    assert written["env_mask"][0] == [0]
    assert isinstance(written["vf_reward"][1], float)


class Scripted(Watched):
    """The model's turns are given, with its own logprobs; all else is TRL's: parsing, calling, joining tokens."""

    said: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns: list[list[tuple[list[int], list[int], list[float]]]] = []  # (prompt, reply, logprobs) of each

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        text, tokenizer = self.said[len(self.turns)], self.processing_class
        reply = [*tokenizer.convert_tokens_to_ids(list(text)), tokenizer.eos_token_id]
        drawn = []
        for prompt in prompt_ids:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0]
            drawn.append((list(prompt), reply, logprobs.tolist()))
        self.turns.append(drawn)
        return [list(reply) for _ in prompt_ids], [list(logprobs) for _, _, logprobs in drawn]


def make_scripted(folder: str) -> Scripted:
    """Three turns with two calls, spelled letter by letter, where the tokenizer has one token for the tool's name."""

    def double(x: int) -> int:
        """Twice a number.

        Args:
            x: The number.
        """
        return 2 * x

    def right(completion: Any, answer: str, state: vf.State) -> float:
        found = [message["content"] for message in completion if message["role"] == "tool"]
        return float(found[-1:] == [answer] and len(state["tool_log"]) == 2)

    env = vf.ToolEnv(dataset=[{"question": "Double 21.", "answer": "84"}], tools=[double], rubric=vf.Rubric([right]))
    model, tokenizer = vf.tiny_model(hidden_size=32, context=4096)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["double"])
    model.resize_token_embeddings(len(tokenizer))
    tools = ToolEnvironments(env)
    trainer = Scripted(
        model=model,
        processing_class=tokenizer,
        reward_funcs=tools.reward,
        environment_factory=tools,
        train_dataset=tools.dataset(),
        args=config(folder, max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=512),
    )
    calls = [f'<tool_call>\n{{"name": "double", "arguments": {{"x": {x}}}}}\n</tool_call>' for x in (21, 42)]
    trainer.said = (*calls, "I double it: 84.")
    return trainer


def call_tools(folder: str) -> None:
    """TRL calls the tools, the rubric scores what came of it, and what is learned from is what was sampled."""
    trainer = make_scripted(folder)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards == [1.0], rewards
    (batch,), tokenizer = trainer.learned, trainer.processing_class
    for row in range(2):
        is_there = batch["completion_mask"][row].bool()
        ids, mask = batch["completion_ids"][row][is_there], batch["tool_mask"][row][is_there].bool()
        turns = [turn[row] for turn in trainer.turns]
        assert ids[mask].tolist() == [token for _, reply, _ in turns for token in reply]
        given = torch.tensor([logprob for _, _, logprobs in turns for logprob in logprobs])
        assert torch.equal(batch["sampling_per_token_logps"][row][is_there][mask], given)
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        whole = [*prompt, *ids.tolist()]
        for before, reply, _ in turns:
            assert whole[: len(before) + len(reply)] == [*before, *reply], "a turn was not sampled after this prefix"
        between = tokenizer.decode(ids[~mask])
        assert "42" in between
        assert "84" in between
        assert tokenizer.encode(tokenizer.decode(whole)) != whole, "tokenized anew, it would be another sequence"
    assert trainer.worst < 1e-4, f"TRL's logprobs and those of sampling are {trainer.worst} apart"


def documented(folder: str) -> None:
    """The page's own block, with a model that is here and one short step."""
    model, tokenizer = vf.tiny_model(characters="abcdmore0123456789", hidden_size=32)
    for part in (model, tokenizer):
        part.save_pretrained(f"{folder}/documented")
    put = {
        "Qwen/Qwen2.5-0.5B-Instruct": f"{folder}/documented",
        "max_completion_length=512": "max_completion_length=8, max_steps=1, use_cpu=True, bf16=False, report_to=[]"
        f', save_strategy="no", output_dir="{folder}"',
    }
    env = Twice(dataset=[{"question": name, "answer": ""} for name in "ab"], rubric=vf.Rubric([digits]), max_turns=2)
    (code,) = unrun_blocks("other-trainers.md", "needs TRL", put)
    names: dict[str, Any] = {"env": env}
    exec(code, names)
    assert names["trainer"].state.global_step == 1


if __name__ == "__main__":
    for check in (learn, fail, call_tools, documented):
        check(sys.argv[1])
        sys.stdout.write(f"{check.__name__}: holds\n")
