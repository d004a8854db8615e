"""A command line and the fields of a rollout → the output of the program. All its processes are ended."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from verifiers.errors import HookError
from verifiers.types import unique_id

MOST_OUTPUT = 16 << 20  # bytes of output that are read
SHOWN_CHARS = 2000
MARK = "VERIFIERS_AGENT"  # a variable in the environment of a program and all processes that it starts

_PLACEHOLDER = re.compile(r"(?<!\$)\{(\{?)([A-Za-z_]\w*)\}(\}?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The output of a program, and its exit code."""

    stdout: str
    stderr: str
    exit_code: int


class Program:
    """A command line with placeholders such as ``{prompt}`` in its words. It does not go through a shell.

    >>> Program("python agent.py --task {prompt} --note {{prompt}}", names=("prompt",)).words({"prompt": "it's $HOME"})
    ['python', 'agent.py', '--task', "it's $HOME", '--note', '{prompt}']
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        names: Sequence[str],
        cwd: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        if not self._words:
            raise ValueError("the command line of the agent is empty")
        asked = {match[2] for word in self._words for match in _PLACEHOLDER.finditer(word) if not match[1]}
        if unknown := sorted(asked - set(names)):
            raise ValueError(
                f"the command line has the unknown placeholder {{{unknown[0]}}}; it may have {', '.join(names)} "
                f"(write {{{{{unknown[0]}}}}} for the literal text)"
            )
        self._cwd = cwd
        self._environment = dict(environment or {})

    def words(self, values: Mapping[str, str]) -> list[str]:
        def put(match: re.Match[str]) -> str:
            return match[0][1:-1] if match[1] and match[3] else values[match[2]] + match[3]

        return [_PLACEHOLDER.sub(put, word) for word in self._words]

    async def run(self, values: Mapping[str, str], *, stdin: str, environment: Mapping[str, str]) -> Output:
        """Run it to its end. All processes that it started end with it, also if this is cancelled."""
        mark = unique_id()
        inherited = {name: value for name, value in os.environ.items() if name != "ANTHROPIC_AUTH_TOKEN"}
        everything = {**inherited, **self._environment, **environment, MARK: mark}
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin.encode(errors="replace"))
            given.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.words(values),
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    env=everything,
                    cwd=self._cwd,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise HookError(f"the agent's command could not be started: {error}") from error
            try:
                exit_code = await process.wait()
            finally:
                _end_group(process.pid)
                await asyncio.shield(asyncio.gather(process.wait(), asyncio.to_thread(end_marked, mark)))
            return Output(stdout=_read(out), stderr=_read(err), exit_code=exit_code)


def check_ended(output: Output) -> None:
    """Raise if the program failed according to its exit code."""
    if output.exit_code:
        how = f"exit code {output.exit_code}" if output.exit_code > 0 else signal.Signals(-output.exit_code).name
        printed = (output.stderr.strip() or output.stdout.strip())[-SHOWN_CHARS:]
        raise HookError(f"the agent's command ended with {how}: {printed or 'it printed nothing'}")


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # all its processes have ended
        pass


def end_marked(mark: str) -> None:
    """Kill processes that left the process group (Linux only), found by the mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in place.read_bytes().split(b"\0"):
                os.kill(int(place.parent.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            continue


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_OUTPUT).decode(errors="replace")
