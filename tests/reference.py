"""The facade → docs/reference.md, the page of every public name: ``python -m tests.reference``."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType

import verifiers as vf

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
HEAD = """# Reference

Every name of `import verifiers as vf`, from its docstring. `vf.stats`, the arithmetic of scores, has a [page](stats.md)
of its own. This page is made by `python -m tests.reference`.
"""
TITLES = {
    "envs": "Environments",
    "rubrics": "Rubrics",
    "parsers": "Parsers",
    "clients": "Clients",
    "results": "Results",
    "store": "Runs on disk",
    "engine": "A model in the process",
    "trainers": "Training",
    "rl": "Training, in the words of 0.1.x",
    "rollout": "Hooks of a rollout",
    "runner": "Interrupted runs",
    "checks": "Checking",
    "sandbox": "The sandbox",
    "logs": "Logs",
    "types": "Types",
    "errors": "Errors",
}
OF_OTHERS = {"types"}  # what classic handed on of OpenAI's package is documented there


def names_by_part() -> dict[str, list[tuple[str, str]]]:
    """(name, where it is defined) by part of the package, in the order of the titles."""
    homes = dict(vf._HOME) | {name: home for name, home in vf._EXTRA_HOME.items() if home not in OF_OTHERS}
    parts: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES}
    for name, home in sorted(homes.items(), key=lambda item: item[0].lower()):
        parts[home.partition(".")[0]].append((name, defined_at(name, home)))
    return parts


def defined_at(name: str, home: str) -> str:
    """Where a class or a function is written; of an alias, where it is handed on."""
    value = getattr(vf, name)
    module = getattr(value, "__module__", "") or ""
    is_ours = isinstance(value, type | FunctionType) and module.startswith("verifiers.")
    return f"{module}.{value.__qualname__}" if is_ours else f"verifiers.{home}.{name}"


def page() -> str:
    parts = [HEAD]
    for part, names in names_by_part().items():
        if names:
            parts.append(f"\n## {TITLES[part]}\n")
            parts += [entry(name, where) for name, where in names]
    return "".join(parts)


def entry(name: str, where: str) -> str:
    """A name's docstring; of a second name for the same thing, which that is."""
    other = where.rpartition(".")[2]
    return f"\n::: {where}\n" if other == name else f"\n### {name}\n\nAnother name of `{other}`.\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
