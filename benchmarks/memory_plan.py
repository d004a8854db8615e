"""Planned and measured peak memory of GRPO steps: a 7B model with all weights on one GPU, LoRA and QLoRA in 24 GB.

python benchmarks/memory_plan.py               # every case that this machine can run, with random weights
python benchmarks/memory_plan.py lora qlora    # some cases
python benchmarks/memory_plan.py --shape small # a tenth of the size
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verifiers as vf
from benchmarks.training import coin, prompts_of
from verifiers.trainers.memory.plan import Device, ModelSize, Training, plan_memory

SHAPES = {  # hidden, feed-forward, layers, heads, key/value heads, vocabulary
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "small": (1024, 2816, 24, 16, 16, 32000),
}
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "cpu_offload": {"optim": "cpu_offload"},
    "lora": {"lora": True, "cap_gb": 24},
    "qlora": {"lora": True, "cap_gb": 24, "load_in_4bit": True},
}
WORDS, NEW = 64, 192


def config_of(shape: str) -> Any:
    hidden, feed_forward, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def make(shape: str) -> tuple[Any, Any]:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, SHAPES[shape][-1])}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config_of(shape))
    torch.set_default_dtype(torch.float32)
    return model, tokenizer


def planned_only(cases: list[str], shape: str, rollouts: int) -> None:
    """Without a GPU: the plan for an H200, and for 24 GB of it."""
    print("there is no card here: planned, and not measured")
    size, length = ModelSize.of(config_of(shape)), WORDS + 2 + NEW
    for name in cases:
        settings = CASES[name]
        asked = Training(
            size=size,
            trained=size.adapters(8) if settings.get("lora") else size.parameters,
            length=length,
            optim=settings.get("optim", "adamw"),
            in_4_bit=settings.get("load_in_4bit", False),
            slots=rollouts,
            step_tokens=rollouts * length,
        )
        capacity = settings.get("cap_gb", 150) * 1e9
        print(f"{name}: {plan_memory(asked, Device(kind='cuda', capacity=capacity, host=137e9))}")


def run(name: str, shape: str, steps: int, rollouts: int) -> None:
    settings = dict(CASES[name])
    lora, cap = settings.pop("lora", False), settings.pop("cap_gb", None)
    total = torch.cuda.get_device_properties(0).total_memory
    model, tokenizer = make(shape)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 1e9 / total) if cap else 1.0)
    torch.cuda.reset_peak_memory_stats()

    def reward(completion: str) -> float:
        return coin(completion)

    rows = [{"prompt": text, "answer": ""} for text in prompts_of(64, WORDS, SHAPES[shape][-1])]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([reward]), message_type="completion")
    config = vf.GRPOConfig(
        batch_size=rollouts,
        group_size=8,
        max_new_tokens=NEW,
        max_prompt_length=WORDS + 2,
        max_steps=steps,
        output_dir=tempfile.mkdtemp() + "/run",
        show_progress=False,
        **settings,
    )
    began = time.perf_counter()
    trainer = vf.GRPOTrainer(
        model=model, tokenizer=tokenizer, env=env, config=config, peft_config=vf.lora_defaults() if lora else None
    )
    report = trainer.train()
    measured, planned = torch.cuda.max_memory_allocated(), trainer.memory.peak
    took = ", ".join(f"{one['step_s']:.1f} ({one['generation_s']:.1f} sampling)" for one in report.steps)
    limit = f" in {cap} GB" if cap else ""
    print(
        f"{name}{limit}: planned {planned / 1e9:.1f} GB, measured {measured / 1e9:.1f} GB ({planned / measured:.2f}×)"
    )
    print(f"   {trainer.memory}")
    print(
        f"   {trainer.client.backend}; seconds a step: {took}; {time.perf_counter() - began:.0f} s in all", flush=True
    )
    ratios = [round(one["ratio_mean"], 4) for one in report.steps]
    print(f"   mean ratio {ratios}, reserved {torch.cuda.max_memory_reserved() / 1e9:.1f} GB", flush=True)
    trainer.client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=32)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        planned_only(given.cases or list(CASES), given.shape, given.rollouts)
        return
    has_bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None
    for name in given.cases or CASES:
        if name in ("adamw_8bit", "qlora") and not has_bitsandbytes:
            print(f"{name}: left out, bitsandbytes is not installed")
            continue
        try:
            run(name, given.shape, given.steps, given.rollouts)
        except Exception as error:  # continue with the next case
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
