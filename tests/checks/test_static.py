"""Findings in source: what is wrong is found by line, what is right is left alone."""

from __future__ import annotations

import pytest

from verifiers.checks.static import find


def kinds(text: str) -> list[str]:
    return [finding.kind for finding in find(text)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("try:\n    f()\nexcept:\n    pass", "bare except"),
        ("x = eval(reply)", "eval"),
        ("exec(completion[-1]['content'])", "eval"),
        ("import builtins\nbuiltins.eval(reply)", "eval"),
        ("import random\nrandom.shuffle(rows)", "randomness"),
        ("from random import choice\nchoice(rows)", "randomness"),
        ("import random as r\nr.Random()", "randomness"),
        ("import numpy as np\nnp.random.rand(3)", "randomness"),
        ("from numpy.random import default_rng\ndefault_rng()", "randomness"),
        ("import secrets\nsecrets.token_hex()", "randomness"),
        ("try:\n    f()\nexcept Exception:\n    return 0.0", "swallowed error"),
    ],
)
def test_what_goes_wrong_is_found(text, kind):
    body = "def g():\n" + "\n".join(f"    {line}" for line in text.splitlines())
    assert kinds(body) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    f()\nexcept ValueError:\n    x = 0.0",
        "x = eval('1 + 1')",
        "def eval_rows(): ...\neval_rows()",
        "import random\nrandom.Random(7).shuffle(rows)",
        "import random\ndraw = random.Random(seed)\ndraw.choice(rows)",
        "import numpy as np\nnp.random.default_rng(seed).random()",
        "import ast\nast.literal_eval(reply)",
        "import random\nrandom.shuffle(rows)  # vf: ok, only the order in which they are shown",
    ],
)
def test_what_is_right_is_left_alone(text):
    assert kinds(text) == []


def test_a_finding_names_its_file_and_line():
    (found,) = find("x = 1\ny = eval(x)\n", "my_env.py")
    assert str(found) == "my_env.py:2 eval() runs whatever text it is given"
