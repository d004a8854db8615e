"""The main process of a container: answers requests on standard input to run cells and to read and write files.

Its source is passed on the command line and runs on the image's Python, so it uses only the standard library.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

WORK, KEPT = os.getcwd(), tempfile.gettempdir()
STDOUT, STDERR, CELL = (os.path.join(KEPT, name) for name in (".stdout", ".stderr", ".cell"))
LOOK_S = 0.05
MAX_FILES = 10_000  # in a list
ENDING_S = 5.0  # for a shell to exit


class CellTimeout(BaseException):
    """The timeout of a cell has expired."""


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    settings = json.loads(requests.readline())
    runner: Shell | Cells = Shell(settings["output"]) if settings["language"] == "bash" else Cells(settings)
    send(replies, settings, answer(write, settings["files"]))
    for line in requests:
        request = json.loads(line)
        if request["do"] == "run":
            send(replies, request, runner.run(request["code"], request["timeout_s"]))
        elif request["do"] == "write":
            send(replies, request, answer(write, request["files"]))
        elif request["do"] == "read":
            send(replies, request, answer(read, request["name"]))
        else:
            send(replies, request, answer(listed))


def send(replies: IO[bytes], request: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    replies.write(json.dumps({**body, "number": request["number"]}).encode() + b"\n")


def answer(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    try:
        return function(*args) or {}
    except OSError as error:
        return {"errno": error.errno, "said": error.strerror}


def write(files: Mapping[str, str]) -> None:
    for name, content in files.items():
        if os.path.dirname(name):
            os.makedirs(os.path.join(WORK, os.path.dirname(name)), exist_ok=True)
        with open(os.path.join(WORK, name), "wb") as file:
            file.write(base64.b64decode(content))


def read(name: str) -> dict[str, Any]:
    with open(os.path.join(WORK, name), "rb") as file:
        return {"content": base64.b64encode(file.read()).decode()}


def listed() -> dict[str, Any]:
    found = [os.path.join(folder, name) for folder, _, names in os.walk(WORK) for name in names]
    return {"names": sorted(os.path.relpath(path, WORK) for path in found)[:MAX_FILES]}


def outputs(limit: int) -> tuple[str, str, bool]:
    """The content of the two output files, and whether one of them exceeds the limit."""
    texts: list[str] = []
    is_full = False
    for name in (STDOUT, STDERR):
        with open(name, "rb") as file:
            data = file.read(limit + 1)
        is_full = is_full or len(data) > limit
        texts.append(data[:limit].decode(errors="replace"))
    return texts[0], texts[1], is_full


def result(limit: int, status: str, **more: Any) -> dict[str, Any]:
    out, err, is_full = outputs(limit)
    if is_full and status in ("ok", "error"):
        status = "output"
    for name in ("value", "error"):
        text = more.get(name)
        if text is not None and len(text) > limit:
            more[name] = f"{text[:limit]}... ({len(text)} characters)"
    return {"status": status, "stdout": out, "stderr": err, **more}


class Cells:
    """Python cells as in a notebook: names persist, and the value of a last expression is returned."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.limit: int = settings["output"]
        self.names: dict[str, Any] = {"__name__": "__main__"}
        for package in settings["packages"]:
            try:
                __import__(package)
            except Exception:  # noqa: S112 (a package that is not in the image)
                continue
        signal.signal(signal.SIGALRM, self.ring)

    def ring(self, number: int, frame: Any) -> None:
        raise CellTimeout

    def run(self, code: str, seconds: float) -> dict[str, Any]:
        for fd, name in ((1, STDOUT), (2, STDERR)):
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, fd)
            if file != fd:  # equal if an earlier cell has closed it
                os.close(file)
        self.streams = [open(fd, "w", errors="backslashreplace", closefd=False) for fd in (1, 2)]  # noqa: SIM115
        sys.stdout, sys.stderr = self.streams
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            value = self.execute(code)
            outcome: dict[str, Any] = {"status": "ok", "value": None if value is None else str.__str__(repr(value))}
        except CellTimeout:
            outcome = {"status": "timeout", "error": f"it ran longer than {seconds:g} s"}
        except MemoryError:
            outcome = {"status": "memory", "error": "it used more memory than allowed"}
        except BaseException:
            outcome = {"status": "error", "error": traceback.format_exc()}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for name in ("stdout", "stderr"):
                try:
                    getattr(sys, name).flush()
                except BaseException:  # noqa: S112 (foreign code, or the cell has closed it)
                    continue
        return result(self.limit, **outcome)

    def execute(self, code: str) -> Any:
        tree = ast.parse(code, "<cell>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), self.names)  # noqa: S102 (in the container)
        if not isinstance(last, ast.Expr):
            return None
        return eval(compile(ast.Expression(last.value), "<cell>", "eval"), self.names)  # noqa: S307


class Shell:
    """One bash process: its working folder and variables persist until it exits or a cell times out."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.start()

    def start(self) -> None:
        self.codes, told = os.pipe()
        self.shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            pass_fds=[told],
            cwd=WORK,
            start_new_session=True,
        )
        self.told = told
        os.close(told)

    def run(self, code: str, seconds: float) -> dict[str, Any]:
        with open(CELL, "w") as file:
            file.write(code + "\n")
        order = f". {CELL} </dev/null >{STDOUT} 2>{STDERR}; echo $? >&{self.told}\n"
        for name in (STDOUT, STDERR):
            with open(name, "wb"):
                pass
        stdin = self.shell.stdin
        assert stdin is not None
        stdin.write(order.encode())
        stdin.flush()
        ends = time.monotonic() + seconds
        while not select.select([self.codes], [], [], LOOK_S)[0] and self.shell.poll() is None:
            if time.monotonic() > ends:
                break
        has_ended, is_told = self.shell.poll() is not None, bool(select.select([self.codes], [], [], 0)[0])
        if not has_ended and not is_told:
            self.restart(0)
            return result(self.limit, "timeout", error=f"it ran longer than {seconds:g} s", is_lost=True)
        said = os.read(self.codes, 64).strip() if is_told else b""
        is_lost = not said  # the cell ended its shell; the pipe may close a moment before the process ends
        exit_code = self.restart(ENDING_S) if is_lost else int(said)
        return result(self.limit, "error" if exit_code else "ok", exit_code=exit_code, is_lost=is_lost)

    def restart(self, patience: float) -> int:
        try:
            exit_code = self.shell.wait(patience)
        except subprocess.TimeoutExpired:
            exit_code = 1
        try:
            os.killpg(self.shell.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.shell.wait()
        os.close(self.codes)
        self.start()
        return exit_code


if __name__ == "__main__":
    main()
