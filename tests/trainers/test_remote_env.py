"""Training on an environment that another process could serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import verifiers as vf
from verifiers.envs.remote.server import EnvServer


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "again"}]


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def twice() -> Twice:
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(8)]
    return Twice(dataset=rows, rubric=vf.Rubric([right]), max_turns=2)


def test_a_model_in_this_process_is_trained_on_a_remote_environment_token_for_token(tmp_path: Path) -> None:
    model, tokenizer = vf.tiny_model(characters="qagin0123456789", hidden_size=32)
    config = vf.GRPOConfig(batch_size=4, group_size=2, max_new_tokens=4, max_steps=1, output_dir=str(tmp_path))
    with EnvServer(twice()) as server:
        trainer = vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=vf.RemoteEnv(server.url), config=config)
        seen: list[Any] = []
        learn = trainer.train_step
        trainer.train_step = lambda batch: (seen.append(batch), learn(batch))[1]  # type: ignore[method-assign]
        trainer.train()
    (batch,) = seen
    trained = trainer.sequences(batch)
    assert len(trained) >= 4, batch.refused
    steps = batch["completions"][0].state["trajectory"]
    assert all(step["tokens"]["completion_logprobs"] for step in steps)
    assert len(steps) == 2
