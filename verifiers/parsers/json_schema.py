"""A JSON Schema and a value → the ways in which the value does not match. Linear time; no regular expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
}
BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: not _is_number(value) or value >= bound,
    "maximum": lambda value, bound: not _is_number(value) or value <= bound,
    "exclusiveMinimum": lambda value, bound: not _is_number(value) or value > bound,
    "exclusiveMaximum": lambda value, bound: not _is_number(value) or value < bound,
    "minLength": lambda value, bound: not isinstance(value, str) or len(value) >= bound,
    "maxLength": lambda value, bound: not isinstance(value, str) or len(value) <= bound,
    "minItems": lambda value, bound: not isinstance(value, list) or len(value) >= bound,
    "maxItems": lambda value, bound: not isinstance(value, list) or len(value) <= bound,
}
NOTES = ("title", "description", "default", "examples", "$schema", "$id")  # annotations, which do not restrict values
KEYWORDS = ("type", "properties", "required", "additionalProperties", "items", "enum", "const", *BOUNDS)


def check_schema(schema: Any, where: str = "schema") -> None:
    """Refuse a schema with an unsupported keyword or a value of the wrong type."""
    if not isinstance(schema, Mapping):
        raise TypeError(f"{where} must be an object of JSON Schema, not {schema!r:.80}")
    if unknown := sorted(set(schema) - {*KEYWORDS, *NOTES}):
        raise ValueError(f"{where} has {unknown[0]!r}, which is not supported; use {', '.join(KEYWORDS)}")
    for name in types_of(schema):
        if name not in TYPES:
            raise ValueError(f"{where}: type {name!r} is not one of {', '.join(TYPES)}")
    for name in BOUNDS.keys() & schema.keys():
        if not _is_number(schema[name]):
            raise ValueError(f"{where}: {name} must be a number, not {schema[name]!r}")
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{where}: required must be a list of names, not {required!r:.80}")
    if not isinstance(properties, Mapping):
        raise ValueError(f"{where}: properties must be an object, not {properties!r:.80}")
    for name, inner in properties.items():
        check_schema(inner, f"{where}.{name}")
    if "items" in schema:
        check_schema(schema["items"], f"{where}[]")
    if not isinstance(schema.get("enum", []), list) or not isinstance(schema.get("additionalProperties", True), bool):
        raise ValueError(f"{where}: enum must be a list and additionalProperties true or false")


def problems(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Each mismatch of a value with its schema, and where it is.

    >>> list(problems({"n": "4"}, {"properties": {"n": {"type": "integer"}}, "required": ["n", "why"]}))
    ["'why' is missing", "n is not integer: '4'"]
    """
    shown = where or "it"
    names = types_of(schema)
    if names and not any(TYPES[name](value) for name in names):
        yield f"{shown} is not {' or '.join(names)}: {value!r:.60}"
        return
    if "const" in schema and not same(value, schema["const"]):
        yield f"{shown} is not {schema['const']!r}: {value!r:.60}"
    if "enum" in schema and not any(same(value, one) for one in schema["enum"]):
        yield f"{shown} is not one of {schema['enum']!r:.80}: {value!r:.60}"
    for name, fits in BOUNDS.items():
        if name in schema and not fits(value, schema[name]):
            yield f"{shown} violates {name} {schema[name]}: {value!r:.60}"
    if isinstance(value, dict):
        yield from _in_object(value, schema, where)
    if isinstance(value, list) and "items" in schema:
        for i, one in enumerate(value):
            yield from problems(one, schema["items"], f"{where}[{i}]")


def _in_object(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    dot = f"{where}." if where else ""
    properties = schema.get("properties", {})
    yield from (f"{dot}{name!r} is missing" for name in schema.get("required", ()) if name not in value)
    if schema.get("additionalProperties") is False:
        yield from (f"{dot}{name!r} is not allowed" for name in value if name not in properties)
    for name, inner in properties.items():
        if name in value:
            yield from problems(value[name], inner, f"{dot}{name}")


def types_of(schema: Mapping[str, Any]) -> list[str]:
    given = schema.get("type", [])
    return [given] if isinstance(given, str) else list(given)


def same(a: Any, b: Any) -> bool:
    """JSON equality: true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
