"""A folder of runs, a viewer over it, and a way to ask it what a page would."""

from __future__ import annotations

import http.client
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.viewer import hostile, making
from tests.viewer.browsing import FLAGS, WAIT_MS
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


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind, made before the browser starts."""
    root = tmp_path_factory.mktemp("runs")
    making.evaluate(root / "evals", model="org/one", skill=0.5, seed=1, n=30, rollouts=4)
    making.evaluate(root / "evals", model="org/two", skill=0.8, seed=2, n=30, rollouts=4)
    making.evaluate(root / "evals", model="org/three", skill=0.6, seed=3, n=30, rollouts=4)
    making.judged_run(root / "evals")
    making.labelled_run(root / "labels")
    making.labelled_run(root / "labels", model="org/better", skill=1.0)
    making.train(root / "train", steps=40)
    making.tool_run(root / "evals")
    hostile.hostile_run(root / "hostile", hostile.PAYLOADS[1].replace("/", "-"))
    hostile.hostile_run(root / "hostile", "second", shift=3)
    hostile.hostile_training(root / "hostile", "t")
    hostile.hostile_training(root / "hostile", "u")
    return root


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    """Of a module and not of the session: while Playwright is there, an event loop counts as running."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright: it drives the browser")
    path = os.environ.get("VERIFIERS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium: install Debian's package, or set VERIFIERS_CHROMIUM to one")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ViewerServer]:
    roots = [folder / name for name in ("evals", "labels", "train", "hostile", "live")]
    with ViewerServer(Library(roots)) as server:
        yield server


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test if it logs an error, opens a dialog, or is told hit()."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(WAIT_MS)
    page.troubles = []
    page.asked = []
    page.on("console", lambda message: message.type in ("error", "warning") and page.troubles.append(message.text))
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("dialog", lambda dialog: (page.troubles.append("dialog"), dialog.dismiss()))
    page.on("request", lambda request: page.asked.append(request.url))
    page.add_init_script("window.hits = 0; window.hit = () => { window.hits += 1; };")
    yield page
    assert page.troubles == []
    page.close()
