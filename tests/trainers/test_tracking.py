"""Figures leave the house: what is sent to each tracker is read back from what it wrote."""

from __future__ import annotations

import importlib
import importlib.util
import json
import struct
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from verifiers.trainers.watch import tracking
from verifiers.trainers.watch.tracking import Guarded, Histogram, flatten, trackers

FIGURES = {
    "step": 3,
    "time": 1.7e9,
    "reward": 0.5,
    "kl": None,
    "loss": float("nan"),
    "metrics": {"correct": 0.25, "format": 1},
    "ratio_histogram": {"edges": [0.0, 0.5, 1.0, 2.0], "counts": [1, 6, 3]},
}


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


def start(report_to: Any, folder: Path) -> list[tracking.Tracker]:
    return trackers(report_to, run_name="first", config={"group_size": 8, "api_key": "sk-1"}, folder=folder)


# --- what is asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, "none", [], ["none"], ""], ids=repr)
def test_nothing_is_reported_where_nothing_is_asked_for(nothing: Any, tmp_path: Path) -> None:
    assert start(nothing, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["mlflow", ["wandb", "mlflow"]], ids=repr)
def test_an_unknown_name_is_one_sentence_before_anything_starts(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mlflow' is not known; choose wandb, trackio, tensorboard, all or none"):
        start(wrong, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_sentence_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"report_to='trackio' needs a package that is not installed; pip install trackio"
    ):
        start("trackio", tmp_path)
    assert start("all", tmp_path) == []


def test_the_folder_that_wandb_leaves_behind_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leftbehind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert importlib.util.find_spec("leftbehind") is not None
    assert not tracking._is_installed("leftbehind")


def test_a_tracker_that_cannot_start_says_why_and_the_others_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Works(Recorder):
        def close(self) -> None:
            closed.append(self.name)

    def refuse(run_name: str, config: dict[str, Any], folder: Path) -> tracking.Tracker:
        raise OSError("no key\nis set")

    monkeypatch.setattr(tracking, "_TRACKERS", {"trackio": lambda *_: Works(), "wandb": refuse})
    monkeypatch.setattr(tracking, "_is_installed", lambda name: True)
    with pytest.raises(
        RuntimeError, match=r"^report_to='wandb' could not start: no key is set; run `wandb login`, set"
    ):
        start(["trackio", "wandb"], tmp_path)
    assert closed == ["recorder"]


def test_all_means_those_that_are_installed_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: lambda *_: Recorder() for name in ("wandb", "trackio", "tensorboard")}
    monkeypatch.setattr(tracking, "_TRACKERS", made)
    monkeypatch.setattr(tracking, "_is_installed", lambda name: name != "trackio")
    assert len(start("all", tmp_path)) == 2
    assert len(start(["wandb", "all", "wandb"], tmp_path)) == 2


# --- what is sent -------------------------------------------------------------------------------------------------


class Recorder:
    """A tracker that keeps what it is told, or fails."""

    name = "recorder"

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.told: list[tuple[int, Mapping[str, Any]]] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.fails:
            raise ConnectionError("network is down")
        self.told.append((step, metrics))

    def close(self) -> None:
        if self.fails:
            raise ConnectionError("still down")


def test_nested_figures_get_names_with_slashes_and_holes_are_left_out() -> None:
    assert flatten(FIGURES) == {
        "step": 3,
        "time": 1.7e9,
        "reward": 0.5,
        "metrics/correct": 0.25,
        "metrics/format": 1,
        "ratio_histogram": Histogram([0.0, 0.5, 1.0, 2.0], [1.0, 6.0, 3.0]),
    }
    assert flatten({"h": {"edges": [0, 1], "counts": [1, 2]}, "text": "x"}) == {}  # edges that do not fit: no histogram


