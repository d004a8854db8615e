"""Puzzles of Reasoning Gym: the rows of one data set or several, and its scorers, held in the sandbox."""

from __future__ import annotations

import ast
import asyncio
import pickle
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.reasoning_gym_answers import evaluates_answers, is_formula_or_text
from verifiers.envs.reasoning_gym_env import ReasoningGymEnv, compares_texts, write_entry
from verifiers.envs.reasoning_gym_scoring import Scorer, is_inert

Load = Callable[..., ReasoningGymEnv]


@pytest.fixture(scope="module")
def countdown() -> Iterator[ReasoningGymEnv]:
    """One of the data sets whose scorers evaluate the answer."""
    env = ReasoningGymEnv("countdown", num_train_examples=1, num_eval_examples=1)
    yield env
    env.close()


@pytest.fixture
def load() -> Iterator[Load]:
    opened: list[ReasoningGymEnv] = []

    def make(gym: Any, **kwargs: Any) -> ReasoningGymEnv:
        opened.append(ReasoningGymEnv(gym, num_train_examples=4, num_eval_examples=kwargs.pop("n", 4), **kwargs))
        return opened[-1]

    yield make
    for env in opened:
        env.close()


def tagged(text: str) -> str:
    return f"<answer>{text}</answer>"


def score(env: vf.Environment, reply: Any) -> list[Any]:
    results = env.evaluate(client=vf.FakeClient(reply), model="m", use_tqdm=False)
    assert not results.failed, results.failed[0]["error"]
    return results["rewards"]


def gold(env: vf.Environment) -> Any:
    answers = {row["question"]: row["answer"] for row in env.get_eval_dataset()}
    return lambda messages: tagged(answers[messages[-1]["content"]])


def test_puzzles_that_are_scored_by_comparing_texts(load: Load) -> None:
    env = load("gcd")
    assert compares_texts("gcd")
    assert score(env, gold(env)) == [1.0] * 4
    for nothing in ("", "7", tagged(""), tagged("no idea")):
        assert score(env, nothing) == [0.0] * 4


def test_puzzles_with_scorers_that_evaluate_the_answer_are_scored_in_the_sandbox(countdown: ReasoningGymEnv) -> None:
    assert not compares_texts("countdown")
    assert score(countdown, gold(countdown)) == [1.0]
    assert max(score(countdown, tagged("1 + 1"))) < 0.1


def test_an_answer_that_runs_code_reaches_nothing_and_earns_nothing(countdown: ReasoningGymEnv, tmp_path: Path) -> None:
    target = tmp_path / "owned"
    for attack in (
        f"__import__('pathlib').Path({str(target)!r}).touch() or 7",
        f"().__class__.__base__.__subclasses__() and open({str(target)!r}, 'w')",
        "__import__('os')._exit(0)",
    ):
        assert max(score(countdown, tagged(attack))) < 0.1
    assert not target.exists()


@pytest.mark.parametrize(
    ("gym", "answer"),
    [
        (
            "countdown",
            "exec('m = __import__(\\'sys\\').modules[\\'reasoning_gym.games.countdown\\']\\nm.sorted = lambda x: 0\\n"
            "m.np.isclose = lambda *a, **k: True') or 1",
        ),
        ("simple_integration", "exec('import sympy\\nsympy.simplify = lambda *a: 0') or 1"),
        ("polynomial_multiplication", "exec('import sympy\\nsympy.parse_expr = lambda *a: 0') or 0"),
    ],
)
def test_an_answer_cannot_take_over_the_scorer_that_evaluates_it(load: Load, gym: str, answer: str) -> None:
    assert score(load(gym, n=2), tagged(answer)) == [0.0, 0.0]


def said(env: vf.Environment, reply: Callable[[vf.Row], str]) -> Any:
    """A model that answers each row by a function."""
    replies = {row["question"]: tagged(reply(row)) for row in env.get_eval_dataset()}
    return lambda messages: replies[messages[-1]["content"]]


def entry(row: vf.Row) -> Any:
    return ast.literal_eval(row["info"]["entry"])["metadata"]


