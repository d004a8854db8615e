"""Runs to look at: a believable evaluation, a second one to compare it with, a training, and a hostile one."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers.store import RunDir, to_record

REPO = Path(__file__).resolve().parents[2]
STEPS = 120


def record_of(example_id: int | str = 0, rollout: int = 0, *, fails: bool = False, **columns: Any) -> dict[str, Any]:
    error = {"type": "JudgeError", "blame": "grader", "message": "the judge is down\nfor now"} if fails else None
    return {
        "example_id": example_id,
        "rollout": rollout,
        "task": "sums",
        "prompt": [{"role": "user", "content": f"What is {example_id}+{example_id}?"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "answer": "4",
        "info": {},
        "reward": None if fails else 1.0,
        "error": error,
        "metrics": {} if fails else {"exact": 1.0},
        **columns,
    }


def evaluate(root: Path, *, model: str, skill: float, seed: int, n: int = 60, rollouts: int = 4) -> Path:
    """A fake model does arithmetic: often right, sometimes wrong, without a format, cut off or not there at all."""
    asked: Counter[str] = Counter()

    async def reply(messages: Any) -> Any:
        question = str(messages[-1]["content"])
        asked[question] += 1
        draw = random.Random(f"{seed} {question} {asked[question]}")
        await asyncio.sleep(draw.expovariate(50))
        right = eval_left_to_right(question)
        luck = draw.random()
        if luck > 0.97:
            return ConnectionError("the endpoint closed the connection")
        if luck > 0.93:
            return f"I think it is {right}, but let me check that again before I answer"
        answer = right if draw.random() < skill else right + draw.choice([-10, -2, -1, 1, 2, 9, 10])
        return f"<reasoning>\n{steps_of(question)}\n</reasoning>\n<answer>\n{answer}\n</answer>"

    env = vf.load_environment("arithmetic", environments_dir=REPO / "environments", seed=3)
    results = env.evaluate(
        vf.FakeClient(reply),
        model,
        num_examples=n,
        rollouts_per_example=rollouts,
        save_results=True,
        results_path=root / f"arithmetic--{model.replace('/', '--')}" / f"{seed:08x}",
        sampling_args={"temperature": 0.7, "max_tokens": 512},
        use_tqdm=False,
    )
    return Path(results.metadata["path_to_save"])


def eval_left_to_right(question: str) -> int:
    numbers = re.findall(r"[-+*]|\d+", question)
    value = int(numbers[0])
    for sign, number in zip(numbers[1::2], numbers[2::2], strict=True):
        value = {"+": value + int(number), "-": value - int(number), "*": value * int(number)}[sign]
    return value


def steps_of(question: str) -> str:
    numbers = re.findall(r"[-+*]|\d+", question)
    value, lines = int(numbers[0]), []
    for sign, number in zip(numbers[1::2], numbers[2::2], strict=True):
        after = {"+": value + int(number), "-": value - int(number), "*": value * int(number)}[sign]
        lines.append(f"{value} {sign} {number} = {after}")
        value = after
    return "\n".join(lines)


# --- a training -------------------------------------------------------------------------------------------------------


def train(
    root: Path,
    *,
    steps: int = STEPS,
    finished: bool = True,
    name: str = "warm-start",
    seed: int = 7,
    pace: float = 14,
) -> Path:
    """What a training leaves behind, made up: rewards rise, entropy falls, and the doctor has something to say."""
    run = RunDir.create(
        root,
        env_id="arithmetic",
        model="smollm2",
        config={"learning_rate": 1e-5, "group_size": 8, "beta": 0.01, "seed": seed, "temperature": 14 / pace},
        run_id=name,
    )
    draw = random.Random(seed)
    with open(run.path / "metrics.jsonl", "w", encoding="utf-8") as file, run.appender() as out:
        for step in range(1, steps + 1):
            file.write(json.dumps(step_line(step, draw, pace)) + "\n")
            if step % 20 == 0:
                mean = curve(step, pace) + 0.02
                found = {"reward": mean, "low": mean - 0.05, "high": mean + 0.05, "n": 200, "failed": 0, "metrics": {}}
                file.write(json.dumps({"step": step, "time": 1.7e9 + 2 * step, "eval": found}) + "\n")
            if step == 34:
                words = "no group has any variance in its rewards: raise the temperature or take easier examples"
                file.write(json.dumps({"step": step, "time": 1.7e9 + 2 * step, "notice": words}) + "\n")
            if step % 5 == 0:
                for record in samples_of(step, draw):
                    out.append(record)
    weights = {"correct": 1.0, "format": 0.1}
    run.update_metadata({"kind": "training", "reward_weights": weights, **({"finished": True} if finished else {})})
    return run.path


def curve(step: int, pace: float = 14) -> float:
    return 0.12 + 0.72 / (1 + math.exp(-(step - 3.2 * pace) / pace))


def step_line(step: int, draw: random.Random, pace: float = 14) -> dict[str, Any]:
    correct = curve(step, pace) - 0.09 + draw.gauss(0, 0.025)
    form = min(1.0, 0.5 + step / 80)
    reward = correct + 0.1 * form
    half = 0.05 + 0.02 * draw.random()
    lag = 1.1 + draw.random() * 0.2
    edges = [0.7 + 0.05 * i for i in range(13)]
    return {
        "step": step,
        "epoch": step / 60,
        "time": 1.7e9 + 2 * step,
        "loss": 0.03 * math.exp(-step / 50) * (1 + draw.gauss(0, 0.3)),
        "reward": reward,
        "reward_low": reward - half,
        "reward_high": reward + half,
        "reward_std": 0.4,
        "kl": 0.0002 * step * (1 + draw.gauss(0, 0.1)),
        "entropy": 1.35 * math.exp(-step / 90) + 0.25 + draw.gauss(0, 0.02),
        "completion_tokens": 90 + 35 * math.sin(step / 30) + draw.gauss(0, 4),
        "completion_tokens_max": 190 + draw.randint(0, 60),
        "truncated": max(0.0, 0.09 - step / 1500 + draw.gauss(0, 0.01)),
        "clip_fraction": max(0.0, 0.02 + draw.gauss(0, 0.006)),
        "zero_variance": min(1.0, max(0.0, 0.55 - 0.4 * curve(step) + draw.gauss(0, 0.05))),
        "failed": 0,
        "ratio_mean": 1 + draw.gauss(0, 0.003),
        "ratio_max": 1.2 + draw.random() * 0.2,
        "ratio_histogram": {
            "edges": edges,
            "counts": [int(900 * math.exp(-((x - 1) ** 2) / 0.008)) for x in edges[1:]],
        },
        "grad_norm": 0.6 + draw.gauss(0, 0.1),
        "learning_rate": 1e-5 * min(1.0, step / 10),
        "tokens_per_s": 5200 + draw.gauss(0, 300),
        "generation_s": lag,
        "scoring_s": 0.02,
        "training_s": 0.45,
        "step_s": lag + 0.5,
        "samples": 256,
        "total_tokens": 23_000 * step,
        "metrics": {"correct": correct, "format": form},
    }


def samples_of(step: int, draw: random.Random) -> list[dict[str, Any]]:
    records = []
    for example in range(4):
        a, b = draw.randint(1, 20), draw.randint(1, 20)
        for repeat in range(4):
            is_right = draw.random() < curve(step)
            words = f"<reasoning>\n{a} + {b}\n</reasoning>\n<answer>\n{a + b + (0 if is_right else 1)}\n</answer>"
            state = {
                "example_id": step * 10 + example,
                "task": "easy",
                "answer": str(a + b),
                "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
                "completion": [{"role": "assistant", "content": words}],
                "reward": float(is_right),
                "metrics": {"correct": float(is_right), "format": 1.0},
                "timing": {"generation_ms": 900.0 + draw.random() * 200, "scoring_ms": 0.4, "total_ms": 1100.0},
                "stop_condition": "max_turns_reached",
                "usage": {"prompt_tokens": 40, "completion_tokens": 60 + draw.randint(0, 20)},
                "step": step,
                "advantage": (1.0 if is_right else -1.0) * (1 - curve(step)),
                "sampled_tokens": [sampled_of(words, draw)],
            }
            records.append(to_record(state, rollout=repeat, state_columns=["step", "advantage", "sampled_tokens"]))
    return records


def sampled_of(words: str, draw: random.Random) -> dict[str, Any]:
    """Tokens as a training keeps them, with the ratio that each had in the update."""
    ids = [5 + ord(character) for character in words]
    logprobs = [min(-0.001, -(abs(draw.gauss(0, 0.6)) ** 3)) for _ in ids]
    return {
        "prompt_tokens": 40,
        "ids": ids,
        "logprobs": logprobs,
        "ratios": [math.exp(draw.gauss(0, 0.1)) for _ in ids],
    }


# --- a judge ----------------------------------------------------------------------------------------------------------

EXPLANATION = """## Why the sky is blue

