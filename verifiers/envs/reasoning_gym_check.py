"""A puzzle of Reasoning Gym and an answer → a score. Only sandboxes and worker processes run this file.

Many of its scorers evaluate the answer as Python. This file imports nothing of this package, because a sandbox gets it
as text.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import json
import sys
import types
from typing import Any


class _Plots(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A stand-in for matplotlib, which Reasoning Gym imports but does not need for scoring, and which writes files."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ("matplotlib", "mpl_toolkits"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: object  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def do_without_plots() -> None:
    """Import Reasoning Gym now, without matplotlib."""
    sys.meta_path.insert(0, _Plots())
    import reasoning_gym  # noqa: F401


@functools.lru_cache(8)
def _dataset(name: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


def read_entry(text: str) -> Any:
    """Parse a puzzle from its text: a Python literal, or else JSON."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return json.loads(text)


def score_answer(name: str, config: str, entry: str, answer: str) -> float:
    """The score that the data set of this name and configuration gives an answer to one of its puzzles."""
    return float(_dataset(name, config).score_answer(answer, read_entry(entry)))
