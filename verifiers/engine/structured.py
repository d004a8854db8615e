"""``response_format`` and ``tool_choice`` of a request, parsed and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import RequestRefusedError

FORMATS = ("text", "json_object", "json_schema")
MODES = ("auto", "none", "required")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseFormat:
    """Text, any JSON object, or a value that matches a schema."""

    type: str = "text"
    schema: Any = field(default=None, repr=False)
    strict: bool = False

    @property
    def is_text(self) -> bool:
        return self.type == "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """Whether the model may or must call a function, and which."""

    mode: str = "auto"
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        return self.mode == "required"

    def offered(self, tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
        """The functions that a forced call may choose from."""
        named = [tool for tool in tools or () if self.name is None or tool_name(tool) == self.name]
        if not named:
            wanted = "a call of a function" if self.name is None else f"a call of {self.name!r}"
            raise RequestRefusedError(f"tool_choice requires {wanted}, but 'tools' has no such function")
        return named

    def record(self) -> Any:
        return self.mode if self.name is None else {"type": "function", "function": {"name": self.name}}


def tool_name(tool: Mapping[str, Any]) -> Any:
    """The name of a tool's function, unchecked."""
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, Mapping) else None


def read_format(name: str, value: Any) -> ResponseFormat:
    """Parse OpenAI's ``response_format``.

    >>> read_format("response_format", {"type": "json_object"})
    ResponseFormat(type='json_object', strict=False)
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in FORMATS:
        raise RequestRefusedError(f"{name!r} must be an object with a type ({', '.join(FORMATS)}), not {value!r:.80}")
    if kind == "json_object":
        return ResponseFormat(type=kind, schema={"type": "object"})
    if kind == "text":
        return ResponseFormat()
    written = value.get("json_schema")
    if not isinstance(written, Mapping) or not isinstance(written.get("schema"), Mapping):
        raise RequestRefusedError(f"{name!r} of type json_schema must have a json_schema with a name and a schema")
    return ResponseFormat(type=kind, schema=written["schema"], strict=written.get("strict") is True)


def read_tool_choice(name: str, value: Any) -> ToolChoice:
    """Parse OpenAI's ``tool_choice``: a mode, or the function to call.

    >>> read_tool_choice("tool_choice", {"type": "function", "function": {"name": "add"}})
    ToolChoice(mode='required', name='add')
    """
    if value in MODES:
        return ToolChoice(mode=value)
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    named = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(named, str):
        shape = '{"type": "function", "function": {"name": …}}'
        raise RequestRefusedError(f"{name!r} must be one of {', '.join(MODES)}, or {shape}, not {value!r:.80}")
    return ToolChoice(mode="required", name=named)


def wants_grammar(sampling: Mapping[str, Any]) -> bool:
    """Whether sampling arguments require a grammar. Compiling one takes too long for an event loop."""
    further = sampling.get("extra_body")
    args = {**sampling, **further} if isinstance(further, Mapping) else sampling
    return args.get("response_format") is not None or args.get("tool_choice") not in (None, "auto", "none")