def test_an_answer_cannot_let_the_scorer_do_the_work_of_the_puzzle(load: Load) -> None:
    integrals = load("simple_integration")
    assert (
        score(integrals, said(integrals, lambda row: f"Integral({entry(row)['integrand']}, {entry(row)['variable']})"))
        == [0.0] * 4
    )
    sums = load("countdown")  # x/x is 1, so any target could be written without the given numbers
    target = lambda row: " + x/x" * entry(row)["target"]  # noqa: E731
    numbers = lambda row: "+".join(map(str, entry(row)["numbers"]))  # noqa: E731
    assert score(sums, said(sums, lambda row: f"({numbers(row)})*(x - x) {target(row)}")) == [0.0] * 4


@pytest.mark.parametrize(
    ("gym", "answer"),
    [("complex_arithmetic", "nan"), ("coin_flip", "0"), ("game_of_life_halting", "never"), ("puzzle24", "3*8*1*1")],
)
def test_an_answer_that_reasoning_gym_accepts_for_every_puzzle_is_wrong(load: Load, gym: str, answer: str) -> None:
    env = load(gym)
    assert score(env, gold(env)) == [1.0] * 4
    assert score(env, tagged(answer)) == [0.0] * 4


def test_right_answers_are_scored_whatever_their_form(load: Load) -> None:
    env = load("simple_integration")
    assert score(env, said(env, lambda row: f"({row['answer']}) + sin(7)")) == [1.0] * 4
    flips = load("coin_flip")
    assert score(flips, said(flips, lambda row: str(Fraction(row["answer"])))) == [1.0] * 4


def test_scorers_that_may_evaluate_an_answer_are_known() -> None:
    from reasoning_gym.factory import DATASETS

    evaluating = {name for name in DATASETS if name != "composite" and evaluates_answers(name)}
    assert evaluating == {
        *("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens", "number_sorting"),
        *("polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
    }


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("82 + 20 - 3", "20 + 82 - 3", True),
        ("[1, 2, 3]", "1 2 3", True),
        ("['1', '2']", "1 2", True),
        ("3 == 3", "5 + 3", False),
        ("'2' '4'", "2 * 4", False),
        ("E", "5 + 3", False),
        ("exp(x)*sin(x) + C", "x + C", True),
        ("['A', 'B']", "AB", True),
        ("x.diff(x)", "x + C", False),
        ("sin('x')", "x + C", False),
        ("sin(x)(x)[0]", "x + C", False),
        ("ｅｖａｌ(x)", "x + C", False),
        ("sqrt(x).\nargs", "x + C", False),
        ("f(x for x in x)", "x + C", False),
    ],
)
def test_what_a_scorer_that_evaluates_answers_may_see(answer: str, right: str, expected: bool) -> None:
    assert is_formula_or_text(answer, right) is expected


def test_an_answer_that_could_run_code_is_the_last_its_process_scores(countdown: ReasoningGymEnv) -> None:
    """It might have put its own scorer in the place of ours."""
    swap = "[setattr(__import__('__main__'), 'score_answer', lambda *_: 1.0)] and 1"
    globals_swap = "exec('import sys; sys.modules[\"__main__\"].score_answer = lambda *_: 1.0')"
    for attack in (swap, globals_swap):
        score(countdown, tagged(attack))
        assert max(score(countdown, tagged("1 + 1"))) < 0.1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("42", True),
        ("(3 + 4) * 5", True),
        ("[['a'], ['b']]", True),
        ("sin(x)", False),
        ("_ (1)", False),
        ("α(1)", False),
    ],
)
def test_what_cannot_call_anything_is_inert(answer: str, expected: bool) -> None:
    assert is_inert(answer) is expected


def test_an_answer_that_hangs_the_scorer_is_wrong_and_the_next_one_is_scored(load: Load) -> None:
    env = load("countdown", n=1, scoring_timeout=3.0)
    assert score(env, tagged("9**9**9**9**9")) == [0.0]
    assert score(env, gold(env)) == [1.0]


