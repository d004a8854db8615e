"""An environment → bytes that restore it on another machine: the object, its rows and its packages."""

from __future__ import annotations

import hashlib
import io
import os
import pickle  # noqa: TID251 - Ray's own transport; nothing is stored
import pickletools
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import cloudpickle

from verifiers.envs.rows import Rows

MOST_BYTES = 64 << 20  # per package: larger ones contain data, which belongs on a shared disk or a hub
_IGNORED = {"__pycache__", ".git", ".venv", "outputs", "dist", "build", "node_modules"}


@dataclass(frozen=True, slots=True)
class Package:
    """A module's file or a package's folder as a zip, and the folder that it was imported from."""

    root: str
    content: bytes


@dataclass(frozen=True, slots=True)
class PackedEnvironment:
    """``digest`` identifies the content; ``rows`` are data sets, which are sent once and not with each run."""

    digest: str
    env: bytes
    packages: dict[str, Package]
    rows: tuple[Rows, ...]


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Leaves data sets out: each run pickles the environment again, because it may have changed, but not its rows."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.rows: list[Rows] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Rows):
            return None
        self.rows.append(obj)
        return len(self.rows) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, rows: list[Rows]) -> None:
        super().__init__(file)
        self.rows = rows

    def persistent_load(self, pid: int) -> Rows:
        return self.rows[pid]


def pack(env: Any) -> PackedEnvironment:
    """Pack an environment; raises a `TypeError` that says what cannot be sent."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(env)
    except Exception as error:  # foreign objects decide how they are pickled
        raise TypeError(
            f"the environment {env.env_id or type(env).__name__!r} cannot be sent to workers: {_culprit(env, error)}; "
            "create it on first use (in setup_state, for example), or leave it out in __getstate__"
        ) from error
    blob = file.getvalue()
    packages = {top: _zipped(top) for top in sorted(_own_packages(_modules_in(blob)))}
    digest = hashlib.sha256(blob)
    for package in packages.values():
        digest.update(package.content)
    return PackedEnvironment(digest.hexdigest(), blob, packages, tuple(pickler.rows))


def unpack(env: bytes, packages: dict[str, Package], rows: list[Rows]) -> Any:
    """Restore the environment in a worker. Its packages override installed ones with the same name."""
    for name, package in packages.items():
        folder = _unpacked(package)
        sys.path.insert(0, str(folder))
        if name in sys.modules and not _lies_in(sys.modules[name], folder):
            for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[loaded]
    return _Unpickler(io.BytesIO(env), rows).load()


def _unpacked(package: Package) -> Path:
    """The folder to import a package from: the original one if this machine (or a shared disk) has it, else a copy."""
    archive = zipfile.ZipFile(io.BytesIO(package.content))
    if all(_has(Path(package.root, name), archive.read(name)) for name in archive.namelist()):
        return Path(package.root)
    digest = hashlib.sha256(package.content).hexdigest()[:24]
    folder = Path(tempfile.gettempdir(), f"verifiers-{os.getuid()}-{digest}")
    if not folder.is_dir():
        made = Path(tempfile.mkdtemp(prefix="verifiers-"))
        archive.extractall(made)
        try:
            made.rename(folder)
        except OSError:  # another worker of this machine was quicker
            if not folder.is_dir():
                raise
    return folder


def _has(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _culprit(env: Any, error: Exception) -> str:
    for name, value in env.__getstate__().items():
        try:
            _Pickler(io.BytesIO()).dump(value)
        except Exception as found:  # foreign objects decide how they are pickled
            return f"its {name!r}, a {type(value).__name__}, cannot be pickled ({found})"
    return str(error)


# --- which packages -----------------------------------------------------------------------------------------------


def _modules_in(blob: bytes) -> set[str]:
    """The modules that unpickling will import."""
    strings: list[str] = []
    found: set[str] = set()
    for opcode, argument, _ in pickletools.genops(blob):
        if opcode.name == "GLOBAL":
            found.add(str(argument).partition(" ")[0])
        elif opcode.name == "STACK_GLOBAL":
            found.update(strings[-2:-1])
        elif isinstance(argument, str):
            strings.append(argument)
    return found | {name for name in strings if name in sys.modules}


def _own_packages(modules: set[str]) -> set[str]:
    """The user's own top-level packages among these and their imports, which the cluster may not have."""
    found: set[str] = set()
    waiting = {name.partition(".")[0] for name in modules}
    while waiting:
        top = waiting.pop()
        if top in found or not _is_own(top):
            continue
        found.add(top)
        for name, module in list(sys.modules.items()):
            if name == top or name.startswith(f"{top}."):
                waiting |= set(_used_by(module)) - found
    return found


def _used_by(module: ModuleType) -> Iterator[str]:
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name.partition(".")[0]


def _is_own(top: str) -> bool:
    """Is this the user's own module: an environment, or a module that is not installed?"""
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    if file is None or top in sys.stdlib_module_names or top in ("__main__", "__mp_main__", "verifiers", "ray"):
        return False
    if callable(getattr(module, "load_environment", None)):
        return True
    paths = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed = "site-packages" in Path(file).parts or "dist-packages" in Path(file).parts
    return not installed and not any(Path(file).is_relative_to(path) for path in paths)


def _zipped(top: str) -> Package:
    home = Path(str(sys.modules[top].__file__))
    root = home.parent.parent if home.name == "__init__.py" else home.parent
    files = sorted(_files(home.parent)) if home.name == "__init__.py" else [home]
    if home.name != "__init__.py" and (home.parent / "pyproject.toml").is_file():
        files = sorted(_files(home.parent))  # an environment in its own folder, whose other files belong to it
    if (size := sum(file.stat().st_size for file in files)) > MOST_BYTES:
        raise TypeError(
            f"the package {top!r} in {home.parent} has {size / 1e6:.0f} MB, too much to send to workers (at most "
            f"{MOST_BYTES / 1e6:.0f}); put its data on a disk that all nodes have, or install it on them"
        )
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            # Without file times, so that the same content gives the same digest.
            archive.writestr(zipfile.ZipInfo(str(file.relative_to(root))), file.read_bytes())
    return Package(str(root), made.getvalue())


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in _IGNORED or path.name.endswith(".egg-info") or path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.is_file() and not path.name.endswith(".pyc"):
            yield path


def _lies_in(module: ModuleType, folder: Path) -> bool:
    return Path(str(getattr(module, "__file__", ""))).is_relative_to(folder)
