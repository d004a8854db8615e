"""Made-up runs → the pictures in docs/images: ``python -m tests.viewer.screenshots``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.viewer import making
from verifiers.viewer import Library, ViewerServer
from verifiers.viewer.library import run_id_of

IMAGES = making.REPO / "docs" / "images"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
SIZE = {"width": 1280, "height": 800}
SETTLE_MS = 1500


def make_runs(root: Path) -> dict[str, str]:
    paths = {
        "one": making.evaluate(root / "evals", model="org/small-1", skill=0.55, seed=11),
        "two": making.evaluate(root / "evals", model="org/small-2", skill=0.75, seed=12),
        "tools": making.tool_run(root / "evals"),
        "training": making.train(root / "train"),
    }
    return {name: run_id_of(path) for name, path in paths.items()}


def shots(ids: dict[str, str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, address, and what is special about the window."""
    return [
        ("runs", "#/", {"height": 420}),
        ("run", f"#/run/{ids['two']}", {}),
        ("rollout", f"#/run/{ids['tools']}/rollout/1?tokens=1", {}),
        ("group", f"#/run/{ids['two']}/group?example=7", {"height": 720}),
        ("compare", f"#/compare/{ids['one']}/{ids['two']}", {"theme": "dark"}),
        ("training", f"#/run/{ids['training']}/training", {"height": 1000}),
    ]


def main() -> None:
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ids = make_runs(root)
        library = Library([root / "evals", root / "train"])
        with ViewerServer(library) as server, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
            for name, address, special in shots(ids):
                size = {**SIZE, **{key: value for key, value in special.items() if key in SIZE}}
                page = browser.new_page(viewport=size, color_scheme=special.get("theme", "light"))
                page.goto(f"{server.url}{address}")
                page.wait_for_timeout(SETTLE_MS)
                page.evaluate(
                    "document.querySelector('.page-head > p')?.replaceChildren('under outputs/evals, outputs/train')"
                )
                page.screenshot(path=IMAGES / f"viewer-{name}.png")
                page.close()
            browser.close()


if __name__ == "__main__":
    main()
