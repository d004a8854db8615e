"""The program of a worker process: it reads calls from one pipe and writes their results to another.

It is started by its path and imports only the standard library, so that a worker starts in milliseconds and imports
only what its functions need. Requests are pickles from the parent; replies are JSON, so that the parent never unpickles
anything from a worker.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import pickle  # noqa: TID251 - from the parent to its own worker, never the other way and never stored
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, BinaryIO

HEADER_BYTES = 8
MAX_TRACEBACK_CHARS = 20_000
CPU_GRACE_S = 10


class Origins:
    """The last module finder: finds modules that the parent loaded from a file outside of ``sys.path``."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self.files.get(name)
        return importlib.util.spec_from_file_location(name, file) if file else None


def take_pipes() -> tuple[BinaryIO, int]:
    """Reserve the two pipes for the protocol; what functions print goes to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # the application has closed its stderr
        os.dup2(nothing, 1)
    os.close(nothing)
    return requests, replies


def be_expendable() -> None:
    """Write no core file, and let the kernel kill this process first if memory runs out, not the application."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # not Linux
        return


def read_requests(pipe: BinaryIO, requests: queue.SimpleQueue[Any]) -> None:
    """Queue the requests. When the parent ends, kill this process and all that its functions started."""
    while header := pipe.read(HEADER_BYTES):
        frame = pipe.read(int.from_bytes(header, "big"))
        if len(header) < HEADER_BYTES or len(frame) < int.from_bytes(header, "big"):
            break
        requests.put(pickle.loads(frame))  # noqa: S301 - the parent's
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def limit_cpu(limit_s: float | None) -> None:
    """Let the kernel end a call that holds the GIL for ever, because this process then cannot see its parent end."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = hard
    if limit_s is not None:
        soft = int(time.process_time() + limit_s * (os.cpu_count() or 1)) + CPU_GRACE_S
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def call(function: Callable[..., Any], arguments: bytes) -> Any:
    result = function(**pickle.loads(arguments))  # noqa: S301 - the parent's
    if inspect.iscoroutine(result):
        import asyncio

        return asyncio.run(result)
    return result


def plain(value: Any) -> Any:
    """Convert values that JSON does not support: numbers and arrays of other libraries."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    if isinstance(value, (set, frozenset)) or (isinstance(value, Sequence) and not isinstance(value, bytes)):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return float(value)
    except Exception:
        raise TypeError(f"it returned a {type(value).__name__}; it must return number, text, list or dict") from None


def described(error: BaseException) -> dict[str, Any]:
    shown = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": str(error), "traceback": shown[-MAX_TRACEBACK_CHARS:]}


def answer(request: Any, functions: dict[int, Callable[..., Any]], origins: Origins) -> bytes:
    """Handle ``("load", key, blob, origins, path)`` or ``("call", key, arguments, origins, limit_s)``."""
    kind, key, blob, files, detail = request
    origins.files.update(files)
    try:
        result = None
        if kind == "load":
            sys.path[:] = detail
            importlib.invalidate_caches()
            functions[key] = pickle.loads(blob)  # noqa: S301 - the parent's
        else:
            limit_cpu(detail)
            result = call(functions[key], blob)
        return json.dumps({"result": result}, default=plain).encode()
    except BaseException as error:  # foreign code; sys.exit() is a failure too
        return json.dumps({"error": described(error)}).encode()


def send(replies: int, body: bytes) -> None:
    frame = memoryview(len(body).to_bytes(HEADER_BYTES, "big") + body)
    while frame:
        frame = frame[os.write(replies, frame) :]


def main() -> None:
    pipe, replies = take_pipes()
    be_expendable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(pipe, requests), daemon=True).start()
    sys.path[:] = requests.get()
    origins = Origins()
    sys.meta_path.append(origins)
    functions: dict[int, Callable[..., Any]] = {}
    send(replies, b'{"result": "ready"}')
    while True:
        send(replies, answer(requests.get(), functions, origins))


if __name__ == "__main__":
    main()
