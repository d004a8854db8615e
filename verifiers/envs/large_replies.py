"""A rollout that is saved → a state that takes less memory: without raw responses and very long texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verifiers.clients.protocol import Completion
from verifiers.store import read_records
from verifiers.store.reading import RecordDecoder
from verifiers.types import State

LARGE_CHARS = 1 << 20
SHOWN_CHARS = 200


def lighten(state: State, place: Place) -> None:
    """Drop raw responses. If a text is very long, drop the completion too, which is then read from disk on access."""
    is_long = is_large(state.get("completion"))
    for step in state.get("trajectory") or ():
        if not isinstance(step, dict):
            continue
        response = dict.get(step, "response")  # the stored value: step["response"] would convert it to OpenAI's object
        if isinstance(response, Completion) and (is_long or response.raw is not None):
            message = place.shortened(response.message) if is_long else response.message
            step["response"] = replace(response, message=message, raw=None)
        if is_long:
            step["prompt"], step["completion"] = place.short(step.get("prompt")), place.short(step.get("completion"))
    if is_long and type(state) is State:
        dict.__setitem__(state, "completion", AWAY)
        state.__class__ = LargeState
        state.place = place  # type: ignore[attr-defined]


def is_large(messages: Any) -> bool:
    """Whether any text of a conversation is too long to keep in memory once it is on disk."""
    if isinstance(messages, str):
        return len(messages) > LARGE_CHARS
    if not isinstance(messages, list):
        return False
    return any(
        isinstance(text, str) and len(text) > LARGE_CHARS
        for message in messages
        if isinstance(message, dict)
        for text in message.values()
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rollout is saved: the file, its probable offset, and its key."""

    path: Path
    offset: int
    key: tuple[Any, int]

    def read(self, column: str) -> Any:
        return (self._here() or self._anywhere())[column]

    def _here(self) -> dict[str, Any] | None:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            line = file.readline()
        try:
            record = RecordDecoder(None)(line)
        except ValueError:  # lines have moved in the meantime
            return None
        return record if (record.get("example_id"), record.get("rollout")) == self.key else None

    def _anywhere(self) -> dict[str, Any]:
        for record in read_records(self.path):
            if (record.get("example_id"), record.get("rollout")) == self.key:
                return record
        raise KeyError(f"the rollout {self.key} was stored only in {self.path}, which no longer has it")

    def short(self, messages: Any) -> Any:
        """Messages without their very long texts."""
        if isinstance(messages, list):
            return [self.shortened(message) if isinstance(message, dict) else message for message in messages]
        return self._stub(messages) if isinstance(messages, str) and len(messages) > LARGE_CHARS else messages

    def shortened(self, message: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._stub(value) if isinstance(value, str) and len(value) > LARGE_CHARS else value
            for name, value in message.items()
        }

    def _stub(self, text: str) -> str:
        return f"{text[:SHOWN_CHARS]}… ({len(text):,} characters; all of them are in {self.path})"


class _Away:
    def __repr__(self) -> str:
        return "<on disk>"


AWAY = _Away()


class LargeState(State):
    """A saved rollout with very long replies. Its ``completion`` is read from disk on access."""

    place: Place

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return self.place.read(key) if value is AWAY else value

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        return self.place.read(key) if value is AWAY else value

    def __iter__(self) -> Iterator[str]:
        """Overridden so that ``dict(state)`` and ``{**state}`` use ``__getitem__`` instead of copying stored values."""
        return super().__iter__()

    def items(self) -> Any:
        return {key: self[key] for key in self}.items()

    def values(self) -> Any:
        return {key: self[key] for key in self}.values()

    def copy(self) -> State:
        return State({key: self[key] for key in self})
