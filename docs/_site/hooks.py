"""What the site has beside docs/: pages from the rest of the repository, the API reference, and examples in full."""

from __future__ import annotations

import ast
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import verifiers

ROOT = Path(__file__).resolve().parents[2]
# Pages of the repository that are not in docs/, by the name they have on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
# A page of the reference: its title, and the modules whose public names are on it.
REFERENCE = {
    "environments": ("Environments", "envs rollout checks integrations"),
    "clients": ("Clients", "clients"),
    "parsers": ("Parsers", "parsers"),
    "rubrics": ("Rubrics", "rubrics"),
    "results": ("Results and runs", "results runner store logs"),
    "stats": ("Statistics", "stats"),
    "sandbox": ("Sandbox", "sandbox"),
    "training": ("Models and training", "engine trainers rl"),
    "types": ("Types", "types message_types"),
    "errors": ("Errors", "errors"),
}
# The fields of a configuration say what they are by their names, types and defaults.
SETTINGS = "\n    options:\n      show_if_no_docstring: true\n      inherited_members: true"
LINK = re.compile(r"(?P<before>(?<!!)\[(?P<text>[^\]]*)\]\(|!\[[^\]]*\]\(|<img [^>]*src=\")(?P<target>[^)\"\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the pages of the reference in the navigation, and pages that it forgot."""
    sections = {next(iter(entry)): next(iter(entry.values())) for entry in config.nav}
    sections["Reference"] += [f"reference/{name}.md" for name in REFERENCE]
    named = set(_paths(config.nav))
    pages = sorted(path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md"))
    if forgotten := [page for page in pages if page not in named]:
        config.nav.append({"More": forgotten})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_relinked(text, source, name)))
    for name, (title, modules) in REFERENCE.items():
        files.append(File.generated(config, f"reference/{name}.md", content=_reference(title, modules.split())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ lead to the site's own pages; an example's page ends with the whole file."""
    source = page.file.src_uri
    if source in OUTSIDE.values():
        return markdown
    example = ROOT / "examples" / f"{Path(source).stem}.py"
    if source.startswith("examples/") and example.is_file():
        code = example.read_text(encoding="utf-8")
        markdown = f"{markdown}\n\n## The whole file\n\n```python\n{code}```\n"
    return _relinked(markdown, f"docs/{source}", source)


def _paths(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from (path for part in nav.values() for path in _paths(part))
    else:
        yield from (path for part in nav for path in _paths(part))


def _relinked(text: str, source: str, name: str) -> str:
    """A page's text with links to other files of the repository as the site knows them; other files lose the link."""

    def place(found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path == f"examples/{Path(source).stem}.py":
            return f"{found['before']}#the-whole-file"
        home = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if home is None:
            return "\0" + found[0]
        where = posixpath.relpath(home, posixpath.dirname(name) or ".")
        return found["before"] + where + (f"#{anchor}" if anchor else "")

    text = re.sub(r"^(```\w+) +no-run\b.*$", r"\1", text, flags=re.MULTILINE)  # with it, the site would see no block
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [LINK.sub(place, part) for part in parts[::2]]
    return re.sub(r"\0\[([^\]]*)\]\([^)]*\)", r"\1", "".join(parts))


def _reference(title: str, modules: list[str]) -> str:
    """A page of the reference: every public name of some modules, those that need an extra too."""
    homes = {**dict(sorted(verifiers._HOME.items())), **dict(sorted(verifiers._EXTRA_HOME.items()))}
    names = [name for name, home in homes.items() if home.split(".")[0] in modules]
    entries = ["::: verifiers.stats"] if "stats" in modules else []
    entries += [
        f"::: {where}" + (SETTINGS if name.endswith("Config") else "")
        for name in names
        if (where := _definition(name, homes[name]))
    ]
    return f"# {title}\n\n" + "\n\n".join(entries) + "\n"


def _definition(name: str, home: str) -> str | None:
    """Where a public name is defined, read from the source: its module may import it only when it is asked for."""
    found = _definitions().get(name, [])
    near = [module for module in found if module.startswith(f"verifiers.{home.split('.')[0]}")]
    return f"{min(near or found, key=len)}.{name}" if found else None


@cache
def _definitions() -> dict[str, list[str]]:
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "verifiers").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [getattr(node, "name", None)] + [getattr(target, "id", None) for target in targets]
            for name in filter(None, names):
                modules[str(name)].append(module)
    return modules
