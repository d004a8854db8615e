"""A folder or a wheel → the environment package in it, parsed but never run, or the reason why there is none."""

from __future__ import annotations

import ast
import email.parser
import re
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.files import TooLargeError, read_regular

LOAD = "load_environment"
MOST_SOURCE = 4 << 20  # bytes of a module or of metadata
MOST_UNPACKED = 2 << 30  # bytes of all files in a wheel, uncompressed
Read = Callable[[str], str | None]  # a path inside the package → its text, or None if it does not exist


class NotAnEnvironmentError(ValueError):
    """A folder or file is not an environment package; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument of ``load_environment``, as source text."""

    name: str
    default: str | None = None
    annotation: str | None = None

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """The description of an environment package."""

    name: str
    version: str | None
    module: str
    arguments: tuple[Argument, ...] = ()
    summary: str = ""


def module_name(name: str) -> str:
    """The module name of a package.

    >>> module_name("My-Env")
    'my_env'
    """
    return re.sub(r"[-.]+", "_", name).lower()


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises a ValueError that names the file and the position of the error."""
    try:
        return tomllib.loads(read_regular(path, most=MOST_SOURCE).decode("utf-8"))
    except TooLargeError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def read_folder(folder: str | Path) -> Package:
    """The environment package in an installable folder."""
    folder = Path(folder)
    pyproject = folder / "pyproject.toml"
    if not folder.is_dir():
        raise NotAnEnvironmentError(f"there is no folder {folder}")
    if not pyproject.is_file():
        raise NotAnEnvironmentError(
            f"{folder} is not a package: it has no pyproject.toml (vf init NAME creates a complete package)"
        )
    try:
        project = read_toml(pyproject).get("project", {})
    except ValueError as error:
        raise NotAnEnvironmentError(str(error)) from error
    name = project.get("name")
    if not isinstance(name, str) or not name:
        raise NotAnEnvironmentError(f"{pyproject} has no name under [project]")
    version = project.get("version")
    read = _reader(folder)
    module = module_name(name)
    return _package(read, module, name=name, version=None if version is None else str(version), where=str(folder))


def read_module_folder(folder: Path, module: str) -> Package:
    """The environment in a folder as ``load_environment`` finds it, even if it is not installable."""
    try:
        return read_folder(folder)
    except NotAnEnvironmentError:
        return _package(_reader(folder), module, name=module.replace("_", "-"), version=None, where=str(folder))


def read_wheel(path: str | Path) -> Package:
    """The environment package in a wheel."""
    path = Path(path)
    if not path.is_file():
        raise NotAnEnvironmentError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as wheel:
            names = _checked_names(wheel, path.name)
            about = next((name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)), None)
            if about is None:
                raise NotAnEnvironmentError(f"{path.name} is not a wheel: it has no METADATA")
            fields = email.parser.Parser().parsestr(_unpacked(wheel, about, path.name), headersonly=True)
            held = set(names)
            return find_package(
                lambda name: _unpacked(wheel, name, path.name) if name in held else None,
                names,
                name=str(fields["Name"]),
                version=fields["Version"],
                where=path.name,
            )
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: it is encrypted
        raise NotAnEnvironmentError(f"{path.name} is not a wheel: {error}") from error


def _checked_names(wheel: zipfile.ZipFile, where: str) -> list[str]:
    """The files in a wheel. Raises if they are too large together."""
    size = sum(info.file_size for info in wheel.infolist())
    if size > MOST_UNPACKED:
        raise NotAnEnvironmentError(
            f"{where} unpacks to {size / 1e9:.1f} GB, which is above the limit of {MOST_UNPACKED / 1e9:.1f} GB"
        )
    return wheel.namelist()


def _unpacked(wheel: zipfile.ZipFile, name: str, where: str) -> str:
    """The text of one file of a wheel, unpacked up to `MOST_SOURCE`, whatever size the wheel declares."""
    info = wheel.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise NotAnEnvironmentError(f"{name} in {where} has a compression that wheels do not use")
    with wheel.open(info) as file:
        text = file.read(MOST_SOURCE + 1) if info.file_size <= MOST_SOURCE else b""
    if info.file_size > MOST_SOURCE or len(text) > MOST_SOURCE:
        raise NotAnEnvironmentError(
            f"{name} in {where} has {max(info.file_size, len(text)) / 1e6:.0f} MB; the limit for modules and metadata "
            f"is {MOST_SOURCE >> 20} MiB"
        )
    return text.decode("utf-8", "replace")


def find_package(read: Read, files: list[str], *, name: str, version: str | None, where: str) -> Package:
    """The environment among the files of a distribution: the module of its name, else any top-level module."""
    own = module_name(name)
    tops = sorted({file.split("/")[0].removesuffix(".py") for file in files if _is_module_at_top(file)})
    reasons = []
    for module in [own, *(top for top in tops if top != own)]:
        try:
            return _package(read, module, name=name, version=version, where=where)
        except NotAnEnvironmentError as error:
            reasons.append(str(error))
    raise NotAnEnvironmentError(
        reasons[0] if own in tops or not tops else f"{where} has {', '.join(tops)}, but none of them defines {LOAD}()"
    )


def _is_module_at_top(file: str) -> bool:
    parts = file.split("/")
    is_module = len(parts) == 1 and file.endswith(".py") and not file.startswith("test_")
    return is_module or (len(parts) == 2 and parts[1] == "__init__.py")


def _reader(folder: Path) -> Read:
    def read(name: str) -> str | None:
        for path in (folder / name, folder / "src" / name, *_unwrapped(folder, name)):
            if path.is_file():
                return read_source(path)
        return None

    return read


def read_source(path: Path) -> str:
    """The text of a module; one that is too large is refused."""
    try:
        return read_regular(path, most=MOST_SOURCE).decode("utf-8", "replace")
    except TooLargeError as error:
        raise NotAnEnvironmentError(f"{path}: {error.strerror}") from error


def _unwrapped(folder: Path, name: str) -> Iterator[Path]:
    """For a folder that is itself the package: ``my_env/__init__.py``, read from inside ``my_env``."""
    first, _, rest = name.partition("/")
    if rest and first == folder.name:
        yield folder / rest


# --- load_environment, parsed and not called --------------------------------------------------------------------------


def _package(read: Read, module: str, *, name: str, version: str | None, where: str) -> Package:
    text = next((text for file in (f"{module}.py", f"{module}/__init__.py") if (text := read(file)) is not None), None)
    if text is None:
        raise NotAnEnvironmentError(
            f"{where} is not an environment: it has neither {module}.py nor {module}/__init__.py, "
            f"the module of {name!r}"
        )
    tree = _parsed(text, f"{module} in {where}")
    found = _definition(tree, read, module)
    if found is None:
        raise NotAnEnvironmentError(f"{where} is not an environment: its module {module!r} does not define {LOAD}()")
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return Package(name=name, version=version, module=module, summary=_first_line(ast.get_docstring(tree)))
    summary = _first_line(ast.get_docstring(found)) or _first_line(ast.get_docstring(tree))
    return Package(name=name, version=version, module=module, arguments=tuple(_arguments(found)), summary=summary)


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        cause = str(error) or "it is nested too deeply"
        raise NotAnEnvironmentError(f"the module {where} is not Python: {cause}") from error


def _definition(tree: ast.Module, read: Read, module: str) -> ast.AST | None:
    """The statement that defines the module's ``load_environment``, also through imports inside the package."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == LOAD:
            return node
        if isinstance(node, ast.ImportFrom) and any((name.asname or name.name) == LOAD for name in node.names):
            inner = _imported(node, read, module)
            return _definition(inner, read, module) or node if inner is not None else node
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == LOAD for to in node.targets):
            return node
    return None


def _imported(node: ast.ImportFrom, read: Read, module: str) -> ast.Module | None:
    given = node.module or ""
    path = f"{module}.{given}" if node.level == 1 else given
    if not path.startswith(f"{module}.") or node.level > 1:
        return None
    text = read(f"{path.replace('.', '/')}.py")
    return None if text is None else _parsed(text, path)


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Argument]:
    plain = [*function.args.posonlyargs, *function.args.args]
    missing = len(plain) - len(function.args.defaults)
    defaults: list[ast.expr | None] = [*[None] * missing, *function.args.defaults, *function.args.kw_defaults]
    for argument, default in zip([*plain, *function.args.kwonlyargs], defaults, strict=True):
        yield Argument(
            name=argument.arg,
            default=None if default is None else ast.unparse(default),
            annotation=None if argument.annotation is None else ast.unparse(argument.annotation),
        )


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n\n")[0].replace("\n", " ")
