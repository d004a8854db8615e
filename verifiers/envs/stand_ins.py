"""Stand-ins for packages that environments import but do not need. Using one raises an error that explains it."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

_PACKAGES = {
    "prime_sandboxes": "{name} needs prime_sandboxes, which is not installed. vf.SandboxEnv and vf.PythonEnv run "
    "code in the sandbox of this machine and do not need it; to rent containers: pip install prime-sandboxes",
}


class _StandIn(ModuleType):
    """A module that has every name: a class for use in annotations and ``except``, which cannot be instantiated."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        message = _PACKAGES[self.__name__.partition(".")[0]].format(name=f"{self.__name__}.{name}")

        def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            raise ImportError(message)

        made = type(name, (Exception,), {"__new__": refuse, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder:
    """The last module finder, so that an installed package is found before its stand-in."""

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
    """Make the stand-ins importable. Called when environments are loaded."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
