"""Seconds per training step of our and TRL's GRPO trainer: the same model, prompts, group size, lengths and steps.

python benchmarks/training.py                  # a tiny model on the CPU; SmolLM2's shape on a GPU
python benchmarks/training.py --only ours      # without TRL (which needs: pip install trl)
python benchmarks/training.py --learn          # instead: the reward of both after the same number of samples
python benchmarks/training.py --host           # instead: CPU per rollout of the trainer's thread, with a minimal model
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verifiers as vf

SHAPES = {  # hidden, feed-forward, layers, heads, key/value heads, width of a head, vocabulary
    "least": (16, 16, 1, 1, 1, 16, 512),
    "tiny": (128, 256, 4, 4, 2, 32, 512),
    "smollm2": (576, 1536, 30, 9, 3, 64, 49152),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
}


def make(shape: str, device: str) -> tuple[Any, Any]:
    """A model with random weights, and a tokenizer with one word per token."""
    hidden, feed_forward, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[shape]
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, vocabulary)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    family = "Qwen3" if shape.startswith("qwen3") else "Llama"
    config = getattr(transformers, f"{family}Config")(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32), tokenizer


def prompts_of(n: int, words: int, vocabulary: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(words)) for _ in range(n)]


def coin(text: str) -> float:
    """A cheap pseudo-random reward, so that rewards differ within every group."""
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0] / 255


def evenness(text: str) -> float:
    """A learnable reward: the share of words with an even number."""
    words = text.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)


REWARDS: dict[str, Callable[[str], float]] = {"coin": coin, "evenness": evenness}


def same_settings(case: dict[str, Any]) -> dict[str, Any]:
    """Settings with the same name in both trainers."""
    return {
        "gradient_accumulation_steps": case["rollouts"] // case["micro"],
        "max_steps": case["steps"],
        "learning_rate": case["rate"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "loss_type": "dr_grpo",
        "scale_rewards": "group",
        "seed": case["seed"],
    }


def ours(
    case: dict[str, Any],
    device: str,
    trainer_class: type[vf.GRPOTrainer] = vf.GRPOTrainer,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """The seconds and the mean reward of each step."""
    model, tokenizer = make(case["shape"], device)

    def reward(completion: str) -> float:
        return REWARDS[case["reward"]](completion)

    rows = [{"prompt": text, "answer": ""} for text in prompts_of(512, case["words"], SHAPES[case["shape"]][-1])]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([reward]), message_type="completion")
    times = [clock()]
    config = vf.GRPOConfig(
        batch_size=case["micro"],
        group_size=case["group"],
        max_new_tokens=case["new"],
        max_prompt_length=case["words"] + 2,
        **same_settings(case),
        output_dir=tempfile.mkdtemp() + "/run",
        show_progress=False,
    )
    trainer = trainer_class(
        model=model,
        tokenizer=tokenizer,
        env=env,
        config=config,
        callbacks=[lambda trainer, figures: times.append(clock())],
        peft_config=vf.lora_defaults() if case.get("lora") else None,
    )
    report = trainer.train()
    last = report.steps[-1]
    print(f"   of which sampling {last['generation_s']:.3f} s, learning {last['training_s']:.3f} s", flush=True)
    return [b - a for a, b in itertools.pairwise(times)], list(report.rewards)


def trl(case: dict[str, Any], device: str) -> tuple[list[float], list[float]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = make(case["shape"], device)
    tokenizer.padding_side = "left"
    rows = Dataset.from_list([{"prompt": text} for text in prompts_of(512, case["words"], SHAPES[case["shape"]][-1])])
    times = [time.perf_counter()]
    learns = case["reward"] != "coin"

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=case["micro"],
        num_generations=case["group"],
        max_completion_length=case["new"],
        **same_settings(case),
        beta=0.0,
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1 if learns else 1000,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=config,
        train_dataset=rows,
        peft_config=vf.lora_defaults() if case.get("lora") else None,
        reward_funcs=[lambda completions, **_: [REWARDS[case["reward"]](text) for text in completions]],
        callbacks=[Clock()],
    )
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    return [b - a for a, b in itertools.pairwise(times)], rewards


ROUNDS = {"cpu": 5, "cuda": 1}


def shown(whose: str, seconds: list[float]) -> float:
    """The median seconds per step, without the first third as warm-up."""
    median = statistics.median(seconds[len(seconds) // 3 :])
    print(f"   {whose} {median:.3f} s a step; each: {', '.join(f'{one:.3f}' for one in seconds)}", flush=True)
    return median


CASES = {
    "cpu": [{"shape": "tiny", "rollouts": 16, "micro": 16, "group": 4, "words": 16, "new": 32, "steps": 24}],
    "cuda": [
        {"shape": "smollm2", "rollouts": 256, "micro": 64, "group": 16, "words": 64, "new": 128, "steps": 9},
        {"shape": "smollm2", "rollouts": 1024, "micro": 128, "group": 16, "words": 64, "new": 128, "steps": 9},
        {
            "shape": "qwen3-1.7b",
            "rollouts": 256,
            "micro": 64,
            "group": 16,
            "words": 64,
            "new": 512,
            "steps": 4,
            "lora": True,
        },
    ],
}


LEARN: dict[str, dict[str, Any]] = {  # settings common to both; a small model learns this on a GPU too
    "cpu": {"steps": 60, "rate": 1e-3},
    "cuda": {"steps": 25, "rate": 2e-3},
}
LEARNER = {"shape": "tiny", "rollouts": 64, "micro": 64, "group": 8, "words": 16, "new": 32, "reward": "evenness"}
LAST = 5  # final steps whose rewards are averaged


def compare_rewards(device: str, seeds: int) -> None:
    """The reward of both with the same settings and number of samples."""
    case = {**LEARNER, **LEARN[device]}
    print(f"{case['steps']} steps of {case['rollouts']} rollouts, {case['new']} new tokens, {seeds} seeds", flush=True)
    reached: dict[str, list[float]] = {"ours": [], "TRL": []}
    for seed in range(seeds):
        for name, trainer in {"ours": ours, "TRL": trl}.items():
            _, rewards = trainer({**case, "seed": seed}, device)
            reached[name].append(statistics.mean(rewards[-LAST:]))
            print(f"   seed {seed}, {name}: {rewards[0]:.3f} at first, {reached[name][-1]:.3f} at the end", flush=True)
    for name, values in reached.items():
        spread = f" (from seed to seed ± {statistics.stdev(values):.3f})" if seeds > 1 else ""
        print(f"   {name}: {statistics.mean(values):.3f} on average{spread}", flush=True)


HOST = {"shape": "least", "rollouts": 1024, "micro": 1024, "group": 16, "words": 64, "new": 64, "steps": 12}


def clocked(learned: list[float]) -> type[vf.GRPOTrainer]:
    """A trainer that records the CPU seconds of each `train_step`."""

    class Clocked(vf.GRPOTrainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            began = time.thread_time()
            figures = super().train_step(batch)
            learned.append(time.thread_time() - began)
            return figures

    return Clocked


def host_time() -> None:
    """CPU time of the thread that runs rollouts and trains; the engine's steps run in their own thread."""
    learned: list[float] = []
    case = {**HOST, "reward": "coin", "rate": 1e-6, "seed": 0}
    steps, _ = ours(case, "cpu", clocked(learned), time.thread_time)
    around = [1000 * (step - part) / HOST["rollouts"] for step, part in zip(steps[1:], learned[1:], strict=True)]
    learning = [1000 * part / HOST["rollouts"] for part in learned[1:]]
    for name, values in {"making, scoring, reporting": around, "train_step": learning}.items():
        print(f"   {name}: {statistics.median(values):.3f} ms of CPU a rollout (least {min(values):.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ours", "trl"])
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.filterwarnings("ignore")
    if device == "cpu":
        torch.set_num_threads(1)
    if args.host:
        host_time()
        return
    if args.learn:
        compare_rewards(device, args.seeds)
        return
    has_trl = importlib.util.find_spec("trl") is not None
    if args.only != "ours" and not has_trl:
        print("TRL is not installed: pip install trl", flush=True)
    for shape in CASES[device]:
        case = {**shape, "reward": "coin", "rate": 1e-6, "seed": 0}
        what = f"{case['shape']}, {case['rollouts']} rollouts in groups of {case['group']}, {case['new']} new tokens"
        what += ", LoRA" if case.get("lora") else ""
        print(what, flush=True)
        mine, theirs = [], []
        for _ in range(ROUNDS[device]):  # alternating, because other load varies
            if args.only != "trl":
                mine.append(shown("ours", ours(case, device)[0]))
            if args.only != "ours" and has_trl:
                theirs.append(shown("TRL", trl(case, device)[0]))
        if mine and theirs:
            print(f"   {statistics.median(theirs) / statistics.median(mine):.1f}× quicker", flush=True)


if __name__ == "__main__":
    main()
