"""Defaults for ``vf eval`` from ``[tool.verifiers.eval]`` in an environment's pyproject.toml."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields

from verifiers.envs.projects import find_pyproject, read_pyproject


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The values of options that are not on the command line."""

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
    """The defaults of the loaded environment of this name; the general ones for those it does not set."""
    path = find_pyproject(name.replace("-", "_"))
    if path is None:
        return Defaults()
    table = read_pyproject(path).get("tool", {}).get("verifiers", {}).get("eval", {})
    known = {field.name for field in fields(Defaults)}
    if unknown := sorted(set(table) - known):
        warnings.warn(f"{path}: unknown keys {unknown} in [tool.verifiers.eval]; use {sorted(known)}", stacklevel=2)
    return Defaults(**{key: value for key, value in table.items() if key in known})
