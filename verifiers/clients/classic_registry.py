"""A classic ``endpoints.py`` → its ``ENDPOINTS`` table, read without running the file."""

from __future__ import annotations

import ast
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_registry(path: Path, *, execute: bool = False) -> dict[str, Any]:
    """``ENDPOINTS`` of a file, from literals, names, f-strings and ``os.getenv``; ``execute`` runs the file instead."""
    if execute:
        table = runpy.run_path(str(path)).get("ENDPOINTS")
    else:
        table = _Reader(path).read().get("ENDPOINTS")
    if not isinstance(table, dict):
        raise ValueError(f"{path} has no table ENDPOINTS = {{name: {{'model': …, 'url': …, 'key': …}}}}")
    return table


class _Reader:
    """Evaluates the few statements and expressions that a table needs; anything else is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        try:
            tree = ast.parse(self.path.read_text(encoding="utf-8"), filename=str(self.path))
        except SyntaxError as error:
            raise ValueError(f"{self.path}:{error.lineno} is not Python: {error.msg}") from error
        for statement in tree.body:
            self._run(statement)
        return self.names

    def _run(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()) | ast.FunctionDef() | ast.ClassDef():
                return  # not executed, so a later use of a name that it defines is an error
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                return
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, self._value(value))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._value(value))
            case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr(), value=value) if name in self.names:
                self.names[name] = self._joined(statement, lambda: self.names[name] | self._value(value))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update"), args=[value])) if (
                isinstance(self.names.get(name), dict)
            ):
                self.names[name].update(self._value(value))
            case _:
                raise self._refusal(statement)

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Subscript(value=ast.Name(id=name), slice=key) if isinstance(self.names.get(name), dict):
                self.names[name][self._value(key)] = value
            case _:
                raise self._refusal(target)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item) for item in items]
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part)) for part in parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._value(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined(node, lambda: self._value(left) + self._value(right))
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._joined(node, lambda: self._value(left) | self._value(right))
            case ast.BoolOp(op=ast.Or(), values=values):
                return next((value for value in map(self._value, values) if value), None)
            case ast.Subscript(value=value, slice=key):
                return self._subscript(node, value, key)
            case ast.Call(func=function, args=arguments, keywords=[]) if len(arguments) in (1, 2):
                return self._call(node, ast.unparse(function), [self._value(argument) for argument in arguments])
            case _:
                raise self._refusal(node)

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr]) -> dict[Any, Any]:
        table: dict[Any, Any] = {}
        for key, value in zip(keys, values, strict=True):
            if key is None:
                table.update(self._value(value))
            else:
                table[self._value(key)] = self._value(value)
        return table

    def _subscript(self, node: ast.expr, value: ast.expr, key: ast.expr) -> Any:
        name = self._value(key)
        if ast.unparse(value) in ("os.environ", "environ"):
            if name not in os.environ:
                raise ValueError(f"{self.path}:{node.lineno} needs the environment variable {name}, which is not set")
            return os.environ[name]
        return self._joined(node, lambda: self._value(value)[name])

    def _call(self, node: ast.expr, function: str, arguments: list[Any]) -> Any:
        if function in ("os.getenv", "getenv", "os.environ.get", "environ.get"):
            return os.environ.get(*arguments)
        if function in ("str", "dict") and len(arguments) == 1:
            return self._joined(node, lambda: {"str": str, "dict": dict}[function](arguments[0]))
        raise self._refusal(node)

    def _joined(self, node: ast.AST, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{self.path}:{getattr(node, 'lineno', '?')} cannot be evaluated: {error!r}") from error

    def _refusal(self, node: ast.AST) -> ValueError:
        line = getattr(node, "lineno", "?")  # the line itself is not shown, because it may contain a key
        return ValueError(
            f"{self.path}:{line} is not a plain table of endpoints, and the file is not executed: simplify it, "
            "move the registry to endpoints.toml, or call load_endpoints(path, execute=True)"
        )
