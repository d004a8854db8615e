"""Runs side by side: evaluations by the package's own comparison, trainings as curves; what cannot be said is not."""

from __future__ import annotations

import pytest

from tests.viewer import making
from verifiers import stats
from verifiers.store.comparing import Side, compare_sides
from verifiers.viewer.library import run_id_of


def pair(ask, a, b, **query):
    return ask(f"compare/{run_id_of(a.path)}/{run_id_of(b.path)}", **query)


def scored(make_record, values, **metrics):
    return [
        make_record(i, reward=value, metrics={name: column[i] for name, column in metrics.items()})
        for i, value in enumerate(values)
    ]


def test_two_environments_get_no_verdict_even_if_they_ask_the_same(ask, make_run, make_record):
    a = make_run(*scored(make_record, [1.0] * 8), env_id="gsm8k")
    b = make_run(*scored(make_record, [0.0] * 8), env_id="gsm8k-strict")
    found = pair(ask, a, b)
    assert found["verdict"] == "No verdict"
    assert found["figures"]["p_value"] is None
    assert found["refusal"] == (
        "A is a run of gsm8k and B of gsm8k-strict; rewards of different environments are not comparable"
    )


def test_the_refusal_is_that_of_the_one_comparison_procedure():
    a, b = Side("one"), Side("two")
    for side in (a, b):
        for example in range(8):
            side.ask(example, f"question {example}")
            side.score("reward", example, float(side is a))
    assert compare_sides(a, b).refusal.startswith("A is a run of one and B of two")
    assert compare_sides(a, b, paired=False).refusal is None, "as two samples they may be compared"
    for a.env_id, b.env_id in (("one", None), ("my_env", "my-env")):  # earlier versions kept an id as it was typed
        assert compare_sides(a, b).refusal is None
        assert compare_sides(a, b).metrics["reward"].verdict == "worse"


def test_figures_of_all_rows_are_on_the_page_of_a_run_and_side_by_side(ask, root):
    """As the run saved them: the functions are the environment's, and a viewer runs no code of it."""
    a, b = making.labelled_run(root), making.labelled_run(root, model="org/better", skill=1.0)
    page = ask(f"runs/{run_id_of(a)}")
    balanced, f1, others = page["aggregates"]
    assert (balanced["name"], f1["name"], others["name"]) == ("balanced", "f1", "others")
    assert 0.5 < balanced["low"] < balanced["mean"] < balanced["high"] <= 1.0
    assert (others["mean"], others["error"]) == (None, "ZeroDivisionError: division by zero")
    found = ask(f"compare/{run_id_of(a)}/{run_id_of(b)}")
    assert found["a"]["aggregates"] == page["aggregates"]
    assert found["b"]["aggregates"][0]["mean"] == 1.0
    table = ask("compare", runs=f"{run_id_of(a)},{run_id_of(b)},{run_id_of(a)}")
    assert [run["aggregates"][0]["mean"] for run in table["runs"]] == [balanced["mean"], 1.0, balanced["mean"]]


@pytest.mark.parametrize("value", [7, [1], {"f1": 3}, {"f1": {"value": "much", "low": True, "error": 5}}, {"": {}}])
def test_figures_of_all_rows_that_are_none_break_no_page(ask, make_run, make_record, value):
    run = make_run(make_record(0), aggregates=value)
    assert all(one["mean"] is None for one in ask.run(run)["aggregates"])


def test_a_metric_is_chosen_and_its_rows_and_verdict_are_of_it(ask, make_run, make_record):
    a = make_run(*scored(make_record, [0.0] * 8, exact=[1.0] * 8))
    b = make_run(*scored(make_record, [1.0] * 8, exact=[0.0] * 8))
    found = pair(ask, a, b, metric="exact")
    assert (found["metric"], found["metric_names"], found["verdict"]) == ("exact", ["reward", "exact"], "B is worse")
    assert {row["difference"] for row in found["rows"]} == {-1.0}
    assert (
        "there is no metric 'nope'"
        in ask(f"compare/{run_id_of(a.path)}/{run_id_of(b.path)}", metric="nope", code=400)["problem"]
    )


def test_several_runs_are_compared_with_the_first_and_corrected_for_how_many_they_are(ask, make_run, make_record):
    values = [[0.0] * 8, [1.0] * 8, [0.0, 1.0] * 4, [0.0] * 8]
    runs = [make_run(*scored(make_record, column), model=f"m{i}") for i, column in enumerate(values)]
    ids = [run_id_of(run.path) for run in runs]
    found = ask("compare", runs=",".join(ids))
    first, better, half, same = found["rows"]
    assert "against_first" not in first
    base = dict(enumerate(values[0]))
    told = stats.compare_metrics(
        dict.fromkeys(ids[1:], base),
        {name: dict(enumerate(column)) for name, column in zip(ids[1:], values[1:], strict=True)},
    )
    for row in (better, half, same):
        expected = told[row["id"]]
        assert (row["against_first"]["p_value"], row["against_first"]["adjusted_p"]) == (
            expected.p_value,
            expected.adjusted_p,
        )
        assert row["against_first"]["verdict"] == expected.verdict
    assert better["verdict"] == "it is better"
    assert [card["model"] for card in found["runs"]] == ["m0", "m1", "m2", "m3"]
    assert (better["figures"][0]["mean"], half["won"], half["lost"]) == (1.0, 4, 0)


def test_among_several_runs_only_those_of_the_same_questions_get_a_verdict(ask, make_run, make_record):
    runs = [
        make_run(*scored(make_record, [0.0] * 8)),
        make_run(*scored(make_record, [1.0] * 8)),
        make_run(*scored(make_record, [1.0] * 8), env_id="another"),
    ]
    found = ask("compare", runs=",".join(run_id_of(run.path) for run in runs))
    assert found["rows"][1]["against_first"]["verdict"] == "better"
    assert (found["rows"][2]["against_first"]["verdict"], found["rows"][2]["against_first"]["p_value"]) == (None, None)
    assert "different environments" in found["rows"][2]["refusal"]