def test_a_tracker_that_fails_warns_once_and_training_goes_on_and_it_is_tried_again() -> None:
    inner = Recorder(fails=True)
    guarded = Guarded(inner)
    with pytest.warns(RuntimeWarning, match="recorder failed to log metrics.*network is down.*training continues"):
        guarded.log(1, FIGURES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded.log(2, FIGURES)
        inner.fails = False
        guarded.log(3, {"step": 3, "time": 1.7e9, "reward": 0.5})
        inner.fails = True
        guarded.close()
    assert inner.told == [(3, {"reward": 0.5})]


# --- the real ones ------------------------------------------------------------------------------------------------


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline file of wandb: a log in blocks of 32 KiB; a piece has a sum, a length and a kind."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    offset, held = 7, b""
    while offset + 7 <= len(raw):
        if 32768 - offset % 32768 < 7:  # what is left of a block is padding
            offset += 32768 - offset % 32768
            continue
        length, kind = struct.unpack("<HB", raw[offset + 4 : offset + 7])
        held += raw[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            record = proto.Record()
            record.ParseFromString(held)
            held = b""
            yield record


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, with a home of its own and nobody logged in; its process ends with the test."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    for place in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "home"))
    package = importlib.import_module("wandb")
    yield package
    package.teardown()


@needs("wandb")
def test_wandb_offline_has_the_figures_the_histogram_and_the_configuration(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    folder.mkdir()
    (first,) = start("wandb", folder)
    first.log(3, FIGURES)
    first.log(3, {"eval": {"reward": 0.75}})
    first.log(4, {"reward": 0.6})
    first.close()
    wandb.teardown()  # its own process writes the file, and is waited for here
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(file))
    (about,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (about.project, about.display_name) == ("verifiers", "first")
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert (config["group_size"], config["api_key"]) == (8, "***")
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["_step"] for row in rows] == [3, 4]
    assert (rows[0]["reward"], rows[0]["metrics/correct"], rows[0]["eval/reward"]) == (0.5, 0.25, 0.75)
    assert (rows[0]["ratio_histogram/values"], rows[0]["ratio_histogram/bins"]) == ([1, 6, 3], [0, 0.5, 1, 2])
    assert "kl" not in rows[0]
    (again,) = start("wandb", folder)  # a resumed training is the same run
    again.close()
    assert len({file.stem for file in folder.glob("wandb/offline-run-*/*.wandb")}) == 1


@needs("wandb")
def test_wandb_without_a_key_is_one_sentence(wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(RuntimeError, match=r"report_to='wandb' could not start: .*WANDB_MODE=offline"):
        start("wandb", tmp_path)


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_the_figures_and_a_resume_hides_what_it_writes_again(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="tensorboard is written through torch")
    (writer,) = start("tensorboard", tmp_path)
    for step in range(1, 5):
        writer.log(step, {**FIGURES, "reward": step / 10})
    writer.close()
    (again,) = start("tensorboard", tmp_path)
    again.log(3, {"reward": 0.9})
    again.close()
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    rewards = [(event.step, round(event.value, 3)) for event in found.Scalars("reward")]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert found.Scalars("metrics/correct")[0].value == 0.25
    histogram = found.Histograms("ratio_histogram")[0].histogram_value
    assert (histogram.num, list(histogram.bucket), list(histogram.bucket_limit)) == (10, [1, 6, 3], [0.5, 1, 2])
    assert "config/text_summary" in found.Tags()["tensors"]


@needs("trackio")
@pytest.mark.filterwarnings("default")
def test_trackio_has_the_figures_and_talks_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = importlib.import_module("trackio")
    monkeypatch.setenv("TRACKIO_PROJECT", "verifiers-tests")
    (tracker,) = start("trackio", tmp_path)
    tracker.log(3, FIGURES)
    tracker.close()
    (again,) = start("trackio", tmp_path)
    again.log(4, {"reward": 0.6})
    again.close()
    assert capsys.readouterr().out == ""
    (run,) = list(trackio.Api().runs("verifiers-tests"))
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    rows = storage.get_logs("verifiers-tests", run.name)
    assert [(row["step"], row["reward"]) for row in rows] == [(3, 0.5), (4, 0.6)]
    assert rows[0]["metrics/correct"] == 0.25
    assert (rows[0]["ratio_histogram"]["values"], rows[0]["ratio_histogram"]["bins"]) == ([1, 6, 3], [0, 0.5, 1, 2])
