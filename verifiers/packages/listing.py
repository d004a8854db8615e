"""Installed packages and folders → the environments that can be loaded, with their arguments."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verifiers.envs.bundled import bundled_folder
from verifiers.envs.projects import needs_us
from verifiers.packages.source import (
    NotAnEnvironmentError,
    Package,
    Read,
    find_package,
    module_name,
    read_module_folder,
    read_source,
)

Kind = Literal["local", "installed", "bundled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One environment and its location."""

    package: Package
    where: str
    kind: Kind

    @property
    def is_local(self) -> bool:
        return self.kind == "local"


def list_environments(folder: str | Path = "environments") -> list[Listed]:
    """The environments in a folder, the installed and the bundled ones; an earlier one hides later ones of its name."""
    bundled = bundled_folder()
    own = () if bundled is None else _in_folder(bundled, "bundled")
    installed = sorted(installed_environments(), key=lambda listed: listed.package.name)
    found: dict[str, Listed] = {}
    for listed in (*_in_folder(Path(folder), "local"), *installed, *own):
        found.setdefault(listed.package.module, listed)
    return list(found.values())


def _in_folder(folder: Path, kind: Kind) -> Iterator[Listed]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir() or path.name.startswith((".", "_")):
            continue
        try:
            package = read_module_folder(path, module_name(path.name))
        except NotAnEnvironmentError:
            continue
        yield Listed(package=package, where=str(path), kind=kind)


def installed_environments() -> Iterator[Listed]:
    """The installed packages that depend on this library and contain an environment."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and needs_us(distribution):
            listed = _read_installed(distribution, name)
            if listed is not None:
                yield listed


def find_other(name: str) -> str | None:
    """The version of the installed package of this name, if it is not an environment."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return distribution.version if _read_installed(distribution, name) is None else None


def find_in(folder: Path, requirement: str) -> Package:
    """The environment among the packages installed into a folder."""
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        files = [str(file) for file in distribution.files or ()]
        name = distribution.metadata["Name"]
        return find_package(_reader([folder]), files, name=name, version=distribution.version, where=name)
    raise NotAnEnvironmentError(f"{requirement} does not install a package")


def _read_installed(distribution: importlib.metadata.Distribution, name: str) -> Listed | None:
    files = [str(file) for file in distribution.files or ()]
    home = Path(str(distribution.locate_file("")))
    try:
        read = _reader([home, *_editable_roots(home, files)])
        package = find_package(read, files, name=name, version=distribution.version, where=name)
    except NotAnEnvironmentError:
        return None
    return Listed(package=package, where=str(home), kind="installed")


def _reader(roots: list[Path]) -> Read:
    def read(file: str) -> str | None:
        for root in roots:
            if (root / file).is_file():
                return read_source(root / file)
        return None

    return read


def _editable_roots(home: Path, files: list[str]) -> Iterator[Path]:
    """The source folders of an editable install, from its ``.pth`` files."""
    for file in files:
        if file.endswith(".pth") and (home / file).is_file():
            lines = (home / file).read_text(encoding="utf-8", errors="replace").splitlines()
            yield from (Path(line) for line in lines if line and not line.startswith("import"))
