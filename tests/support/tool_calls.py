"""What tests of tools share: replies with calls, and the last message a model was shown."""

from __future__ import annotations

import itertools
import json
from typing import Any

_ids = itertools.count()


def call(name: str, arguments: Any = None, id: str | None = None) -> dict[str, Any]:
    """One call as endpoints list them; arguments that are not a text are written as JSON."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {
        "id": id or f"call_{next(_ids)}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    """An assistant's message that makes these calls."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def tool_texts(state: Any) -> list[str]:
    """What the tools said in a rollout, in order."""
    return [message["content"] for message in state["completion"] if message["role"] == "tool"]
