"""``[tool.verifiers.eval]`` of an environment's own pyproject.toml → defaults for ``vf eval``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields

from verifiers.envs.projects import find_pyproject, read_pyproject


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
    path = find_pyproject(name.replace("-", "_"))
    if path is None:
        return Defaults()
    table = read_pyproject(path).get("tool", {}).get("verifiers", {}).get("eval", {})
    known = {field.name for field in fields(Defaults)}
    if unknown := sorted(set(table) - known):
        warnings.warn(f"{path}: [tool.verifiers.eval] has unknown {unknown}; it can have {sorted(known)}", stacklevel=2)
    return Defaults(**{key: value for key, value in table.items() if key in known})
