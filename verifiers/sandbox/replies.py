"""Decodes and validates the replies of sessions.

A reply may be malicious: by its size, by the memory that it needs once decoded, or by unexpected values. So it is
measured before it is decoded, and each of its fields is validated.
"""

from __future__ import annotations

import base64
import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from verifiers.sandbox.inside.wire import (
    DEEPEST,
    LIST_BYTES,
    MAX_FILES,
    MAX_LISTS,
    PIECE_BYTES,
    depth,
    outline,
    unframed,
)
from verifiers.sandbox.result import Status

Field = Callable[[Any], Any]
"""Validates and converts the value of a field; raises ValueError with a description of valid values."""

SLACK_BYTES = 4096
SMALL_BYTES = 4096
"""Messages up to this size need at most a few hundred kilobytes once decoded, whatever they contain."""
ESCAPED = 12
"""The maximum number of bytes of one character in JSON."""
STATUSES: tuple[Status, ...] = get_args(Status)
WHYS = ("memory", "disk", "signal", "exit")


class BadReplyError(ValueError):
    """A session sent something that is not a valid reply to its request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The valid replies to one kind of request: their fields, and limits on their size.

    ``most_texts`` limits strings, including field names; ``most_lists`` lists and objects; ``most_signs`` characters
    outside strings.
    """

    fields: Mapping[str, Field]
    most_bytes: int
    most_texts: int = 16
    most_lists: int = 2
    most_signs: int = 512


