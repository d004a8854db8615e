"""A name → the folder of a new environment package with a working example task."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from verifiers.packages.source import module_name

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*\Z", re.ASCII)
_TAKEN = ("verifiers", "test", "tests", "environments")


def new_package(
    name: str, folder: str | Path = "environments", *, is_multi_file: bool = False, rewrites_readme: bool = False
) -> list[Path]:
    """Write a package into ``folder/<module>`` and return its files. If it exists, at most the README is rewritten."""
    if module_name(name) in sys.stdlib_module_names:
        raise ValueError(f"{name!r} cannot be the name of an environment: it is a module of Python's standard library")
    if not _NAME.fullmatch(name) or module_name(name) in _TAKEN:
        raise ValueError(
            f"{name!r} cannot be the name of an environment: use lower-case words joined by '-', such as 'my-env'"
        )
    module = module_name(name)
    home = Path(folder) / module
    is_there = home.exists()
    if is_there and not rewrites_readme:
        raise FileExistsError(f"{home} exists already; choose another name, or remove it first")
    own = f"{module}/{module}" if is_multi_file else module
    files = {
        "pyproject.toml": PYPROJECT,
        f"{own}.py": MODULE,
        **({f"{module}/__init__.py": INIT} if is_multi_file else {}),
        "README.md": README,
        f"test_{module}.py": TEST,
    }
    words = {
        "NAME": name.replace("_", "-"),
        "MODULE": module,
        "INCLUDED": f"{module}/**/*.py" if is_multi_file else f"{module}.py",
        "CARRIED": f"{module}/pyproject.toml" if is_multi_file else f"{module}.pyproject.toml",
    }
    if is_there:
        files = {"README.md": README}
    for path, text in files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(re.sub(r"@(\w+)@", lambda found: words[found[1]], text), encoding="utf-8")
    return [home / path for path in files]


PYPROJECT = """\
[project]
name = "@NAME@"
version = "0.1.0"
description = "How often a letter occurs in a word."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["verifiers>=0.2.0"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
include = ["@INCLUDED@"]

[tool.hatch.build.targets.wheel.force-include]
"pyproject.toml" = "@CARRIED@"  # the defaults below, for whoever installs it

[tool.verifiers.eval]
num_examples = 20
rollouts_per_example = 3
"""

MODULE = '''\
"""How often does a letter occur in a word? A small task that works, to be changed into yours."""

from __future__ import annotations

import random

import verifiers as vf

LETTERS = "aeinrst"


def make_rows(n: int, seed: int) -> list[dict[str, str]]:
    """Questions with their answers, none of them twice; the same seed gives the same questions."""
    draw = random.Random(seed)
    rows = {}
    while len(rows) < n:
        word = "".join(draw.choices(LETTERS, k=draw.randint(4, 12)))
        letter = draw.choice(LETTERS)
        question = f"How often does the letter {letter} occur in {word}?"
        rows[question] = {"question": question, "answer": str(word.count(letter))}
    return list(rows.values())


def correct(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """The reward: 1 for the right number, 0 for anything else."""
    return float(parser.parse_answer(completion) == answer)


def load_environment(num_train_examples: int = 500, num_eval_examples: int = 100, seed: int = 0) -> vf.Environment:
    """Counting letters; questions are generated, and none is both for training and for evaluation."""
    parser = vf.XMLParser(["reasoning", "answer"])
    rows = make_rows(num_eval_examples + num_train_examples, seed)
    return vf.SingleTurnEnv(
        dataset=rows[num_eval_examples:],
        eval_dataset=rows[:num_eval_examples],
        system_prompt=f"Answer in this form, with a whole number as the answer:\\n{parser.get_format_str()}",
        parser=parser,
        rubric=vf.Rubric([correct, parser.get_format_reward_func()], weights=[1.0, 0.1], parser=parser),
    )
'''

INIT = '''\
"""How often does a letter occur in a word?"""

from @MODULE@.@MODULE@ import load_environment

__all__ = ["load_environment"]
'''

README = """\
# @NAME@

How often does a letter occur in a word? The model reasons, then gives a whole number in `<answer>` tags.

    vf check @NAME@
    vf eval @NAME@ -m smollm2 -n 20 -r 1

| argument | default | what it does |
|---|---|---|
| `num_train_examples` | 500 | how many questions to train on |
| `num_eval_examples` | 100 | how many questions to evaluate on |
| `seed` | 0 | another seed gives other questions |

The reward is 1 for the right number, and 0.1 for a reply in the form that was asked for.
"""

TEST = '''\
"""Counting letters: the answers are right, and only a right answer is paid for."""

from __future__ import annotations

from pathlib import Path

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    return vf.load_environment("@NAME@", environments_dir=FOLDER, **kwargs)


def test_every_answer_is_right():
    for row in load().eval_dataset:
        words = row["question"].removesuffix("?").split()
        assert row["answer"] == str(words[-1].count(words[5]))


def test_a_right_answer_is_worth_more_than_a_wrong_one():
    env = load(num_eval_examples=10)
    gold = {row["question"]: row["answer"] for row in env.eval_dataset}

    def mean_reward(answer):
        client = vf.FakeClient(lambda messages: env.parser.format(reasoning="I count.", answer=answer(messages)))
        return env.evaluate(client=client, model="fake", use_tqdm=False).mean_reward

    assert mean_reward(lambda messages: gold[messages[-1]["content"]]) > 1.0
    assert mean_reward(lambda messages: "many") < 0.2
'''
