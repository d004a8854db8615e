"""The examples: each runs, does what its page says, and has a page and a picture."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LADDER = sorted((ROOT / "examples").glob("[0-9]*.py"))
# Their output is exactly that of their page; what a training prints differs in its last digits from machine to machine.
EXACT = [path for path in LADDER if not path.name.startswith("3")]


def load(number: str) -> Any:
    (path,) = (ROOT / "examples").glob(f"{number}_*.py")
    return importlib.import_module(f"examples.{path.stem}")


def page_of(path: Path) -> str:
    return (ROOT / "docs" / "examples" / f"{path.stem}.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", LADDER, ids=lambda path: path.stem)
def test_each_example_has_a_page_with_its_picture_and_code_that_is_its_own(path: Path) -> None:
    page, code = page_of(path), path.read_text(encoding="utf-8")
    assert f"(../images/{path.stem}.svg)" in page
    assert (ROOT / "docs" / "images" / f"{path.stem}.svg").stat().st_size < 50_000
    assert f"(../../examples/{path.name})" in page
    excerpts = blocks(page, "python")
    assert excerpts
    for excerpt in excerpts:
        indented = [textwrap.indent(excerpt, " " * spaces) for spaces in (0, 4, 8)]
        assert any(one in code for one in indented), f"not in the example any more:\n{excerpt}"
    assert f"(examples/{path.stem}.md)" in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", LADDER, ids=lambda path: path.stem)
def test_each_example_uses_public_names_only_and_opens_with_its_number_and_command(path: Path) -> None:
    code = path.read_text(encoding="utf-8")
    assert re.findall(r"^ *(?:from|import) verifiers.*$", code, re.MULTILINE) == ["import verifiers as vf"]
    assert code.startswith(f'"""{path.name.partition("_")[0]} · ')
    assert f"\npython examples/{path.name}" in code.split('"""')[1]


@pytest.mark.parametrize("path", EXACT, ids=lambda path: path.stem)
def test_each_evaluation_prints_what_its_page_shows(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(path.name.partition("_")[0]).main()
    printed = capsys.readouterr().out
    (shown,) = blocks(page_of(path), "text")
    assert printed.strip() == shown.strip()


def test_an_example_is_a_program_that_runs_from_anywhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", LADDER[0]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("44 rollouts of 44 examples, 0 failed")


def test_a_partial_reward_teaches_a_model_with_random_weights_in_a_few_steps(tmp_path: Path) -> None:
    report = load("301").main(tmp_path, steps=16)
    assert report.rewards[0] < 0.4
    assert max(report.rewards[-4:]) > 0.6
    assert (tmp_path / "vowels" / "plot.svg").is_file()


@pytest.mark.timeout(600)
def test_a_policy_learns_to_use_what_the_environment_says_between_its_turns(tmp_path: Path) -> None:
    report = load("302").main(tmp_path, steps=20)
    found, sensible = ([step["metrics"][name] for step in report.steps] for name in ("found", "sensible"))
    assert found[0] < 0.2
    assert sum(sensible[-5:]) / 5 > 1.8 * sensible[0]
    assert sum(found[-5:]) > 1.5 * sum(found[:5])


@pytest.mark.timeout(600)
def test_a_tiny_transformer_learns_to_reverse_texts_it_has_never_seen(tmp_path: Path) -> None:
    example = load("303")
    done = example.main(tmp_path, seed=0)
    assert done.start < 0.3
    assert done.before.mean_reward < 0.3
    assert done.end > 0.7
    assert done.after.mean_reward > 0.7
    env = example.environment()
    assert not set(env.dataset["question"]) & set(env.eval_dataset["question"])


def test_a_picture_says_failed_where_there_is_no_reward_and_escapes_what_a_model_wrote() -> None:
    pictures = importlib.import_module("examples.pictures")
    drawn = pictures.intervals("Rewards", [("<b>", 0.5, 0.2, 0.8), ("other", None, None, None)])
    assert "&lt;b&gt;" in drawn
    assert "<b>" not in drawn
    assert "failed: no reward" in drawn
