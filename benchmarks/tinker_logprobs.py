"""Cost of rescoring samples with training's logprobs in `vf tinker-serve`, as a share of a sample-and-train round.

python benchmarks/tinker_logprobs.py     # SmolLM2-135M with LoRA, prompts of 16 and of 200 tokens: CPU time; on a GPU
                                         # wall-clock time, with more prompts and random weights of the same shape
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import engine as shapes
from verifiers import tiny_model
from verifiers.integrations.tinker import TinkerServer
from verifiers.integrations.tinker.data import Datum, TrainingRequest
from verifiers.integrations.tinker.scoring import Reply

QUESTIONS = ("What is the capital of France?", "Write a story about a ship.", "Name five primes.", "Is snow white?")


def main() -> None:
    on_card = torch.cuda.is_available()
    n_prompts, n, tokens = (32, 8, 128) if on_card else (len(QUESTIONS), 4, 64)
    given: tuple[Any, ...] = (shapes.make("smollm2", "cuda"), tiny_model()[1]) if on_card else ("smollm2",)
    server = TinkerServer(*given, name="smollm2", folder=tempfile.mkdtemp(), rows=n_prompts * n, length=512)
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
             "num_samples": n, "sampling_params": {"max_tokens": tokens, "seed": 1}}
            for prompt in prompts
        ]  # fmt: skip
        waiting = [service.sample(body).future for body in bodies]
        replies = [one.result().json()["sequences"] for one in waiting]
        return [[*prompt, *one["tokens"]] for prompt, some in zip(prompts, replies, strict=True) for one in some]

    def train(sequences: list[list[int]]) -> None:
        data = [
            Datum(
                ids_T=np.array(ids[:-1]),
                inputs={"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)},
            )
            for ids in sequences
        ]
        service.learn(TrainingRequest(model_id=model_id, data=data, loss_fn="cross_entropy")).future.result()
        service.optim_step({"model_id": model_id, "adam_params": {"learning_rate": 1e-6}}).future.result()

    clock = time.perf_counter if on_card else time.process_time
    for length in (16, 200):
        encoded = [service.ready.codec.encode(f"{text} " * (1 + length // 5), special=False) for text in QUESTIONS]
        prompts = [[i + 3, *one[: length - 1]] for i, one in zip(range(n_prompts), encoded * n_prompts, strict=False)]
        for _ in range(2 if on_card else 1):
            train(sample(prompts))  # warm-up
        sequences, sampling = _timed(lambda prompts=prompts: sample(prompts), clock)
        _, training = _timed(lambda sequences=sequences: train(sequences), clock)
        replies = [Reply(ids[:length], ids[length:]) for ids in sequences]
        _, scoring = _timed(lambda replies=replies: service.scoring.replies(replies), clock)
        print(
            f"prompts of {length} tokens, {sum(len(one.ids) for one in replies)} tokens sampled: sampling "
            f"{sampling:.2f} s of {'a card' if on_card else 'CPU'}, training {training:.2f} s; logprobs of training "
            f"for what was sampled {scoring:.2f} s, {100 * scoring / (sampling + training - scoring):.0f}% more than "
            "a round without",
            flush=True,
        )
    service.close()


def _timed(run: Callable[[], Any], clock: Callable[[], float]) -> tuple[Any, float]:
    began = clock()
    return run(), clock() - began


if __name__ == "__main__":
    main()
