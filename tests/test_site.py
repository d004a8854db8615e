"""The documentation as a whole: links lead somewhere, every name and variable is explained, the site builds."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import unicodedata
import venv
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import verifiers as vf

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *DOCS,
    *sorted(ROOT.glob("environments/*/README.md")),
]

LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)|<img [^>]*src=\"(?P<image>[^\"]+)\"")
FENCED = re.compile(r"^(?P<ticks>```+|~~~+).*?^(?P=ticks)", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its code: brackets and parentheses in there are no links."""
    return re.sub(r"`[^`\n]*`", "``", FENCED.sub("", page.read_text(encoding="utf-8")))


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it.

    >>> slug("Exact, or not at all"), slug("Without a model: `FakeClient`")
    ('exact-or-not-at-all', 'without-a-model-fakeclient')
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = unicodedata.normalize("NFC", text).lower().replace("`", "").strip()
    return re.sub(r"\s", "-", re.sub(r"[^\w\- ]", "", text))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#{1,6} +(.*?)\s*$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {slug(heading) for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of one."""
    found = []
    for match in LINK.finditer(prose(page)):
        address = match["target"] or match["image"]
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not target.exists():
            found.append(f"{page.relative_to(ROOT)}: {address}: there is no such file")
        elif parts.fragment and (target.suffix != ".md" or unquote(parts.fragment) not in anchors(target)):
            found.append(f"{page.relative_to(ROOT)}: {address}: there is no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_to_a_heading_that_is_there(page: Path) -> None:
    assert not broken(page)


def test_a_link_to_a_file_or_a_heading_that_is_not_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](#one) [b](#two) [c](gone.md) `[d](code.md)`\n```\n[e](code.md)\n```\n", encoding="utf-8"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert broken(page) == ["page.md: #two: there is no such heading", "page.md: gone.md: there is no such file"]


# --- names and variables ----------------------------------------------------------------------------------------------


def mentioned(name: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def test_every_public_name_is_on_some_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS)
    names = [*vf.__all__, *vf._EXTRA_HOME]
    assert [name for name in names if not mentioned(name, text)] == []


def test_the_page_of_names_has_every_public_name_and_no_other() -> None:
    text = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
    names = {*vf.__all__, *vf._EXTRA_HOME}
    assert [name for name in sorted(names) if not mentioned(name, text)] == []
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    shown = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert shown <= names


VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ", "env")


def keys_read(tree: ast.AST) -> list[ast.expr]:
    """The expressions by which a module asks the environment: literals, and names that stand for some."""
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if (node.func.attr in ("get", "pop") and is_environ(node.func.value)) or node.func.attr == "getenv":
                keys.append(node.args[0])
        elif isinstance(node, ast.Subscript) and is_environ(node.value) and isinstance(node.ctx, ast.Load):
            keys.append(node.slice)
        elif isinstance(node, ast.Compare) and any(is_environ(one) for one in node.comparators):
            keys.append(node.left)
    return keys


def constants(node: ast.AST) -> set[str]:
    values = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return {value for value in values if isinstance(value, str) and VARIABLE.fullmatch(value)}


def tables(tree: ast.Module) -> Iterator[set[str]]:
    """The constants at the top of a module: texts, tuples of them, and dicts whose keys or plain values they are."""
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            plain = [one for one in value.values if isinstance(one, ast.Constant)]
            yield {name for part in [*filter(None, value.keys), *plain] for name in constants(part)}
        elif value is not None:
            yield constants(value)


def variables() -> dict[str, str]:
    """Environment variables that the package reads, and where. A name that is not written there is looked up among the
    constants of its module, and an attribute among all assignments to attributes of that name."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "verifiers").rglob("*.py"))
        if "inside" not in path.parts  # within the sandbox it is the sandbox's own environment
    }
    assigned: dict[str, set[str]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    assigned.setdefault(ast.unparse(target).rpartition(".")[2], set()).update(constants(node.value))
    found: dict[str, str] = {}
    for path, tree in trees.items():
        for key in keys_read(tree):
            if isinstance(key, ast.Constant):
                names = constants(key)
            elif isinstance(key, ast.Attribute):
                names = assigned.get(key.attr, set())
            else:
                names = {name for table in tables(tree) for name in table}
            found |= dict.fromkeys(names, path)
    return found


def test_every_environment_variable_that_is_read_is_on_some_page() -> None:
    found = variables()
    assert {"VERIFIERS_CACHE", "VF_HUB_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "WORLD_SIZE", "CC"} <= found.keys()
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS)
    assert {name: path for name, path in found.items() if not mentioned(name, text)} == {}


# What someone who knows this field types into the search.
TERMS = """
reinforcement learning, verifiable reward, GRPO, group-relative policy optimization, DAPO, CISPO, advantage,
importance_cap, on-policy, off-policy, entropy, reference model, KL, clip, reward hacking, partial reward,
curriculum, LoRA, supervised fine-tuning, rejection sampling, warm-up, loss mask, packed, gradient_checkpointing,
data parallel, chat template, logprobs, KV cache, prefix cache, continuous batching, vLLM, pass@k, confidence,
paired, contamination, held-out, few_shot, LLM-as-a-judge, multi-turn, tool call, MCP, sandbox, checkpoint, resume,
wandb, learning curve, system prompt, temperature, truncated, rate limit, retries, cache, notebook,
OpenAI-compatible
"""


def test_what_people_of_the_field_search_for_is_found() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*DOCS, ROOT / "README.md"]).lower()
    terms = [term.strip() for term in TERMS.replace("\n", " ").split(",")]
    assert [term for term in terms if term.lower() not in text] == []


def test_every_public_name_has_a_page_of_the_reference_that_its_module_is_on() -> None:
    tree = ast.parse((ROOT / "docs" / "_site" / "hooks.py").read_text(encoding="utf-8"))
    (table,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "REFERENCE"]
    covered = {module for _, modules in ast.literal_eval(table).values() for module in modules.split()}
    homes = {home.split(".")[0] for home in {**vf._HOME, **vf._EXTRA_HOME}.values()}
    assert homes <= covered


# --- the site -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly in a virtual environment of its own."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["docs"]]
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *needs], check=True, timeout=900)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"}
    command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", folder / "built"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING" not in said
    shown = {path.name: re.findall(r"```.*", path.read_text(encoding="utf-8")) for path in folder.glob("built/*.html")}
    assert {name: ticks for name, ticks in shown.items() if ticks and name != "changelog.html"} == {}, "no blocks"
    return folder / "built"


class Parts(HTMLParser):
    """What a page loads, what it links to, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self.anchors |= {has[name] for name in ("id", "name") if name in has}
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        elif tag == "link" and has.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(has["href"])
        elif "src" in has:
            self.loads.append(has["src"])


def parse(site: Path) -> dict[Path, Parts]:
    return {path: Parts(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_site_builds_without_a_warning_loads_nothing_from_elsewhere_and_all_its_links_lead_somewhere(
    site: Path,
) -> None:
    pages = parse(site)
    assert len(pages) > 45
    wrong = []
    for path, parts in pages.items():
        for address in [*parts.loads, *parts.links]:
            split = urlsplit(address)
            if split.scheme or split.netloc:
                if address in parts.loads:
                    wrong.append(f"{path.name} loads {address}")
                continue
            target = (path.parent / unquote(split.path)).resolve() if split.path else path
            target = target / "index.html" if target.is_dir() else target
            if path.name != "404.html" and not target.is_file():
                wrong.append(f"{path.name}: {address}: no such file")
            elif split.fragment and target in pages and unquote(split.fragment) not in pages[target].anchors:
                wrong.append(f"{path.name}: {address}: no such anchor")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_public_name_of_ours_is_in_the_reference_with_its_docstring_and_in_the_search(site: Path) -> None:
    headings = {
        anchor.rpartition(".")[2]
        for path, parts in parse(site).items()
        if path.parent.name == "reference"
        for anchor in parts.anchors
        if anchor.startswith("verifiers.")
    }
    openai = {name for name in vf._EXTRA_HOME if vf._EXTRA_HOME[name] == "types"}
    aliases = {"GenerateOutputs", "ModelResponse", "RLConfig", "RLTrainer"}
    not_ours = aliases | {"__version__"}
    assert sorted({*vf.__all__, *vf._EXTRA_HOME} - openai - not_ours - headings) == []
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"index.html", "training.html", "reference/environments.html", "examples/301_train.html"} <= places
    reference = (site / "reference" / "environments.html").read_text(encoding="utf-8")
    assert "An environment in which the model replies once." in reference
    statistics = (site / "reference" / "stats.html").read_text(encoding="utf-8")
    assert '<span class="gp">' in statistics  # doctests are shown as code ...
    assert "<blockquote>" not in statistics  # ... and not as quotations


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_search_works_in_a_page_opened_from_the_disk(site: Path) -> None:
    driver = pytest.importorskip("playwright.sync_api")
    program = os.environ.get("VERIFIERS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no chromium: install Debian's package, or set VERIFIERS_CHROMIUM to one")
    with driver.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").click()
        page.keyboard.type("importance_cap")
        page.wait_for_selector(".md-search-result__item", timeout=60_000)
        assert "importance_cap" in page.locator(".md-search-result__list").inner_text()
        browser.close()
    assert {urlsplit(address).scheme for address in asked} == {"file"}
