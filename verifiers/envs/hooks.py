"""The methods of a subclass, found by name or by decorator, as hooks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from verifiers import calls
from verifiers.errors import HookError
from verifiers.message_types import as_tool
from verifiers.rollout import marked
from verifiers.signatures import signature_of

ASKING_TIMEOUT_S = 3600.0
"""The limit for overrides that call the model themselves, which may take longer than other hooks."""
ASKING = ("rollout", "get_model_response")
SCORING = ("score_rollout",)


def only_reads(condition: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Coroutine[Any, Any, bool]]:
    """A built-in stop condition that only reads the state. Users' code awaits it; the library calls it directly."""

    @functools.wraps(condition)
    async def ask(self: Any, state: Any) -> bool:
        return condition(self, state)

    ask.only_reads = condition  # type: ignore[attr-defined]
    return ask


class Stop(NamedTuple):
    """A stop condition: as a hook, as a plain function if it `only_reads`, and whether it takes messages."""

    name: str
    is_met: Callable[..., Awaitable[Any]]
    reads: Callable[[Any, Any], bool] | None
    takes_messages: bool


def as_verdict(value: Any, name: str) -> bool:
    """Whether a condition is met, from what its function returned. What is always true cannot be meant.

    >>> as_verdict(1, "solved"), as_verdict(None, "solved")
    (True, False)
    >>> as_verdict((False, "no answer yet"), "solved")
    Traceback (most recent call last):
    verifiers.errors.HookError: solved returned (False, 'no answer yet'), a tuple; it must return True or False
    """
    if inspect.iscoroutine(value):
        value.close()
        raise HookError(f"{name} returned a coroutine; it must await it, and return True or False")
    if isinstance(value, (tuple, str, bytes)) or inspect.isawaitable(value):
        raise HookError(f"{name} returned {value!r:.100}, a {type(value).__name__}; it must return True or False")
    return bool(value)


class Hooks(dict[str, calls.Hook | None]):
    """An object's methods by name as hooks; None for the library's own methods and missing ones. Cached."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self._owner = owner
        self._marked: dict[str, list[tuple[str, Callable[..., Awaitable[Any]]]]] = {}

    def __missing__(self, name: str) -> calls.Hook | None:
        owner = self._owner
        method = getattr(owner, name, None)
        is_ours = name not in vars(owner) and calls.is_default(getattr(type(owner), name, None))
        hook = self[name] = None if method is None or is_ours else _make_hook(name, method)
        return hook

    def marked(self, kind: str) -> list[tuple[str, Callable[..., Awaitable[Any]]]]:
        """The methods marked ``@stop``, ``@cleanup`` or ``@teardown`` with their names, highest priority first."""
        hooks = self._marked.get(kind)
        if hooks is None:
            hooks = self._marked[kind] = [
                (method.__name__, method if hasattr(method, "only_reads") else calls.Hook(method, kind="hook"))
                for method in marked(self._owner, kind)
            ]
        return hooks

    @functools.cached_property
    def stops(self) -> list[Stop]:
        """The stop conditions, highest priority first."""
        return [
            Stop(name, hook, getattr(hook, "only_reads", None), takes_messages(method))
            for (name, hook), method in zip(self.marked("stop"), marked(self._owner, "stop"), strict=True)
        ]


class ClassicHooks:
    """Names of other releases: of 0.1.9 for decorated methods (read-only: to add one, decorate it), and of 0.1.11.

    Code for them (an overridden ``rollout``, or a host) uses these.
    """

    clean_up: Callable[[Any], Awaitable[None]]
    _close: Callable[[], Awaitable[None]]
    oai_tools: list[dict[str, Any]] | None

    @property
    def tool_defs(self) -> list[dict[str, Any]] | None:
        """The tools offered to the model; from 0.1.11 on, ``oai_tools`` has this name."""
        return self.oai_tools

    @tool_defs.setter
    def tool_defs(self, tools: Sequence[Any] | None) -> None:
        self.oai_tools = None if tools is None else [as_tool(tool) for tool in tools]

    @property
    def _stop_conditions(self) -> tuple[Callable[..., Any], ...]:
        return tuple(marked(self, "stop"))

    @property
    def _cleanup_handlers(self) -> tuple[Callable[..., Any], ...]:
        return tuple(marked(self, "cleanup"))

    @property
    def _teardown_handlers(self) -> tuple[Callable[..., Any], ...]:
        return tuple(marked(self, "teardown"))

    async def _cleanup(self, state: Any) -> None:
        await self.clean_up(state)

    async def _teardown(self) -> None:
        await self._close()


def _make_hook(name: str, method: Callable[..., Any]) -> calls.Hook:
    if name in ASKING:
        return calls.Hook(method, timeout_s=ASKING_TIMEOUT_S, may_share=False)
    return calls.Hook(method, kind="reward" if name in SCORING else "hook")


def takes_messages(function: Callable[..., Any]) -> bool:
    """Whether a hook takes ``(messages, state)`` rather than ``(state)``."""
    names = [p.name for p in signature_of(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return len(names) > 1 and names[0] != "state"
