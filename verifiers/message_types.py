"""Messages, tool calls and tools: dicts whose keys are attributes too, as releases 0.1.5 to 0.1.14 each read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from verifiers.views import View, filled, view_of

# --- tool calls and tools -----------------------------------------------------------------------------------------


class _OfFunction(View):
    """An object with a ``function`` in it, whose fields are those of the whole as well: ``call.name``."""

    __slots__ = ()
    _inside: ClassVar[tuple[str, ...]]  # the fields of the function

    def _holder(self, key: Any) -> dict[str, Any] | None:
        """The function, for a key of it that the whole does not have itself."""
        if key not in self._inside or dict.__contains__(self, key):
            return None
        function = dict.get(self, "function")
        return function if isinstance(function, dict) else None

    def __missing__(self, key: str) -> Any:
        function = self._holder(key)
        if function is None:
            raise KeyError(key)
        return function[key]

    def __setitem__(self, key: str, value: Any) -> None:
        function = self._holder(key)
        if function is None:
            dict.__setitem__(self, key, value)
        else:
            function[key] = value

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or key in (self._holder(key) or ())

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def model_dump(self, **_: Any) -> Self:
        """A copy, because the fields of its function are found in this class only."""
        return self.model_copy(deep=True)


class ToolCall(_OfFunction):
    """A tool call of a message, in OpenAI's form. Its function's name and arguments are its own fields too.

    >>> call = ToolCall(id="call_0", name="add", arguments='{"a": 1}')
    >>> call["function"]["name"], call.function.name, call.name, call["arguments"]
    ('add', 'add', 'add', '{"a": 1}')
    """

    __slots__ = ()
    _inside = ("name", "arguments")

    def __init__(self, *, id: str, name: str, arguments: str, type: str = "function", **more: Any) -> None:
        super().__init__(id=id, type=type, function={"name": name, "arguments": arguments}, **more)


class Tool(_OfFunction):
    """A tool that is offered to the model, in OpenAI's form: a name, a description and a JSON schema.

    >>> tool = Tool(name="now", description="The time.", parameters={"type": "object", "properties": {}})
    >>> tool["function"]["name"], tool.name, tool.strict
    ('now', 'now', None)
    """

    __slots__ = ()
    _inside = ("name", "description", "parameters", "strict")
    _optional = frozenset(("strict",))

    def __init__(
        self,
        *,
        name: str,
        description: str,
        parameters: dict[str, Any],
        strict: bool | None = None,
        type: str = "function",
        **more: Any,
    ) -> None:
        function = {"name": name, "description": description, "parameters": parameters}
        super().__init__(type=type, function=function if strict is None else {**function, "strict": strict}, **more)


def as_tool_call(call: Any) -> Any:
    """A tool call in any release's form as a `ToolCall`; what is none (a JSON text) stays as it is."""
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, dict):
        dump = getattr(call, "model_dump", None)
        call = dump(exclude_none=True) if callable(dump) else call
    if not isinstance(call, dict):
        return call
    return ToolCall(**{"id": "", **call}) if _is_flat(call, "arguments") else filled(ToolCall, call)


def as_tool(tool: Any) -> Any:
    """A tool's schema in OpenAI's form or in that of 0.1.11, ``{"name", "description", "parameters"}``, as a `Tool`."""
    if isinstance(tool, Tool) or not isinstance(tool, dict):
        return tool
    return Tool(**{"description": "", **tool}) if _is_flat(tool, "parameters") else filled(Tool, tool)


def _is_flat(given: dict[str, Any], field: str) -> bool:
    return (
        "function" not in given and "name" in given and field in given and given.get("type", "function") == "function"
    )


# --- messages -----------------------------------------------------------------------------------------------------


class AnyMessage(View):
    """A message. The classes of the roles are `SystemMessage`, `UserMessage`, `AssistantMessage` and `ToolMessage`."""

    __slots__ = ()
    _role: ClassVar[str] = "user"

    def __init__(self, *, content: Any, role: str | None = None, **more: Any) -> None:
        given = {key: value for key, value in more.items() if value is not None}
        super().__init__(role=self._role if role is None else role, content=content, **given)
        _make_readable(self)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        dumped = super().model_dump(exclude_none=exclude_none)
        if isinstance(calls := dumped.get("tool_calls"), list):
            dumped["tool_calls"] = [as_tool_call(call) for call in calls]
        return dumped


class SystemMessage(AnyMessage):
    """``vf.SystemMessage(content="Be brief.")``"""

    __slots__ = ()
    _role = "system"

    @classmethod
    def from_path(cls, path: str | Path) -> SystemMessage:
        """The message whose content is the text of a file."""
        return cls(content=Path(path).read_text(encoding="utf-8"))


class UserMessage(AnyMessage):
    """``vf.UserMessage(content="2+2?")``; the content is a text or a list of parts.

    >>> message = UserMessage(content="2+2?")
    >>> message.content, message == {"role": "user", "content": "2+2?"}
    ('2+2?', True)
    """

    __slots__ = ()


class AssistantMessage(AnyMessage):
    """A reply: ``content``, ``reasoning_content``, ``tool_calls``. As attributes, those that are missing are None.

    >>> reply = AssistantMessage(content=None, tool_calls=[ToolCall(id="1", name="now", arguments="{}")])
    >>> reply.tool_calls[0].name, reply["tool_calls"][0]["function"]["name"], reply.reasoning_content
    ('now', 'now', None)
    """

    __slots__ = ()
    _role = "assistant"
    _optional = frozenset(("content", "reasoning_content", "thinking_blocks", "tool_calls"))

    def __init__(self, *, content: Any = None, role: str | None = None, **more: Any) -> None:
        super().__init__(content=content, role=role, **more)


