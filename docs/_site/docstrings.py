"""Docstrings as the site shows them: doctests become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^[ ]*>>> .*\n(?:[ ]*\S.*\n?)*)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences around each run of ``>>>`` lines and what they print; a paragraph otherwise."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring's text with its doctests in fences."""
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text + "\n").rstrip("\n")
