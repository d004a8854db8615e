"""The source of an environment → static findings: bare ``except``, ``eval``, randomness without a seed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ALLOWED = "vf: ok"  # a comment on the line that suppresses its findings
NOT_DRAWING = ("getstate", "seed", "setstate")
NUMPY_MAKERS = frozenset(("Generator", "PCG64", "Philox", "SeedSequence", "seed"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A likely fault in the source."""

    kind: Literal["bare except", "eval", "randomness", "swallowed error"]
    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.message}"


def read_findings(files: Sequence[Path]) -> list[Finding]:
    """The findings of several files, in order."""
    return [
        finding for path in files for finding in find(path.read_text(encoding="utf-8", errors="replace"), path.name)
    ]


def find(text: str, file: str = "<text>") -> list[Finding]:
    """The findings in one source text.

    >>> [str(finding) for finding in find("try:\\n    x = eval(reply)\\nexcept:\\n    x = 0", "env.py")]
    ['env.py:2 eval() runs whatever text it is given', "env.py:3 a bare 'except' also catches Ctrl-C and typing errors"]
    """
    tree = ast.parse(text, filename=file)
    lines = text.splitlines()
    names = _Names(tree)
    found = [
        Finding(kind=kind, file=file, line=node.lineno, message=message)
        for node, kind, message in _look(tree, names)
        if ALLOWED not in lines[node.lineno - 1]
    ]
    return sorted(found, key=lambda finding: finding.line)


class _Names:
    """The names under which a file imports modules and functions."""

    def __init__(self, tree: ast.Module) -> None:
        self.modules: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    self.modules[name.asname or name.name.partition(".")[0]] = name.name
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in node.names:
                    self.functions[name.asname or name.name] = f"{node.module}.{name.name}"

    def full(self, node: ast.expr) -> str:
        """``np.random.choice`` → ``numpy.random.choice``; "" for anything but a dotted name."""
        if isinstance(node, ast.Name):
            return self.functions.get(node.id) or self.modules.get(node.id) or node.id
        if isinstance(node, ast.Attribute):
            before = self.full(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""


Seen = tuple[ast.expr | ast.ExceptHandler, Literal["bare except", "eval", "randomness", "swallowed error"], str]


def _look(tree: ast.Module, names: _Names) -> Iterator[Seen]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node, "bare except", "a bare 'except' also catches Ctrl-C and typing errors"
            elif names.full(node.type) in ("Exception", "BaseException") and _gives_a_number(node):
                yield (
                    node,
                    "swallowed error",
                    "any error becomes a score here; let it raise: a failure is not a reward of 0",
                )
        elif isinstance(node, ast.Call):
            name = names.full(node.func)
            if name in ("eval", "exec", "builtins.eval", "builtins.exec") and not _is_constant(node):
                yield node, "eval", f"{name.rpartition('.')[2]}() runs whatever text it is given"
            elif problem := _unseeded(name, node):
                yield node, "randomness", problem


def _gives_a_number(handler: ast.ExceptHandler) -> bool:
    match handler.body[-1]:
        case ast.Return(value=ast.Constant(value=value)):
            return type(value) in (int, float)
    return False


def _is_constant(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant)


def _unseeded(name: str, call: ast.Call) -> str | None:
    module, _, function = name.rpartition(".")
    has_seed = bool(call.args or call.keywords)
    if module == "random" and function.islower() and function not in NOT_DRAWING:
        return f"random.{function}() has no seed of its own; draw from random.Random(seed)"
    if name in ("random.Random", "numpy.random.default_rng", "numpy.random.RandomState"):
        return None if has_seed else f"{name}() without a seed gives different numbers each time"
    if module == "numpy.random" and function not in NUMPY_MAKERS:
        return f"numpy.random.{function}() has no seed of its own; draw from numpy.random.default_rng(seed)"
    if module == "secrets" or name in ("random.SystemRandom", "os.urandom"):
        return f"{name}() is never reproducible"
    return None
