"""SmolLM2-135M-Instruct trained for minutes on one GPU: held-out accuracy before and after, paired by question.

python benchmarks/learning_smollm2.py                         # arithmetic, LoRA and full
GSM8K_PATH=folder python benchmarks/learning_smollm2.py gsm8k  # the same on GSM8K (train.jsonl, test.jsonl)
    --model PATH   a folder or GGUF file instead of the embedded model
        --seed 1 2     one run per seed
        --minutes 2    stop each run's reinforcement learning after this time
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verifiers as vf
from verifiers.stats import compare

ROOT = Path(__file__).resolve().parents[1]
SAMPLED = 4  # rollouts per held-out question

CASES: dict[str, dict[str, Any]] = {
    "arithmetic": {
        "env": {"difficulty": "easy", "num_train_examples": 4000, "num_eval_examples": 1000},
        "metric": "correct",
        "config": {"batch_size": 512, "group_size": 16, "max_new_tokens": 96, "max_steps": 150},
        "rates": {"full": 2e-5, "lora": 3e-4},
    },
    "gsm8k": {
        "env": {},
        "metric": "correct_answer",
        "config": {"batch_size": 1024, "group_size": 32, "max_new_tokens": 200, "max_steps": 400},
        # Right answers are rare: with a higher rate the model always gives one frequent number, without reasoning.
        "rates": {"full": 1e-5, "lora": 1e-4},
        # The original model never uses the box, so all rewards would be 0.
        "warm_up_rates": {"full": 1e-4, "lora": 1e-3},
        "warm_up_epochs": 5,
    },
}


def run(name: str, how: str, model_name: str, minutes: float, seed: int) -> dict[str, Any]:
    case = CASES[name]
    sys.path.append(str(ROOT / "environments" / name))
    env = vf.load_environment(name, **case["env"])
    model, tokenizer = vf.get_model_and_tokenizer(model_name)
    began = time.perf_counter()

    def stop_in_time(trainer: Any, figures: Any) -> None:
        if figures["step"] % 10 == 1:
            shown = {key: round(figures[key], 3) for key in ("reward", "entropy", "completion_tokens", "step_s")}
            print(f"   step {figures['step']} {shown} {figures['metrics']}", flush=True)
        trainer.should_stop = time.perf_counter() - began > 60 * minutes

    trainer = vf.GRPOTrainer(
        model=model,
        tokenizer=tokenizer,
        env=env,
        peft_config=vf.lora_defaults(r=16, alpha=32) if how == "lora" else None,
        config=vf.GRPOConfig(
            **case["config"],
            learning_rate=case["rates"][how],
            warmup_steps=5,
            seed=seed,
            max_prompt_length=384,
            bf16=torch.cuda.is_available(),
            eval_sampling_args={"temperature": 0.0},
            output_dir=tempfile.mkdtemp() + "/run",
            show_progress=False,
        ),
        callbacks=[stop_in_time],
    )
    at_first = trainer.evaluate()
    if "warm_up_rates" in case:
        warm_up(trainer, env, case["warm_up_rates"][how], case["warm_up_epochs"], seed)
    before = held_out(trainer)
    results = before["greedy"]
    metric = case["metric"] if case["metric"] in results.metric_names else results.metric_names[0]
    began = time.perf_counter()
    report = trainer.train()
    seconds = time.perf_counter() - began
    after = held_out(trainer)
    print(f"{name}, {how}, seed {seed}, {len(report.steps)} steps in {seconds:.0f} s", flush=True)
    whole = compare(scores(at_first, metric), scores(after["greedy"], metric))
    print(f"   held-out {metric} as it came, greedy: {at_first.interval(metric)}", flush=True)
    print(f"   question by question, greedy, A as it came and B after: {whole}", flush=True)
    figures = {}
    for way in before:
        gain = compare(scores(before[way], metric), scores(after[way], metric))
        print(f"   held-out {metric}, {way}: before {before[way].interval(metric)}", flush=True)
        print(f"   held-out {metric}, {way}: after  {after[way].interval(metric)}", flush=True)
        print(f"   question by question, {way}, A before and B after: {gain}", flush=True)
        figures[way] = {
            "before": vars_of(before[way].interval(metric)),
            "after": vars_of(after[way].interval(metric)),
            "paired": {"difference": gain.difference, "low": gain.low, "high": gain.high, "p": gain.p_value},
        }
    return {
        "case": name,
        "how": how,
        "seed": seed,
        "steps": len(report.steps),
        "seconds": seconds,
        "as_it_came": vars_of(at_first.interval(metric)),
        **figures,
        "rewards": [round(reward, 4) for reward in report.rewards],
        "sample": str(after["greedy"]["completion"][0])[:600],
    }


def held_out(trainer: Any) -> dict[str, Any]:
    """Evaluate greedily, as in use, and by sampling, as in training, with repeats for a narrower interval."""
    sampled = trainer.env.generate_sync(
        inputs=trainer.eval_rows,
        client=trainer.client,
        rollouts_per_example=SAMPLED,
        sampling_args={**trainer.sampling, "temperature": 1.0},
        use_tqdm=False,
    )
    return {"greedy": trainer.evaluate(), f"{SAMPLED} sampled at temperature 1": sampled}


def scores(results: Any, metric: str) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for example, score in zip(results["example_id"], results[metric], strict=True):
        found.setdefault(example, []).append(score)
    return found


def warm_up(trainer: Any, env: Any, rate: float, epochs: int, seed: int) -> None:
    """Supervised fine-tuning on the worked solutions of the training rows."""
    solutions = {}
    for line in Path(os.environ["GSM8K_PATH"], "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps, _, answer = row["answer"].partition("####")
        solutions[row["question"]] = f"{re.sub('<<.*?>>', '', steps).strip()}\n\\boxed{{{answer.strip()}}}"
    rows = [
        {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": solutions[row["question"]]}]}
        for row in env.get_dataset()
        if row.get("question") in solutions
    ]
    began = time.perf_counter()
    vf.SFTTrainer(
        model=trainer.model,
        tokenizer=trainer.tokenizer,
        dataset=rows,
        config=vf.SFTConfig(
            batch_size=64,
            num_epochs=epochs,
            seed=seed,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_ratio=0.1,
            output_dir=tempfile.mkdtemp() + "/run",
            show_progress=False,
        ),
    ).train()
    trainer.client.forget()
    print(f"   warmed up on {len(rows)} solutions in {time.perf_counter() - began:.0f} s", flush=True)


def vars_of(interval: Any) -> dict[str, Any]:
    return {name: getattr(interval, name) for name in ("mean", "low", "high", "n")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["arithmetic"], choices=list(CASES))
    parser.add_argument("--how", nargs="*", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", nargs="*", type=int, default=[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    rows = []
    for name in args.cases:
        for how, seed in itertools.product(args.how, args.seed):
            rows.append(run(name, how, args.model, args.minutes, seed))
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
