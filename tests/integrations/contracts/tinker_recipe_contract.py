"""Run in an environment with tinker-cookbook: its recipe for verifiers, on our package, against our server, learns."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TINKER_API_KEY"] = "tml-local"
os.environ["TINKER_TELEMETRY"] = "0"

import torch
from tinker_cookbook.recipes.verifiers_rl import evaluate as recipe_evaluate
from tinker_cookbook.recipes.verifiers_rl import train as recipe
from tinker_cookbook.rl import rollouts

import verifiers as vf
from verifiers.integrations.tinker import TinkerServer

torch.set_num_threads(1)

ENVIRONMENT = """
import verifiers as vf

def digits(completion):
    said = completion[-1]["content"]
    return sum(char.isdigit() for char in said) / 8

def load_environment(n=4):
    rows = [{"question": "abcdefgh"[i % 8], "answer": ""} for i in range(n)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([digits]))
"""


class TakesTermination:
    """The recipe's override of `do_group_rollout` lacks an argument that its own package passes: it is left out."""

    def __init__(self, module: Any) -> None:
        vars(self)["module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        async def patched(*args: Any, termination: Any = None, **kwargs: Any) -> Any:
            return await value(*args, **kwargs)

        setattr(self.module, name, patched if name == "do_group_rollout" else value)


def main(folder: Path) -> None:
    (folder / "digits_world.py").write_text(ENVIRONMENT)
    sys.path.insert(0, str(folder))
    model, tokenizer = vf.tiny_model(hidden_size=64)
    home = folder / "tiny"
    model.save_pretrained(home)
    tokenizer.save_pretrained(home)
    recipe.rollouts = TakesTermination(rollouts)
    with TinkerServer(str(home), name=str(home), folder=folder / "saved") as server:
        os.environ["TINKER_BASE_URL"] = server.url
        config = recipe.CLIConfig(
            model_name=str(home),
            renderer_name="role_colon",
            lora_rank=8,
            vf_env_id="digits-world",
            vf_env_args=json.dumps({"n": 24}),
            group_size=16,
            groups_per_batch=2,
            learning_rate=1e-2,
            max_tokens=8,
            save_every=6,
            log_path=str(folder / "log"),
            behavior_if_log_dir_exists="delete",
        )
        asyncio.run(recipe.cli_main(config, None))
        figures = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
        rewards = [one["env/all/reward/total"] for one in figures if "env/all/reward/total" in one]
        assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.3, rewards
        print("learn: holds")
        kls = [abs(one["optim/kl_sample_train_v1"]) for one in figures if "optim/kl_sample_train_v1" in one]
        assert kls
        assert max(kls) < 1e-5, kls
        print("same logprobs: holds")
        saved = [json.loads(line) for line in (folder / "log" / "checkpoints.jsonl").read_text().splitlines()]
        sampler = saved[-1]["sampler_path"]
    with TinkerServer(str(home), name=str(home), folder=folder / "saved") as server:  # started anew
        os.environ["TINKER_BASE_URL"] = server.url
        results = asyncio.run(recipe_evaluate.evaluate("digits-world", {}, None, 4, 4, 8, 8, 1.0, model_path=sampler))
        mean = sum(results["reward"]) / len(results["reward"])
        assert mean > rewards[0] + 0.3, (mean, rewards)
        print("evaluate after a restart: holds")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
