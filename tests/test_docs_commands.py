"""Every `vf …` command line on a page, and in the help texts of the commands, names a command and options that exist.

Nothing is run: a placeholder (`RUN`, `…`) may stand for any value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from verifiers.cli.main import vf

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "environments").glob("*/README.md")),
]
PYTHON = re.compile(r"^ *```py.*?^ *```", re.M | re.S)
# A command begins a line or a span in backticks, or follows `&&` or the setting of a variable.
START = re.compile(r"(?:^[ \t]*(?:\$ |[!%])?|`[!%]?|&& |\w=\S+ )(?=((?:vf|python -m verifiers) +[\w-][^`\n]*))", re.M)
END = re.compile(r" #| {2,}| && | \| | > ")


def command_lines(text: str) -> Iterator[str]:
    """The commands in a text: continued lines are joined; comments, descriptions and shell operators are cut off."""
    text = re.sub(r"\s*\\\n\s*", " ", PYTHON.sub("", text))
    for found in START.findall(text):
        yield END.split(found)[0].strip().rstrip(".")


def fault(line: str) -> str | None:
    """What is wrong with a command line, if anything."""
    words = shlex.split(line)[3 if line.startswith("python") else 1 :]
    command: click.Command = vf
    while isinstance(command, click.Group) and words and words[0] != "COMMAND" and not words[0].startswith("-"):
        inner = command.get_command(click.Context(command), words.pop(0))
        if inner is None:
            return f"{line}: there is no such command"
        command = inner
    command = command.make_context("vf", [*words], resilient_parsing=True).command  # such as `vf export verl`
    try:
        command.make_parser(click.Context(command)).parse_args(words)
    except click.NoSuchOption as error:
        return f"{line}: {error.format_message()}"
    except click.BadOptionUsage:  # an option is mentioned without a value
        pass
    return None


def faults(text: str) -> list[str]:
    return [found for line in command_lines(text) if (found := fault(line))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_on_the_page_has_a_command_and_options_that_exist(page: Path) -> None:
    assert not faults(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", vf.list_commands(click.Context(vf)))
def test_every_command_line_in_the_help_of_a_command_has_options_that_exist(name: str) -> None:
    command = vf.get_command(click.Context(vf), name)
    assert command is not None
    assert not faults(command.help or "")


WRONG = """\
`vf eval gsm8k --modle x`, `vf evil`, `vf runs tga last x`, `vf eval --until` and `vf view RUN --export run.html`

    $ vf plan MODEL --gpu 4x24GB           what fits

```
KEY=1 python -m verifiers serve smollm2 --prot 8000   # a comment with --no-such-flag
vf train arithmetic -m smollm2 \\
    --learning-rat 1e-5
vf power 0.02 --mean 0.7 && vf export last -q sft
```
"""


def test_a_misspelt_command_or_option_is_found_wherever_it_is() -> None:
    assert [line.split(":")[0] for line in faults(WRONG)] == [
        "vf eval gsm8k --modle x",
        "vf evil",
        "vf runs tga last x",
        "vf plan MODEL --gpu 4x24GB",
        "python -m verifiers serve smollm2 --prot 8000",
        "vf train arithmetic -m smollm2 --learning-rat 1e-5",
        "vf export last -q sft",
    ]
