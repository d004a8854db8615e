"""Formats tables, wrapped lines and counts for the terminal, without control characters."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

import click

from verifiers.logs import printable

GAP = "  "
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "bright_black"}


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), right: Sequence[int] = ()) -> list[str]:
    """Aligned columns; those in ``right`` are right-aligned, and lines have no trailing spaces.

    >>> table([["a", "1"], ["long", "23"]], header=["name", "n"], right=[1])
    ['name   n', 'a      1', 'long  23']
    """
    cells = [[printable(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(max(map(len, cells), default=0))] if cells else []
    lines = []
    for row in cells:
        padded = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append(GAP.join(padded).rstrip())
    return lines


def terminal_width() -> int:
    return max(30, min(shutil.get_terminal_size((110, 24)).columns, 120))


def hang(text: str, indent: int) -> str:
    """Wrap a text in the last column with a hanging indent.

    >>> print("name: " + hang("one two", 6))
    name: one two
    """
    width = max(20, terminal_width() - indent)
    lines = [line for part in printable(text).splitlines() for line in textwrap.wrap(part, width) or [""]]
    return ("\n" + " " * indent).join(lines)


def fitted(lines: Iterable[str], *, indent: int | None = None, stream: TextIO | None = None) -> list[str]:
    """Lines wrapped to the width of the terminal and indented; unchanged if the stream is not a terminal.

    Lines are broken only at spaces, so that paths can still be copied.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return list(lines)
    width = shutil.get_terminal_size((110, 24)).columns
    fitting: list[str] = []
    for line in lines:
        own = len(line) - len(line.lstrip()) + 2 if indent is None else indent
        is_long = len(line) > width > 2 * own
        fitting += _wrapped(line, width, " " * own) if is_long else [line]
    return fitting


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        line, width, subsequent_indent=indent, tabsize=4, break_on_hyphens=False, break_long_words=False
    )


def status_word(status: str) -> str:
    """``ok``, ``warn``, ``fail`` or ``skip`` in its colour, padded to four characters."""
    return click.style(f"{status:<4}", fg=COLOURS[status])


def heading(text: str) -> str:
    return click.style(text, bold=True)


def dim(text: str) -> str:
    return click.style(text, dim=True)


def some(number: int, noun: str) -> str:
    """A count with its noun.

    >>> some(1, "example"), some(1200, "example")
    ('1 example', '1,200 examples')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
