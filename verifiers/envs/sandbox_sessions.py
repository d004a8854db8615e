"""A rollout → its session in the sandbox, opened on first use and closed at the end of the rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from verifiers import calls
from verifiers.errors import HookError
from verifiers.sandbox import Result, Sandbox, SandboxBackend, SandboxSession
from verifiers.sandbox.backend import MakeBackend, find_backend
from verifiers.tools.programs import Language, report
from verifiers.types import State

_AWAY = ("_sandbox", "_open", "_of_rows", "_states")
LOST = "(the earlier cells are forgotten: their process was ended)"


class Sessions:
    """The sandbox of an environment, with one session per running rollout.

    ``files``, and those of a row's ``info["files"]``, are in the folder of each session. ``collect`` names files that
    are read into ``state["files"]`` when a rollout ends. ``backend`` determines where code runs.
    """

    def __init__(
        self,
        language: Language,
        *,
        files: Mapping[str, bytes | str] | None = None,
        collect: Iterable[str] = (),
        memory_mb: int = 512,
        timeout_s: float = 30.0,
        packages: Iterable[str] = (),
        allow_unsafe: bool = False,
        backend: str | MakeBackend = "local",
    ) -> None:
        if isinstance(collect, str):
            raise TypeError(f"collect must be a list of file names; got the string {collect!r}")
        self.language, self.collect = language, tuple(collect)
        self._settings: dict[str, Any] = {
            "language": language,
            "memory_mb": memory_mb,
            "timeout_s": timeout_s,
            "packages": tuple(packages),
            **({"allow_unsafe": True} if allow_unsafe else {}),
        }
        self._files = dict(files or {})
        self._backend = backend
        self._sandbox = self._make(self._files)
        self._open: dict[str, SandboxSession] = {}
        self._of_rows: dict[str, SandboxBackend] = {}  # sandboxes with the files of one row
        self._states: WeakValueDictionary[str, State] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """The sandbox and its sessions are not pickled; a copy creates its own."""
        return {key: value for key, value in vars(self).items() if key not in _AWAY}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._sandbox = self._make(self._files)
        self._open, self._of_rows = {}, {}
        self._states = WeakValueDictionary()

    def _make(self, files: Mapping[str, bytes | str], **settings: Any) -> SandboxBackend:
        return find_backend(self._backend)(files=files, **self._settings, **settings)

    def expect(self, state: State) -> str:
        """The id of a rollout's session, which is opened on first use."""
        key: str = state["trajectory_id"]
        self._states[key] = state
        return key

    def named(self, sandbox_id: str) -> SandboxSession:
        """The session with this id."""
        state = self._states.get(sandbox_id)
        if state is None:
            raise HookError(f"no running rollout has the sandbox {sandbox_id!r}; its id is in state['sandbox_id']")
        return self.of(state)

    def of(self, state: State) -> SandboxSession:
        """The session of a rollout."""
        key = state["trajectory_id"]
        session = self._open.get(key)
        if session is None:
            session = self._open[key] = self._sandbox_for(state).session()
        return session

    def _sandbox_for(self, state: State) -> SandboxBackend:
        info = state.get("info")
        own = info.get("files") if isinstance(info, Mapping) else None
        if not own:
            return self._sandbox
        if not isinstance(own, Mapping) or not all(isinstance(content, (str, bytes)) for content in own.values()):
            raise HookError(f"a row's info['files'] must map names to texts or bytes, not {own!r:.100}")
        kept_ready = {"warm": 0} if find_backend(self._backend) is Sandbox else {}
        made = self._of_rows[state["trajectory_id"]] = self._make({**self._files, **own}, **kept_ready)
        return made

    async def run(self, code: str, state: State) -> str:
        """Run a cell in the rollout's session. Returns the output that the model gets."""
        log: list[str] = state.setdefault("cells", [])
        try:
            result: Result = await self.of(state).run(code)
        except ValueError as error:  # invalid files, which are not the model's fault
            raise HookError(f"the sandbox cannot be used: {error}") from error
        shown = report(result)
        if log and result.is_fresh:
            shown = f"{LOST}\n{shown}"
        log.append(result.status)
        return shown

    async def finish(self, state: State) -> None:
        """Read the files to collect, and end the session."""
        key = state["trajectory_id"]
        session = self._open.pop(key, None)
        if session is None:
            return
        try:
            if self.collect:
                state["files"] = await self._collected(session)
        finally:
            await self._end(key, session)

    async def _end(self, key: str, session: SandboxSession) -> None:
        of_row = self._of_rows.pop(key, None)
        ends = [session.close, *([] if of_row is None else [of_row.close])]
        for end in ends:
            if isinstance(self._sandbox, Sandbox):
                end()
            else:  # it may call a program or a service
                await calls.in_thread(end)

    async def _collected(self, session: SandboxSession) -> dict[str, str]:
        kept = {}
        for name in self.collect:
            try:
                kept[name] = (await session.read(name)).decode(errors="replace")
            except OSError:  # the model did not write it, or created a folder of this name
                continue
        return kept

    def close(self) -> None:
        """End all open sessions and sandboxes."""
        for session in self._open.values():
            session.close()
        for backend in self._of_rows.values():
            backend.close()
        self._open.clear()
        self._of_rows.clear()
        self._sandbox.close()


def cell_metrics(state: State) -> dict[str, float]:
    """Metrics: the number of cells that a rollout ran, and of those that failed."""
    log = state.get("cells") or ()
    return {"cells": float(len(log)), "failed_cells": float(sum(status != "ok" for status in log))}
