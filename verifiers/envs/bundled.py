"""Finds the environments that come with this library: inside its wheel, or beside it in its repository."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
IN_THE_WHEEL = PACKAGE / "bundled"
IN_THE_REPOSITORY = PACKAGE.parent / "environments"


def bundled_folder() -> Path | None:
    """The folder of the bundled environments, each in a folder with its module's name, or None.

    ``environments/`` beside the package counts only in this library's repository, because beside an installed package
    it may be somebody else's folder.
    """
    if IN_THE_WHEEL.is_dir():
        return IN_THE_WHEEL
    is_repository = (PACKAGE.parent / "constraints.txt").is_file() and (PACKAGE.parent / "tests" / "envs").is_dir()
    return IN_THE_REPOSITORY if is_repository and IN_THE_REPOSITORY.is_dir() else None


def bundled_names() -> list[str]:
    """The modules of the bundled environments.

    >>> "arithmetic" in bundled_names()
    True
    """
    folder = bundled_folder()
    found = [] if folder is None else [path.name for path in folder.iterdir() if (path / f"{path.name}.py").is_file()]
    return sorted(found)


def bundled_module(name: str) -> str | None:
    """The module of the bundled environment with this name (``reverse-text``, ``reasoning-gym``), or None.

    >>> bundled_module("reverse-text"), bundled_module("nothing")
    ('reverse_text', None)
    """
    own = name.replace("-", "_").lower()
    names = bundled_names()
    return next((one for one in (own, f"{own}_env") if one in names), None)
