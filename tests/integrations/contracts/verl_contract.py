"""Run in an environment with verl: its agent loop worker as a Ray actor; a tiny model stands for the server."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import ray
import torch
from hydra import compose, initialize_config_module
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

import verifiers as vf
from verifiers.integrations.verl import compute_score, export_rows

ENVIRONMENT = """
import verifiers as vf


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "more"}]


def digits(completion):
    said = [char for message in completion if message["role"] == "assistant" for char in message["content"]]
    return sum(char.isdigit() for char in said) / 8


def load_environment(turns=2):
    rows = [{"question": name, "answer": name} for name in "abcd"]
    return Twice(dataset=rows, rubric=vf.Rubric([digits]), max_turns=turns)
"""


class TorchServer(LLMServerClient):
    """Samples from the model in a folder, token by token, as the server behind verl would."""

    def __init__(self, folder: str) -> None:
        self.folder, self.model = folder, None

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **kwargs: Any) -> TokenOutput:
        from transformers import AutoModelForCausalLM

        if self.model is None:
            torch.set_num_threads(1)
            self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        made = self.model.generate(
            torch.tensor([prompt_ids]),
            do_sample=True,
            top_k=0,
            max_new_tokens=min(4, sampling_params["max_tokens"]),
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        ids = made.sequences[0, len(prompt_ids) :]
        logprobs = torch.stack(made.logits, 1)[0].log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        return TokenOutput(token_ids=ids.tolist(), log_probs=logprobs.tolist(), stop_reason="completed")


def config(folder: str, loops: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder}",
                "actor_rollout_ref.rollout.prompt_length=64",
                "actor_rollout_ref.rollout.response_length=64",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.name=vllm",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
                "data.train_files=x",
                "data.val_files=x",
            ],
        )


def batch_of(rows: list[dict[str, Any]]) -> DataProto:
    def column(name: str) -> Any:
        return np.array([*[row[name] for row in rows], None], dtype=object)[:-1]

    return DataProto.from_dict(
        tensors={"dummy_tensor": torch.zeros(len(rows), 1, dtype=torch.uint8)},
        non_tensors={
            "raw_prompt": column("prompt"),
            "agent_name": column("agent_name"),
            "index": np.arange(len(rows)),
            "extra_info": column("extra_info"),
        },
    )


def start_ray(attempts: int = 6) -> None:
    """Ray gives its own processes seconds to start: on a loaded machine one try may not do."""
    for left in range(attempts - 1, -1, -1):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


def play(folder: Path) -> Any:
    model, tokenizer = vf.tiny_model(characters="abcdmore0123456789", hidden_size=64)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    files = export_rows(vf.load_environment("twice_env"), folder / "data", env_id="twice_env", env_args={"turns": 2})
    rows = pyarrow.parquet.read_table(files["train"]).to_pylist()
    loops = Path(__file__).parents[3] / "examples" / "verl" / "agent_loops.yaml"
    settings = config(str(folder / "model"), str(loops))
    start_ray()
    try:
        worker = ray.remote(AgentLoopWorker).remote(settings, TorchServer(str(folder / "model")))
        out = ray.get(worker.generate_sequences.remote(batch_of([row for row in rows for _ in range(2)])), timeout=600)
    finally:
        ray.shutdown()
    check(out, model, tokenizer)
    reward = compute_score("x", "12", "", extra_info=rows[0]["extra_info"])
    assert reward["score"] == 0.25, reward
    assert reward["digits"] == 0.25


def check(out: Any, model: Any, tokenizer: Any) -> None:
    batch = out.batch
    scores, mask, responses = batch["rm_scores"].sum(-1), batch["response_mask"], batch["responses"]
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits
    logprobs = logits[:, -responses.shape[1] - 1 : -1].log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    gap = float(((logprobs - batch["rollout_log_probs"]).abs() * mask).max())
    assert gap < 1e-4, f"the trainer's logprobs and those of sampling are {gap} apart"
    length = batch["attention_mask"][:, -responses.shape[1] :].sum(-1)
    assert bool((mask.sum(-1) < length).any()), "something was said between the turns, and it is masked"
    for ids, told, score in zip(responses, mask, scores, strict=True):
        said = tokenizer.decode(ids[told.bool()], skip_special_tokens=True)
        in_text = len(re.findall("[0-9]", said)) / 8
        assert abs(in_text - float(score)) < 1e-6 or len(said) < 8, (said, float(score))
    assert out.non_tensor_batch["__num_turns__"].tolist() == [4] * len(scores)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "twice_env.py").write_text(ENVIRONMENT)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ['PYTHONPATH']}"
    play(folder)
    sys.stdout.write("play: holds\n")
