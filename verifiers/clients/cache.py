"""A client and a file → a client that sends the same request only once."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from verifiers.calls import PerLoop
from verifiers.clients.protocol import Client, Completion, Request
from verifiers.clients.records import (
    completion_record,
    read_completion,
    read_json,
    record_key,
    request_record,
    write_json,
)
from verifiers.clients.resolve import as_client, server_of
from verifiers.errors import DeadlineError, Error

logger = logging.getLogger(__name__)

BUSY_S = 2.0
SET_UP_ATTEMPTS = 100

InFlight = dict[str, "asyncio.Future[Completion]"]


class CachedClient:
    """Answers known requests from a file, and asks ``client`` for the rest.

    The whole request is the key. By default only requests for a reproducible reply are cached: those with
    ``temperature`` 0 or a ``seed``. With ``sampled=True`` the others are cached too: the n-th time this object gets a
    request, it gives the n-th reply in the file, so that repeats of an example stay different samples. Errors are never
    cached. The server's URL is part of the key; ``namespace`` replaces it, for a model that moves to another server or
    for models of the same name in this process.
    """

    def __init__(self, client: Any, path: str | Path, *, sampled: bool = False, namespace: str | None = None) -> None:
        self.client: Client = as_client(client)
        self.sampled = sampled
        server = server_of(self.client) if namespace is None else namespace
        self.namespace = server if isinstance(server, str) else ""
        self.hits = 0
        self.misses = 0
        self._file = _File(Path(path))
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._in_flight: PerLoop[InFlight] = PerLoop(dict)
        self._has_warned = False

    @property
    def base_url(self) -> str:
        return str(getattr(self.client, "base_url", ""))

    @property
    def api_key(self) -> str | None:
        key = getattr(self.client, "api_key", None)
        return key if isinstance(key, str) else None

    async def complete(self, request: Request) -> Completion:
        is_fixed = request.sampling.get("temperature") == 0 or request.sampling.get("seed") is not None
        if not is_fixed and not self.sampled:
            self._warn_once()
            return await self.client.complete(request)
        key = record_key(request_record(request), salt=self.namespace)
        return await self._find(key if is_fixed else self._numbered(key), request)

    def _numbered(self, key: str) -> str:
        with self._lock:
            self._asked[key] += 1
            return f"{key}/{self._asked[key]}"

    def close(self) -> None:
        self._file.close()

    async def _find(self, key: str, request: Request) -> Completion:
        in_flight = await self._in_flight.get()
        while True:
            if (cached := self._file.get(key)) is not None:
                self.hits += 1
                return _free(cached)
            if (leader := in_flight.get(key)) is None:
                return await self._ask(key, request, in_flight)
            try:
                async with asyncio.timeout(request.timeout_s):
                    completion = await asyncio.shield(leader)
            except TimeoutError as error:
                raise DeadlineError(f"no reply within {request.timeout_s} s") from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not leader.cancelled() or (task is not None and task.cancelling()):
                    raise
                continue  # the call that sent the request was cancelled, not this one: another call must send it
            self.hits += 1
            return _free(completion)

    async def _ask(self, key: str, request: Request, in_flight: InFlight) -> Completion:
        self.misses += 1
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        in_flight[key] = answer
        try:
            completion = await self.client.complete(request)
        except Error as error:
            answer.set_exception(error)
            answer.exception()  # mark as retrieved, even if no other call waits for it
            raise
        except BaseException:  # cancelled, or a client that breaks the protocol: waiting calls ask for themselves
            answer.cancel()
            raise
        else:
            self._file.put(key, completion)
            answer.set_result(completion)
            return completion
        finally:
            del in_flight[key]

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "requests that sample (no seed, temperature not 0) are only cached with CachedClient(sampled=True)"
            )


def _free(completion: Completion) -> Completion:
    """The completion with a cost of 0, because it came from the cache."""
    if completion.usage is None or completion.usage.cost_usd is None:
        return completion
    return replace(completion, usage=replace(completion.usage, cost_usd=0.0))


class _File:
    """Keys and completions in SQLite, in WAL mode so that many threads and processes can share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._closer = weakref.finalize(self, connection.close)
            _set_up(connection)
        except (sqlite3.DatabaseError, OSError) as error:
            raise ValueError(f"{self.path} cannot be used as a cache: {error}; delete it or use another") from error
        self._connection, self._process = connection, os.getpid()

    def get(self, key: str) -> Completion | None:
        row = self._execute("SELECT completion FROM completions WHERE key = ?", key)
        if row is None:
            return None
        try:
            return read_completion(read_json(row[0]))
        except (ValueError, TypeError) as error:
            logger.warning("%s: an entry cannot be read, and its request is sent again (%s)", self.path, error)
            return None

    def put(self, key: str, completion: Completion) -> None:
        written = write_json(completion_record(completion))
        self._execute("INSERT OR REPLACE INTO completions VALUES (?, ?)", key, written)

    def _execute(self, statement: str, *values: Any) -> Any:
        """Run one statement. If the file is locked or damaged, only this entry is lost, not the run."""
        with self._lock:
            if self._process != os.getpid():  # after a fork: the parent's connection must not be shared
                self._closer.detach()
                self._open()
            try:
                return self._connection.execute(statement, values).fetchone()
            except sqlite3.DatabaseError as error:
                logger.warning("%s: %s", self.path, error)
                return None

    def close(self) -> None:
        self._closer()


def _set_up(connection: sqlite3.Connection) -> None:
    for attempts_left in reversed(range(SET_UP_ATTEMPTS)):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS completions (key TEXT PRIMARY KEY, completion BLOB) WITHOUT ROWID"
            )
            return
        except sqlite3.OperationalError as error:  # another process is setting it up; the busy timeout does not apply
            if not attempts_left or "locked" not in str(error):
                raise
            time.sleep(0.02)