def read_reply(message: bytes | bytearray, shape: Shape) -> dict[str, Any]:
    """The fields of a reply; raises only `BadReplyError`.

    >>> read_reply(b'{"number": 3, "errno": 2}', FILE_WRITTEN)
    {'number': 3, 'errno': 2}
    >>> read_reply(b'{"number": 3, "errno": 1000000000000}', FILE_WRITTEN)
    Traceback (most recent call last):
    verifiers.sandbox.replies.BadReplyError: its 'errno' is not a known errno
    """
    if len(message) > SMALL_BYTES or message.count(b"[") + message.count(b"{") > DEEPEST:
        _measure(message, shape)
    try:
        reply = unframed(message)
        if b"\\ud" in message.lower():  # a lone surrogate could not be encoded later
            reply = json.loads(json.dumps(reply, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise BadReplyError(f"it is not JSON ({type(error).__name__})") from None
    if type(reply) is not dict:
        raise BadReplyError(f"it is not an object but {type(reply).__name__}")
    fields = ENDED if "ended" in reply else shape.fields
    for name, value in reply.items():
        field = fields.get(name)
        if field is None:
            raise BadReplyError(f"it has an unexpected field, {name!r:.50}")
        try:
            reply[name] = field(value)
        except ValueError as error:
            raise BadReplyError(f"its {name!r} is not {error}") from None
    return reply


def _measure(message: bytes | bytearray, shape: Shape) -> None:
    """Refuse a message that would need too much memory, before decoding it."""
    # The quotation mark that begins a string never follows a backslash.
    if message.count(b'"') - message.count(b'\\"') > 2 * shape.most_texts:
        raise BadReplyError(f"it has more than {shape.most_texts} strings")
    signs = outline(message)
    if len(signs) > shape.most_signs:
        raise BadReplyError(f"it has {len(signs)} characters outside strings; at most {shape.most_signs} are allowed")
    lists = signs.count(b"[") + signs.count(b"{")
    if lists > shape.most_lists:
        raise BadReplyError(f"it has {lists} lists and objects; at most {shape.most_lists} are allowed")
    if lists > DEEPEST and depth(signs) > DEEPEST + 1:
        raise BadReplyError(f"it is nested more than {DEEPEST} deep")


# --- fields -------------------------------------------------------------------------------------------------------


def _whole(least: int, most: int) -> Field:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return check


def _optional(field: Field) -> Field:
    return lambda value: None if value is None else field(value)


def _text(most: int) -> Field:
    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"a string of at most {most} characters")
        return value

    return check


def _one_of(*values: str) -> Field:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _errno(value: Any) -> int:
    if type(value) is not int or value not in errno.errorcode:
        raise ValueError("a known errno")
    return value


def _content(most: int) -> Field:
    def check(value: Any) -> bytes:
        try:
            content = base64.b64decode(value if isinstance(value, str) else "*", validate=True)
        except ValueError:
            raise ValueError("base64") from None
        if len(content) > most:
            raise ValueError(f"at most {most} bytes long")
        return content

    return check


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > MAX_FILES:
        raise ValueError(f"a list of at most {MAX_FILES} names")
    return sorted(filter(_is_inside, value))


def _is_inside(name: Any) -> bool:
    """Whether a file name stays inside the folder, so that copying the files cannot write elsewhere."""
    if not isinstance(name, str) or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        return False
    return bool(name)


def _note(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object")
    number = value.get("number")
    return {"why": _one_of(*WHYS)(value.get("why")), "number": None if number is None else _whole(0, 255)(number)}


# --- shapes -------------------------------------------------------------------------------------------------------

_NUMBER: dict[str, Field] = {"number": _whole(0, 1 << 53)}
ENDED: dict[str, Field] = {"ended": _note}
"""The zygote's note on a session's end, on the same socket; a session can also send it itself."""
FILE_WRITTEN = Shape(fields={**_NUMBER, "errno": _errno}, most_bytes=SLACK_BYTES)
FILE_READ = Shape(
    fields={**FILE_WRITTEN.fields, "content": _content(PIECE_BYTES)},
    most_bytes=(PIECE_BYTES + 2) // 3 * 4 + SLACK_BYTES,
)
FILES_LISTED = Shape(
    fields={**FILE_WRITTEN.fields, "names": _names},
    most_bytes=LIST_BYTES + SLACK_BYTES,
    most_texts=MAX_FILES + 16,
    most_signs=3 * MAX_FILES + 512,
)


def cell_ran(output_bytes: int) -> Shape:
    """The reply to a cell: its value and its error may be as long as its output."""
    text = _optional(_text(6 * output_bytes + SLACK_BYTES))  # an escaped character takes six
    return Shape(
        fields={
            **_NUMBER,
            "status": _one_of(*STATUSES),
            "value": text,
            "error": text,
            "exit_code": _optional(_whole(0, 255)),
            "is_fresh": _flag,
        },
        most_bytes=ESCAPED * output_bytes + SLACK_BYTES,
    )


def function_returned(output_bytes: int) -> Shape:
    """The reply to a function call: as for a cell, but with any JSON value, of up to four times that length."""
    ran = cell_ran(output_bytes)
    return Shape(
        fields={**ran.fields, "value": lambda value: value},
        most_bytes=ran.most_bytes,
        most_texts=2 * output_bytes,
        most_lists=MAX_LISTS,
        most_signs=4 * output_bytes + SLACK_BYTES,
    )


# --- of containers ------------------------------------------------------------------------------------------------

_ANSWER: dict[str, Field] = {**_NUMBER, "errno": _errno, "said": _optional(_text(SLACK_BYTES))}
CONTAINER_WRITTEN = Shape(fields=_ANSWER, most_bytes=2 * SLACK_BYTES)
CONTAINER_LISTED = replace(FILES_LISTED, fields={**_ANSWER, "names": _names}, most_bytes=ESCAPED * LIST_BYTES)


def container_read(disk_bytes: int) -> Shape:
    """A whole file of a container."""
    most_bytes = (disk_bytes + 2) // 3 * 4 + SLACK_BYTES
    return Shape(fields={**_ANSWER, "content": _content(disk_bytes)}, most_bytes=most_bytes)


def container_ran(output_bytes: int) -> Shape:
    """The reply to a cell in a container, which includes its output."""
    ran = cell_ran(output_bytes)
    fields = {name: field for name, field in ran.fields.items() if name != "is_fresh"}
    text = _text(output_bytes)
    return Shape(
        fields={**fields, "stdout": text, "stderr": text, "is_lost": _flag},
        most_bytes=4 * ran.most_bytes,
        most_texts=32,
    )
