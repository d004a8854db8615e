"""Calls of a model → the conversations they are part of: a sub-agent's, or one rewritten, is a branch of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.messages import as_messages, called_functions, role_of, text_of
from verifiers.types import ChatMessage, unique_id

_Said = tuple[str | None, str, str]


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
        self._said: list[list[_Said]] = []

    def place(self, prompt: Any, reply: ChatMessage) -> tuple[int, str]:
        """Number and id of the branch that a call goes on with: the longest that its prompt repeats, or a new one."""
        before = [_said(message) for message in _messages(prompt)]
        found = [n for n, said in enumerate(self._said) if before[: len(said)] == said]
        number = max(found, key=lambda n: len(self._said[n]), default=len(self._said))
        after = [*before, _said(reply)]
        if number == len(self._said):
            self._ids.append(unique_id() if self._ids else self._first_id)
            self._said.append(after)
        else:
            self._said[number] = after
        return number, self._ids[number]


def last_conversation(steps: Sequence[Mapping[str, Any]]) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """The conversation that the last step ended: what it began with, and all that was said after that."""
    last = steps[-1]
    first = next(step for step in steps if step["trajectory_id"] == last["trajectory_id"])
    prompt = _messages(first["prompt"])
    after = _messages(last["prompt"])[len(prompt) :]
    return prompt, [*after, *as_messages(last["completion"], role="assistant")]


def _messages(prompt: Any) -> list[ChatMessage]:
    is_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    return [] if is_ids else as_messages(prompt)


def _said(message: ChatMessage) -> _Said:
    """A message but for what agents change about it: space around it, the ids of its calls, empty fields."""
    functions = sorted((str(one.get("name")), repr(one.get("arguments"))) for one in called_functions(message))
    return role_of(message), text_of(message).strip(), repr(functions)
