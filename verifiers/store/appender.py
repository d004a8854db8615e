"""Appends records to a file as lines: each is written immediately, and synced to disk soon after."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from verifiers.files import is_same_file
from verifiers.store.checksum import seal
from verifiers.store.disk import cut_partial_line, named, opened, sync_folder, write_all
from verifiers.store.mending import mend_last_line
from verifiers.store.record import Record, encode

SYNC_EVERY_S = 0.5
LOOK_EVERY_S = 0.02  # how often to check that the file still exists


class ResultsGoneError(FileNotFoundError):
    """The file being written was deleted, moved or replaced by another."""

    def __init__(self, path: Path) -> None:
        message = "this file was deleted or replaced while the run wrote to it; what was saved in it may be lost"
        super().__init__(errno.ENOENT, message, str(path))


class Appender:
    """Appends records to ``results.jsonl``; made by :meth:`RunDir.appender`. Thread-safe.

    An appended record survives the death of this process (``kill -9``) immediately, and a crash of the machine once it
    is synced: at most ``sync_every_s`` later, or when ``flush`` or ``close`` returns.
    """

    def __init__(
        self,
        path: Path,
        *,
        lock: AbstractContextManager[object] | None = None,
        sync_every_s: float = SYNC_EVERY_S,
    ) -> None:
        self.path = path
        self.sync_every_s = sync_every_s
        self._mutex = threading.Lock()
        self._is_torn = False
        self._is_closed = False
        self._is_unsynced = False
        self._sync_error: OSError | None = None
        self._is_gone = False
        self._look_at = 0.0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._syncer: threading.Thread | None = None
        with ExitStack() as held:
            held.enter_context(lock or nullcontext())
            mend_last_line(path)
            self._fd = held.enter_context(opened(path, os.O_RDWR | os.O_APPEND))
            sync_folder(path.parent)
            self._held = held.pop_all()

    def append(self, record: Record) -> None:
        """Write one record now, with its checksum. An error (such as a full disk) leaves no partial line."""
        line = seal(encode(record))
        with self._mutex:
            self._check_usable()
            if (now := time.monotonic()) >= self._look_at:
                self._look_at = now + LOOK_EVERY_S
                self._check_there()
            if self._is_torn:
                cut_partial_line(self._fd)
            self._is_torn = True
            try:
                write_all(self._fd, line)
            except BaseException as error:
                cut_partial_line(self._fd)
                if isinstance(error, OSError):
                    named(error, self.path)
                raise
            self._is_torn = False
            if not self._is_unsynced:
                self._is_unsynced = True
                self._wake_syncer()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def flush(self) -> None:
        """Wait until everything appended is on disk."""
        with self._mutex:
            self._check_usable()
        self._sync()  # even if nothing is marked unsynced: the other thread's fsync may not have finished
        self._raise_sync_error()

    def close(self) -> None:
        """Sync, close the file and release the lock; a second call does nothing."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
        self._closing.set()
        self._wake.set()
        if self._syncer is not None:
            self._syncer.join()
        with self._held:
            self._sync()
        self._raise_sync_error()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ValueError(f"the appender of {self.path} is closed; open another one")
        if self._is_gone or self._sync_error is not None:
            self._raise_sync_error()

    def _check_there(self) -> None:
        if not os.fstat(self._fd).st_nlink:
            self._is_gone = True
            raise ResultsGoneError(self.path)

    def _raise_sync_error(self) -> None:
        if self._is_gone:
            raise ResultsGoneError(self.path)
        if self._sync_error is not None:
            raise OSError(
                self._sync_error.errno, f"could not sync to disk: {self._sync_error.strerror}", str(self.path)
            ) from self._sync_error

    def _wake_syncer(self) -> None:
        if self._syncer is None:
            self._syncer = threading.Thread(target=self._sync_now_and_then, daemon=True, name="verifiers-fsync")
            self._syncer.start()
        self._wake.set()

    def _sync_now_and_then(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closing.wait(self.sync_every_s):
                return  # close() syncs by itself
            self._sync()

    def _sync(self) -> None:
        """Sync outside the mutex: a slow disk must not delay `append`."""
        with self._mutex:
            self._is_unsynced = False
        self._is_gone = self._is_gone or not is_same_file(self._fd, self.path)
        try:
            os.fsync(self._fd)
        except OSError as error:  # permanent: after a failed fsync the kernel may have dropped the data
            self._sync_error = error
