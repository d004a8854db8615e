"""Run in an environment with verl: its agent loop worker as a Ray actor; a tiny model stands for the server."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
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


def double(x: int) -> int:
    \"\"\"Twice a number.\"\"\"
    return 2 * x


def called(completion):
    return float([one["content"] for one in completion if one["role"] == "tool"] == ["42", "84"])


def load_environment(tools=False):
    rows = [{"question": name, "answer": name} for name in "abcd"]
    if tools:
        return vf.ToolEnv(dataset=rows, tools=[double], rubric=vf.Rubric([called]), max_turns=3)
    return Twice(dataset=rows, rubric=vf.Rubric([digits]), max_turns=2)
"""
CALLS = [f'<tool_call>\n{{"name": "double", "arguments": {{"x": {x}}}}}\n</tool_call>' for x in (21, 42)]


class TorchServer(LLMServerClient):
    """Stands for the server behind verl: samples from the model in a folder, and writes down what it was asked.

    ``script`` are replies that the first turns of a request have instead, spelled letter by letter.
    """

    def __init__(self, folder: str, log: str, script: Sequence[str] = ()) -> None:
        self.folder, self.log, self.script = folder, log, script
        self.model, self.asked = None, Counter[str]()

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **kwargs: Any) -> TokenOutput:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if self.model is None:
            torch.set_num_threads(1)
            self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        turn = self.asked[request_id]
        self.asked[request_id] += 1
        if turn < len(self.script):
            reply = [*self.tokenizer.convert_tokens_to_ids(list(self.script[turn])), self.tokenizer.eos_token_id]
        else:
            most = min(4, sampling_params["max_tokens"])
            # A role's token within a reply is no text, so the template would write the reply anew.
            roles = [i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special]
            whole = self.model.generate(
                torch.tensor([prompt_ids]),
                do_sample=True,
                top_k=0,
                max_new_tokens=most,
                pad_token_id=0,
                suppress_tokens=[i for i in roles if i != self.tokenizer.eos_token_id],
            )
            reply = whole[0, len(prompt_ids) :].tolist()
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt_ids, *reply]])).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0].tolist()
        with open(self.log, "a") as log:
            log.write(json.dumps([request_id, prompt_ids, reply, logprobs]) + "\n")
        steps = {"min_global_steps": turn, "max_global_steps": turn}  # as if weights had come between the turns
        return TokenOutput(token_ids=reply, log_probs=logprobs, stop_reason="completed", extra_fields=steps)


def config(folder: str, loops: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder}",
                "actor_rollout_ref.rollout.prompt_length=64",
                "actor_rollout_ref.rollout.response_length=512",
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


def save_model(folder: Path) -> tuple[Any, Any]:
    """A tiny model; its tokenizer has a token for a word that the model spells, so that tokens made anew would show."""
    model, tokenizer = vf.tiny_model(hidden_size=64, context=1024)
    tokenizer.add_tokens(["double"])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def play(folder: Path, settings: Any, env_args: dict[str, Any], script: Sequence[str] = ()) -> tuple[Any, Any, Any]:
    """What the worker made of two rollouts of each row; what its server was asked and said, by request; the rows."""
    env = vf.load_environment("played_env", **env_args)
    files = export_rows(env, folder / "data", env_id="played_env", env_args=env_args)
    rows = pyarrow.parquet.read_table(files["train"]).to_pylist()
    log = folder / f"log{len(script)}.jsonl"
    worker = ray.remote(AgentLoopWorker).remote(settings, TorchServer(str(folder / "model"), str(log), script))
    out = ray.get(worker.generate_sequences.remote(batch_of([row for row in rows for _ in range(2)])), timeout=600)
    ray.kill(worker)
    turns: dict[str, list[Any]] = {}
    for line in log.read_text().splitlines():
        request_id, *turn = json.loads(line)
        turns.setdefault(request_id, []).append(turn)
    return out, turns, rows


def check_tokens(out: Any, turns: Any, model: Any) -> None:
    """What the trainer gets is what was sampled, in order; the model's own logprobs of it are those of sampling."""
    batch = out.batch
    mask, responses = batch["response_mask"].bool(), batch["responses"]
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits
    logprobs = logits[:, -responses.shape[1] - 1 : -1].log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    gap = float(((logprobs - batch["rollout_log_probs"]).abs() * mask).max())
    assert gap < 1e-5, f"the trainer's logprobs and those of sampling are {gap} apart"
    got = []
    for row, attention, told, given in zip(
        batch["input_ids"], batch["attention_mask"].bool(), mask, batch["rollout_log_probs"], strict=True
    ):
        whole = row[attention].tolist()
        got.append((whole, row[-responses.shape[1] :][told].tolist(), given[told].tolist()))
    wanted = []
    for one in turns.values():
        for before, after in itertools.pairwise(one):
            assert after[0][: len(before[0]) + len(before[1])] == before[0] + before[1], "a turn began anew"
        last = one[-1]
        said = [token for turn in one for token in turn[1]]
        exact = torch.tensor([logprob for turn in one for logprob in turn[2]]).tolist()
        wanted.append((last[0] + last[1], said, exact))
    assert sorted(got) == sorted(wanted), "tokens, mask and logprobs are those of the server"
    n_turns = len(next(iter(turns.values())))
    assert [len(one) for one in turns.values()] == [n_turns] * len(got)
    told = out.non_tensor_batch
    assert told["__num_turns__"].tolist() == [2 * n_turns] * len(got)
    assert told["min_global_steps"].tolist() == [0] * len(got)
    assert told["max_global_steps"].tolist() == [n_turns - 1] * len(got)


def play_turns(folder: Path, settings: Any, model: Any, tokenizer: Any) -> None:
    out, turns, rows = play(folder, settings, {})
    check_tokens(out, turns, model)
    assert len(turns) == 8
    scores = out.batch["rm_scores"].sum(-1)
    for ids, told, score in zip(out.batch["responses"], out.batch["response_mask"], scores, strict=True):
        said = tokenizer.decode(ids[told.bool()], skip_special_tokens=True)
        assert abs(len(re.findall("[0-9]", said)) / 8 - float(score)) < 1e-6, (said, float(score))
    reward = compute_score("x", "12", "", extra_info=rows[0]["extra_info"])
    assert (reward["score"], reward["digits"]) == (0.25, 0.25), reward


def play_tools(folder: Path, settings: Any, model: Any, tokenizer: Any) -> None:
    out, turns, _ = play(folder, settings, {"tools": True}, CALLS)
    check_tokens(out, turns, model)
    assert [len(one) for one in turns.values()] == [3] * 8
    assert out.batch["rm_scores"].sum(-1).tolist() == [1.0] * 8, "both calls were made, and answered"
    (last, *_) = [one[-1][0] for one in turns.values()]
    assert tokenizer.encode(tokenizer.decode(last)) != last, "tokenized anew, it would be another sequence"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "played_env.py").write_text(ENVIRONMENT)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ['PYTHONPATH']}"
    model, tokenizer = save_model(folder / "model")
    loops = Path(__file__).parents[3] / "examples" / "verl" / "agent_loops.yaml"
    settings = config(str(folder / "model"), str(loops))
    start_ray()
    try:
        for check in (play_turns, play_tools):
            check(folder, settings, model, tokenizer)
            sys.stdout.write(f"{check.__name__}: holds\n")
    finally:
        ray.shutdown()
