"""``[tool.verifiers.eval]`` of an environment's own pyproject.toml → defaults for ``vf eval``."""

from __future__ import annotations

import sys
import tomllib
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What is meant where the command line does not say."""

    num_examples: int = 5
    rollouts_per_example: int = 3
    max_concurrent: int = 32
    max_tokens: int | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.name == "temperature" else (int,)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise ValueError(f"[tool.verifiers.eval] {field.name} must be a number, not {value!r}")


def read_defaults(name: str) -> Defaults:
    """The defaults of an environment that has been loaded under this name; ours where it has none."""
    path = _find_pyproject(name)
    if path is None:
        return Defaults()
    table = _read(path).get("tool", {}).get("verifiers", {}).get("eval", {})
    known = {field.name for field in fields(Defaults)}
    if unknown := sorted(set(table) - known):
        warnings.warn(f"{path}: [tool.verifiers.eval] has unknown {unknown}; it can have {sorted(known)}", stacklevel=2)
    return Defaults(**{key: value for key, value in table.items() if key in known})


def _find_pyproject(name: str) -> Path | None:
    """Beside the module, or above the package; only one of this very name, for a folder may hold several modules."""
    module = name.replace("-", "_")
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    folders = Path(file).resolve().parents[:2]
    for path in (folders[0] / f"{module}.pyproject.toml", *(folder / "pyproject.toml" for folder in folders)):
        if path.is_file() and _plain(_read(path).get("project", {}).get("name", "")) == _plain(name):
            return path
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def _plain(name: Any) -> str:
    return str(name).lower().replace("-", "_").replace(".", "_")
