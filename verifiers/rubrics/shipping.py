"""A function and its arguments → bytes for a worker process. Names what cannot be sent, or leaves it out of a state.

Importable objects are pickled by name. Others (functions and classes of a script or a notebook, lambdas, closures) are
pickled by value, with the globals that they use, so that the user's script does not run again in a worker.
"""

from __future__ import annotations

import abc
import builtins
import dataclasses
import dis
import functools
import importlib
import importlib.machinery
import io
import itertools
import marshal
import os
import pickle  # noqa: TID251 - from a parent to its own workers, never the other way and never stored
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from verifiers.types import State
from verifiers.views import View, plain

LIVE = ("client",)
"""Keys of a state that are not sent to workers, because they hold connections and API keys."""

_ABSENT: Any = object()
_keys = itertools.count(1)
_READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_IS_HEAP_TYPE = 1 << 9


@dataclasses.dataclass(frozen=True, slots=True)
class InWorker:
    """A function by its name, if only the workers should import its module."""

    module: str
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _look_up, (self.module, self.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Shipment:
    """A function as bytes. ``bindings`` are the globals packed with it: if one of them changes, it is stale."""

    key: int
    blob: bytes
    origins: Mapping[str, str]
    bindings: tuple[tuple[dict[str, Any], str, Any], ...]

    @property
    def is_current(self) -> bool:
        return all(namespace.get(name, _ABSENT) is value for namespace, name, value in self.bindings)


def ship(function: Callable[..., Any] | InWorker) -> Shipment:
    """Pack a function. Raises a `TypeError` that says what in it cannot be sent, and what to do."""
    packer = _Packer()
    try:
        blob = packer.pack(function)
    except Exception as error:  # foreign objects decide how they are pickled
        raise TypeError(_why_not(function, packer, error)) from error
    return Shipment(next(_keys), blob, packer.origins, tuple(packer.bindings))


def _why_not(function: Any, packer: _Packer, error: Exception) -> str:
    name = getattr(function, "__name__", None) or type(function).__name__
    cause = str(error)
    if isinstance(function, types.MethodType):
        cause = f"it is a method, and its {type(function.__self__).__name__} cannot be pickled ({error})"
    for _, used, value in packer.bindings:
        if value is not _ABSENT and not can_be_sent(value):
            cause = f"it uses the global {used!r}, a {type(value).__name__}, which cannot be pickled ({error})"
            break
    return (
        f"{name!r} is cpu_bound and cannot be sent to a worker process: {cause}. Make it a plain function that gets "
        f"what it needs as arguments or creates it itself, or put it into a separate module"
    )


def can_be_sent(value: Any) -> bool:
    try:
        _Packer().pack(value)
    except Exception:  # foreign objects decide how they are pickled
        return False
    return True


# --- arguments ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Keyword arguments as bytes, and the names of those left out."""

    blob: bytes
    origins: Mapping[str, str]
    left_out: tuple[str, ...] = ()


def pack_arguments(kwargs: Mapping[str, Any]) -> Arguments:
    """Pack the arguments of a call. States are sent as copies without live objects and parts that cannot be pickled."""
    values = {name: _without_live(value) for name, value in kwargs.items()}
    packer = _Packer()
    try:
        return Arguments(packer.pack(values), packer.origins)
    except Exception:  # foreign objects decide how they are pickled
        left_out: list[str] = []
        values = {
            name: kept for name, value in values.items() if (kept := _prune(value, name, left_out)) is not _ABSENT
        }
        packer = _Packer()
        return Arguments(packer.pack(values), packer.origins, tuple(left_out))


def _without_live(value: Any) -> Any:
    if isinstance(value, State):
        copy = State({name: entry for name, entry in value.items() if name not in LIVE})
        if isinstance(steps := copy.get("trajectory"), list):
            copy["trajectory"] = [
                {**step, "response": None} if isinstance(step, dict) and "response" in step else step for step in steps
            ]
        return copy
    if type(value) is list and value and isinstance(value[0], State):
        return [_without_live(item) for item in value]
    return value


def prune(value: Any) -> Any:
    """A value without the parts that cannot be pickled."""
    return _prune(value, "", [])


def _prune(value: Any, where: str, left_out: list[str]) -> Any:
    """The value without the parts that cannot be pickled; `_ABSENT` if nothing remains."""
    if can_be_sent(value):
        return value
    value = plain(value) if isinstance(value, View) else value
    if isinstance(value, dict) and type(value) in (dict, State):
        pruned = {key: _prune(entry, f"{where}[{key!r}]", left_out) for key, entry in value.items()}
        return type(value)({key: entry for key, entry in pruned.items() if entry is not _ABSENT})
    if type(value) in (list, tuple):
        items = [_prune(item, f"{where}[{i}]", left_out) for i, item in enumerate(value)]
        return type(value)([None if item is _ABSENT else item for item in items])
    left_out.append(where)
    return _ABSENT


# --- by name or by value ------------------------------------------------------------------------------------------


class _Packer(pickle.Pickler):
    """A pickler that can also pickle functions and classes that are not importable."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5)
        self.origins: dict[str, str] = {}
        self.bindings: list[tuple[dict[str, Any], str, Any]] = []
        self._namespaces: dict[int, dict[str, Any]] = {}

    def pack(self, value: Any) -> bytes:
        self.dump(value)
        return self._file.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            if self._is_importable(obj):
                return NotImplemented
            return self._class(obj) if isinstance(obj, type) else self._function(obj)
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, (staticmethod, classmethod)):
            return type(obj), (obj.__func__,)
        if type(obj) is property:
            return property, (obj.fget, obj.fset, obj.fdel, obj.__doc__)
        if type(obj) is functools.cached_property:
            return functools.cached_property, (obj.func,)
        if type(obj) is types.MappingProxyType:
            return _read_only, (dict(obj),)
        return _SENTINELS.get(id(obj), NotImplemented)

    def _is_importable(self, obj: Any) -> bool:
        if isinstance(obj, type) and not obj.__flags__ & _IS_HEAP_TYPE:  # built in
            return True
        module = sys.modules.get(obj.__module__)
        if module is None or obj.__module__ == "__main__":
            return False
        found: Any = module
        for part in obj.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not obj:
            return False
        if not _is_on_path(obj.__module__.partition(".")[0]):
            file = getattr(module, "__file__", None)
            if file is None:
                return False
            self.origins[obj.__module__] = os.path.abspath(file)
        return True

    def _function(self, function: types.FunctionType) -> tuple[Any, ...]:
        names = _global_names(function.__code__)
        known = function.__globals__
        self.bindings += [(known, name, known.get(name, _ABSENT)) for name in sorted(names)]
        used = {name: known[name] for name in names if name in known}
        cells = [_content(cell) for cell in function.__closure__ or ()]
        attributes = {
            name: value for name, value in vars(function).items() if name not in ("vectorized", "__wrapped__")
        }
        namespace = self._namespaces.setdefault(id(known), {"__name__": known.get("__name__", "__main__")})
        skeleton = (marshal.dumps(function.__code__), namespace, function.__name__, function.__qualname__, len(cells))
        details = (used, cells, function.__defaults__, function.__kwdefaults__, attributes, _submodules(function, used))
        return _make_function, skeleton, details, None, None, _fill_function

    def _class(self, cls: type) -> tuple[Any, ...]:
        if type(cls) not in (type, abc.ABCMeta):
            raise pickle.PicklingError(
                f"the class {cls.__qualname__!r} has the metaclass {type(cls).__name__!r}; put it into a module"
            )
        key = _class_keys.get(cls)
        if key is None:
            key = _class_keys[cls] = next(_keys)
        slots = [vars(cls)["__slots__"]] if "__slots__" in vars(cls) else []
        names = [slots[0]] if slots and isinstance(slots[0], str) else list(slots[0]) if slots else []
        left_out = {"__dict__", "__weakref__", "__slots__", "_abc_impl", *_ANNOTATIONS, *names}
        body = {name: value for name, value in vars(cls).items() if name not in left_out}
        skeleton = (key, type(cls), cls.__name__, cls.__bases__, slots)
        return _make_class, skeleton, body, None, None, _fill_class


_ANNOTATIONS = ("__annotations__", "__annotate_func__", "__annotations_cache__")  # the last two since Python 3.14
_class_keys: WeakKeyDictionary[type, int] = WeakKeyDictionary()
_SENTINELS = {
    id(getattr(dataclasses, name)): name
    for name in ("MISSING", "KW_ONLY", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR", "_HAS_DEFAULT_FACTORY")
}


@functools.lru_cache(maxsize=1024)
def _is_on_path(top: str) -> bool:
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return True
    found = importlib.machinery.PathFinder.find_spec(top)
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if found is None or found.origin is None or loaded is None:
        return found is not None
    return bool(os.path.realpath(found.origin) == os.path.realpath(loaded))


def _content(cell: types.CellType) -> tuple[Any] | None:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return None


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that a function and its inner functions may read."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname in _READS_GLOBAL)
    return frozenset(own).union(
        *(_global_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
    )


@functools.lru_cache(maxsize=1024)
def _attribute_names(code: types.CodeType) -> frozenset[str]:
    inner = (_attribute_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _submodules(function: types.FunctionType, used: Mapping[str, Any]) -> list[str]:
    """Modules used as attributes of other modules (``a.b`` after ``import a.b``), which must be imported too."""
    roots = [f"{value.__name__}." for value in used.values() if hasattr(value, "__path__")]
    names = _attribute_names(function.__code__)
    return [
        module
        for root in roots
        for module in list(sys.modules)
        if module.startswith(root) and names.issuperset(module[len(root) :].split("."))
    ]


# --- in the worker ------------------------------------------------------------------------------------------------

_classes: dict[int, type] = {}
_unfilled: set[int] = set()


def _look_up(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _read_only(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return types.MappingProxyType(mapping)


def _make_function(code: bytes, namespace: dict[str, Any], name: str, qualname: str, n_cells: int) -> Any:
    namespace.setdefault("__builtins__", builtins)
    function = types.FunctionType(
        marshal.loads(code), namespace, name, closure=tuple(types.CellType() for _ in range(n_cells))
    )
    function.__qualname__ = qualname
    function.__module__ = namespace["__name__"]
    return function


def _fill_function(function: types.FunctionType, details: tuple[Any, ...]) -> None:
    used, cells, defaults, kwdefaults, attributes, submodules = details
    for module in submodules:
        importlib.import_module(module)
    function.__globals__.update(used)
    for cell, content in zip(function.__closure__ or (), cells, strict=True):
        if content is not None:
            (cell.cell_contents,) = content
    function.__defaults__ = defaults
    function.__kwdefaults__ = kwdefaults
    vars(function).update(attributes)


def _make_class(key: int, meta: type, name: str, bases: tuple[type, ...], slots: list[Any]) -> type:
    if key not in _classes:
        _classes[key] = meta(name, bases, {"__slots__": slots[0]} if slots else {})
        _unfilled.add(id(_classes[key]))
    return _classes[key]


def _fill_class(cls: type, body: Mapping[str, Any]) -> None:
    if id(cls) not in _unfilled:  # the same class came with an earlier call
        return
    _unfilled.discard(id(cls))
    for name, value in body.items():
        setattr(cls, name, value)
        if callable(named := getattr(type(value), "__set_name__", None)):
            named(value, cls, name)
    abc.update_abstractmethods(cls)  # does nothing for a class that is not abstract