class ToolMessage(AnyMessage):
    """The result of a tool call: ``vf.ToolMessage(tool_call_id="call_0", content="4")``."""

    __slots__ = ()
    _role = "tool"

    def __init__(self, *, tool_call_id: str, content: Any, role: str | None = None, **more: Any) -> None:
        super().__init__(content=content, role=role, tool_call_id=tool_call_id, **more)


class TextMessage(AnyMessage):
    """A prompt of a completions endpoint, as a message."""

    __slots__ = ()
    _role = "text"


_KINDS: dict[Any, type[AnyMessage]] = {
    cls._role: cls for cls in (SystemMessage, UserMessage, AssistantMessage, ToolMessage, TextMessage)
}


def readable(message: dict[str, Any]) -> AnyMessage:
    """The same message as an object of the class of its role, at every level readable by key and by attribute."""
    if isinstance(message, AnyMessage):
        return message
    role = message.get("role")
    made: AnyMessage = dict.__new__(_KINDS.get(role, AnyMessage) if type(role) is str else AnyMessage)
    dict.update(made, message)
    _make_readable(made)
    return made


def _make_readable(message: AnyMessage) -> None:
    if "tool_calls" in message and type(calls := message["tool_calls"]) is list:
        message["tool_calls"] = [as_tool_call(call) for call in calls]
    if type(content := message.get("content")) is list:
        message["content"] = view_of(content)


# --- parts of a message's content ---------------------------------------------------------------------------------


class TextContentPart(View):
    """``vf.TextContentPart(text="2+2?")``"""

    __slots__ = ()

    def __init__(self, *, text: str, type: str = "text", **more: Any) -> None:
        super().__init__(type=type, text=text, **more)


class ImageUrlSource(View):
    """``vf.ImageUrlSource(url="data:image/png;base64,…")``"""

    __slots__ = ()

    def __init__(self, *, url: str, **more: Any) -> None:
        super().__init__(url=url, **more)


class ImageUrlContentPart(View):
    """``vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=…))``"""

    __slots__ = ()

    def __init__(self, *, image_url: Any, type: str = "image_url", **more: Any) -> None:
        super().__init__(type=type, image_url=image_url, **more)


class InputAudioSource(View):
    """``vf.InputAudioSource(data="…", format="wav")``"""

    __slots__ = ()

    def __init__(self, *, data: str, format: str, **more: Any) -> None:
        super().__init__(data=data, format=format, **more)


class InputAudioContentPart(View):
    """``vf.InputAudioContentPart(input_audio=vf.InputAudioSource(data=…, format=…))``"""

    __slots__ = ()

    def __init__(self, *, input_audio: Any, type: str = "input_audio", **more: Any) -> None:
        super().__init__(type=type, input_audio=input_audio, **more)


# --- replies ------------------------------------------------------------------------------------------------------


class ResponseTokens(View):
    """The tokens of a reply: ``prompt_ids``, ``completion_ids`` and ``completion_logprobs``."""

    __slots__ = ()
    _optional = frozenset(("routed_experts",))


class ResponseMessage(AssistantMessage):
    """The message of a reply, with how it ended. This is not part of the message: it is in attributes, not in keys.

    >>> message = ResponseMessage(content="4", finish_reason="length", is_truncated=True)
    >>> message.is_truncated, message
    (True, {'role': 'assistant', 'content': '4'})
    """

    __slots__ = ("finish_reason", "is_truncated", "tokens")
    _optional = AssistantMessage._optional | {"finish_reason", "is_truncated", "tokens"}

    def __init__(
        self, *, finish_reason: str | None = None, is_truncated: bool | None = None, tokens: Any = None, **message: Any
    ) -> None:
        super().__init__(**message)
        self.finish_reason, self.is_truncated, self.tokens = finish_reason, is_truncated, tokens

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ResponseMessage.__slots__:
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    @classmethod
    def of(cls, message: dict[str, Any], finish_reason: str | None, is_truncated: bool | None, tokens: Any) -> Self:
        """The message of a reply, with exactly its keys."""
        made: Self = filled(cls, message)
        _make_readable(made)
        made.finish_reason, made.is_truncated, made.tokens = finish_reason, is_truncated, tokens
        return made

    def copied(self) -> Self:
        return self.of(super().copied(), self.finish_reason, self.is_truncated, self.tokens)

    def __reduce__(self) -> Any:
        return type(self).of, (dict(self), self.finish_reason, self.is_truncated, self.tokens)


_MESSAGES = frozenset((AnyMessage, ResponseMessage, *_KINDS.values()))


def are_readable(messages: Any) -> bool:
    """Whether this is a list of messages that are all readable by attribute."""
    return type(messages) is list and _MESSAGES.issuperset(map(type, messages))


class Response(View):
    """A reply as ``get_model_response`` returns it from 0.1.11 on: ``response.message.content``."""

    __slots__ = ()
    _optional = frozenset(("usage",))

    def __init__(
        self, *, message: Any, id: str = "", created: int = 0, model: str = "", usage: Any = None, **more: Any
    ) -> None:
        message = message if isinstance(message, ResponseMessage) else ResponseMessage(**message)
        choice = {"index": 0, "message": message, "finish_reason": message.finish_reason}
        super().__init__(id=id, created=created, model=model, usage=usage, choices=[choice], **more)
        if tokens := message.tokens:
            self["prompt_token_ids"] = tokens["prompt_ids"]
            choice["token_ids"] = tokens["completion_ids"]
            choice["logprobs"] = {"content": [{"logprob": one} for one in tokens["completion_logprobs"]]}

    @property
    def message(self) -> ResponseMessage:
        message: ResponseMessage = self["choices"][0]["message"]
        return message
