"""Adds a checksum to a line of JSON as its last field, and verifies it."""

from __future__ import annotations

from zlib import crc32

FIELD = "line_crc32"
_MARK = f',"{FIELD}":"'.encode()
_CLOSE = b'"}'
_TAIL = len(_MARK) + 8 + len(_CLOSE)
_HALF = len(_MARK) // 2


def seal(line: bytes) -> bytes:
    r"""Add a last field to a line with one object: the CRC-32 of all bytes before that field.

    >>> seal(b'{"reward":1.0}\n')
    b'{"reward":1.0,"line_crc32":"7b32b435"}\n'
    """
    body = line[:-2]
    return b'%b%b%08x"}\n' % (body, _MARK, crc32(body)) if len(body) > 1 else line


def is_intact(line: bytes) -> bool:
    r"""Whether the checksum of a line is right; a line without one, from an older run, counts as intact.

    >>> is_intact(b'{"reward":1.0,"line_crc32":"7b32b435"}\n'), is_intact(b'{"reward":9.0,"line_crc32":"7b32b435"}\n')
    (True, False)
    """
    end = len(line) - line.endswith(b"\n")
    start = end - _TAIL
    if start < 0:
        return True
    mark = line[start : start + len(_MARK)]
    if mark != _MARK:  # a bit may have flipped in the mark itself, so half of it is enough to recognise it
        return not (mark.startswith(_MARK[:_HALF]) or mark.endswith(_MARK[_HALF:]))
    return line[end - 10 : end] == b"%08x%b" % (crc32(memoryview(line)[:start]), _CLOSE)


def is_sealed(line: bytes) -> bool:
    """Whether a line has a checksum."""
    start = len(line) - line.endswith(b"\n") - _TAIL
    return start >= 0 and line.startswith(_MARK, start)
