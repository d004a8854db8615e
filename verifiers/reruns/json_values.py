"""Texts that hold JSON → what they hold."""

from __future__ import annotations

import json
from typing import Any


def json_value(value: Any) -> Any:
    """Structured values are written as JSON texts where attributes cannot hold them."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