@pytest.mark.parametrize(
    ("runs", "words"),
    [("", "2 to 8 runs"), ("a", "2 to 8 runs"), (",".join("abcdefghi"), "2 to 8 runs")],
)
def test_too_few_or_too_many_runs_are_refused_in_one_sentence(ask, runs, words):
    assert words in ask("compare", runs=runs, code=400)["problem"]


def test_rollouts_of_trainings_are_never_pooled_into_a_verdict(ask, root, make_run, make_record):
    a, b = (run_id_of(making.train(root, steps=20, name=name)) for name in ("a", "b"))
    evaluation = run_id_of(make_run(make_record()).path)
    for path in (f"compare/{a}/{b}", f"compare/{a}/{evaluation}"):
        assert "a different policy at each step" in ask(path, code=400)["problem"]
    assert "a different policy at each step" in ask("compare", runs=f"{a},{evaluation}", code=400)["problem"]


# --- the axes of curves ---------------------------------------------------------------------------------------------


def test_a_training_has_steps_tokens_seconds_and_samples_as_axes(ask, root):
    page = ask(f"runs/{run_id_of(making.train(root, steps=30))}/training")
    assert page["axes"]["tokens"][-1] == 23_000 * 30
    assert page["axes"]["samples"] == [256 * step for step in range(1, 31)]
    assert page["axes"]["seconds"][-1] == pytest.approx(sum(page["series"]["step_s"]))
    assert all(len(axis) == 30 for axis in page["axes"].values())


def test_a_stretch_of_a_long_training_comes_with_all_its_steps(ask, root):
    run = run_id_of(making.train(root, steps=1700))
    whole = ask(f"runs/{run}/training")
    part = ask(f"runs/{run}/training", first=100, last=160)
    assert (whole["steps_a_point"], part["steps_a_point"]) == (3, 1)
    assert part["steps"] == list(range(100, 161))
    assert part["axes"]["samples"][0] == 25_600, "an axis counts from the beginning, not from the stretch"
    assert "is not a number" in ask(f"runs/{run}/training", first="x", code=400)["problem"]


# --- shares ---------------------------------------------------------------------------------------------------------


def test_the_shares_of_reward_functions_add_up_to_the_mean_at_each_step(ask, tmp_path, root):
    torch = pytest.importorskip("torch")
    assert torch is not None
    from tests.trainers import making as trainers

    def half(completion):
        return 0.5

    import verifiers as vf

    rubric = vf.Rubric([trainers.share_of_e, half], weights=[2.0, 0.5])
    trainers.trainer(root / "t", env=trainers.environment(rubric=rubric)).train()
    found = ask(f"runs/{run_id_of(root / 't' / 'run')}/shares")
    assert [(one["name"], one["weight"]) for one in found["functions"]] == [("share_of_e", 2.0), ("half", 0.5)]
    for i, reward in enumerate(found["reward"]):
        assert sum(one["values"][i] for one in found["functions"]) == pytest.approx(reward)
    assert found["functions"][1]["values"] == [0.25] * 3


def test_weights_on_a_schedule_are_taken_as_they_were_at_each_step(ask, root):
    pytest.importorskip("torch")
    import verifiers as vf
    from tests.trainers import making as trainers

    def half(completion):
        return 0.5

    rubric = vf.Rubric([trainers.share_of_e, half], weights=[1.0, 1.0])
    env = trainers.environment(rubric=rubric)
    trainers.trainer(root / "t", env=env, weight_schedule=lambda epochs: [1.0, 1.0 + epochs]).train()
    found = ask(f"runs/{run_id_of(root / 't' / 'run')}/shares")
    one, two = found["functions"]
    assert two["is_scheduled"]
    assert two["values"][0] == 0.5
    assert two["values"][-1] > two["values"][0]
    for i, reward in enumerate(found["reward"]):
        assert one["values"][i] + two["values"][i] == pytest.approx(reward)


def test_an_evaluation_says_what_each_function_adds_and_one_without_weights_says_nothing(
    ask, root, make_run, make_record
):
    path = making.judged_run(root)
    found = ask(f"runs/{run_id_of(path)}/shares")
    assert [(one["name"], one["weight"]) for one in found["functions"]] == [("judged", 1.0), ("shows_code", 0.25)]
    assert sum(one["values"][0] for one in found["functions"]) == pytest.approx(found["reward"][0])
    assert ask.run(make_run(make_record()), "/shares")["functions"] == []


# --- links ----------------------------------------------------------------------------------------------------------


def test_a_link_names_a_rollout_by_what_it_is_and_survives_a_move_and_a_resume(ask, make_run, make_record, root):
    run = make_run(make_record(0, fails=True), make_record(7, 0), make_record(7, 1), make_record("7", 1))
    link = {"run": run.path.name, "env": "sums", "example": "7", "rollout": 1}
    before = ask("find", **link)
    assert (before["run"], before["number"]) == (run_id_of(run.path), 2)
    run.compact()
    elsewhere = root / "moved" / run.path.name
    elsewhere.parent.mkdir()
    run.path.rename(elsewhere)
    after = ask("find", **link)
    assert (after["run"], after["number"]) == (run_id_of(elsewhere), 1)
    assert ask("find", **{**link, "example": '"7"'})["number"] == 2
    assert ask("find", run=run.path.name)["number"] is None
    assert "no run 'nope'" in ask("find", run="nope", code=404)["problem"]
    assert "no such rollout" in ask("find", **{**link, "rollout": 9}, code=404)["problem"]
