"""A tool call → what the model reads: the result as text, or one sentence that describes the error."""

from __future__ import annotations

import dataclasses
import difflib
import io
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from verifiers.calls import Hook
from verifiers.errors import Error
from verifiers.tools.faults import ToolTimeoutError, UnknownToolError, kind_of
from verifiers.tools.protocols import Call, read_arguments
from verifiers.tools.schemas import Schema
from verifiers.tools.tool import Tool, as_tool

TOOL_TIMEOUT_S = 60.0
MAX_RESULT_CHARS = 20_000
MAX_PARTS = 64  # images and texts per result

ErrorFormatter = Callable[[Exception], str]
Content = str | list[dict[str, Any]]
_PARTS = ("text", "image_url", "input_audio", "input_image", "file")


class ToolBox:
    """The tools of an environment, by name, in order.

    >>> def largest(numbers: list[int]) -> int: return max(numbers)
    >>> import asyncio
    >>> box = ToolBox([largest])
    >>> asyncio.run(box.call("largest", '{"numbers": [1, 3, 2]}'))
    '3'
    >>> asyncio.run(box.call("larges", "{}"))
    Traceback (most recent call last):
    verifiers.tools.faults.UnknownToolError: there is no tool 'larges'; did you mean 'largest'?
    """

    def __init__(
        self,
        tools: Iterable[Any] = (),
        *,
        timeout_s: float = TOOL_TIMEOUT_S,
        max_result_chars: int = MAX_RESULT_CHARS,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"tool_timeout_s={timeout_s!r} must be a number above 0")
        if max_result_chars < 100:
            raise ValueError(f"max_result_chars={max_result_chars!r} must be at least 100")
        self.timeout_s = timeout_s
        self.max_result_chars = max_result_chars
        self._tools: dict[str, Tool] = {}
        self._hooks: dict[str, Hook] = {}
        for tool in tools:
            self.add(tool)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the hooks, which cannot be pickled; they are created again on use."""
        return {**vars(self), "_hooks": {}}

    def add(self, tool: Any, args_to_skip: Iterable[str] = ()) -> Tool:
        """Add a tool; raises ValueError if there is one with the same name."""
        made = as_tool(tool, args_to_skip=args_to_skip)
        if made.name in self._tools:
            raise ValueError(f"there is already a tool {made.name!r}; rename one of them")
        self._tools[made.name] = made
        return made

    def remove(self, tool: Any) -> Tool:
        """Remove a tool, given by itself, its function or its name."""
        for name, known in self._tools.items():
            if tool is known or tool == name or tool == known.function:
                return self._tools.pop(name)
        raise ValueError(f"{tool!r:.100} is not one of the tools; they are {self.listed}")

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __getitem__(self, name: str) -> Tool:
        """The tool with this name; the error for an unknown name suggests the closest one."""
        tool = self._tools.get(name)
        if tool is not None:
            return tool
        near = difflib.get_close_matches(name[:100], self._tools, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the tools are {self.listed}"
        raise UnknownToolError(f"there is no tool {name[:100]!r}; {hint}")

    @property
    def listed(self) -> str:
        return ", ".join(self._tools) or "none"

    @property
    def schemas(self) -> list[Schema]:
        """The tools' schemas, as sent to an endpoint."""
        return [tool.schema for tool in self]

    async def call(self, name: str, arguments: Any) -> Content:
        """Parse and check the arguments, run the tool, return its result as the model reads it. Errors are raised."""
        tool = self[name]
        return self.shown(await self.run(tool, tool.check(read_arguments(arguments))))[0]

    async def run(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        """Run a tool with checked arguments, a sync one in a thread. Its exceptions are raised."""
        hook = self._hook(tool)
        limit_s = hook.timeout_s or self.timeout_s
        began = time.monotonic()
        try:
            return await hook(**arguments)
        except TimeoutError as error:
            if time.monotonic() - began < limit_s:  # raised by the tool itself
                raise
            raise ToolTimeoutError(f"{tool.name} took longer than {limit_s:g} seconds") from error

    def _hook(self, tool: Tool) -> Hook:
        """The hook that calls a tool. Its time limit starts when the call has a thread. Sync tools never run on the
        shared thread: the model's arguments decide how long a call takes, so a quick tool may block next time."""
        hook = self._hooks.get(tool.name)
        if hook is None or hook.function is not tool.function:
            hook = Hook(tool.function, timeout_s=tool.timeout_s or self.timeout_s, may_share=False)
            self._hooks[tool.name] = hook
        return hook

    def shown(self, result: Any) -> tuple[Content, bool]:
        """A result as the model reads it, and whether it was truncated."""
        content = as_content(result)
        if not isinstance(content, str):
            return self._cut_parts(content)
        text = content
        limit = self.max_result_chars
        if len(text) <= limit:
            return text, False
        return text[:limit] + self._note(len(text)), True

    def _cut_parts(self, parts: list[dict[str, Any]]) -> tuple[Content, bool]:
        """Truncate parts to the limits on their total text length and on their number."""
        left, total = self.max_result_chars, 0
        kept: list[dict[str, Any]] = []
        for part in parts:
            text = part.get("text")
            if isinstance(text, str):
                total += len(text)
                part = {**part, "text": text[:left]}
                left -= len(part["text"])
            if len(kept) < MAX_PARTS and part.get("text") != "":
                kept.append(part)
        if total <= self.max_result_chars and len(parts) <= MAX_PARTS:
            return parts, False
        return [*kept, {"type": "text", "text": self._note(total, len(parts))}], True

    def _note(self, length: int, parts: int = 1) -> str:
        of = f"{parts:,} parts with " if parts > 1 else ""
        most = f"{MAX_PARTS} and " if parts > MAX_PARTS else ""
        return f"\n[cut: the result has {of}{length:,} characters, these are the first {most}{self.max_result_chars:,}]"


def is_content_parts(result: Any) -> bool:
    """Did a tool return content parts (a text, an image) in the format of chat messages?"""
    return (
        isinstance(result, list)
        and bool(result)
        and all(isinstance(part, dict) and part.get("type") in _PARTS and len(part) > 1 for part in result)
    )


def as_content(result: Any) -> Content:
    """A tool's return value as message content: parts if it contains an image, else a text."""
    if is_content_parts(result):
        parts: list[dict[str, Any]] = result
        return parts
    if _is_image(result):
        return [_image_part(result)]
    if isinstance(result, (list, tuple)) and any(map(_is_image, result)):
        return [_image_part(one) if _is_image(one) else {"type": "text", "text": as_text(one)} for one in result]
    return as_text(result)


def _is_image(value: Any) -> bool:
    """Is this a Pillow image (or one of smolagents', which are subclasses)? Checked by class name, without imports."""
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(value).__mro__)


