"""Run in an environment with verl: our launch script with its own configuration, as far as it goes without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import create_rl_dataset, need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

import verifiers as vf
from verifiers.integrations.verl import export_rows

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "verl" / "train.sh"


def launch(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The script, whose program is verl's own: it composes its configuration and prints it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "DATA": str(folder / "data"), "MODEL": str(folder / "model")}
    command = ["bash", str(SCRIPT), *more, "--cfg", "job", "--resolve"]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=900, check=False)


def main(folder: Path) -> None:
    env = vf.load_environment("arithmetic", num_train_examples=3, num_eval_examples=2)
    export_rows(env, folder / "data", env_id="arithmetic")
    _, tokenizer = vf.tiny_model(hidden_size=32)
    tokenizer.save_pretrained(folder / "model")
    page = (ROOT / "docs" / "other-trainers.md").read_text()
    rewards = re.findall(r"^reward\.\S+=\S+$", page, re.MULTILINE)  # what the page says of reward-only use
    done = launch(folder, *rewards)
    assert done.returncode == 0, done.stderr[-3000:]
    config: Any = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    check(config)
    read_rows(config, tokenizer, env)
    assert len(rewards) == 2
    mistyped = launch(folder, "actor_rollout_ref.rollout.agent.default_agent_lop=verifiers")
    assert mistyped.returncode != 0
    assert "default_agent_lop" in mistyped.stderr + mistyped.stdout


def check(config: Any) -> None:
    """What verl's trainer does first with its settings; and the agent loop is ours, made as its worker makes it."""
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.calculate_log_probs
    assert rollout.agent.default_agent_loop == "verifiers"
    (loop,) = OmegaConf.load(rollout.agent.agent_loop_config_path)
    assert loop.name == "verifiers"
    assert hydra.utils.get_class(loop._target_).__name__ == "VerifiersAgentLoop"


def read_rows(config: Any, tokenizer: Any, env: vf.Environment) -> None:
    """verl's own data set reads what we exported, for the agent loop; and its reward function is our rubric."""
    rows = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    assert len(rows) == 3
    assert rows[0]["agent_name"] == "verifiers"
    assert rows[0]["extra_info"]["vf_env_id"] == "arithmetic"
    assert rows[0]["reward_model"]["ground_truth"] == env.get_dataset()[0]["answer"]
    assert rows[0]["raw_prompt"][-1]["content"] == env.get_dataset()[0]["prompt"][-1]["content"]
    reward = get_custom_reward_fn(config)
    answer = rows[0]["reward_model"]["ground_truth"]
    found = [
        reward(data_source="x", solution_str=text, ground_truth=answer, extra_info=rows[0]["extra_info"])["score"]
        for text in (f"<answer>{answer}</answer>", "no")
    ]
    assert found[0] > found[1], found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.write("launch: holds\n")