Sunlight is **scattered** by molecules, *short* waves far more than long ones (`1/λ⁴`):

1. red light passes nearly straight through
2. blue light goes everywhere
   - so that one sees it in **every** direction

| colour | wavelength | scattered |
|---|---|---|
| red | 650 nm | 1× |
| blue | 450 nm | 4.4× |

```python
def scattered(nm):  # relative to red
    return (650 / nm) ** 4
```

> See [Rayleigh](https://example.org/rayleigh)."""


def judged_run(root: Path, *, n: int = 8) -> Path:
    """Explanations in markdown, of which a judge says what it thinks."""
    draw = random.Random(4)

    def reply(_: Any) -> str:
        return EXPLANATION if draw.random() < 0.7 else "Because it mirrors the **ocean**."

    def verdict(messages: Any) -> str:
        is_right = "scattered" in str(messages[-1]["content"])
        return f"It names {'**Rayleigh scattering**' if is_right else 'the ocean'}.\n\n{'yes' if is_right else 'no'}"

    async def judged(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        return float((await judge(prompt, completion, answer, state)).endswith("yes"))

    def shows_code(completion: Any) -> float:
        return float("```" in completion[-1]["content"])

    rubric = vf.JudgeRubric(judge_client=vf.FakeClient(verdict), judge_model="org/judge")
    rubric.add_reward_func(judged, 1.0)
    rubric.add_reward_func(shows_code, 0.25)
    rows = [{"question": f"Why is the sky blue? (reader {i})", "answer": "Rayleigh scattering"} for i in range(n)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=rubric)
    env.env_id = "explain"
    path = root / "explain--org--writer" / "00000900"
    env.evaluate(vf.FakeClient(reply), "org/writer", rollouts_per_example=2, results_path=path, use_tqdm=False)
    RunDir.open(path).update_metadata({"tags": ["baseline", "paper"], "note": "the first with a judge"})
    return path


# --- turns with tools and tokens --------------------------------------------------------------------------------------


def labelled_run(root: Path, *, model: str = "org/labels", skill: float = 0.8, seed: int = 0) -> Path:
    """Yes or no, where aggregate metrics say more than a mean; one of them has a function that fails."""
    draw = random.Random(seed)

    def reply(messages: Any) -> str:
        truth = "yes" if int(messages[-1]["content"].split()[1]) % 5 == 0 else "no"
        return truth if draw.random() < skill else "no"

    def right(completion: Any, answer: str) -> bool:
        return completion[-1]["content"] == answer

    def share_of_others(rows: Any) -> float:
        return 1 / sum(row["parsed"] not in ("yes", "no") for row in rows)

    rows = [{"question": f"Is {n} a multiple of five?", "answer": "yes" if n % 5 == 0 else "no"} for n in range(40)]
    env = vf.SingleTurnEnv(
        dataset=rows,
        rubric=vf.Rubric([right]),
        aggregates={"balanced": "balanced_accuracy", "f1": vf.stats.f1_of("yes"), "others": share_of_others},
    )
    env.env_id = "multiples"
    path = root / f"multiples--{model.replace('/', '--')}" / "00000600"
    env.evaluate(vf.FakeClient(reply), model, results_path=path, use_tqdm=False)
    return path


def tool_run(root: Path, *, model: str = "org/tooled") -> Path:
    """A conversation with tool calls and reasoning, saved with its trajectory, so that tokens have logprobs."""
    run = RunDir.create(root, env_id="shop", model=model, config={"max_turns": 4}, run_id="00000700")
    draw = random.Random(5)
    texts = [message["content"] or "find_order(customer=C-17)" for message in tool_messages()[::2]]
    vocabulary = write_tokenizer(run.path / "checkpoints" / "step-000001", texts)
    with run.appender() as out:
        for example in range(6):
            steps = []
            for text in texts:
                ids = [vocabulary[piece] for piece in pieces_of(text)]
                logprobs = [min(-0.001, -(abs(draw.gauss(0, 0.8)) ** 3)) for _ in ids]
                tokens = {"prompt_ids": [1] * 10, "completion_ids": ids, "completion_logprobs": logprobs}
                steps.append({"prompt": [], "completion": [], "tokens": tokens, "extras": {}})
            state = {
                "example_id": f"order-{example}",
                "task": "shop",
                "answer": "12.50",
                "info": {"customer": "C-17", "difficulty": "hard"},
                "prompt": [
                    {"role": "system", "content": "You are a shop assistant. Use the tools."},
                    {"role": "user", "content": "What does my order cost in euros?"},
                ],
                "completion": tool_messages(),
                "reward": 0.5 + example / 12,
                "metrics": {"correct": 0.5 + example / 12, "polite": 1.0},
                "timing": {"generation_ms": 2310.0, "scoring_ms": 140.0, "total_ms": 2450.0},
                "stop_condition": "no_tools_called",
                "usage": {"prompt_tokens": 812, "completion_tokens": 96, "cost_usd": 0.0011},
                "trajectory": steps,
            }
            out.append(to_record(state, rollout=0, state_columns=["trajectory"]))
    run.update_metadata({"num_rollouts": 6, "num_failed": 0, "avg_reward": 0.7})
    return run.path


def tool_messages() -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "find_order", "arguments": '{"customer": "C-17"}'}}
    return [
        {"role": "assistant", "content": "", "reasoning_content": "First the order.", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "name": "find_order",
            "content": '{"total": 13.5, "currency": "USD"}',
        },
        {"role": "assistant", "content": ANSWER},
    ]


ANSWER = """The order of customer C-17 was charged in US dollars, so I convert it first.
13.50 USD at a rate of 0.926 is 12.50 EUR.

<answer>12.50</answer> – naïvely rounded, but right to the cent."""


def pieces_of(text: str) -> list[str]:
    return re.findall(r" ?\w+|\s+|[^\w\s]", text)


def write_tokenizer(folder: Path, texts: list[str]) -> dict[str, int]:
    """A tokenizer whose tokens are the words of these texts, as a checkpoint would hold one."""
    vocabulary = {
        piece: 5 + i for i, piece in enumerate(sorted({piece for text in texts for piece in pieces_of(text)}))
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {as_bytes(piece): i for piece, i in vocabulary.items()}, "merges": []},
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return vocabulary


def as_bytes(text: str) -> str:
    """The spelling of byte-level tokens: bytes that cannot be printed are moved up by 256."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = {byte: 256 + i for i, byte in enumerate(byte for byte in range(256) if byte not in kept)}
    return "".join(chr(moved.get(byte, byte)) for byte in text.encode())
