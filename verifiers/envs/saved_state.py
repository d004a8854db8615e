"""A rollout on disk → a state that is loaded on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verifiers.envs.states import restored_state
from verifiers.store.saved import TIMES, SavedRollouts
from verifiers.types import Row, State

_FIGURES = frozenset(("example_id", "task", "reward", "error", "stop_condition", "is_truncated", "usage"))


class SavedState(State):
    """Like the state from :func:`restored_state`, but immutable figures are read without loading it.

    Any other access, or writing to it, loads it; from then on it is an ordinary state.
    """

    __slots__ = ("_number", "_row", "_saved")

    def __init__(self, saved: SavedRollouts, number: int, row: Row) -> None:
        self._saved: SavedRollouts | None = saved
        self._number = number
        self._row: Row | None = row

    def load(self) -> State:
        """Load the whole state into memory, and return it."""
        saved, row = self._saved, self._row
        if saved is not None and row is not None:
            state = restored_state(saved.record(self._number), row)
            advantage = saved.advantages[self._number]
            self._saved = self._row = None
            dict.update(self, state)
            if advantage == advantage:
                self.note_advantage(advantage)
        return self

    def note_advantage(self, advantage: float) -> None:
        if self._saved is not None:
            self._saved.advantages[self._number] = advantage
        else:
            super().note_advantage(advantage)

    def peek_timing(self) -> Mapping[str, Any]:
        if self._saved is None:
            return super().peek_timing()
        return {name: self._saved.time_ms(self._number, name) for name in TIMES}

    def peek_metric(self, name: str) -> Any:
        return super().peek_metric(name) if self._saved is None else self._saved.metric(self._number, name)

    def peek_metric_names(self) -> tuple[str, ...]:
        return super().peek_metric_names() if self._saved is None else self._saved.metric_names(self._number)

    def _figure(self, saved: SavedRollouts, row: Row, key: str) -> Any:
        if key == "error":
            return None  # rollouts with errors are not stored in columns
        return row[key] if key == "example_id" else getattr(saved, key)(self._number)

    # --- dict methods, which load the state -------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        if self._saved is not None and self._row is not None and key in _FIGURES:
            return self._figure(self._saved, self._row, key)
        return State.__getitem__(self.load(), key)

    def get(self, key: str, default: Any = None) -> Any:
        saved = self._saved
        if saved is not None and self._row is not None:
            if key == "reward":  # checked first, because every report reads it of every rollout
                return saved.reward(self._number)
            if key in _FIGURES:
                return self._figure(saved, self._row, key)
        return State.get(self.load(), key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        State.__setitem__(self.load(), key, value)

    def __contains__(self, key: object) -> bool:
        return State.__contains__(self.load(), key)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self.load())

    def __reversed__(self) -> Iterator[str]:
        return dict.__reversed__(self.load())

    def __len__(self) -> int:
        return dict.__len__(self.load())

    def __eq__(self, other: object) -> bool:
        return dict.__eq__(self.load(), other.load() if isinstance(other, SavedState) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return dict.__repr__(self.load())

    def __or__(self, other: Any) -> Any:
        return dict(self.load()) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self.load())

    def __ior__(self, other: Any) -> Any:
        self.load().update(other)
        return self

    def __delitem__(self, key: str) -> None:
        dict.__delitem__(self.load(), key)

    def __reduce__(self) -> Any:
        return State, (dict(self.load()),)

    def keys(self) -> Any:
        return dict.keys(self.load())

    def values(self) -> Any:
        return dict.values(self.load())

    def items(self) -> Any:
        return dict.items(self.load())

    def copy(self) -> Any:
        return dict.copy(self.load())

    def pop(self, *args: Any) -> Any:
        return dict.pop(self.load(), *args)

    def popitem(self) -> Any:
        return dict.popitem(self.load())

    def setdefault(self, *args: Any) -> Any:
        return dict.setdefault(self.load(), *args)

    def update(self, *args: Any, **kwargs: Any) -> None:
        dict.update(self.load(), *args, **kwargs)

    def clear(self) -> None:
        dict.clear(self.load())
