"""``vf runs``: saved runs are listed, tagged, annotated and deleted; one that is running is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verifiers.store import RunDir, list_runs


@pytest.fixture
def saved(run) -> RunDir:
    run("eval", "arithmetic", "-m", "fake", "-n", "2", "-r", "1")
    run("eval", "wordle", "-m", "fake", "-n", "1", "-r", "1")
    (found,) = [one for one in list_runs() if one.metadata["env_id"] == "arithmetic"]
    return found


def test_runs_are_listed_with_what_they_are_and_how_they_stand(run, saved):
    shown = run("runs").stdout
    assert saved.path.name in shown
    assert "finished" in shown
    assert "2 runs" in shown
    assert [one["env_id"] for one in json.loads(run("runs", "list", "wordle", "--json").stdout)] == ["wordle"]
    assert "no run mentions nothing-like-it" in run("runs", "list", "nothing-like-it").stdout


def test_tags_and_notes_stay_with_the_run_and_find_it(run, saved):
    run("runs", "tag", saved.path.name, "baseline", "v1")
    run("runs", "tag", saved.path.name, "-d", "v1")
    run("runs", "note", saved.path.name, "before the new prompt")
    assert saved.metadata["tags"] == ["baseline"]
    (found,) = json.loads(run("runs", "list", "baseline", "--json").stdout)
    assert found["note"] == "before the new prompt"
    assert "#baseline before the new prompt" in run("runs").stdout
    assert "is not a tag" in run("runs", "tag", saved.path.name, "two words", code=1).stderr
    run("eval", "arithmetic", "-m", "fake", "-n", "2", "-r", "1", "--resume", str(saved.path))
    assert saved.metadata["tags"] == ["baseline"]


def test_a_tag_does_not_make_an_old_run_the_last_one(run, saved):
    saved.update_metadata({"date": "2026-01-01T00:00:00+00:00"})
    assert list_runs()[-1].path == saved.path
    assert "baseline" not in run("runs", "tag", "last", "newer").stdout
    assert saved.metadata.get("tags") is None
    assert run("runs").stdout.splitlines()[-2].startswith(saved.path.name)


def test_a_training_is_called_by_its_id_wherever_it_was_put(run, saved):
    for place, name in (("outputs/train/arithmetic--m", "abcd1234"), ("outputs/train", "mine")):
        RunDir.create_at(Path(place) / name, env_id="arithmetic", model="m", config={}).update_metadata(
            {"kind": "training", "date": "2126-01-01T00:00:00+00:00"}
        )
        assert f"{name}: long" in run("runs", "tag", name, "long").stdout
        run("view", name, "--export", "page.html")
    assert "4 runs" in run("runs").stdout
    assert run("runs", "tag", "last", "newest").stdout.partition(":")[0] in ("abcd1234", "mine")
    assert "wordle" in run("export", "last", "-o", "-").stdout.lower(), "of trainings there is nothing to export"


def test_a_run_is_deleted_when_one_says_yes_and_kept_otherwise(run, saved):
    from click.testing import CliRunner

    from verifiers.cli.main import vf

    kept = CliRunner().invoke(vf, ["runs", "delete", saved.path.name], input="n\n", prog_name="vf")
    assert "kept" in kept.output
    assert saved.path.exists()
    run("runs", "delete", saved.path.name, "-y")
    assert not saved.path.exists()
    assert not saved.path.parent.exists()
    assert len(list_runs()) == 1


def test_a_run_that_is_being_written_is_neither_deleted_nor_changed(run, saved):
    with RunDir(saved.path).lock():
        saved.update_metadata({"finished": False})
        assert "is being written by" in run("runs", "delete", saved.path.name, "-y", code=1).stderr
        assert "is being written by" in run("runs", "tag", saved.path.name, "x", code=1).stderr
        assert json.loads(run("runs", "list", "arithmetic", "--json").stdout)[0]["status"] == "running"
    assert saved.path.exists()


def test_what_is_no_run_is_not_deleted(run):
    Path("mine").mkdir()
    Path("mine/file.txt").write_text("precious")
    assert "contains no run" in run("runs", "delete", "mine", "-y", code=2).stderr
    assert Path("mine/file.txt").exists()


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_the_list_of_runs_fits_a_narrow_terminal(run, saved, in_terminal, columns):
    saved.update_metadata({"finished": False, "model": "an-organisation/a-model-with-a-long-name"})
    lines = in_terminal(columns, "runs")
    assert max(map(len, lines)) <= columns, lines
    assert lines[0].split()[:2] == ["id", "environment"]
    assert "reward" in lines[0]
    assert ("when" in lines[0]) == (columns == 80)
    assert "rollouts" in run("runs").stdout, "all columns, if not in a terminal"
