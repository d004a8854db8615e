"""Classic import path: an error and its causes, as a list that can be counted and shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from verifiers.errors import Error

__all__ = ["ErrorChain", "get_error_chain", "get_vf_error_chain"]


def get_error_chain(
    error: BaseException | None, parent_type: type[BaseException] = BaseException
) -> list[BaseException]:
    """An error and its chain of causes, up to the first that is not of type ``parent_type``."""
    chain: list[BaseException] = []
    while isinstance(error, parent_type) and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def get_vf_error_chain(error: BaseException | None) -> list[Error]:
    """The chain of causes, up to the first that is not one of the library's errors."""
    return cast(list[Error], get_error_chain(error, Error))


class ErrorChain:
    """A chain of errors. Two chains with the same error types are equal, so that they can be counted.

    >>> from verifiers.errors import ModelError, wrap
    >>> chain = ErrorChain(wrap(KeyError("x"), ModelError, "the call"))
    >>> chain, KeyError in chain
    (ModelError -> KeyError, True)
    """

    def __init__(
        self,
        error: BaseException,
        build_error_chain: Callable[[BaseException], list[BaseException]] = get_error_chain,
    ) -> None:
        self.root_error = error
        self.chain = build_error_chain(error)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(type(error).__name__ for error in self.chain)

    def __eq__(self, other: object) -> bool:
        return self.kinds == other.kinds if isinstance(other, ErrorChain) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.kinds)

    def __contains__(self, kind: type[BaseException]) -> bool:
        return any(isinstance(error, kind) for error in self.chain)

    def __repr__(self) -> str:
        return " -> ".join(self.kinds)

    def __str__(self) -> str:
        return ", caused by ".join(map(repr, self.chain))
