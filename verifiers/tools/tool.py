"""A function → a tool: its schema in OpenAI's format, and the types of its arguments."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verifiers.signatures import hints_of, signature_of
from verifiers.tools.docstrings import read_docstring
from verifiers.tools.faults import MissingArgumentError, UnknownArgumentError, WrongTypeError
from verifiers.tools.schemas import Schema, description_in, fit, hint_of, schema_of, with_common_definitions

MAX_NAME_CHARS = 64
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One argument of a tool."""

    name: str
    hint: Any = Any
    is_required: bool = True


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model can call, with its schema.

    `as_tool` makes one from any callable. ``hidden`` are arguments that the environment fills in and the model never
    sees. Without ``timeout_s`` the environment's limit applies. Calls of one turn to ``sequential`` tools run one after
    another, in the order in which the model made them.

    >>> def add(a: int, b: int = 1) -> int:
    ...     '''Add two numbers.'''
    ...     return a + b
    >>> as_tool(add).schema["function"]["parameters"]["required"]
    ['a']
    """

    name: str
    function: Callable[..., Any]
    schema: Schema
    parameters: tuple[Parameter, ...]
    hidden: frozenset[str] = frozenset()
    takes_more: bool = False
    timeout_s: float | None = None
    sequential: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is not a valid tool name: endpoints accept up to 64 letters, digits, _ and -; "
                "set a name with vf.tools.as_tool(function, name=...)"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s!r} of tool {self.name!r} must be a number above 0")

    @property
    def description(self) -> str:
        return str(self.schema["function"].get("description", ""))

    def check(self, arguments: Mapping[str, Any], *, filled_in: Collection[str] = ()) -> dict[str, Any]:
        """Check the arguments and convert them to the function's types; raises a `ToolError` about the first problem.

        The environment provides the arguments in ``filled_in``, so these may be missing.
        """
        known = {p.name: p for p in self.parameters}
        extra = [name for name in arguments if name not in known]
        if extra and not self.takes_more:
            raise UnknownArgumentError(self._takes(f"has no argument {extra[0]!r}"))
        missing = [p.name for p in self.parameters if p.is_required and p.name not in {*arguments, *filled_in}]
        if missing:
            raise MissingArgumentError(self._takes(f"needs the argument {missing[0]!r}"))
        fitted: dict[str, Any] = {}
        for name, value in arguments.items():
            try:
                fitted[name] = fit(value, known[name].hint) if name in known else value
            except ValueError as error:
                raise WrongTypeError(f"the argument {name!r} of {self.name} is wrong: {error}") from error
        return fitted

    def _takes(self, problem: str) -> str:
        listed = ", ".join(p.name if p.is_required else f"{p.name} (optional)" for p in self.parameters)
        return f"{self.name} {problem}; it takes {listed or 'no arguments'}"


def as_tool(
    function: Any,
    *,
    name: str | None = None,
    description: str | None = None,
    args_to_skip: Iterable[str] = (),
    timeout_s: float | None = None,
    sequential: bool = False,
) -> Tool:
    """Make a tool from a function (or method, callable object or smolagents tool); a `Tool` is returned as it is.

    A function's attribute ``timeout_s`` sets its limit.
    """
    args_to_skip = tuple(args_to_skip)
    if isinstance(function, Tool):
        if name or description or args_to_skip or timeout_s or sequential:
            raise TypeError(f"{function.name!r} is already a tool; pass the settings where it is created")
        return function
    if is_smolagents_tool(function):
        return _from_smolagents(function, timeout_s, sequential=sequential)
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"a tool must be a function with type hints and a docstring, not {function!r:.100}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"the tool {name_of(function)!r} yields, but a tool must return its result: return a list instead"
        )
    hidden = frozenset(args_to_skip)
    parameters = _parameters(function)
    if unknown := hidden - {p.name for p in parameters}:
        raise ValueError(
            f"args_to_skip has {sorted(unknown)}, which {name_of(function)!r} does not take; it takes "
            f"{', '.join(p.name for p in parameters) or 'no arguments'}"
        )
    doc = read_docstring(_documented(function))
    shown = [p for p in parameters if p.name not in hidden and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    hints = hints_of(inspect.unwrap(_documented(function)))
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    tool_name = name or name_of(function)
    return Tool(
        name=tool_name,
        function=function,
        schema=_schema(
            tool_name,
            doc.description if description is None else description,
            {p.name: _property(p, hints.get(p.name, Any), doc.args.get(p.name, "")) for p in shown},
            [p.name for p in shown if p.default is p.empty],
            takes_more=takes_more,
        ),
        parameters=tuple(
            Parameter(name=p.name, hint=hints.get(p.name, Any), is_required=p.default is p.empty) for p in shown
        ),
        hidden=hidden,
        takes_more=takes_more,
        timeout_s=getattr(function, "timeout_s", None) if timeout_s is None else timeout_s,
        sequential=sequential,
    )


def convert_func_to_oai_tool(func: Any, args_to_skip: Iterable[str] = (), **_: Any) -> Schema:
    """The schema of a function in the format of OpenAI's chat endpoints.

    >>> def shout(text: str) -> str:
    ...     '''Say it loudly.
    ...
    ...     Args:
    ...         text: What to say.
    ...     '''
    ...     return text.upper()
    >>> convert_func_to_oai_tool(shout)["function"]["parameters"]["properties"]
    {'text': {'type': 'string', 'description': 'What to say.'}}
    """
    return as_tool(func, args_to_skip=args_to_skip).schema


def from_schema(
    name: str,
    function: Callable[..., Any],
    parameters: Mapping[str, Any],
    *,
    description: str = "",
    timeout_s: float | None = None,
    sequential: bool = False,
) -> Tool:
    """A tool from a function and a JSON Schema of its arguments."""
    properties = parameters.get("properties") or {}
    required: Collection[str] = parameters.get("required") or ()
    return Tool(
        name=name,
        function=function,
        schema={
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": {}, **parameters},
            },
        },
        parameters=tuple(
            Parameter(name=key, hint=hint_of(schema), is_required=key in required) for key, schema in properties.items()
        ),
        takes_more=bool(parameters.get("additionalProperties")),
        timeout_s=timeout_s,
        sequential=sequential,
    )


def renamed(tool: Tool, name: str) -> Tool:
    """The same tool under another name."""
    function = {**tool.schema["function"], "name": name}
    return replace(tool, name=name, schema={**tool.schema, "function": function})


def usable_name(name: str) -> str:
    """The name with every character that endpoints refuse replaced, and shortened to their limit.

    >>> usable_name("bad.name/x"), usable_name("add")
    ('bad_name_x', 'add')
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:MAX_NAME_CHARS] or "tool"


