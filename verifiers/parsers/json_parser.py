"""A reply that contains a JSON object → its fields by name, and back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from verifiers.messages import text_of
from verifiers.parsers.json_schema import check_schema, problems
from verifiers.parsers.parser import ExtractFn, Parser, identity, reply_text
from verifiers.types import Messages

READ_AT_MOST = 3  # characters scanned for objects, as a multiple of the reply's length, so that the time is linear
MOST_OBJECTS = 1_000  # only the last so many objects of a reply are read
MOST_NESTED = 10_000  # longest braces with invalid JSON, in characters, that are searched for an object inside


class JSONParser(Parser):
    """Reads an object from a reply: the last one that is valid, alone, in a code block, or within text.

    ``fields`` names its required fields; or ``schema`` is a JSON Schema (types, properties, required, enum, bounds,
    items; any other keyword is an error). Objects that do not match are ignored.

    >>> parser = JSONParser(["reasoning", "answer"])
    >>> parser.parse('Sure: {"reasoning": "2+2", "answer": 4} Done.')
    namespace(reasoning='2+2', answer=4)
    >>> parser.parse_answer('{"reasoning": "2+2", "answer": 4}'), parser.parse_answer("no idea")
    ('4', None)
    """

    def __init__(
        self,
        fields: Sequence[str] | None = None,
        *,
        schema: Mapping[str, Any] | None = None,
        answer_field: str = "answer",
        extract_fn: ExtractFn = identity,
    ) -> None:
        super().__init__(extract_fn=extract_fn)
        if (fields is None) == (schema is None):
            raise TypeError("JSONParser takes either fields=[names] or schema={…}")
        if fields is not None:
            _check_names(fields)
            schema = {"type": "object", "properties": {name: {} for name in fields}, "required": list(fields)}
        assert schema is not None
        check_schema(schema)
        if not isinstance(answer_field, str):
            raise TypeError(f"answer_field must be a string, not {answer_field!r}")
        self.schema = {"type": "object", **schema}
        self.answer_field = answer_field

    def parse(self, text: Messages) -> Any:
        """Every field as an attribute with its JSON value; all None if the reply contains no matching object."""
        found = self.parse_object(text)
        return SimpleNamespace(**{name: (found or {}).get(name) for name in self.get_fields()})

    def parse_object(self, text: Messages) -> dict[str, Any] | None:
        """The last matching object, unchanged; None if there is none.

        >>> JSONParser(["answer"]).parse_object('{"answer": 1} no: {"answer": 2, "sure": true}')
        {'answer': 2, 'sure': True}
        """
        reply = text if isinstance(text, str) else reply_text(text)
        return next((found for found in _from_the_last(reply) if self.fits(found)), None)

    def fits(self, found: Any) -> bool:
        """Whether a value matches the schema."""
        return next(problems(found, self.schema), None) is None

    def parse_answer(self, completion: Messages) -> str | None:
        """The answer field of the last assistant message that has one, as text (numbers and lists as JSON)."""
        if isinstance(completion, str):
            return self._answer_in(completion)
        for reply in reversed(self.get_assistant_messages(completion)):
            answer = self._answer_in(text_of(reply))
            if answer is not None:
                return answer
        return None

    def _answer_in(self, text: str) -> str | None:
        answer = (self.parse_object(text) or {}).get(self.answer_field)
        if answer is None:
            return None
        return self._extract(answer.strip() if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))

    def get_fields(self) -> list[str]:
        """The fields in order: those with a property of their own, then those that are only required."""
        return list(dict.fromkeys([*self.schema.get("properties", {}), *self.schema.get("required", ())]))

    def format(self, **values: Any) -> str:
        """A reply with these values.

        >>> JSONParser(["answer"]).format(answer=4)
        '{"answer": 4}'
        """
        if wrong := list(problems(values, self.schema)):
            raise ValueError(f"the values do not match the schema: {wrong[0]}")
        return json.dumps(values, ensure_ascii=False)

    def get_format_str(self) -> str:
        """The format, as text for a prompt.

        >>> print(JSONParser(["reasoning", "answer"]).get_format_str())
        {"reasoning": ..., "answer": ...}
        """
        return "{" + ", ".join(f"{json.dumps(name)}: {self._shown(name)}" for name in self.get_fields()) + "}"

    def _shown(self, name: str) -> str:
        inner = self.schema.get("properties", {}).get(name, {})
        if "enum" in inner:
            return " | ".join(json.dumps(one, ensure_ascii=False) for one in inner["enum"])
        kinds = inner.get("type", "...")
        return kinds if isinstance(kinds, str) else " | ".join(kinds)

    def get_format_reward_func(self) -> Callable[..., float]:
        """A reward for following the format: 1 for a matching object, else half the share of fields that one has.

        >>> follows = JSONParser(["a", "answer"]).get_format_reward_func()
        >>> follows('{"a": 1, "answer": 2}'), follows('{"answer": 2}'), follows("2")
        (1.0, 0.25, 0.0)
        """

        def format_reward_func(completion: Messages, **kwargs: Any) -> float:
            return self._mean_over_replies(self._format_score, completion)

        return format_reward_func

    def _format_score(self, text: str) -> float:
        fields, most = self.get_fields(), 0
        for found in _from_the_last(text):
            if self.fits(found):
                return 1.0
            most = max(most, sum(name in found for name in fields))
        return 0.5 * most / len(fields) if fields else 0.0


def objects_in(text: str) -> list[dict[str, Any]]:
    """The outermost JSON objects in a text, in order. Never raises, and takes linear time.

    >>> objects_in('x {"a": {"b": 1}} {oops {"c": NaN} {"d": []}')
    [{'a': {'b': 1}}, {'d': []}]
    """
    return list(_from_the_last(text))[::-1]


def _from_the_last(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a text, last first, decoded lazily."""
    spans = _spans(text)[-MOST_OBJECTS:]
    while spans:
        start, end = spans.pop()
        found = _decoded(text[start:end])
        if found is not None:
            yield found
        elif 2 < end - start <= MOST_NESTED:  # not valid JSON, but it may contain an object
            spans += _spans(text[start + 1 : end - 1], start + 1)


