"""Parses command-line values (JSON objects, headers, lists of names), and writes the command line for given values."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click

from verifiers.clients.secrets import hide_in_url
from verifiers.store.config import without_secrets

SHOWN_CHARS = 72


class Integer(click.IntRange):
    """A whole number within bounds; click's own name for it is "integer range"."""

    name = "integer"


class Number(click.FloatRange):
    """A number within bounds; click's own name for it is "float range"."""

    name = "number"


def read_json(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[str, Any] | None:
    """A JSON object; an error shows its place."""
    if text is None:
        return None
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(point_at(error), ctx, param) from error
    if not isinstance(parsed, dict):
        message = f'it must be a JSON object such as {{"key": 1}}, not {json.dumps(parsed):.60}'
        raise click.BadParameter(message, ctx, param)
    return parsed


def point_at(error: json.JSONDecodeError) -> str:
    """The error message, the line of the error, and a mark under its column.

    >>> try: json.loads('{"a" 1}')
    ... except json.JSONDecodeError as error: print(point_at(error))
    this is not JSON: Expecting ':' delimiter at character 6
      {"a" 1}
           ^
    """
    line = error.doc.splitlines()[error.lineno - 1] if error.doc.strip() else ""
    start = max(0, error.colno - 1 - SHOWN_CHARS // 2)
    shown = re.sub(r"[^\x20-\uffff]", "?", line[start : start + SHOWN_CHARS])
    mark = " " * (error.colno - 1 - start) + "^"
    return f"this is not JSON: {error.msg} at character {error.pos + 1}\n  {shown}\n  {mark}"


def read_headers(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Headers of the form ``Name: Value``."""
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name.strip()):
            # The header itself is not shown, because it may be a key.
            raise click.BadParameter("a header must have the form 'Name: Value'", ctx, param)
        headers[name.strip()] = value.strip()
    return headers


def read_count(ctx: click.Context, param: click.Parameter, number: int | None) -> int | None:
    """A positive count, or -1 for all."""
    if number is not None and (number == 0 or number < -1):
        raise click.BadParameter(f"it must be 1 or more, or -1 for no limit, not {number}", ctx, param)
    return number


def read_names(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def read_half_width(ctx: click.Context, param: click.Parameter, given: Any) -> float | None:
    """``±0.02``, ``+-0.02`` or ``0.02``."""
    if given is None:
        return None
    try:
        number = float(re.sub(r"^\s*(±|\+/?-)\s*", "", str(given)))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise click.BadParameter(f"it must be a positive number such as ±0.02, not {given!r}", ctx, param)
    return number


def read_range(ctx: click.Context, param: click.Parameter, given: str | None) -> str | None:
    """Two numbers separated by a comma, the smaller first."""
    if given is None:
        return None
    try:
        least, most = map(float, given.split(","))
    except ValueError:
        least = most = 0.0
    if not -float("inf") < least < most < float("inf"):
        raise click.BadParameter(f"it must be two numbers, the smaller first, such as 0,1.1; not {given!r}", ctx, param)
    return given


def given_values(ctx: click.Context) -> dict[str, Any]:
    """The values given on the command line, without defaults."""
    return {
        name: value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }


def command_line(ctx: click.Context, given: Mapping[str, Any], *, without: Sequence[str] = (), **changes: str) -> str:
    """The command line for these values with some options changed and secrets masked, to be copied by the user."""
    words = ctx.command_path.split()
    for param in ctx.command.params:
        name = param.name or ""
        if name in given and name not in without and name not in changes:
            words += _words(param, given[name])
    for name, value in changes.items():
        words += [f"--{name.replace('_', '-')}", value]
    return shlex.join(words)


def _words(param: click.Parameter, value: Any) -> list[str]:
    if isinstance(param, click.Argument):
        return [str(value)]
    flag = param.opts[0]
    if isinstance(param, click.Option) and param.is_flag:
        return [flag] if value else param.secondary_opts[:1]
    if param.multiple and isinstance(value, dict):  # headers, which are usually keys
        return [word for name in value for word in (flag, f"{name}: ***")]
    if isinstance(value, dict):
        return [flag, json.dumps(without_secrets(value), ensure_ascii=False)]
    return [flag, ",".join(value) if isinstance(value, list) else hide_in_url(str(value))]
