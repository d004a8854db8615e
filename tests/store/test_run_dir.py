"""Where runs live, what they remember of their making, and who may continue them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.store import RunDir, find_run, is_run_dir, list_runs, safe_name

Make = Callable[..., dict[str, Any]]


def test_a_new_run_has_the_classic_place_and_its_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    run = RunDir.create(tmp_path, env_id="sums", model="org/model", config=config)
    assert run.path.parent == tmp_path / "sums--org--model"
    assert re.fullmatch("[0-9a-f]{8}", run.path.name)
    metadata = msgspec.json.decode((run.path / "metadata.json").read_bytes())
    assert (metadata["env_id"], metadata["model"], metadata["config"]) == ("sums", "org/model", config)
    assert metadata["sampling_args"] == {"temperature": 0.7}
    assert len(metadata["config_fingerprint"]) == 16


def test_the_default_root_is_outputs_evals_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir.create(env_id="a", model="b", config={}, run_id="first")
    assert run.path == Path("outputs/evals/a--b/first")
    assert [found.path for found in list_runs()] == [run.path]


def test_a_run_id_is_taken_once(tmp_path: Path) -> None:
    RunDir.create(tmp_path, env_id="a", model="b", config={}, run_id="x")
    with pytest.raises(FileExistsError, match=r"resume it with RunDir\.open"):
        RunDir.create(tmp_path, env_id="a", model="b", config={}, run_id="x")


def test_opening_what_is_no_run_says_so(tmp_path: Path, run: RunDir) -> None:
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        RunDir.open(tmp_path)
    assert RunDir.open(run.path).metadata == run.metadata
    assert RunDir.open(run.results_path).path == run.path
    assert is_run_dir(run.path)
    assert not is_run_dir(tmp_path)


def test_damaged_metadata_is_named_and_the_rollouts_are_still_read(run: RunDir, make_record: Make) -> None:
    with run.appender() as out:
        out.append(make_record(1))
    run.metadata_path.write_bytes(b'{"env_id": ')
    with pytest.raises(ValueError, match=r"metadata\.json is damaged"):
        _ = run.metadata
    assert [record["example_id"] for record in run.records()] == [1]
    assert len(list_runs(run.path.parent.parent)) == 1
    assert find_run(run.path.parent.parent, env_id="sums", model="org/model", config={}) is None


def test_metadata_is_replaced_at_once_or_not_at_all(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.update_metadata({"avg_reward": 0.5})
    assert (run.metadata["avg_reward"], run.metadata["env_id"]) == (0.5, "sums")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    before = run.metadata_path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.update_metadata({"avg_reward": 0.9})
    assert run.metadata_path.read_bytes() == before
    assert sorted(os.listdir(run.path)) == [".lock", "metadata.json"]


# --- the same configuration -----------------------------------------------------------------------------------------


def test_the_same_configuration_may_continue(run: RunDir, config: dict[str, Any]) -> None:
    run.check_same(config)
    run.check_same({**config, "rollouts_per_example": 2.0, "seed": None, "env_args": {}})


def test_a_run_under_the_id_that_an_environment_had_by_its_module_may_continue(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, env_id="my_sums", model="m", config={"env_id": "my_sums"})
    run.check_same({"env_id": "my-sums"})
    with pytest.raises(ValueError, match="made with env_id='my_sums', you ask for 'mysums'"):
        run.check_same({"env_id": "mysums"})


def test_every_difference_is_named_with_both_values(run: RunDir, config: dict[str, Any]) -> None:
    asked = {**config, "sampling_args": {"temperature": 1.0, "top_p": 0.9}, "env_id": "products"}
    with pytest.raises(ValueError) as caught:
        run.check_same(asked)
    message = str(caught.value)
    assert "made with sampling_args.temperature=0.7, you ask for 1.0" in message
    assert "made with sampling_args.top_p=None, you ask for 0.9" in message
    assert "made with env_id='sums', you ask for 'products'" in message
    assert "use the same settings or a new run directory" in message


def test_a_run_that_does_not_say_how_it_was_made_is_not_continued(run: RunDir) -> None:
    run.metadata_path.write_bytes(b'{"env_id": "sums", "model": "m"}')
    with pytest.raises(ValueError, match="does not contain the run's config"):
        run.check_same({})


def test_a_configuration_with_objects_in_it_is_the_same_in_the_next_process(tmp_path: Path) -> None:
    class Judge:
        pass

    run = RunDir.create(tmp_path, env_id="a", model="b", config={"judge": Judge(), "seeds": (1, 2), "f": len})
    run.check_same({"judge": Judge(), "seeds": [1, 2], "f": len})


def test_secrets_are_not_stored(tmp_path: Path) -> None:
    config = {
        "env_args": {"judge_api_key": "sk-secret", "api_key_var": "MY_KEY", "max_tokens": 5},
        "sampling_args": {"extra_headers": {"Authorization": "Bearer sk-secret"}},
    }
    run = RunDir.create(tmp_path, env_id="a", model="b", config=config)
    assert b"sk-secret" not in run.metadata_path.read_bytes()
    assert run.metadata["config"]["env_args"]["api_key_var"] == "MY_KEY"
    run.check_same(config)
    with pytest.raises(ValueError) as caught:
        run.check_same({"env_args": {"password": "hunter2"}})
    assert "hunter2" not in str(caught.value)


def test_the_newest_run_of_a_configuration_is_found(tmp_path: Path, config: dict[str, Any]) -> None:
    make = {"env_id": "sums", "model": "org/model"}
    RunDir.create(tmp_path, **make, config=config, run_id="old")
    newest = RunDir.create(tmp_path, **make, config=config, run_id="new")
    os.utime(tmp_path / "sums--org--model" / "old", (1, 1))
    RunDir.create(tmp_path, **make, config={**config, "sampling_args": {}}, run_id="other")
    RunDir.create(tmp_path, env_id="sums", model="else", config=config)
    found = find_run(tmp_path, **make, config=config)
    assert found is not None
    assert found.path == newest.path
    assert find_run(tmp_path, **make, config={"env_id": "none"}) is None


# --- names ----------------------------------------------------------------------------------------------------------


@given(st.text(), st.text(), st.text(min_size=1))
def test_no_name_leaves_its_folder(env_id: str, model: str, run_id: str) -> None:
    for name in (safe_name(f"{env_id}--{model}"), safe_name(run_id)):
        path = Path("/root") / name
        assert Path(os.path.normpath(path)).parent == Path("/root")
        assert 0 < len(os.fsencode(name)) <= 255
        assert "\x00" not in name


@pytest.mark.parametrize(
    "name", ["..", "../../etc/passwd", "/abs", "a\x00b", "x" * 4000, "é" * 300, "a\\..\\b", "\ud800"]
)
def test_tricks_and_monsters_become_one_folder_under_the_root(tmp_path: Path, name: str) -> None:
    run = RunDir.create(tmp_path / "root", env_id=name, model=name, config={}, run_id=name)
    assert run.path.resolve().parent.parent == (tmp_path / "root").resolve()
    assert run.metadata["config"] == {}
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_long_names_that_differ_at_the_end_stay_different() -> None:
    assert safe_name("x" * 500 + "a") != safe_name("x" * 500 + "b")
