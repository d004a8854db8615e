"""A type hint → JSON Schema; a value that a model wrote → a value of that type, or an error message."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

Schema = dict[str, Any]

_PLAIN: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    bytes: {"type": "string"},
    dict: {"type": "object"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    set: {"type": "array"},
    frozenset: {"type": "array"},
}
_HINTS = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_ARRAYS = (list, set, frozenset, Sequence, Collection, Iterable)
_IN_JSON = (str, int, float, tuple, list, dict, type(None))
MAX_DEPTH = 8  # limits recursive types


def schema_of(hint: Any, _depth: int = 0) -> Schema:
    """The JSON Schema of a type hint; ``{}``, which allows anything, if JSON Schema cannot describe it.

    >>> schema_of(list[int] | None)
    {'anyOf': [{'type': 'array', 'items': {'type': 'integer'}}, {'type': 'null'}]}
    >>> schema_of(Literal["up", "down"])
    {'type': 'string', 'enum': ['up', 'down']}
    """
    if _depth > MAX_DEPTH:
        return {}
    if (named := _named_type(hint)) is not hint:
        return schema_of(named, _depth + 1)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        described = description_in(hint)
        inner = schema_of(args[0], _depth)
        return {**inner, "description": described} if described else inner
    if isinstance(hint, type) and hint in _PLAIN:
        return dict(_PLAIN[hint])
    if hint is None:
        return {"type": "null"}
    if origin is Literal:
        return _enumerated(list(args))
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(arg, _depth + 1) for arg in args]}
    if origin is tuple:
        return _tuple(args, _depth)
    if origin in _ARRAYS:
        return {"type": "array", "items": schema_of(args[0], _depth + 1)} if args else {"type": "array"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        values = schema_of(args[1], _depth + 1) if len(args) == 2 else {}
        return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
    return _class_schema(hint, _depth) if isinstance(hint, type) else {}


def _named_type(hint: Any) -> Any:
    """The type that a ``NewType`` or a ``type`` statement names; any other hint unchanged."""
    if isinstance(hint, typing.NewType):
        return hint.__supertype__
    return hint.__value__ if type(hint).__name__ == "TypeAliasType" else hint


def _enumerated(values: list[Any]) -> Schema:
    if not all(isinstance(value, _IN_JSON) for value in values):
        return {}
    kinds = {type(value) for value in values}
    schema = dict(_PLAIN.get(kinds.pop(), {})) if len(kinds) == 1 else {}
    return {**schema, "enum": values}


def _tuple(args: tuple[Any, ...], depth: int) -> Schema:
    if len(args) == 2 and args[1] is Ellipsis:
        return {"type": "array", "items": schema_of(args[0], depth + 1)}
    items = [schema_of(arg, depth + 1) for arg in args]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _class_schema(cls: type, depth: int) -> Schema:
    if issubclass(cls, enum.Enum):
        return _enumerated([member.value for member in cls])
    if callable(described := getattr(cls, "model_json_schema", None)):  # pydantic
        return dict(described())
    if typing.is_typeddict(cls):
        return _typed_dict(cls, depth)
    if dataclasses.is_dataclass(cls):
        hints = _fields(cls)
        fields = [f for f in dataclasses.fields(cls) if f.init]
        required = [
            f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        return _object({f.name: hints[f.name] for f in fields}, required, depth)
    for known, schema in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if issubclass(cls, known):
            return {"type": schema}
    if issubclass(cls, Mapping):
        return {"type": "object"}
    return _library_schema(cls)


def _fields(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"the types of the fields of {cls.__qualname__!r}, which a tool takes, cannot be evaluated: {error}; "
            "import them outside of `if TYPE_CHECKING:`, and define them in a module, not in a function"
        ) from error


def _typed_dict(cls: Any, depth: int) -> Schema:
    hints = _fields(cls)
    # If annotations are strings, `__required_keys__` ignores Required and NotRequired.
    marks = {name: get_origin(hint) for name, hint in hints.items()}
    optional = {name for name, mark in marks.items() if mark is typing.NotRequired}
    required = {name for name, mark in marks.items() if mark is typing.Required} | cls.__required_keys__
    return _object(hints, required - optional, depth)


def _object(hints: Mapping[str, Any], required: Collection[str], depth: int) -> Schema:
    return {
        "type": "object",
        "properties": {name: schema_of(_bare(hint), depth + 1) for name, hint in hints.items()},
        "required": [name for name in hints if name in required],
    }


def _bare(hint: Any) -> Any:
    """The type of a TypedDict's field, without ``Required[…]`` or ``NotRequired[…]``."""
    return get_args(hint)[0] if get_origin(hint) in (typing.Required, typing.NotRequired) else hint


