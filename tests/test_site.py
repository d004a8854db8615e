"""The documentation as a site: every page is in it, every link leads somewhere, every public name is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
import venv
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and the forges make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in (first or second for first, second in LINK.findall(text)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{page.name}: {target}"


def test_every_public_name_is_found_in_some_page():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = {*vf.__all__, *vf._EXTRA_HOME} - {name for name, home in vf._EXTRA_HOME.items() if home == "types"}
    missing = [name for name in sorted(names - {"__version__"}) if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def test_the_reference_has_every_name_of_the_facade_and_no_other():
    pytest.importorskip("torch", reason="the page names where trainers and the engine are defined")
    from tests.reference import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "make it again with: python -m tests.reference"


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- (?:Start: )?([\w-]+\.md)$", config[config.index("\nnav:") :], flags=re.MULTILINE)
    assert sorted(named) == [page.name for page in PAGES]


# --- built ----------------------------------------------------------------------------------------------------------


class Addresses(HTMLParser):
    """What a page links to and loads, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe") and given.get("src"):
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") == "stylesheet":
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by tools in an environment of their own."""
    folder = tmp_path_factory.mktemp("site")
    venv.create(folder / "venv", with_pip=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["optional-dependencies"]["docs"], *project["dependencies"]]
    pip = [folder / "venv" / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *needed]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"no package registry: {installed.stderr.strip().splitlines()[-1:]}")
    built = subprocess.run(
        [folder / "venv" / "bin" / "mkdocs", "build", "--strict", "--site-dir", folder / "out"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    assert "WARNING" not in built.stderr
    return folder / "out"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_builds_without_warnings_and_every_link_in_it_leads_somewhere(site):
    pages = {path: Addresses(path.read_text(encoding="utf-8")) for path in site.glob("*.html")}
    assert len(pages) == len(PAGES) + 1
    for path, found in pages.items():
        assert [one for one in found.loaded if "//" in one] == [], "nothing comes from elsewhere"
        for link in found.links:
            if link.startswith(("http://", "https://", "mailto:", "javascript:")) or path.name == "404.html":
                continue
            name, _, anchor = link.partition("#")
            target = path if name in ("", ".") else (path.parent / name).resolve()
            assert target.exists(), f"{path.name}: {link}"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{path.name}: {link}"
    reference = (site / "reference.html").read_text(encoding="utf-8")
    assert all(f">{name}<" in reference for name in vf.__all__ if name not in ("stats", "__version__"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_is_searched_from_disk_and_asks_for_nothing(site):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("VERIFIERS_CHROMIUM") or shutil.which("chromium") or pytest.skip("there is no chromium")
    asked: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("sandbox")
        page.wait_for_selector(".md-search-result__item", timeout=60_000)
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
