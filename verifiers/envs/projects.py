"""Finds the ``pyproject.toml`` of an environment's module, and tells whether a package depends on this library."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from typing import Any


def find_pyproject(module_name: str) -> Path | None:
    """The pyproject.toml beside a module or above its package, if it has the module's name."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None:
        return None
    folders = Path(file).resolve().parents[:2]
    for path in (folders[0] / f"{module_name}.pyproject.toml", *(folder / "pyproject.toml" for folder in folders)):
        if path.is_file() and _plain(read_pyproject(path).get("project", {}).get("name", "")) == _plain(module_name):
            return path
    return None


def read_pyproject(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def _plain(name: Any) -> str:
    return str(name).lower().replace("-", "_").replace(".", "_")


def needs_us(distribution: importlib.metadata.Distribution) -> bool:
    """Whether a package depends on this library, as environments do. (Searching all installed files takes seconds.)"""
    return any(_starts_with_us(need) for need in distribution.requires or ())


def _starts_with_us(need: str) -> bool:
    """Whether a requirement is for this library.

    >>> _starts_with_us("verifiers>=0.1.9"), _starts_with_us("verifiers-extra"), _starts_with_us("openai")
    (True, False, False)
    """
    rest = need.strip().removeprefix("verifiers")
    return rest != need.strip() and not rest[:1].isalnum() and rest[:1] not in ("-", "_", ".")
