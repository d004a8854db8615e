"""The list of runs: which folders are runs, what each line says, and that one broken run costs no other its line."""

from __future__ import annotations

import os

import pytest

import verifiers as vf
from tests.viewer import making
from tests.viewer.conftest import Asker
from verifiers import stats
from verifiers.store import RunDir
from verifiers.viewer import Library, ViewerServer
from verifiers.viewer.cards import Summaries
from verifiers.viewer.library import Run, run_id_of


def cards(ask):
    return {card["name"]: card for card in ask("runs")["runs"]}


@pytest.mark.parametrize("place", ["sums", "tiny-1/rewarded-0", "a/b/c"])
def test_a_training_is_found_where_its_output_dir_put_it(ask, root, place):
    RunDir.create_at(root / place, env_id="sums", model="tiny", config={})
    [card] = ask("runs")["runs"]
    assert card["id"] == run_id_of(root / place)


def test_nothing_inside_a_run_is_another_run_and_hidden_folders_are_not_looked_into(ask, root):
    for place in ("sums", "sums/checkpoints/step-000010", ".trash/old"):
        (root / place).mkdir(parents=True)
        (root / place / "metadata.json").write_text("{}")
    assert list(cards(ask)) == ["sums"]


def test_a_root_that_is_a_run_itself_is_shown(root):
    RunDir.create_at(root / "sums", env_id="sums", model="tiny", config={})
    assert [run.path for run in Library([root / "sums"]).runs()] == [root / "sums"]


def test_a_training_with_an_evaluation_is_a_line_of_the_list(ask, root):
    path = making.train(root, steps=25)
    [card] = ask("runs")["runs"]
    assert (card["kind"], card["step"], card["status"]) == ("training", 25, "finished")
    assert card["low"] < card["reward"] < card["high"]
    assert card["duration_ms"] == pytest.approx(48_000, rel=0.1)
    assert ask(f"runs/{run_id_of(path)}/training")["evaluations"][0]["step"] == 20


class Unreadable(Run):
    """A run over which the reader stumbles in a way that nobody thought of."""

    def read_metadata(self):
        raise RuntimeError("a bug of the reader")


def test_one_run_that_cannot_be_read_costs_no_other_its_line(make_run, make_record, root):
    good, bad = make_run(make_record()), make_run(make_record())
    library = Library([root])
    library.runs()
    library._runs[run_id_of(bad.path)] = Unreadable(run_id_of(bad.path), bad.path)
    with ViewerServer(library) as server:
        listed = cards(Asker(server))
    assert listed[good.path.name]["reward"] == 1.0
    assert listed[bad.path.name]["status"] == "damaged"
    assert listed[bad.path.name]["problem"] == "this run cannot be read: RuntimeError: a bug of the reader"
    assert listed[bad.path.name].keys() == listed[good.path.name].keys()


def test_a_line_has_the_interval_that_the_report_has(ask, root):
    rows = [{"question": str(i), "answer": str(i)} for i in range(12)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda answer: float(int(answer) % 3 == 0)]))
    results = env.evaluate(
        vf.FakeClient("x"), "m", rollouts_per_example=2, results_path=root / "e--m" / "r", use_tqdm=False
    )
    [card] = ask("runs")["runs"]
    told = results.interval()
    assert (card["reward"], card["low"], card["high"]) == pytest.approx((told.mean, told.low, told.high))
    assert card["duration_ms"] == pytest.approx(results.metadata["time_ms"])
    assert card["rollouts"] == 24


def test_status_tags_and_note_are_in_the_line(ask, make_run, make_record):
    done = make_run(make_record(), num_rollouts=1, tags=["paper", 3, "x" * 100], note="the last one")
    stopped = make_run(make_record())
    os.utime(stopped.results_path, (1_600_000_000, 1_600_000_000))
    broken = make_run(make_record())
    broken.metadata_path.write_text("{")
    listed = cards(ask)
    assert {name: card["status"] for name, card in listed.items()} == {
        done.path.name: "finished",
        stopped.path.name: "unfinished",
        broken.path.name: "damaged",
    }
    assert (listed[done.path.name]["tags"], listed[done.path.name]["note"]) == (["paper", "x" * 60], "the last one")
    with stopped.appender():
        assert cards(ask)[stopped.path.name]["status"] == "live"


def test_a_run_that_was_interrupted_is_not_live_although_its_process_goes_on(ask, make_run, make_record):
    run = make_run(make_record(), interrupted="Ctrl-C", finished=False)
    assert cards(ask)[run.path.name]["status"] == "unfinished"


def test_figures_of_many_runs_are_kept_and_a_run_that_grew_is_read_again(make_run, make_record, root):
    run = make_run(make_record(0, reward=0.0))
    library, kept = Library([root]), Summaries()
    [found] = library.runs()
    found.index.refresh()
    kept.keep(found)
    assert kept.get(found)["reward"] == 0.0
    with run.appender() as out:
        out.append(make_record(1, reward=1.0))
    assert kept.get(found) is None


def test_more_runs_than_are_kept_open_all_get_their_interval(make_run, make_record, root):
    for i in range(20):
        make_run(*(make_record(j, reward=float((i + j) % 2)) for j in range(6)), num_rollouts=6)
    with ViewerServer(Library([root])) as server:
        for _ in range(200):
            found = Asker(server)("runs")["runs"]
            if all(card["low"] is not None for card in found):
                break
        told = stats.mean_interval([0.0, 1.0] * 3, range(6))
        assert {(card["low"], card["high"]) for card in found} == {(told.low, told.high)}
