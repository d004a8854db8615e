"""A docstring → its summary, argument descriptions, return description and examples."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

_SECTIONS = {
    "args": "args",
    "arguments": "args",
    "parameters": "args",
    "params": "args",
    "keyword args": "args",
    "other parameters": "args",
    "returns": "returns",
    "return": "returns",
    "yields": "returns",
    "example": "examples",
    "examples": "examples",
    "raises": "rest",
    "notes": "rest",
    "note": "rest",
    "see also": "rest",
    "warnings": "rest",
    "attributes": "rest",
}
_ARGUMENT = re.compile(r"\*{0,2}(?P<name>[A-Za-z_]\w*)\s*(?:\([^()\n]*\)\s*)?:(?P<text>.*)", re.DOTALL)
_NUMPY_ARGUMENT = re.compile(r"\*{0,2}(?P<names>[A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::.*)?")
_REST_FIELD = re.compile(r":(?P<kind>param|parameter|arg|argument|key|returns?)\b(?P<words>[^:\n]*):(?P<text>.*)")


@dataclass(slots=True)
class Docstring:
    """The parts of a docstring; missing parts are empty."""

    summary: str = ""
    args: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    examples: str = ""

    @property
    def description(self) -> str:
        """The description for the model: the summary, the return value and the examples."""
        parts = [self.summary]
        if self.returns:
            parts.append(f"Returns: {self.returns}")
        if self.examples:
            parts.append(f"Examples:\n{self.examples}")
        return "\n\n".join(part for part in parts if part)


def read_docstring(function: Any) -> Docstring:
    """Read a function's docstring, in Google's, numpy's or reST's style.

    >>> def add(a, b):
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: The first number.
    ...         b (int): The second
    ...             number.
    ...
    ...     Returns:
    ...         Their sum.
    ...     '''
    >>> doc = read_docstring(add)
    >>> doc.summary, doc.args, doc.returns
    ('Add two numbers.', {'a': 'The first number.', 'b': 'The second number.'}, 'Their sum.')
    """
    text = inspect.getdoc(function) or ""
    sections = _split(text.splitlines())
    doc = Docstring(
        summary="\n".join(sections["summary"]).strip(),
        returns=_joined(sections["returns"]),
        examples=inspect.cleandoc("\n".join(["", *sections["examples"]])).strip(),
    )
    is_numpy = bool(sections["is_numpy"])
    doc.args = _numpy_args(sections["args"]) if is_numpy else _google_args(sections["args"])
    _take_rest_fields(doc)
    return doc


def _split(lines: list[str]) -> dict[str, list[str]]:
    """The lines of each section; ``is_numpy`` is not empty if a heading is underlined."""
    sections: dict[str, list[str]] = {
        name: [] for name in ("summary", "args", "returns", "examples", "rest", "is_numpy")
    }
    current = "summary"
    at = 0
    while at < len(lines):
        line = lines[at]
        heading = line.strip().removesuffix(":").lower()
        underline = lines[at + 1].strip() if at + 1 < len(lines) else ""
        is_underlined = len(underline) >= 3 and not underline.strip("-=")
        is_heading = line[:1].strip() != "" and heading in _SECTIONS
        if is_heading and (is_underlined or line.rstrip().endswith(":")):
            current = _SECTIONS[heading]
            if is_underlined:
                sections["is_numpy"].append(heading)
                at += 1
        elif current != "summary" and line[:1].strip() and not sections["is_numpy"]:
            current = "summary"  # an unindented line ends the section
            sections["summary"] += ["", line]
        else:
            sections[current].append(line)
        at += 1
    return sections


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())


def _entries(lines: list[str]) -> list[str]:
    """The entries of a section: each unindented line with the indented lines after it."""
    written = inspect.cleandoc("\n".join(["", *lines])).splitlines()
    entries: list[str] = []
    for line in written:
        if not line.strip():
            continue
        if line[:1].strip() or not entries:
            entries.append(line.strip())
        else:
            entries[-1] += "\n" + line.strip()
    return entries


def _google_args(lines: list[str]) -> dict[str, str]:
    found = (_ARGUMENT.match(entry) for entry in _entries(lines))
    return {match["name"]: " ".join(match["text"].split()) for match in found if match}


def _numpy_args(lines: list[str]) -> dict[str, str]:
    args = {}
    for entry in _entries(lines):
        head, _, text = entry.partition("\n")
        match = _NUMPY_ARGUMENT.fullmatch(head)
        if match:
            args.update({name.strip(): " ".join(text.split()) for name in match["names"].split(",")})
    return args


def _take_rest_fields(doc: Docstring) -> None:
    """Move ``:param name: text`` and ``:returns: text`` out of the summary."""
    kept: list[str] = []
    for line in doc.summary.splitlines():
        match = _REST_FIELD.match(line.strip())
        if match is None:
            kept.append(line)
        elif match["kind"].startswith("return"):
            doc.returns = doc.returns or match["text"].strip()
        elif words := match["words"].split():
            doc.args.setdefault(words[-1], match["text"].strip())
    doc.summary = "\n".join(kept).strip()
