"""Every environment of this repository passes its own check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verifiers.checks import check_environment

FOLDER = Path(__file__).resolve().parents[2] / "environments"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/pyproject.toml"))
PROBLEMS = [
    (f"Ida has {n} nets with 4 crabs each. How many crabs has she?", f"{n} * 4\n#### {4 * n}") for n in range(9)
]
# Where the default would be fetched from the hub.
ARGS = {"math_python": {"dataset_name": "generated"}}


@pytest.fixture(autouse=True)
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What environments would fetch from the hub."""
    lines = "".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in PROBLEMS)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines)
    monkeypatch.setenv("GSM8K_PATH", str(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_it_passes_every_check(name):
    try:
        report = check_environment(name, env_args=ARGS.get(name), environments_dir=FOLDER)
    except ImportError as error:
        pytest.skip(str(error))
    bad = [f"{verdict.name}: {verdict.found}" for verdict in report.verdicts if verdict.status == "fail"]
    assert not bad, "\n".join(bad)
