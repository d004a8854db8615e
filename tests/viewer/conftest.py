"""A folder of runs, a viewer over it, and a way to ask it what a page would."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.viewer import making
from verifiers.store import RunDir
from verifiers.viewer import Library, ViewerServer
from verifiers.viewer.library import run_id_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "evals"


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    return making.record_of


@pytest.fixture
def make_run(root: Path) -> Callable[..., RunDir]:
    """``make_run(record, …)`` with these records in it."""

    def make(*records: dict[str, Any], env_id: str = "sums", model: str = "org/model", **metadata: Any) -> RunDir:
        run = RunDir.create(root, env_id=env_id, model=model, config={"seed": 1})
        with run.appender() as out:
            for record in records:
                out.append(record)
        if metadata:
            run.update_metadata(metadata)
        return run

    return make


class Asker:
    """The viewer over a root, as its own page sees it."""

    def __init__(self, server: ViewerServer) -> None:
        self.server = server

    def raw(
        self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host="Host" in (headers or {}))
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders()
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()
        finally:
            connection.close()

    def __call__(self, path: str, *, code: int = 200, **query: Any) -> Any:
        found, _, body = self.raw(f"/api/{path}{'?' + urlencode(query) if query else ''}")
        assert found == code, body
        return json.loads(body)

    def run(self, run: RunDir, path: str = "", **query: Any) -> Any:
        return self(f"runs/{run_id_of(run.path)}{path}", **query)


@pytest.fixture
def ask(root: Path) -> Iterator[Asker]:
    with ViewerServer(Library([root])) as server:
        yield Asker(server)
