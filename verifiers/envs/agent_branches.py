"""Model calls → the conversations that they belong to. A sub-agent or a rewritten history is a separate branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.messages import as_messages, called_functions, role_of, text_of
from verifiers.types import ChatMessage, unique_id

_MessageKey = tuple[str | None, str, str]


class Branches:
    """The conversations of one rollout, in the order in which they began.

    >>> ask, say = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    >>> branches = Branches("main")
    >>> branches.place([ask], say)
    (0, 'main')
    >>> branches.place([ask, say, ask], say)[0], branches.place([{"role": "user", "content": "a summary"}], say)[0]
    (0, 1)
    """

    def __init__(self, first_id: str) -> None:
        self._first_id = first_id
        self._ids: list[str] = []
        self._histories: list[list[_MessageKey]] = []

    def place(self, prompt: Any, reply: ChatMessage) -> tuple[int, str]:
        """The index and id of the branch that a call continues: the longest that starts its prompt, or a new one."""
        before = [_message_key(message) for message in _messages(prompt)]
        found = [n for n, history in enumerate(self._histories) if before[: len(history)] == history]
        number = max(found, key=lambda n: len(self._histories[n]), default=len(self._histories))
        after = [*before, _message_key(reply)]
        if number == len(self._histories):
            self._ids.append(unique_id() if self._ids else self._first_id)
            self._histories.append(after)
        else:
            self._histories[number] = after
        return number, self._ids[number]


def last_conversation(steps: Sequence[Mapping[str, Any]]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """The conversation of the last step: its first prompt, and all messages after it."""
    last = steps[-1]
    first = next(step for step in steps if step["trajectory_id"] == last["trajectory_id"])
    prompt = _messages(first["prompt"])
    after = _messages(last["prompt"])[len(prompt) :]
    return prompt, [*after, *as_messages(last["completion"], role="assistant")]


def _messages(prompt: Any) -> list[ChatMessage]:
    is_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    return [] if is_ids else as_messages(prompt)


def _message_key(message: ChatMessage) -> _MessageKey:
    """A message without what agents change in it: surrounding white space, ids of tool calls, empty fields."""
    functions = sorted((str(one.get("name")), repr(one.get("arguments"))) for one in called_functions(message))
    return role_of(message), text_of(message).strip(), repr(functions)