def _spans(text: str, offset: int = 0) -> list[tuple[int, int]]:
    """The spans of outermost pairs of braces, outside strings, that could be objects."""
    spans: list[tuple[int, int]] = []
    left = READ_AT_MOST * len(text)
    found = _OBJECT.search(text)
    while found is not None and left > 0:
        start, end = found.span()
        if end - start == 1:  # it contains other braces, or is never closed
            end = _closing(text, start)
        if end:
            spans.append((offset + start, offset + end))
        left -= (end or len(text)) - start
        found = _OBJECT.search(text, end or start + 1)
    return spans


def _closing(text: str, start: int) -> int:
    """The index just after the brace that closes the one at ``start``, or 0."""
    depth, position = 1, start + 1
    while depth:
        position = _UP_TO_BRACE.match(text, position).end()  # type: ignore[union-attr]  # it can match ""
        if position >= len(text) or text[position] == '"':
            return 0
        depth += 1 if text[position] == "{" else -1
        position += 1
    return position


# The beginning of an object, or a whole object without others inside.
_OBJECT = re.compile(r'\{(?=\s*+["}])(?:[^"{}]*+(?:"(?:[^"\\]++|\\.)*+"[^"{}]*+)*+\})?', re.DOTALL)
_UP_TO_BRACE = re.compile(r'[^"{}]*+(?:"(?:[^"\\]++|\\.)*+"[^"{}]*+)*+', re.DOTALL)


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, ValueError):
        return None
    return found if isinstance(found, dict) and not _has_infinity(found) else None


def _has_infinity(value: Any) -> bool:
    """Whether a value contains a number that is too large for a float."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return True
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return False


def _check_names(fields: Any) -> None:
    if isinstance(fields, str) or not isinstance(fields, Sequence):
        raise TypeError(f"fields must be a list of names, not {fields!r}")
    if not fields:
        raise ValueError("fields is empty; name at least one field")
    if wrong := [name for name in fields if not isinstance(name, str) or not name]:
        raise TypeError(f"a field must be a name, not {wrong[0]!r}")
    if len(set(fields)) < len(fields):
        raise ValueError("a field is named twice")
