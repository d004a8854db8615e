"""Classic import path: a function's schema in the form of 0.1.9."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verifiers.message_types import Tool, as_tool
from verifiers.tools import tool
from verifiers.tools.calling import is_content_parts as is_valid_tool_content_parts
from verifiers.tools.docstrings import read_docstring
from verifiers.tools.schemas import Schema

__all__ = ["convert_func_to_oai_tool", "convert_func_to_tool_def", "is_valid_tool_content_parts"]


def convert_func_to_oai_tool(func: Any, args_to_skip: Iterable[str] = (), **_: Any) -> Schema:
    """A function's schema in which each argument has a title and is required, as strict endpoints demand.

    >>> def shout(text: str, times: int = 1) -> str: return text.upper() * times
    >>> convert_func_to_oai_tool(shout)["function"]["parameters"]["required"]
    ['text', 'times']
    """
    schema = tool.convert_func_to_oai_tool(func, args_to_skip)
    function = schema["function"]
    doc = read_docstring(func)
    if function["description"] == doc.description:  # only newer schemas describe the return value
        function = {**function, "description": doc.summary}
    parameters = function["parameters"]
    titled = {name: {**one, "title": name.replace("_", " ").title()} for name, one in parameters["properties"].items()}
    as_written = {"properties": titled, "required": list(titled), "title": f"{function['name']}_args"}
    return {**schema, "function": {**function, "parameters": {**parameters, **as_written}}}


def convert_func_to_tool_def(func: Any) -> Tool:
    """The same as an object with ``name``, ``description`` and ``parameters``, as from 0.1.11 on.

    >>> def shout(text: str) -> str: return text.upper()
    >>> convert_func_to_tool_def(shout).name
    'shout'
    """
    made: Tool = as_tool(convert_func_to_oai_tool(func))
    return made
