"""A folder, a wheel, a git URL, a name on an index or ``org/name`` on a hub → an installed environment."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verifiers.clients.secrets import hide_in_url
from verifiers.envs.bundled import bundled_module
from verifiers.packages import hub as hubs
from verifiers.packages.listing import find_in, find_other, installed_environments
from verifiers.packages.source import NotAnEnvironmentError, Package, module_name, read_folder, read_wheel

Program = Literal["pip", "uv"]
_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w.+-]+))?\Z", re.ASCII)
_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)(?:(?:@|==)([\w.+-]+))?\Z", re.ASCII)
_SHOWN_LINES = 12
_MOST_CHARS = 4096  # the longest path on any system


class InstallError(Exception):
    """Nothing was installed; the message says why."""


class BundledError(InstallError):
    """The environment comes with this library. On an index, a package of its name may be somebody else's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What was installed, from where, and with which program."""

    package: Package
    source: str
    program: Program


@dataclass(frozen=True, kw_only=True, slots=True)
class Installer:
    """``pip`` or ``uv``, and where it installs."""

    program: Program
    target: str | None = None
    has_deps: bool = True

    def fetch(self, requirement: str, index: str | None, folder: Path) -> Package:
        """Fetch the package of a requirement, without dependencies, into a separate folder, to inspect it first."""
        if self.program == "pip":
            only_there = {"PIP_EXTRA_INDEX_URL": index, "PIP_FIND_LINKS": str(folder)} if index else {}
            from_index = ["-i", index] if index else []
            self._run(["wheel", "--no-deps", "--wheel-dir", str(folder), *from_index, requirement], only_there)
            return read_wheel(_only_wheel(folder))
        self._run(
            [
                "install",
                "--no-deps",
                "--target",
                str(folder),
                *(["--default-index", index] if index else []),
                requirement,
            ]
        )
        return find_in(folder, requirement)

    def install(
        self, package: Package, wanted: Sequence[str], *, index: str | None = None, is_editable: bool = False
    ) -> None:
        """Install a package that was inspected; refuse to replace an installed one that is not an environment."""
        if self.target is None and (replaced := find_other(package.name)) is not None:
            raise InstallError(
                f"{package.name} {replaced} is installed here and is not an environment; installing the environment "
                "would replace it. Give the environment another name"
            )
        words = [
            "install",
            *(["--target", self.target] if self.target else []),
            *([] if self.has_deps else ["--no-deps"]),
        ]
        if index is not None:  # uv takes a package that is on this index from no other index
            words += ["--index", index]
        self._run([*words, *(["--editable"] if is_editable else []), *wanted])

    def _run(self, words: Sequence[str], settings: Mapping[str, str] | None = None) -> None:
        run_program(self.program, words, settings)