def test_a_scorer_that_cannot_cope_with_the_right_answer_fails_the_rollout(countdown: ReasoningGymEnv) -> None:
    row = dict(countdown.get_eval_dataset()[0])
    row["info"] = {**row["info"], "entry": "no puzzle"}
    results = countdown.generate([row], client=vf.FakeClient(tagged("1 + 1")), model="m", use_tqdm=False)
    assert "fails on the right answer" in str(results.failed[0]["error"])


def test_without_a_sandbox_worker_processes_score_and_a_warning_says_so(load: Load, monkeypatch: Any) -> None:
    async def refuse() -> None:
        raise vf.SandboxError("user namespaces are forbidden")

    env = load("countdown", n=1)
    monkeypatch.setattr(env.scorer._sandbox, "start", refuse)
    with pytest.warns(UserWarning, match="no sandbox here .user namespaces are forbidden.: scorers of Reasoning Gym"):
        assert score(env, gold(env)) == [1.0]
    assert max(score(env, tagged("1 +"))) < 0.1


def test_several_data_sets_are_mixed_by_their_weights(load: Load) -> None:
    gym = [{"name": "gcd", "weight": 3, "config": {"max_numbers": 3}}, "lcm"]
    env = load(gym, n=200)
    rows = env.get_eval_dataset()
    tasks = rows["task"]
    assert 120 < tasks.count("gcd") < 180
    assert set(tasks) == {"gcd", "lcm"}
    assert len(set(rows["question"])) > 190
    assert score(env, gold(env)) == [1.0] * 200


def test_the_same_seed_gives_the_same_puzzles_and_evaluation_has_others(load: Load) -> None:
    def questions(seed: int) -> list[str]:
        env = load("gcd", seed=seed)
        assert not set(env.get_dataset()["question"]) & set(env.get_eval_dataset()["question"])
        return env.get_dataset()["question"]

    assert questions(1) == questions(1) != questions(2)


def test_puzzles_keep_their_tuples_on_the_way_to_a_scorer() -> None:
    assert write_entry({"answer": "1", "metadata": {"size": (1, 2), 3: None}}) == (
        "{'answer': '1', 'metadata': {'size': (1, 2), 3: None}}"
    )
    assert write_entry({"answer": float("inf")}) == '{"answer": Infinity}'


def test_it_can_be_pickled_and_used_in_several_loops(load: Load) -> None:
    env = pickle.loads(pickle.dumps(load("countdown", n=1)))
    try:
        assert score(env, gold(env)) == [1.0]

        async def again() -> Any:
            return await env.evaluate(client=vf.FakeClient(gold(env)), model="m", use_tqdm=False)

        assert asyncio.run(again())["rewards"] == [1.0]
    finally:
        env.close()


def test_a_scorer_holds_no_process_before_it_is_asked() -> None:
    scorer = Scorer(1.0)
    assert scorer._has_sandbox is None
    scorer.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gym": "chain_sun"}, "no data set 'chain_sun'; did you mean chain_sum"),
        ({"gym": []}, "gym needs at least one data set"),
        ({"gym": [{"name": "gcd", "weight": 0}]}, "each with a weight above 0"),
        ({"gym": [{"nam": "gcd"}]}, "a dict with name, weight and config; got {'nam': 'gcd'}"),
        ({"gym": "gcd", "config": {"min_numbers": -1}}, "Reasoning Gym's 'gcd' refuses {'min_numbers': -1}"),
        ({"gym": "gcd", "config": {"colour": 1}}, "refuses {'colour': 1}"),
        ({"gym": "gcd", "config": {"seed": 1}}, "seed of 'gcd' cannot be configured: the environment sets them"),
        ({"gym": ["gcd", "lcm"], "config": {"x": 1}}, "config= is for one data set"),
    ],
)
def test_nonsense_is_refused_when_the_environment_is_built(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningGymEnv(**arguments)


def test_without_the_package_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"pip install 'verifiers\[games\]'"):
        ReasoningGymEnv("gcd")
