"""Every python block of the documentation runs, in order, page by page, as the cells of a notebook would.

A block that cannot run says why, either way:

    <!-- not run: needs an API key -->
    ```python

    ```python no-run: needs an API key
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md")
    if page.exists()
]

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)(?P<rest>[^`]*)$")
COMMENT = re.compile(r"^\s*<!--\s*not run\b:?(?P<reason>.*?)-->\s*$")
NO_RUN = re.compile(r"\bno-run\b:?(?P<reason>.*)$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced python block; ``line`` is that of its first line of code, ``not_run`` the reason if it is skipped."""

    line: int
    code: str
    not_run: str | None


def python_blocks(text: str) -> Iterator[Block]:
    """The python blocks of a page of Markdown, in order."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        opening = FENCE.match(lines[index])
        index += 1
        if not opening:
            continue
        start = index
        closing = re.compile(rf"^[ \t]*{opening['ticks'][0]}{{{len(opening['ticks'])},}}[ \t]*$")
        while index < len(lines) and not closing.match(lines[index]):
            index += 1
        if opening["language"].lower() in {"python", "python3", "py"}:
            code = textwrap.dedent("\n".join(lines[start:index]) + "\n")
            above = next((line for line in reversed(lines[: start - 1]) if line.strip()), "")
            said = NO_RUN.search(opening["rest"]) or COMMENT.match(above)
            yield Block(line=start + 1, code=code, not_run=said["reason"].strip() if said else None)
        index += 1


def run_block(block: Block, page: Path, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    """Run one block, with top-level ``await`` as in a notebook; line numbers are those of the page."""
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, namespace))
    else:
        exec(code, namespace)


def blame(error: BaseException, page: Path, block: Block) -> str:
    """Where on the page it went wrong, and the traceback from there on."""
    if isinstance(error, SyntaxError) and error.filename == str(page):
        line = error.lineno
    else:
        here = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(page)]
        line = here[0] if here else block.line
    shown = "".join(traceback.format_exception(error))
    return f"{page.name}:{line}: {type(error).__name__}: {error}\n\n{shown}"


def run_page(page: Path, note: Callable[[str, object], None], module: ModuleType) -> None:
    """Run a page's blocks in the namespace of one module; a failure is an error that names the page and line."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    ran = 0
    with asyncio.Runner() as runner:
        for block in python_blocks(page.read_text(encoding="utf-8")):
            if block.not_run is None:
                try:
                    run_block(block, page, module.__dict__, runner)
                except (Exception, SystemExit) as error:
                    pytest.fail(blame(error, page, block), pytrace=False)
                ran += 1
            elif block.not_run:
                note("block_not_run", f"{name}:{block.line}: {block.not_run}")
            else:
                pytest.fail(f"{name}:{block.line}: this block is not run, and does not say why", pytrace=False)
    note("blocks_run", ran)


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A fresh ``__main__`` without a file, in an empty folder."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(tmp_path)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_the_page_runs(
    page: Path, notebook: ModuleType, record_property: Callable[[str, object], None]
) -> None:
    run_page(page, record_property, notebook)


def test_docstrings_show_code_as_doctests_which_run_and_not_in_fences_which_do_not() -> None:
    fenced = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "verifiers").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.match(r"\s*```(python|py)\b", line)
    ]
    assert not fenced


PAGE = """\
# A page
```python
x = 20
async def double(x): return 2 * x
```
text
   ```py
   y = await double(x) + 2
   assert y == 42
   ```
```bash
make test
```
<!-- not run: needs a key -->

```python
raise RuntimeError
```
````markdown
```python
raise RuntimeError("inside another fence")
```
````
```python no-run: takes a day
raise RuntimeError
```
"""


def test_blocks_share_a_namespace_may_await_and_are_skipped_only_with_a_reason(
    tmp_path: Path, notebook: ModuleType
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    notes: list[tuple[str, object]] = []
    run_page(page, lambda key, value: notes.append((key, value)), notebook)
    assert notebook.__dict__["y"] == 42
    assert notes == [
        ("block_not_run", "page.md:17: needs a key"),
        ("block_not_run", "page.md:25: takes a day"),
        ("blocks_run", 2),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n```python\nx = 1\n1 / 0\n```\n", r"page\.md:4: ZeroDivisionError"),
        ("```python\nx = 1\nx +\n```\n", r"page\.md:3: SyntaxError"),
        ("```python no-run\nx = 1\n```\n", r"page\.md:2: this block is not run, and does not say why"),
        ("<!-- not run -->\n```python\nx = 1\n```\n", r"page\.md:3: this block is not run, and does not say why"),
        ("```python\ndef f():\n    raise SystemExit(3)\n```\n\n```python\nf()\n```\n", r"page\.md:7: SystemExit"),
    ],
)
def test_a_failure_names_the_page_and_the_line(text: str, message: str, tmp_path: Path, notebook: ModuleType) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(pytest.fail.Exception, match=message):
        run_page(page, lambda key, value: None, notebook)
