"""docs/cli.md and docs/packages.md: every command on the pages is one that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from verifiers.cli.main import COMMANDS, vf

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "cli.md"
LINES = sorted(
    {
        line
        for page in (PAGE, DOCS / "packages.md")
        for line in re.findall(r"^vf .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
)


@pytest.fixture
def runs(folder: Path) -> None:
    """The runs and the traces that the page speaks of."""
    (folder / "traces.jsonl").touch()
    for name in ("gsm8k--small/1a2b3c4d", "gsm8k--large/5e6f7a8b"):
        (folder / "outputs" / "evals" / name).mkdir(parents=True)
        (folder / "outputs" / "evals" / name / "metadata.json").write_text("{}")


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_page_is_understood(line, runs):
    words = shlex.split(line)[1:]
    command: click.Command = vf
    context = click.Context(vf)
    while isinstance(command, click.Group) and words:
        command = command.get_command(context, words.pop(0))
    command.make_context("vf", words)


def test_every_command_and_every_flag_of_eval_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    assert len(LINES) > 25
    for name in COMMANDS:
        assert f"`vf {name} " in text or f"`vf {name}`" in text
    for param in vf.get_command(click.Context(vf), "eval").params:
        if isinstance(param, click.Option):
            assert any(f"`{flag}`" in text or f"`{flag} " in text for flag in param.opts), param.opts
