"""Packages that environments import without need: a stand-in takes their place, and says so when it is used."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

_PACKAGES = {
    "prime_sandboxes": "prime_sandboxes is not installed, and {name} is part of it. vf.SandboxEnv and vf.PythonEnv run "
    "code in the sandbox of this machine and need none of it; to rent containers: pip install prime-sandboxes",
}


class _StandIn(ModuleType):
    """A module with any name in it; each is a class that can be named in annotations and ``except``, and not made."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        said = _PACKAGES[self.__name__.partition(".")[0]].format(name=f"{self.__name__}.{name}")

        def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            raise ImportError(said)

        made = type(name, (Exception,), {"__new__": refuse, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder:
    """Asked last: a package that is installed is found before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def offer_stand_ins() -> None:
    """From now on, what environments import without need can be imported; done where environments are loaded."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
