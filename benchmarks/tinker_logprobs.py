"""What `vf tinker-serve` pays on a CPU for samples with the logprobs of training: CPU of a sample-and-train round.

python benchmarks/tinker_logprobs.py     # SmolLM2-135M with LoRA; 4 prompts of 16, and of 200 tokens, 4 replies each
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verifiers.integrations.tinker import TinkerServer
from verifiers.integrations.tinker.data import Datum, TrainingRequest
from verifiers.trainers.sampling import PLAIN

QUESTIONS = ("What is the capital of France?", "Write a story about a ship.", "Name five primes.", "Is snow white?")
REPLIES, TOKENS = 4, 64


def main() -> None:
    server = TinkerServer("smollm2", folder=tempfile.mkdtemp(), rows=REPLIES * len(QUESTIONS), length=512)
    service = server.service
    session = service.open_session()
    model_id = service.create_model(
        {"session_id": session, "base_model": service.name, "model_seq_id": 0, "lora_config": {"rank": 16}}
    ).told["model_id"]
    asked = {"model_id": model_id, "sampling_session_seq_id": 0}
    sampler = service.save_for_sampler(asked).future.result()["sampling_session_id"]

    def sample(prompts: list[list[int]]) -> list[list[int]]:
        bodies = [
            {"sampling_session_id": sampler, "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
             "num_samples": REPLIES, "sampling_params": {"max_tokens": TOKENS, "seed": 1}}
            for prompt in prompts
        ]  # fmt: skip
        waiting = [service.sample(body).future for body in bodies]
        replies = [one.result().json()["sequences"] for one in waiting]
        return [
            [*prompt, *one["tokens"]] for prompt, some in zip(prompts, replies, strict=True) for one in some
        ]  # fmt: skip

    def train(sequences: list[list[int]]) -> None:
        data = [Datum(ids_T=np.array(ids[:-1]), inputs={"target_tokens": np.array(ids[1:])}) for ids in sequences]
        weighted = [
            Datum(ids_T=one.ids_T, inputs={**one.inputs, "weights": np.ones(len(one.ids_T), np.float32)})
            for one in data
        ]
        service.learn(TrainingRequest(model_id=model_id, data=weighted, loss_fn="cross_entropy")).future.result()
        service.optim_step({"model_id": model_id, "adam_params": {"learning_rate": 1e-6}}).future.result()

    train(sample([[1, 2, 3, 4]]))  # to warm up
    for length in (16, 200):
        encoded = [service.ready.codec.encode(f"{text} " * (1 + length // 5), special=False) for text in QUESTIONS]
        prompts = [one[:length] for one in encoded]
        service.scoring.is_exact = False
        sequences, sampling = _cpu(lambda prompts=prompts: sample(prompts))
        replies = [[ids[length:] for ids in sequences[i : i + REPLIES]] for i in range(0, len(sequences), REPLIES)]
        _, training = _cpu(lambda sequences=sequences: train(sequences))
        _, scoring = _cpu(
            lambda prompts=prompts, replies=replies: [
                service.scoring.replies(prompt, some, PLAIN) for prompt, some in zip(prompts, replies, strict=True)
            ]
        )
        count = sum(len(ids) for some in replies for ids in some)
        print(
            f"prompts of {length} tokens, {count} tokens sampled: sampling {sampling:.1f} s of CPU, training "
            f"{training:.1f} s, the logprobs of training for what was sampled {scoring:.1f} s, "
            f"{100 * scoring / (sampling + training):.0f}% of a round",
            flush=True,
        )
    service.close()


def _cpu(run: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return run(), time.process_time() - began


if __name__ == "__main__":
    main()