def _image_part(image: Any) -> dict[str, Any]:
    raw = image.to_raw() if callable(getattr(image, "to_raw", None)) else image
    if raw.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        raw = raw.convert("RGB")  # PNG does not support CMYK and others
    held = io.BytesIO()
    raw.save(held, format="PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(held.getvalue()).decode()}"}}


def as_text(result: Any) -> str:
    """A tool's return value as text: a text as it is, data as JSON, any other object by ``str``.

    >>> as_text({"ok": True, "seen": [1, None]}), as_text(4.0), as_text(None)
    ('{"ok":true,"seen":[1,null]}', '4.0', 'None')
    """
    text = result if isinstance(result, str) else _written(result)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which endpoints refuse
        text = text.encode("utf-8", "backslashreplace").decode()
    return text


def _written(result: Any) -> str:
    if isinstance(result, (dict, list, tuple)) or (dataclasses.is_dataclass(result) and not isinstance(result, type)):
        try:
            return msgspec.json.encode(result).decode()
        except (TypeError, ValueError, RecursionError, OverflowError):
            pass
    return str(result)


def explain(error: Exception, formatter: ErrorFormatter | None = None) -> str:
    """The error message that the model reads; an environment may have its own formatter.

    >>> explain(ZeroDivisionError("division by zero")), explain(UnknownToolError("there is no tool 'x'"))
    ('Error: ZeroDivisionError: division by zero', "Error: there is no tool 'x'")
    """
    if formatter is not None:
        return as_text(formatter(error))
    try:
        said = str(error)
    except Exception:  # foreign __str__
        said = ""
    if isinstance(error, Error):
        return as_text(f"Error: {said}")
    return as_text(f"Error: {type(error).__name__}: {said}" if said else f"Error: {type(error).__name__}")


def record(call: Call, error: Exception | None, *, is_cut: bool, seconds: float) -> dict[str, Any]:
    """The entry of one call in ``state["tool_log"]``, as plain data."""
    fault = kind_of(error) if error is not None else "oversized" if is_cut else None
    return {"name": call.name, "arguments": call.arguments, "fault": fault, "seconds": round(seconds, 6)}