def _library_schema(cls: type) -> Schema:
    """The schema of classes that msgspec knows (dates, decimals, UUIDs); ``{}`` for other classes."""
    try:
        schema = msgspec.json.schema(cls)
    except (TypeError, RuntimeError):
        return {}
    return {} if "$ref" in schema else schema


def with_common_definitions(schema: Schema) -> Schema:
    """Move the ``$defs`` of inner schemas to the top, where references look for them.

    >>> inner = {"$defs": {"A": {"type": "integer"}}, "$ref": "#/$defs/A"}
    >>> with_common_definitions({"type": "object", "properties": {"x": inner}})
    {'type': 'object', 'properties': {'x': {'$ref': '#/$defs/A'}}, '$defs': {'A': {'type': 'integer'}}}
    """
    originals: Schema = {}
    moved: Schema = {}

    def walk(part: Any, names: Mapping[str, str]) -> Any:
        if isinstance(part, list):
            return [walk(item, names) for item in part]
        if not isinstance(part, dict):
            return part
        inner = part.get("$defs")
        if isinstance(inner, dict):
            new = {name: _free_name(name, inner, originals) for name in inner}
            names = {**names, **new}
            unknown = [name for name in inner if new[name] not in originals]
            originals.update({new[name]: inner for name in unknown})
            moved.update({new[name]: walk(inner[name], names) for name in unknown})
        reference = names.get(str(part.get("$ref", "")).removeprefix("#/$defs/"))
        kept = {key: walk(value, names) for key, value in part.items() if key != "$defs"}
        return {**kept, "$ref": f"#/$defs/{reference}"} if reference else kept

    whole = walk(schema, {})
    return {**whole, "$defs": moved} if moved else whole


def _free_name(name: str, inner: Schema, originals: Schema) -> str:
    """The name of a definition at the top; definitions that differ get names that differ."""
    free, number = name, 2
    while free in originals and originals[free] != inner:
        free, number = f"{name}_{number}", number + 1
    return free


def description_in(hint: Any) -> str:
    """The description in ``Annotated[int, "…"]``; pydantic's ``Field`` and msgspec's ``Meta`` work as well.

    >>> description_in(Annotated[int, "how many"])
    'how many'
    """
    for extra in getattr(hint, "__metadata__", ()):
        text = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(text, str) and text:
            return text
    return ""


