"""Grade-school word problems: from the hub, or from a folder with train.jsonl and test.jsonl."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import verifiers as vf

SYSTEM_PROMPT = "Solve the problem step by step. Give the final number, and nothing else, inside \\boxed{}."
THINK_PROMPT = (
    "Solve the problem step by step inside <think>...</think>. "
    "After it give the final number, and nothing else, inside \\boxed{}."
)


def read_split(path: Path) -> list[dict[str, str]]:
    """The rows of one file; the answer is the text after ``####`` in the worked solution."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, solution = row["question"], row["answer"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is not a JSON object with question and answer: {error}") from error
        if "####" not in solution:
            raise ValueError(f"{path}:{number}: the answer has no '####' before its final number")
        rows.append({"question": question, "answer": vf.extract_hash_answer(solution)})
    return rows


def read_rows(split: str, folder: Path | None, n: int) -> Any:
    """The first ``n`` rows of a split (-1: all), from the folder or from the hub."""
    if folder is not None:
        rows = read_split(folder / f"{split}.jsonl")
        return rows if n < 0 else rows[:n]
    try:
        found = vf.load_example_dataset("gsm8k", split=split)
    except OSError as error:
        advice = "set dataset_path or GSM8K_PATH to a folder with train.jsonl and test.jsonl"
        raise OSError(f"gsm8k could not be loaded from the hub; without it, {advice}: {error}") from error
    return found if n < 0 else found.select(range(min(n, len(found))))


def find_folder(dataset_path: str | None) -> Path | None:
    """The folder in ``dataset_path`` or ``GSM8K_PATH``; None for the hub."""
    given = dataset_path or os.environ.get("GSM8K_PATH")
    if not given:
        return None
    folder = Path(given).expanduser()
    for split in ("train", "test"):
        if not (folder / f"{split}.jsonl").is_file():
            raise FileNotFoundError(f"{folder} has no {split}.jsonl; it must contain train.jsonl and test.jsonl")
    return folder


def has_box(parser: vf.Parser, completion: vf.Messages) -> bool:
    """Is there an answer at all?"""
    return bool(parser.parse_answer(completion))


def load_environment(
    dataset_path: str | None = None,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    use_think: bool = False,
    system_prompt: str | None = None,
) -> vf.SingleTurnEnv:
    """GSM8K; the reward is 1 if the number in the last ``\\boxed{}`` equals the right one, else 0."""
    folder = find_folder(dataset_path)
    in_box = functools.partial(vf.extract_boxed_answer, strict=True)  # a reply without a box has no answer
    parser = vf.ThinkParser(extract_fn=in_box) if use_think else vf.MaybeThinkParser(extract_fn=in_box)
    return vf.SingleTurnEnv(
        dataset=functools.partial(read_rows, "train", folder, num_train_examples),
        eval_dataset=functools.partial(read_rows, "test", folder, num_eval_examples),
        system_prompt=system_prompt or (THINK_PROMPT if use_think else SYSTEM_PROMPT),
        parser=parser,
        rubric=vf.MathRubric([has_box], [0.0], parser=parser),
    )
