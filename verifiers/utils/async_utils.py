"""Classic import path: awaiting a value that may be awaitable, and optional semaphores."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

from verifiers.calls import maybe_await

__all__ = ["NullAsyncContext", "maybe_await", "maybe_semaphore"]


class NullAsyncContext:
    """An async context that does nothing."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *exc: object) -> None: ...


async def maybe_semaphore(limit: int | None = None) -> AbstractAsyncContextManager[Any]:
    """A semaphore of this size; without a limit (None, 0, -1) a context that does nothing.

    >>> type(asyncio.run(maybe_semaphore(-1))).__name__
    'NullAsyncContext'
    """
    return asyncio.Semaphore(limit) if limit is not None and limit > 0 else NullAsyncContext()
