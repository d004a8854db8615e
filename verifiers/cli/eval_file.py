"""Reads a TOML file of several ``[[eval]]`` as options of ``vf eval``; errors show their place in the file."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

NOT_IN_A_FILE = ("verbose", "as_json", "dry_run", "resume", "no_interleave_scoring", "save_every")
OTHER_NAMES = {"env": "env_id", "name": "env_id", "headers": "header"}


def read_evals(path: str, ctx: click.Context) -> list[dict[str, Any]]:
    """The option values of each evaluation in the file; keys above the first ``[[eval]]`` apply to all."""
    text = _read(path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise click.UsageError(f"{path} is not TOML: {point_at(error, text)}") from error
    evals = table.pop("eval", None)
    if not isinstance(evals, list) or not evals or not all(isinstance(one, dict) for one in evals):
        raise click.UsageError(f"{path} has no [[eval]]; each evaluation needs this line and an env_id")
    shared = _values(table, f"{path}", ctx)
    found = []
    for number, one in enumerate(evals, 1):
        where = f"{path}: [[eval]] {number}"
        values = {**shared, **_values(one, where, ctx)}
        if not isinstance(values.get("env_id"), str):
            raise click.UsageError(f'{where} has no environment; add env_id = "name"')
        found.append(values)
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from error


def point_at(error: tomllib.TOMLDecodeError, text: str) -> str:
    """The error message, the line of the error, and a mark under its column.

    >>> try: tomllib.loads("a = 1\\nb = = 2")
    ... except tomllib.TOMLDecodeError as error: print(point_at(error, "a = 1\\nb = = 2"))
    Invalid value (at line 2, column 5)
      b = = 2
          ^
    """
    place = re.search(r"at line (\d+), column (\d+)", str(error))
    lines = text.splitlines()
    if place is None or int(place[1]) > len(lines):
        return str(error)
    line, column = lines[int(place[1]) - 1], int(place[2])
    shown = re.sub(r"[^\x20-\uffff]", " ", line)
    return f"{error}\n  {shown}\n  {' ' * (column - 1)}^"


def _values(table: Mapping[str, Any], where: str, ctx: click.Context) -> dict[str, Any]:
    options = {str(param.name): param for param in ctx.command.params if param.name not in NOT_IN_A_FILE}
    values = {}
    for key, given in table.items():
        name = OTHER_NAMES.get(key, key.replace("-", "_"))
        if name not in options:
            close = difflib.get_close_matches(name, [*options, *OTHER_NAMES], n=1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(sorted(options))}"
            raise click.UsageError(f"{where} has an unknown key {key!r}; {hint}")
        values[name] = _value(options[name], given, f"{where}: {key}", ctx)
    return values


def _value(param: click.Parameter, given: Any, where: str, ctx: click.Context) -> Any:
    """Convert a TOML value to the value of the option; objects and lists are TOML tables and arrays."""
    is_object = isinstance(param, click.Option) and (param.metavar in ("JSON", "NAME:VALUE"))
    if is_object or isinstance(given, dict):
        if not is_object or not isinstance(given, dict):
            raise click.UsageError(f"{where} must {'be a table' if is_object else 'not be a table'}, not {given!r:.60}")
        return {str(key): str(value) for key, value in given.items()} if param.multiple else given
    if isinstance(given, list):
        if param.name not in ("state_columns", "model"):
            raise click.UsageError(f"{where} must not be a list, but is {given!r:.60}")
        return [str(name) for name in given]
    if param.name == "env_id":
        return given
    if param.name == "model":
        return [str(given)]
    if isinstance(param, click.Option) and param.is_flag != isinstance(given, bool):
        raise click.UsageError(f"{where} must {'be true or false, not' if param.is_flag else 'not be'} {given!r:.60}")
    try:
        return param.process_value(ctx, str(given) if isinstance(given, float) else given)  # 1.5 is no count
    except click.BadParameter as error:
        raise click.UsageError(f"{where}: {error.message}") from error