def hint_of(schema: Any) -> Any:
    """The type hint for a JSON Schema of a simple type, for tools that come with a schema; else ``Any``.

    >>> hint_of({"type": "integer"}), hint_of({"anyOf": [{"type": "string"}, {"type": "null"}]})
    (<class 'int'>, typing.Any)
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(kind, str):
        hint = _HINTS.get(kind, Any)
        return hint | None if hint is not Any and schema.get("nullable") else hint
    return Any


# --- values -------------------------------------------------------------------------------------------------------


def fit(value: Any, hint: Any) -> Any:
    """Convert a JSON value to the type of a hint, tolerating common mistakes of models; raises ValueError otherwise.

    >>> fit("3", int), fit(3.0, int), fit("[1, 2]", list[int]), fit(7, str), fit("yes", str | None)
    (3, 3, [1, 2], '7', 'yes')
    >>> fit("three", int)
    Traceback (most recent call last):
    ValueError: expected integer, got 'three'
    """
    if not schema_of(hint):  # an unknown type accepts anything
        return value
    for attempt in (_strictly, _leniently, _parsed, _as_string):
        try:
            return attempt(value, hint)
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            continue
    raise ValueError(f"expected {_named(hint)}, got {value!r:.100}")


def _strictly(value: Any, hint: Any) -> Any:
    return _converted(value, hint, strict=True)


def _leniently(value: Any, hint: Any) -> Any:
    return _converted(value, hint, strict=False)


def _parsed(value: Any, hint: Any) -> Any:
    """Parse JSON within a string: ``"[1, 2]"`` for a list."""
    if not isinstance(value, str):
        raise ValueError("only a text can contain JSON")
    return _converted(msgspec.json.decode(value), hint, strict=False)


def _as_string(value: Any, hint: Any) -> Any:
    """Convert a number to text if the type is a text."""
    if isinstance(value, (dict, list)) or value is None:
        raise ValueError("not a number")
    return _converted(msgspec.json.encode(value).decode(), hint, strict=True)


def _converted(value: Any, hint: Any, *, strict: bool) -> Any:
    hint = _named_type(hint)
    if get_origin(hint) is Annotated:
        return _converted(value, get_args(hint)[0], strict=strict)
    if isinstance(hint, type) and callable(validate := getattr(hint, "model_validate", None)):  # pydantic
        return validate(value)
    try:
        return msgspec.convert(value, _supported(hint), strict=strict, dec_hook=_made)
    except TypeError:  # a hint that msgspec does not support
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _member(value, hint)
        if get_origin(hint) not in (Union, types.UnionType):
            return value
    for arg in get_args(hint):
        try:
            return _converted(value, arg, strict=strict)
        except ValueError:
            continue
    raise ValueError(f"{value!r:.100} is none of {_named(hint)}")


def _supported(hint: Any) -> Any:
    """The hint with ``Any`` in place of inner types that JSON Schema cannot describe, and ``list`` for ``Iterable``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Literal, Annotated) or not args:
        return hint
    inner = tuple(arg if arg is Ellipsis else _supported(arg) if schema_of(arg) else Any for arg in args)
    if origin in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007 - made from values
    if origin is Iterable:
        origin = list
    return hint if inner == args and origin is get_origin(hint) else origin[inner]


def _made(cls: Any, value: Any) -> Any:
    """An instance of a class that msgspec does not know, inside another type: of pydantic, or a kind of dict."""
    if callable(validate := getattr(cls, "model_validate", None)):
        return validate(value)
    origin = get_origin(cls) or cls
    if isinstance(value, dict) and isinstance(origin, type) and issubclass(origin, dict):
        items = dict[get_args(cls)] if len(get_args(cls)) == 2 else dict  # type: ignore[misc]
        made = origin()
        made.update(_converted(value, items, strict=False))
        return made
    raise ValueError(f"expected {_named(cls)}, got {value!r:.100}")


def _member(value: Any, cls: type[enum.Enum]) -> enum.Enum:
    """The member of an enumeration whose values msgspec does not support: of several types, or tuples."""
    wanted = msgspec.json.encode(value)
    for member in cls:
        if msgspec.json.encode(member.value) == wanted:
            return member
    raise ValueError(f"expected {_named(cls)}, got {value!r:.100}")


def _named(hint: Any) -> str:
    """A hint in JSON's terms: ``integer``, ``array of string``, ``one of "up", "down"``."""
    return _in_words(schema_of(hint))


def _in_words(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_in_words(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(msgspec.json.encode(value).decode() for value in schema["enum"])
    kind = str(schema.get("type", "another value"))
    if kind == "array" and schema.get("items"):
        return f"array of {_in_words(schema['items'])}"
    if kind == "object" and "properties" in schema:
        return f"object with {', '.join(schema['properties'])}"
    return kind