def name_of(function: Any) -> str:
    """The name of a function, as shown to the model."""
    while isinstance(function, functools.partial):
        function = function.func
    named = getattr(function, "__name__", None) or getattr(function, "name", None)
    return str(named or type(function).__name__)


# --- reading a signature ------------------------------------------------------------------------------------------


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):  # builtins without a signature
        raise TypeError(f"the arguments of {name_of(function)!r} cannot be read; wrap it in a function") from None
    bound = function.keywords if isinstance(function, functools.partial) else {}
    parameters = [p for p in signature.parameters.values() if p.name not in bound]
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise TypeError(
                f"the argument {parameter.name!r} of tool {name_of(function)!r} is positional only; tools are called "
                "with arguments by name"
            )
    return [p for p in parameters if p.kind is not p.POSITIONAL_ONLY]


def _documented(function: Any) -> Any:
    """The function whose docstring and hints count: without partials, and ``__call__`` of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _property(parameter: inspect.Parameter, hint: Any, described: str) -> Schema:
    schema = schema_of(hint)
    if text := description_in(hint) or described:
        schema["description"] = text
    default = parameter.default
    if isinstance(default, float) and not math.isfinite(default):  # JSON has no such number
        return schema
    if isinstance(default, (str, int, float, bool)) or (isinstance(default, (list, dict)) and not default):
        schema["default"] = default
    return schema


def _schema(
    name: str, description: str, properties: Mapping[str, Schema], required: list[str], *, takes_more: bool
) -> Schema:
    parameters: Schema = {"type": "object", "properties": dict(properties), "required": required}
    if not takes_more:
        parameters["additionalProperties"] = False
    parameters = with_common_definitions(parameters)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# --- smolagents ---------------------------------------------------------------------------------------------------


def is_smolagents_tool(value: Any) -> bool:
    """Is this a smolagents tool? Checked by its attributes, without imports."""
    return isinstance(getattr(value, "inputs", None), dict) and callable(getattr(value, "forward", None))


def _from_smolagents(tool: Any, timeout_s: float | None, *, sequential: bool) -> Tool:
    properties: dict[str, Schema] = {}
    for name, described in tool.inputs.items():
        kind = described.get("type")
        schema = {key: value for key, value in described.items() if key != "nullable"}
        if kind in ("any", "image", "audio"):  # types that JSON Schema does not have
            schema.pop("type")
        properties[name] = {**schema, "nullable": True} if described.get("nullable") else schema
    required = [name for name, described in tool.inputs.items() if not described.get("nullable")]
    schema = {"properties": properties, "required": required, "additionalProperties": False}
    return from_schema(
        tool.name, tool, schema, description=tool.description, timeout_s=timeout_s, sequential=sequential
    )
