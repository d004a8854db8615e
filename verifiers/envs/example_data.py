"""The name of a well-known data set → rows of question and answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.envs.hub_errors import in_a_sentence
from verifiers.parsers import extract_boxed_answer, extract_hash_answer, strip_non_numeric
from verifiers.types import Row

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Example:
    """The location of a data set on the hub, and how to read its rows: row and seed → question and answer."""

    hub_id: str
    split: str
    read: Callable[[Row, int], Row]
    configs: tuple[str | None, ...] = (None,)
    keep: Callable[[Row], bool] | None = None


def load_example_dataset(name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0) -> Any:
    """A well-known data set as a Hugging Face ``Dataset`` of ``question`` and ``answer``; all or ``n`` random rows.

    >>> load_example_dataset("gsm9k")
    Traceback (most recent call last):
    ValueError: there is no example dataset 'gsm9k'; there are aime2024, aime2025, amc2023, ...
    """
    example = EXAMPLES.get(name)
    if example is None:
        raise ValueError(f"there is no example dataset {name!r}; there are {', '.join(EXAMPLES)}")
    try:
        from datasets import Dataset, concatenate_datasets, load_dataset
    except ImportError:
        raise ImportError("example datasets need: pip install 'verifiers[data]'") from None
    wanted = split or example.split
    with in_a_sentence(f"the data set {example.hub_id!r} cannot be loaded"):
        rows = concatenate_datasets([load_dataset(example.hub_id, config, split=wanted) for config in example.configs])
    if example.keep is not None:
        rows = rows.select([i for i, row in enumerate(rows) if example.keep(row)])
    if n is not None and n > 0:
        rows = rows.shuffle(seed=seed).select(range(min(n, len(rows))))
    return Dataset.from_list([example.read(row, seed) for row in rows])


def _columns(question: str, answer: str, clean: Callable[[Any], str] = str) -> Callable[[Row, int], Row]:
    """Read a question and an answer from two columns."""
    return lambda row, _: {"question": row[question], "answer": clean(row[answer])}


def _with_options(question: str, options: Mapping[str, str]) -> str:
    return "\n".join((f"Question: {question}", "", *(f"{letter}: {option}" for letter, option in options.items())))


def _read_gpqa(row: Row, seed: int) -> Row:
    """Shuffle the options, differently for each question, because the right answer is the first in every row."""
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    order = random.Random(f"{seed} {row['Question']}").sample(range(4), 4)
    shown = {LETTERS[place]: options[option] for place, option in enumerate(order)}
    return {"question": _with_options(row["Question"], shown), "answer": LETTERS[order.index(0)]}


def _read_mmlu(row: Row, _: int) -> Row:
    options = dict(zip(LETTERS, row["choices"], strict=False))
    return {"question": _with_options(row["question"], options), "answer": LETTERS[row["answer"]]}


def _read_mmlu_pro(row: Row, _: int) -> Row:
    options = dict(zip(LETTERS, row["options"], strict=False))
    return {"question": _with_options(row["question"], options), "answer": row["answer"]}


def _read_openbookqa(row: Row, _: int) -> Row:
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    choices = (f"{label}. {text}" for label, text in zip(labels, texts, strict=True))
    question = "\n".join((f"Question: {row['question_stem']}", "", "Choices:", *choices))
    return {"question": question, "answer": row["answerKey"]}


def _is_python(row: Row) -> bool:
    return "using the programming language python:" in row["prompt"][:100]


_problem = _columns("problem", "answer")

EXAMPLES = {
    "aime2024": Example("HuggingFaceH4/aime_2024", "train", _columns("problem", "answer", lambda text: str(int(text)))),
    "aime2025": Example(
        "opencompass/AIME2025",
        "test",
        _columns("question", "answer", strip_non_numeric),
        configs=("AIME2025-I", "AIME2025-II"),
    ),
    "amc2023": Example("knoveleng/AMC-23", "train", _problem),
    "gpqa_diamond": Example("Idavidrein/gpqa", "train", _read_gpqa, configs=("gpqa_diamond",)),
    "gpqa_main": Example("Idavidrein/gpqa", "train", _read_gpqa, configs=("gpqa_main",)),
    "gsm8k": Example("openai/gsm8k", "test", _columns("question", "answer", extract_hash_answer), configs=("main",)),
    "math": Example("chiayewken/competition_math", "train", _columns("problem", "solution", extract_boxed_answer)),
    "math500": Example("HuggingFaceH4/MATH-500", "test", _problem),
    "mmlu": Example("cais/mmlu", "dev", _read_mmlu, configs=("all",)),
    "mmlu_pro": Example("TIGER-Lab/MMLU-Pro", "validation", _read_mmlu_pro),
    "openbookqa": Example("allenai/openbookqa", "train", _read_openbookqa, configs=("main",)),
    "openrs": Example("knoveleng/open-rs", "train", _problem),
    "openrs_easy": Example("knoveleng/open-rs", "train", _problem, keep=lambda row: row["level"] == "Easy"),
    "openrs_hard": Example("knoveleng/open-rs", "train", _problem, keep=lambda row: row["level"] == "Hard"),
    "prime_code": Example(
        "PrimeIntellect/verifiable-coding-problems",
        "train",
        _columns("prompt", "verification_info"),
        keep=_is_python,
    ),
}
