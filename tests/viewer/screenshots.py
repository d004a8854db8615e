"""Made-up runs → the pictures of the documentation: ``python -m tests.viewer.screenshots``.

With a folder as argument, every page is drawn there light, dark and narrow, to be looked at.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.viewer import making
from tests.viewer.browsing import FLAGS, wait_until
from verifiers.viewer import Library, ViewerServer
from verifiers.viewer.library import run_id_of

IMAGES = making.REPO / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
NARROW = {"width": 390, "height": 844}
SETTLE_MS = 500
LOADED = "!document.body.classList.contains('loading') && document.querySelector('main h1, main h2') !== null"


def make_runs(root: Path) -> dict[str, str]:
    paths = {
        "one": making.evaluate(root / "evals", model="org/small-1", skill=0.55, seed=11),
        "two": making.evaluate(root / "evals", model="org/small-2", skill=0.75, seed=12),
        "three": making.evaluate(root / "evals", model="org/small-3", skill=0.6, seed=13),
        "tools": making.tool_run(root / "evals"),
        "judged": making.judged_run(root / "evals"),
        "labels": making.labelled_run(root / "evals"),
        "better_labels": making.labelled_run(root / "evals", model="org/better", skill=0.95),
        "training": making.train(root / "train"),
        "second": making.train(root / "train", name="colder", seed=8, pace=20),
        "third": making.train(root / "train", name="larger-groups", seed=9, pace=9),
    }
    return {name: run_id_of(path) for name, path in paths.items()}


def shots(ids: dict[str, str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, address, and what is special about the window."""
    trainings = "/".join(ids[name] for name in ("training", "second", "third"))
    return [
        ("runs", "#/", {"height": 640}),
        ("run", f"#/run/{ids['two']}?sort=example", {}),
        ("rollout", f"#/run/{ids['judged']}/rollout/0", {"height": 980}),
        ("tokens", f"#/run/{ids['tools']}/rollout/1?view=logprob", {}),
        ("group", f"#/run/{ids['two']}/group?example=7", {"height": 720}),
        ("compare", f"#/compare/{ids['one']}/{ids['two']}", {"theme": "dark"}),
        ("table", f"#/compare/{ids['one']}/{ids['two']}/{ids['three']}", {"height": 700}),
        ("training", f"#/run/{ids['training']}/training", {"height": 1000}),
        ("overlay", f"#/compare/{trainings}?smooth=0.6", {"height": 900}),
        ("rewards", f"#/run/{ids['training']}/rewards", {"height": 740}),
    ]


def further(ids: dict[str, str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Pages that the documentation has no picture of."""
    return [
        ("labels", f"#/run/{ids['labels']}", {}),
        ("labels-compared", f"#/compare/{ids['labels']}/{ids['better_labels']}", {}),
        ("two-environments", f"#/compare/{ids['one']}/{ids['judged']}", {}),
        ("token-ratios", f"#/run/{ids['training']}/rollout/0?view=ratio", {}),
        ("token-advantages", f"#/run/{ids['training']}/rollout/0?view=advantage", {}),
        ("shares", f"#/run/{ids['judged']}/rewards", {"height": 740}),
        ("nowhere", "#/run/nowhere", {"height": 400}),
    ]


def draw(browser: Any, url: str, path: Path, size: dict[str, int], theme: str) -> None:
    page = browser.new_page(viewport=size, color_scheme=theme)
    page.goto(url)
    wait_until(page, LOADED)
    page.wait_for_timeout(SETTLE_MS)
    page.evaluate("document.querySelector('.page-head > p')?.replaceChildren('under outputs/evals, outputs/train')")
    page.screenshot(path=path, full_page=size == NARROW)
    page.close()


def main(folder: Path | None) -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        ids = make_runs(root)
        library = Library([root / "evals", root / "train"])
        with ViewerServer(library) as server, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
            for name, address, special in shots(ids) + (further(ids) if folder else []):
                size = {**SIZE, **{key: value for key, value in special.items() if key in SIZE}}
                url = f"{server.url}{address}"
                if folder is None:
                    draw(browser, url, IMAGES / f"viewer-{name}.png", size, special.get("theme", "light"))
                    continue
                draw(browser, url, folder / f"{name}-light.png", size, "light")
                draw(browser, url, folder / f"{name}-dark.png", size, "dark")
                draw(browser, url, folder / f"{name}-narrow.png", NARROW, "light")
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
