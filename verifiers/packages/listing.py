"""What is installed and what lies in a folder → the environments one can load, with their arguments."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verifiers.packages.source import (
    NotAnEnvironmentError,
    Package,
    Read,
    find_package,
    module_name,
    read_module_folder,
    read_source,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One environment, and where it is."""

    package: Package
    where: str
    is_local: bool


def list_environments(folder: str | Path = "environments") -> list[Listed]:
    """The environments in a folder, then the installed ones; a local one hides an installed one of its name."""
    local = list(_local(Path(folder)))
    hidden = {listed.package.module for listed in local}
    installed = sorted(_installed(), key=lambda listed: listed.package.name)
    return [*local, *(listed for listed in installed if listed.package.module not in hidden)]


def _local(folder: Path) -> Iterator[Listed]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir() or path.name.startswith((".", "_")):
            continue
        try:
            package = read_module_folder(path, module_name(path.name))
        except NotAnEnvironmentError:
            continue
        yield Listed(package=package, where=str(path), is_local=True)


def _installed() -> Iterator[Listed]:
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and _needs_us(distribution):
            listed = _read_installed(distribution, name)
            if listed is not None:
                yield listed


def find_in(folder: Path, requirement: str) -> Package:
    """The environment among packages that were installed into a folder of their own."""
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        files = [str(file) for file in distribution.files or ()]
        name = distribution.metadata["Name"]
        return find_package(_reader([folder]), files, name=name, version=distribution.version, where=name)
    raise NotAnEnvironmentError(f"{requirement} installs no package")


def _needs_us(distribution: importlib.metadata.Distribution) -> bool:
    """An environment package depends on this library; looking into every installed file would take seconds."""
    return any(_starts_with_us(need) for need in distribution.requires or ())


def _starts_with_us(need: str) -> bool:
    rest = need.strip().removeprefix("verifiers")
    return rest != need.strip() and not rest[:1].isalnum() and rest[:1] not in ("-", "_", ".")


def _read_installed(distribution: importlib.metadata.Distribution, name: str) -> Listed | None:
    files = [str(file) for file in distribution.files or ()]
    home = Path(str(distribution.locate_file("")))
    try:
        read = _reader([home, *_editable_roots(home, files)])
        package = find_package(read, files, name=name, version=distribution.version, where=name)
    except NotAnEnvironmentError:
        return None
    return Listed(package=package, where=str(home), is_local=False)


def _reader(roots: list[Path]) -> Read:
    def read(file: str) -> str | None:
        for root in roots:
            if (root / file).is_file():
                return read_source(root / file)
        return None

    return read


def _editable_roots(home: Path, files: list[str]) -> Iterator[Path]:
    """The source folders an editable install points at with a ``.pth`` file."""
    for file in files:
        if file.endswith(".pth") and (home / file).is_file():
            lines = (home / file).read_text(encoding="utf-8", errors="replace").splitlines()
            yield from (Path(line) for line in lines if line and not line.startswith("import"))