def run_program(program: Program, words: Sequence[str], settings: Mapping[str, str] | None = None) -> None:
    """Run a command of pip or uv. If it fails, the error contains the last lines of its output."""
    command, *rest = words
    of_uv = ["uv", "build", "--quiet"] if command == "build" else ["uv", "pip", command, "--quiet"]
    start = (
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", command]
        if program == "pip"
        else [*of_uv, "--python", sys.executable]
    )
    env = {**os.environ, **(settings or {})}
    done = subprocess.run([*start, *rest], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        printed = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        shown = "\n".join(printed[-_SHOWN_LINES:])
        raise InstallError(hide_in_url(f"{program} {command} ended with {done.returncode}:\n{shown}"))


def find_program(wanted: Program | None = None) -> Program:
    """The program to install with: ``wanted``, or else pip if this Python has it, else uv."""
    there: list[Program] = []
    if importlib.util.find_spec("pip") is not None:
        there.append("pip")
    if shutil.which("uv") is not None:
        there.append("uv")
    if wanted is not None and wanted not in there:
        raise InstallError(f"{wanted} is not available; available: {', '.join(there) or 'neither pip nor uv'}")
    if not there:
        raise InstallError(f"neither pip nor uv is available; try: {sys.executable} -m ensurepip")
    return wanted or there[0]


def install(
    what: str,
    *,
    index: str | None = None,
    hub: str | None = None,
    environments_dir: str | Path = "environments",
    program: Program | None = None,
    target: str | None = None,
    has_deps: bool = True,
    is_editable: bool = False,
) -> Installed:
    """Install an environment. A package that is not an environment is refused before anything is installed."""
    installer = Installer(program=find_program(program), target=target, has_deps=has_deps)
    try:
        return _install(what, installer, index, hub, Path(environments_dir), is_editable)
    except (NotAnEnvironmentError, hubs.HubError) as error:
        raise InstallError(str(error)) from error


def _install(
    what: str, installer: Installer, index: str | None, hub: str | None, folder: Path, is_editable: bool
) -> Installed:
    if len(what) > _MOST_CHARS or "\0" in what:
        raise InstallError(f"{what[:60]!r}… ({len(what)} characters) is neither the name of an environment nor a path")
    path = Path(what).expanduser()
    if what and is_folder(path):
        return _install_folder(path, installer, is_editable)
    if what.endswith(".whl"):
        package = read_wheel(path)
        installer.install(package, [str(path)])
        return Installed(package=package, source=str(path), program=installer.program)
    if what.startswith("git+"):
        return _install_from_git(what, installer, is_editable)
    local = local_folder(what, folder) if index is None else None
    if local is not None:
        return _install_folder(local, installer, is_editable)
    if is_editable:
        raise InstallError(f"{what!r} is not a folder; only a folder can be installed as editable")
    if index is None and (named := _NAMED.fullmatch(what)) and (module := bundled_module(named[1])) is not None:
        raise BundledError(f"{module.replace('_', '-')} comes with verifiers and need not be installed")
    if on_hub := _ON_HUB.fullmatch(what):
        return _install_from_hub(on_hub[1], on_hub[2], on_hub[3], installer, hub)
    named = _NAMED.fullmatch(what)
    if named is None:
        forms = "a folder, a .whl file, git+URL, name, name@version or org/name@version"
        raise InstallError(f"{what!r} cannot be installed; pass {forms}")
    return _install_from_index(named[1], named[2], installer, index)


def local_folder(what: str, folder: Path) -> Path | None:
    """The folder of a local environment, by the names that ``load_environment`` accepts."""
    if _NAMED.fullmatch(what) is None:
        return None
    names = (module_name(what), f"{module_name(what)}_env")
    return next((folder / name for name in names if is_folder(folder / name)), None)


def is_folder(path: Path) -> bool:
    """Whether the folder exists; False if the name is too long for a path."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _install_folder(path: Path, installer: Installer, is_editable: bool) -> Installed:
    package = read_folder(path)
    installer.install(package, [str(path.resolve())], is_editable=is_editable)
    return Installed(package=package, source=str(path), program=installer.program)


def _install_from_git(address: str, installer: Installer, is_editable: bool) -> Installed:
    """``git+https://host/repository[@branch][#subdirectory=environments/name]``, built and inspected first."""
    if is_editable:
        raise InstallError("only a folder can be installed as editable; clone the repository and install its folder")
    if shutil.which("git") is None:
        raise InstallError("git+ URLs need the program git, which is not installed")
    with tempfile.TemporaryDirectory(prefix="vf-install-") as folder:
        package = installer.fetch(address, None, Path(folder))
        wheel = next(Path(folder).glob("*.whl"), None)  # the wheel that was inspected, if pip built it
        installer.install(package, [address if wheel is None else str(wheel)])
    return Installed(package=package, source=hide_in_url(address), program=installer.program)


def uninstall(name: str, *, program: Program | None = None) -> Package:
    """Uninstall an environment. A package that is not an environment is not uninstalled."""
    module = module_name(name)
    found = [listed.package for listed in installed_environments()]
    package = next((one for one in found if one.module in (module, f"{module}_env") or one.name == name), None)
    if package is None:
        if bundled_module(name) is not None:
            raise InstallError(f"{name} comes with verifiers and cannot be uninstalled separately")
        there = ", ".join(sorted(one.name for one in found)) or "none"
        raise InstallError(f"no environment {name!r} is installed; installed environments: {there}")
    program = find_program(program)
    run_program(program, ["uninstall", *(["--yes"] if program == "pip" else []), package.name])
    return package


def _install_from_index(name: str, version: str | None, installer: Installer, index: str | None) -> Installed:
    requirement = name if version in (None, "latest") else f"{name}=={version}"
    with tempfile.TemporaryDirectory(prefix="vf-install-") as folder:
        package = installer.fetch(requirement, index, Path(folder))
        if installer.program == "pip":  # install the inspected wheel; its dependencies come from the default index
            installer.install(package, [str(_only_wheel(Path(folder)))])
        else:
            installer.install(package, [f"{name}=={package.version}"], index=index)
    return Installed(package=package, source=index or "the package index", program=installer.program)


def _install_from_hub(org: str, name: str, version: str | None, installer: Installer, hub: str | None) -> Installed:
    address = hub or os.environ.get(hubs.HUB_VARIABLE)
    if not address:
        raise InstallError(
            f"{org}/{name} is on a hub, but no hub is set: pass its URL with --hub or in {hubs.HUB_VARIABLE}, "
            f"or use the hub's own program: prime env install {org}/{name}"
        )
    entry = hubs.look_up(address, org, name, None if version == "latest" else version)
    if entry.wheel_url is None:
        return _install_from_index(entry.name, entry.version, installer, entry.index_url)
    with tempfile.TemporaryDirectory(prefix="vf-install-") as folder:
        wheel = hubs.fetch(entry.wheel_url, Path(folder))
        package = read_wheel(wheel)
        installer.install(package, [str(wheel), *entry.further])
    return Installed(package=package, source=f"{org}/{name} on {address}", program=installer.program)


def _only_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel
