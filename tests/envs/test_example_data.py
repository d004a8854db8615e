"""Names of well-known data sets become rows of question and answer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

import verifiers as vf

HUB: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [{"question": f"{i}+0?", "answer": f"easy\n#### {i}"} for i in range(9)],
    "HuggingFaceH4/aime_2024": [{"problem": "p", "answer": "033"}],
    "opencompass/AIME2025": [{"question": "q", "answer": "$70^\\circ$"}],
    "chiayewken/competition_math": [{"problem": "p", "solution": "so \\boxed{\\frac12}"}],
    "cais/mmlu": [{"question": "Which?", "choices": ["w", "x", "y", "z"], "answer": 2}],
    "TIGER-Lab/MMLU-Pro": [{"question": "Which?", "options": ["w", "x"], "answer": "B"}],
    "allenai/openbookqa": [
        {"question_stem": "Which?", "choices": {"text": ["w", "x"], "label": ["A", "B"]}, "answerKey": "B"}
    ],
    "Idavidrein/gpqa": [
        {
            "Question": f"Which {i}?",
            "Correct Answer": "right",
            **{f"Incorrect Answer {j}": f"wrong {j}" for j in (1, 2, 3)},
        }
        for i in range(20)
    ],
    "knoveleng/open-rs": [{"problem": p, "answer": "1", "level": level} for p, level in (("a", "Easy"), ("b", "Hard"))],
    "PrimeIntellect/verifiable-coding-problems": [
        {
            "prompt": f"Solve the following coding problem using the programming language {name}:",
            "verification_info": name,
        }
        for name in ("python", "rust")
    ],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The hub's `load_dataset`, with a few rows of each data set."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None = None, *, split: str | None = None) -> Any:
        asked.append((path, name, split))
        splits = DatasetDict(dict.fromkeys(("train", "test", "dev", "validation"), Dataset.from_list(HUB[path])))
        return splits if split is None else splits[split]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize(
    ("name", "row", "asked"),
    [
        ("gsm8k", {"question": "0+0?", "answer": "0"}, [("openai/gsm8k", "main", "test")]),
        ("aime2024", {"question": "p", "answer": "33"}, [("HuggingFaceH4/aime_2024", None, "train")]),
        (
            "aime2025",
            {"question": "q", "answer": "70"},
            [("opencompass/AIME2025", f"AIME2025-{n}", "test") for n in ("I", "II")],
        ),
        ("math", {"question": "p", "answer": "\\frac12"}, [("chiayewken/competition_math", None, "train")]),
        (
            "mmlu",
            {"question": "Question: Which?\n\nA: w\nB: x\nC: y\nD: z", "answer": "C"},
            [("cais/mmlu", "all", "dev")],
        ),
        (
            "mmlu_pro",
            {"question": "Question: Which?\n\nA: w\nB: x", "answer": "B"},
            [("TIGER-Lab/MMLU-Pro", None, "validation")],
        ),
        (
            "openbookqa",
            {"question": "Question: Which?\n\nChoices:\nA. w\nB. x", "answer": "B"},
            [("allenai/openbookqa", "main", "train")],
        ),
        ("openrs_hard", {"question": "b", "answer": "1"}, [("knoveleng/open-rs", None, "train")]),
    ],
)
def test_example_datasets_read_as_question_and_answer(
    name: str, row: dict[str, str], asked: list[tuple[Any, ...]], hub: list[tuple[Any, ...]]
) -> None:
    dataset = vf.load_example_dataset(name)
    assert isinstance(dataset, Dataset)
    assert dataset[0] == row
    assert hub == asked


def test_example_datasets_are_cut_to_n_random_rows_of_a_split(hub: list[tuple[Any, ...]]) -> None:
    picked = vf.load_example_dataset("gsm8k", split="train", n=4, seed=1)
    assert len(picked) == 4
    assert len(set(picked["answer"])) == 4
    assert hub[0][2] == "train"
    assert picked.to_list() == vf.load_example_dataset("gsm8k", "train", 4, 1).to_list()
    assert picked.to_list() != vf.load_example_dataset("gsm8k", "train", 4, 2).to_list()
    assert len(vf.load_example_dataset("gsm8k", n=100)) == 9
    assert len(vf.load_example_dataset("prime_code")) == 1


def test_the_right_option_of_gpqa_is_not_always_in_the_same_place(hub: list[tuple[Any, ...]]) -> None:
    rows = vf.load_example_dataset("gpqa_diamond").to_list()
    assert len({row["answer"] for row in rows}) > 1
    for row in rows:
        assert f"\n{row['answer']}: right" in row["question"]
    assert rows == vf.load_example_dataset("gpqa_diamond").to_list()


def test_a_machine_without_the_data_extra_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'verifiers[data]'")):
        vf.load_example_dataset("gsm8k")
