"""Decodes attribute values that are JSON text."""

from __future__ import annotations

import json
from typing import Any


def json_value(value: Any) -> Any:
    """The decoded value of JSON text, other values unchanged: span attributes often contain structured data as JSON."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
