"""Lists the paths that sandboxed code may read (programs, libraries, this Python), and those hidden from it."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

# Not all of /usr: there may be applications in /usr/src, and settings in /usr/local/etc.
_OF_PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "include")
_SYSTEM = (
    *(f"{top}/{name}" for top in ("/usr", "/usr/local") for name in _OF_PROGRAMS),
    *("/lib", "/lib32", "/lib64", "/bin", "/sbin"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"),
)
_NEEDS_VERIFIERS = re.compile(rb"^Requires-Dist:\s*verifiers\b", re.IGNORECASE | re.MULTILINE)


def site_folders() -> list[str]:
    """The site-packages folders of this Python."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and os.path.isdir(path)]


def readable_folders() -> list[str]:
    """The folders that code may read: system programs and libraries, and this Python; never home or project folders."""
    folders = list(_SYSTEM)
    paths = sysconfig.get_paths()
    folders += [paths[name] for name in ("stdlib", "platstdlib")]
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix):
        folders += [os.path.join(prefix, name) for name in ("lib", "lib64", "bin", "pyvenv.cfg")]
    folders += site_folders()
    found: list[str] = []
    for folder in folders:
        if os.path.exists(folder) and not any(folder == one or folder.startswith(one + "/") for one in found):
            found.append(folder)
    return found


def hidden_paths() -> list[str]:
    """Paths inside site-packages that code must not read: environments, because they contain the right answers."""
    found: set[str] = set()
    for site in {path for folder in site_folders() for path in (folder, os.path.realpath(folder))}:
        found.update(os.path.join(site, name) for name in _names_of_environments(site))
    return sorted(path for path in found if os.path.exists(path))


def _names_of_environments(site: str) -> set[str]:
    """The names in a site folder that belong to verifiers or to packages that require it."""
    names: set[str] = {"verifiers"}
    for entry in os.scandir(site):
        if entry.name.endswith(".dist-info"):
            folder = Path(entry.path)
            try:
                if entry.name.startswith("verifiers-") or _NEEDS_VERIFIERS.search((folder / "METADATA").read_bytes()):
                    names |= {_top(path) for path in _files_of(folder)}
            except OSError:  # an incomplete package
                continue
    names.discard("..")  # files outside this folder, such as scripts
    compiled = {name.removesuffix(".py") for name in names if name.endswith(".py")}
    cache = Path(site, "__pycache__")
    return names | {f"__pycache__/{path.name}" for path in cache.glob("*.pyc") if path.name.split(".")[0] in compiled}


def _top(path: str) -> str:
    return path if path.startswith("__pycache__/") else path.partition("/")[0]


def _files_of(folder: Path) -> list[str]:
    """The files of an installed package; without a list of them, those named after the package."""
    try:
        lines = (folder / "RECORD").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        name = folder.name.partition("-")[0]
        return [name, f"{name}.py", folder.name]
    return [line.rpartition(",")[0].rpartition(",")[0].strip('"') for line in lines]
