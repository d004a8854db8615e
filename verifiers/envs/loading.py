"""An environment's id → the environment: from a folder, an installed package, or the bundled ones."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from verifiers.envs.bundled import bundled_folder, bundled_names
from verifiers.envs.environment import Environment
from verifiers.envs.projects import find_pyproject, needs_us, read_pyproject
from verifiers.envs.stand_ins import offer_stand_ins
from verifiers.signatures import signature_of

MOST_CHARS = 200  # of an id; file systems allow names of 255 bytes
_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?([A-Za-z0-9][\w-]*(?:\.[\w-]+)*)(?:@([\w.+-]+))?\Z", re.ASCII)


def load_environment(env_id: str, *, environments_dir: str | Path = "environments", **env_args: Any) -> Environment:
    """Load ``name``, ``org/name`` or ``org/name@version`` and call its ``load_environment(**env_args)``.

    The URL of an environment server (``vf env-serve``) gives a `RemoteEnv`.
    """
    if is_url(env_id):
        from verifiers.envs.remote.env import RemoteEnv

        return RemoteEnv(env_id, **env_args)
    name, version = split_id(env_id)
    module = find_module(env_id, environments_dir)
    if version is not None:
        _check_version(env_id, module.__name__, version)
    load = module.load_environment
    _check_args(env_id, load, env_args)
    with _exit_is_an_error(f"{module.__name__}.load_environment()"):
        env = load(**env_args)
    if not isinstance(env, Environment):
        raise TypeError(f"{module.__name__}.load_environment() returned {type(env).__name__}, not an Environment")
    env.env_id = env.env_id or name.replace("_", "-")
    env.env_args = env.env_args or env_args
    return env


def is_url(env_id: str) -> bool:
    """Whether this is the URL of an environment server."""
    return str(env_id).startswith(("http://", "https://"))


def split_id(env_id: str) -> tuple[str, str | None]:
    """The name and the version in an id. Anything that could be a path is refused.

    >>> split_id("primeintellect/alphabet-sort@0.1.4")
    ('alphabet-sort', '0.1.4')
    """
    text = str(env_id)
    match = _ID.fullmatch(text) if len(text) <= MOST_CHARS else None
    if match is None or ".." in text:
        shown = f"{env_id!r:.60}… ({len(text)} characters)" if len(text) > MOST_CHARS else f"{env_id!r:.200}"
        raise ValueError(f"{shown} is not an environment id; ids look like 'name', 'org/name' or 'org/name@version'")
    return match[1], match[2]


def find_module(env_id: str, environments_dir: str | Path = "environments") -> ModuleType:
    """Import the module of an environment: that of its name, or of its name with ``_env``."""
    name, _ = split_id(env_id)
    offer_stand_ins()
    own = name.replace("-", "_")
    names, folder = (own, f"{own}_env"), Path(environments_dir)
    for find in (lambda one: _import_local(one, folder), _import_installed, _import_bundled):
        for one in names:
            try:
                module = find(one)
            except ImportError as error:
                raise _of_another_release(env_id, error) or error from error.__cause__
            if callable(getattr(module, "load_environment", None)):
                assert module is not None
                return module
    if _is_no_package(own):
        whose = "this library itself" if own.partition(".")[0] == "verifiers" else "a module of Python"
        raise ValueError(f"{env_id!r} is not an environment: {own} is {whose}; vf list shows the environments")
    if (folder / own).is_dir() or own in sys.modules:
        raise ValueError(f"{env_id!r} is not an environment: {own} has no load_environment()")
    raise ValueError(_not_found(env_id, own, folder))


def _of_another_release(env_id: str, error: ImportError) -> ImportError | None:
    """The error for an environment that imports a name from verifiers that does not exist here."""
    if (error.name or "").partition(".")[0] != "verifiers":
        return None
    return ImportError(
        f"the environment {env_id!r} imports something that verifiers does not have ({error}); if it was written for "
        "release 0.1.11 or newer, it may use what is only there: see 'Coming from classic 0.1.x' in the documentation"
    )


def _import_local(module_name: str, folder: Path) -> ModuleType | None:
    """Import a module, a package, or a package in its project's folder. Local modules override installed ones."""
    if _is_no_package(module_name):  # in `sys.modules` it would replace the module that everything else imports
        return None
    home = folder / module_name
    for path in (home / f"{module_name}.py", home / "__init__.py", home / module_name / "__init__.py"):
        if not path.is_file():
            continue
        loaded = sys.modules.get(module_name)
        if loaded is not None and _is_at(loaded, path):
            return loaded
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            with _exit_is_an_error(f"importing {module_name!r}"):
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        return module
    return None


@contextmanager
def _exit_is_an_error(what: str) -> Iterator[None]:
    """In user code: ``exit(0)`` would otherwise end a command as if it had succeeded."""
    try:
        yield
    except SystemExit as error:
        raise ImportError(f"{what} calls exit({error.code!r})") from error


def _import_bundled(module_name: str) -> ModuleType | None:
    folder = bundled_folder()
    return None if folder is None else _import_local(module_name, folder)


def _is_at(module: ModuleType, path: Path) -> bool:
    return module.__file__ is not None and Path(module.__file__).resolve() == path.resolve()


def _is_no_package(module_name: str) -> bool:
    """Modules of this library and of Python are not environments, and importing some of them has side effects."""
    top = module_name.partition(".")[0]
    return top == "verifiers" or top in sys.stdlib_module_names


def _import_installed(module_name: str) -> ModuleType | None:
    if _is_no_package(module_name):
        return None
    try:
        with _exit_is_an_error(f"importing {module_name!r}"):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == module_name.partition(".")[0]:
            return None
        if missing == "verifiers":
            raise
        raise ImportError(
            f"the environment {module_name!r} needs the module {error.name!r}, which is not installed; "
            "see its pyproject.toml or README for the package to install"
        ) from error


def _check_version(env_id: str, module_name: str, version: str) -> None:
    """Check the version of the loaded module, which for a folder is that of its own pyproject.toml."""
    if version == "latest":
        return
    name = module_name.replace("_", "-")
    path = find_pyproject(module_name)
    found = None if path is None else read_pyproject(path)["project"].get("version")
    if found is None:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            message = f"{env_id!r} requires version {version}, but {name!r} is not an installed package"
            raise ValueError(message) from None
    if found != version:
        where = f"is in {path.parent}" if path and path.name == "pyproject.toml" else "is installed"
        raise ValueError(f"{env_id!r} requires version {version}, but {found} {where}")


def _check_args(env_id: str, load: Callable[..., Any], env_args: dict[str, Any]) -> None:
    parameters = signature_of(load).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in env_args if name not in parameters]
    if unknown:
        known = ", ".join(parameters) or "no arguments"
        raise TypeError(f"the environment {env_id!r} does not take {unknown}; it takes {known}")


def _not_found(env_id: str, module_name: str, folder: Path) -> str:
    """The message. It does not suggest a package on an index, where the name may be somebody else's."""
    local = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    installed = [one.metadata["Name"].replace("-", "_") for one in importlib.metadata.distributions() if needs_us(one)]
    close = difflib.get_close_matches(module_name, [*bundled_names(), *local, *installed], n=3)
    message = f"there is no environment {env_id!r}: not in {folder}, not installed, and not bundled with this library."
    if close:
        message += f" Did you mean {', '.join(dict.fromkeys(close))}?"
    return f"{message} vf list shows all of them; vf install takes a folder, a wheel, git+URL, or org/name on a hub"
