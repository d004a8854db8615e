"""What tests of the pages do in a browser: open one, wait for a condition, read a text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from verifiers.viewer import ViewerServer
from verifiers.viewer.library import run_id_of

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WAIT_MS = 30_000


def address_of(folder: Path, *names: str) -> str:
    [path] = folder.glob("/".join(names))
    return run_id_of(path)


def text(page: Any, selector: str) -> str:
    page.wait_for_selector(selector)
    return str(page.inner_text(selector))


def wait_until(page: Any, condition: str) -> None:
    """Playwright's own way evaluates text inside the page, which the policy of these pages forbids."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def open_page(page: Any, server: ViewerServer, hash_: str, selector: str) -> None:
    page.goto(f"{server.url}{hash_}")
    page.wait_for_selector(selector)
