"""The files of an environment → whether it is a documented package that others can install."""

from __future__ import annotations

import sys
from pathlib import Path

from verifiers.checks.static import read_findings
from verifiers.checks.verdicts import Report, Status
from verifiers.packages.source import NotAnEnvironmentError, read_folder, read_toml

STATIC: dict[str, tuple[str, Status]] = {
    "bare except": ("no bare except", "fail"),
    "eval": ("no eval or exec", "fail"),
    "randomness": ("randomness has a seed", "warn"),
    "swallowed error": ("errors are not scores", "warn"),
}


def sources_of(module: str) -> list[Path]:
    """The source files of an environment that was imported under this module name, without its tests."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return []
    path = Path(file).resolve()
    if path.name != "__init__.py" and not (path.parent / "pyproject.toml").is_file():
        return [path]  # a single module in a folder of installed packages
    return sorted(
        found
        for found in path.parent.rglob("*.py")
        if not found.name.startswith(("test_", "conftest")) and "tests" not in found.relative_to(path.parent).parts
    )


def check_static(report: Report, files: list[Path]) -> None:
    """Report findings in the source."""
    if not files:
        report.add("the source", "skip", "it has no source file")
        return
    findings = read_findings(files)
    for kind, (name, status) in STATIC.items():
        own = [str(finding) for finding in findings if finding.kind == kind]
        report.add(
            name, status if own else "ok", "; ".join(own[:3]) + (f" … {len(own)} in all" if len(own) > 3 else "")
        )


def folder_of(files: list[Path]) -> Path | None:
    """The folder of the package's pyproject.toml, or None."""
    parents = list(files[0].parents[:2]) if files else []
    return next((folder for folder in parents if (folder / "pyproject.toml").is_file()), None)


def check_package(report: Report, files: list[Path]) -> None:
    """Check that pyproject.toml can be installed, and that the README names every argument."""
    name = "the package"
    folder = folder_of(files)
    if folder is None:
        report.add(name, "skip", "no pyproject.toml beside its source (vf init makes one)")
        return
    try:
        package = read_folder(folder)
        project = read_toml(folder / "pyproject.toml").get("project", {})
    except (NotAnEnvironmentError, ValueError) as error:
        report.add(name, "fail", str(error))
        return
    problems = []
    if not any(str(need).startswith("verifiers") for need in project.get("dependencies", ())):
        problems.append("it does not depend on verifiers")
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else None
    if text is None:
        problems.append("it has no README.md")
    else:
        missing = [argument.name for argument in package.arguments if f"`{argument.name}`" not in text]
        problems += [f"README.md does not document {', '.join(missing)}"] if missing else []
    if not package.summary:
        problems.append("load_environment has no docstring")
    report.add(
        name, "warn" if problems else "ok", "; ".join(problems) or f"{package.name} {package.version or ''}".strip()
    )
