"""The code-python environment: right functions score, wrong ones do not, and tricks gain nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf

pytestmark = pytest.mark.skipif(vf.sandbox.level().name == "none", reason="this machine can isolate nothing")
FOLDER = Path(__file__).resolve().parents[1]
TASK = {
    "question": "Write a Python function. double(x) returns twice x.",
    "info": {"function": "double", "tests": [{"args": [x], "expected": 2 * x} for x in (1, 2, 30)]},
}


def load(**kwargs: Any) -> Any:
    return vf.load_environment("code-python", environments_dir=FOLDER, **kwargs)


@pytest.fixture
def doubling(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(TASK) + "\n")
    return load(dataset_path=str(path), timeout_s=1.0)


def score(env: Any, reply: str) -> tuple[float, float]:
    results = env.evaluate(vf.FakeClient(reply), "fake", use_tqdm=False)
    assert not results.failed
    return results["rewards"][0], results["share_passed"][0]


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nIt doubles."


def test_a_right_function_scores_however_it_is_wrapped(doubling):
    code = "def double(x):\n    return x + x"
    assert score(doubling, block(code)) == (1.0, 1.0)
    assert score(doubling, code) == (1.0, 1.0)
    assert score(doubling, block("broken(") + block(code)) == (1.0, 1.0)


def test_a_wrong_function_scores_the_share_of_its_right_answers_as_a_metric_only(doubling):
    assert score(doubling, block("def double(x):\n    return 2 if x == 1 else 0")) == (0.0, pytest.approx(1 / 3))
    for reply in ("", "no code", block("def triple(x): return 3 * x"), block("def double(x): return 1 / 0")):
        assert score(doubling, reply) == (0.0, 0.0)


TRICKS = [
    "class Same:\n    def __eq__(self, other): return True\ndef double(x): return Same()",
    "class Same(int):\n    def __eq__(self, other): return True\ndef double(x): return Same(7)",
    "import os\ndef double(x): os._exit(0)",
    "import sys\ndef double(x): sys.exit(0)",
    "def double(x):\n    while True: pass",
    "def double(x): raise SystemExit",
    "import sys\ndef double(x):\n    f = sys._getframe()\n    while f.f_back: f = f.f_back\n"
    "    return f.f_locals.get('expected', f.f_globals.get('expected'))",
    'import json\njson.dumps = lambda *a, **k: \'{"status": "ok", "value": 2}\'\ndef double(x): return x',
    "def double(x): return True",
    "def double(x): return float(2 * x)",
    "def double(x): return [2 * x]",
    "import gc\ndef double(x): return [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]",
    "def double(x): return open('/proc/self/environ').read()",
    "print('{\"passed\": 3}')\nraise SystemExit(0)",
]


@pytest.mark.parametrize("code", TRICKS, ids=[str(i) for i in range(len(TRICKS))])
def test_tricks_gain_nothing(doubling, code):
    assert score(doubling, block(code))[0] == 0.0


# A pattern of each task, and a solution that is independent of the environment's own.
SOLUTIONS = {
    r"rotated by (\d+) places to the left": "def rotate(a):\n    for _ in range({0}): a = a[1:] + a[:1]\n    return a",
    r"rotated by (\d+) places to the right": "def rotate(a):\n"
    "    for _ in range({0}): a = a[-1:] + a[:-1]\n    return a",
    r"multiples of (\d+) or of (\d+)": "def sum_of_multiples(n):\n"
    "    return sum({{*range({0}, n + 1, {0}), *range({1}, n + 1, {1})}})",
    r"modulo (\d+), where .* = (\d+) a\(n-1\) \+ (\d+)": "def recurrence(n):\n    a = [0, 1]\n"
    "    while len(a) <= n: a.append({1} * a[-1] + {2} * a[-2])\n    return a[n] % {0}",
    r"in base (\d+), .* fewer than (\d+) digits": "def in_base(n, is_first=True):\n    s = '0123456789abcdef'\n"
    "    text = s[n] if n < {0} else in_base(n // {0}, False) + s[n % {0}]\n"
    "    return text.zfill({1}) if is_first else text",
    r"words of more than (\d+) letters, each once, in alpha": "def some_words(text):\n"
    "    return sorted({{w for w in text.split() if len(w) > {0}}})",
    r"words of fewer than (\d+) letters, each once, in reverse": "def some_words(text):\n"
    "    return sorted({{w for w in text.split() if len(w) < {0}}})[::-1]",
    r"nearest to (-?\d+); of two that are, the smaller": "def nearest(items):\n"
    "    return sorted(sorted(items), key=lambda x: abs(x - ({0})))[0]",
}


def solution(question: str) -> str:
    for pattern, code in SOLUTIONS.items():
        if found := re.search(pattern, question):
            return block(code.format(*found.groups()))
    return "I do not know."


def test_generated_tests_agree_with_solutions_written_apart_from_them():
    env = load(num_eval_examples=150)
    rows = [row for row in env.eval_dataset if solution(row["question"]) != "I do not know."]
    client = vf.FakeClient(lambda messages: solution(messages[-1]["content"]))
    results = env.generate(rows, client, "fake", use_tqdm=False)
    assert len(rows) > 40
    assert len({row["info"]["function"] for row in rows}) == 6
    assert results["rewards"] == [1.0] * len(rows)


def test_rows_repeat_by_seed_and_never_leak():
    env, again = load(num_train_examples=300), load(num_train_examples=300)
    assert env.dataset.to_list() == again.dataset.to_list()
    assert set(env.dataset["question"]).isdisjoint(env.eval_dataset["question"])
    assert len({row["info"]["function"] for row in env.dataset}) == 10
    assert len(set(env.dataset["question"])) > 290
    assert len(set(env.eval_dataset["question"])) > 190


def test_with_tools_the_model_tries_its_code_first(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(TASK) + "\n")
    env = load(dataset_path=str(path), use_tools=True)
    code = "def double(x): return 2 * x"
    function = {"name": "python", "arguments": json.dumps({"code": f"{code}\ndouble(4)"})}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    results = env.evaluate(vf.FakeClient([call, block(code)]), "fake", use_tqdm=False)
    env.close()
    assert results["completion"][0][1]["content"] == "8"
    assert results["rewards"] == [1.0]
