"""Makes command options from a configuration's fields, and reads their values from a TOML file."""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin, get_type_hints

import click

from verifiers.cli.arguments import point_at
from verifiers.cli.eval_file import point_at as point_at_toml

if TYPE_CHECKING:
    from verifiers.trainers.base_config import Config

WORDS = "verifiers.words"  # key of the command's original arguments in a context's `meta`
YES, NO, NOTHING = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")


class Value(click.ParamType):  # type: ignore[type-arg]  # generic in some versions only
    """Converts a text to the type of a field; ``none`` stands for None if the field allows it."""

    def __init__(self, hint: Any) -> None:
        self.kinds = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
        self.name = self._name()

    def _name(self) -> str:
        names = {bool: "on/off", int: "N", float: "X", dict: "JSON"}
        plain = [get_origin(kind) or kind for kind in self.kinds]
        found = [names[kind] for kind in plain if kind in names]
        return found[0] if found and str not in plain else "PATH" if Path in plain else "NAME"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        for kind in (get_origin(kind) or kind for kind in self.kinds):
            try:
                return _read(value, kind)
            except ValueError:
                continue
        return self._refuse(value, param, ctx)

    def _refuse(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> NoReturn:
        wanted = {"on/off": "true or false", "N": "a whole number", "X": "a number", "JSON": "a JSON object"}
        also = ", or none" if type(None) in self.kinds else ""
        self.fail(f"{value!r} is not {wanted.get(self.name, 'a valid value')}{also}", param, ctx)


def _read(text: str, kind: Any) -> Any:
    """Convert a text to one type; ValueError if that is impossible."""
    if kind is bool:
        if text.lower() not in YES + NO:
            raise ValueError
        return text.lower() in YES
    if kind is type(None):
        if text.lower() not in NOTHING:
            raise ValueError
        return None
    if kind in (int, float):
        return kind(text)
    if kind is dict:
        return _read_object(text)
    if text.lower() in NOTHING:
        raise ValueError
    return [part.strip() for part in text.split(",")] if "," in text and kind is not Path else text


def _read_object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(point_at(error)) from error
    if not isinstance(parsed, dict):
        raise ValueError
    return parsed


class KnobOption(click.Option):
    """The option of one field, with all its names; help shows only the first."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return f"{self.opts[0]} {self.make_metavar(ctx)}", self.help or ""


def knob_options(kind: type[Config], *, without: Sequence[str] = ()) -> Callable[[Any], Any]:
    """A decorator that adds an option for each field of a configuration, with aliases, dashes and underscores."""
    hints = get_type_hints(kind)
    names: dict[str, list[str]] = {one.name: [one.name] for one in fields(kind) if one.name not in without}
    for alias, name in kind.aliases.items():
        if name in names:
            names[name].append(alias)
    defaults = kind()

    def add(command: Any) -> Any:
        for name, spelled in reversed(names.items()):
            dashed = [f"--{one.replace('_', '-')}" for one in spelled]
            spellings = dict.fromkeys([*dashed, *(f"--{one}" for one in spelled)])
            is_switch = hints[name] in (bool, bool | None)
            also = f" (also {', '.join(dashed[1:])})" if dashed[1:] else ""
            default = getattr(defaults, name)
            shown = str(default) if not isinstance(default, bool) else "on" if default else "off"
            command = click.option(
                *spellings,
                name,
                cls=KnobOption,
                type=Value(hints[name]),
                default=None,
                help=f"{'default ' + shown if default not in (None, {}, ()) else ''}{also}".strip(),
                **({"is_flag": False, "flag_value": "true"} if is_switch else {}),
            )(command)
        return command

    return add


class FileCommand(click.Command):
    """A command that accepts ``@ file.toml`` or ``@file.toml`` as ``--config file.toml``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        ctx.meta[WORDS] = list(args)
        for word in args:
            if word == "@":
                words.append("--config")
            elif word.startswith("@"):
                words += ["--config", word[1:]]
            else:
                words.append(word)
        return super().parse_args(ctx, words)


@dataclass(kw_only=True)
class Settings:
    """The content of a file: values of the configuration, the environment and its arguments, the model, LoRA."""

    knobs: dict[str, Any] = field(default_factory=dict)
    env_id: str | None = None
    env_args: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    data: str | None = None
    lora: dict[str, Any] | None = None


def read_settings(path: str | None, kind: type[Config], table: str) -> Settings:
    """Read a TOML file: ``env``, ``model``, ``[lora]``, and configuration fields at the top level or in ``table``."""
    if path is None:
        return Settings()
    try:
        text = Path(path).read_text(encoding="utf-8")
        found: dict[str, Any] = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise click.UsageError(f"{path} is not TOML: {point_at_toml(error, text)}") from error
    env, lora = found.pop("env", None), found.pop("lora", None)
    env_args = dict(env) if isinstance(env, Mapping) else {}
    named = env_args.pop("id", None) if env_args else env
    settings = Settings(
        env_id=found.pop("env_id", named),
        env_args={**env_args, **found.pop("env_args", {})},
        model=found.pop("model", None),
        data=found.pop("data", None),
        lora={} if lora is True else None if lora is None or lora is False else dict(lora),
    )
    own = found.pop(table, {})
    try:
        checked = kind(**found, **own)
    except TypeError as error:
        raise click.UsageError(f"{path}: {error}") from error
    given = [kind.aliases.get(name, name) for name in (*found, *own) if name not in kind.without_effect]
    settings.knobs = {name: getattr(checked, name) for name in given}
    return settings
