"""Messages as markdown and code: what is rendered, that it stays text, and that it takes linear time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.viewer import hostile, making
from tests.viewer.browsing import address_of, open_page, text

pytestmark = pytest.mark.timeout(300)

RENDER = """async (text) => {
  const { markdownView } = await import("/static/markdown.js");
  const box = markdownView(text);
  const tags = [...box.querySelectorAll("*")].map((node) => node.tagName.toLowerCase());
  return { text: box.textContent, tags, html: box.innerHTML };
}"""
TIME = """async (text) => {
  const { markdownView } = await import("/static/markdown.js");
  const began = performance.now();
  const box = markdownView(text);
  let depth = 0;
  for (let node = box; node; node = node.lastElementChild) depth += 1;
  return [performance.now() - began, depth];
}"""


@pytest.fixture(scope="module")
def shown(browser: Any, server: Any) -> Any:
    page = browser.new_page()
    open_page(page, server, "#/", "table.runs")
    yield page
    page.close()


@pytest.mark.parametrize(
    ("written", "html"),
    [
        ("**bold**, *slanted*, `a*b*c`", "<p><strong>bold</strong>, <em>slanted</em>, <code>a*b*c</code></p>"),
        ("4*3*2 and 2 * 3 * 4", "<p>4*3*2 and 2 * 3 * 4</p>"),
        ("snake_case_name and _so_", "<p>snake_case_name and <em>so</em></p>"),
        ("**open and *never closed", "<p>**open and *never closed</p>"),
        (r"\*not\* this", "<p>*not* this</p>"),
        ("one\ntwo", "<p>one\ntwo</p>"),
        ("# Title\ntext", '<p class="heading h1">Title</p><p>text</p>'),
        ("#5 is no title", "<p>#5 is no title</p>"),
        ("- a\n- b\n  - c", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul>"),
        ("3. x\n4. y", '<ol start="3"><li><p>x</p></li><li><p>y</p></li></ol>'),
        ("-5 and 1.5", "<p>-5 and 1.5</p>"),
        ("> said\n> so", "<blockquote><p>said\nso</p></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("<answer>\n4\n</answer>", '<p><span class="markup">&lt;answer&gt;</span>\n4\n'
         '<span class="markup">&lt;/answer&gt;</span></p>'),
        ("``a ` b``", "<p><code>a ` b</code></p>"),
        ("~~gone~~", "<p><del>gone</del></p>"),
    ],
)  # fmt: skip
def test_a_small_subset_of_markdown_is_rendered_and_the_rest_stays_as_written(shown, written, html):
    assert shown.evaluate(RENDER, written)["html"] == html


def test_a_fence_is_a_block_of_code_with_its_language_and_colours(shown):
    found = shown.evaluate(RENDER, 'x\n```python\ndef f():  # why\n    return "a"\n```\ny')
    assert "<figcaption><span>python</span>" in found["html"]
    for part in (
        '<span class="code-name">def</span>',
        '<span class="code-comment"># why</span>',
        '<span class="code-string">"a"</span>',
    ):
        assert part in found["html"]
    assert shown.evaluate(RENDER, "```\nnever **closed**")["text"].endswith("never **closed**")


def test_a_table_is_a_table(shown):
    found = shown.evaluate(RENDER, "| a | b |\n|---|:-:|\n| 1 | **2** |\n| 3 |")
    assert found["tags"].count("tr") == 3
    assert (found["tags"].count("td"), found["tags"].count("strong")) == (3, 1)


def test_an_address_is_shown_and_leads_nowhere_and_a_picture_is_not_loaded(shown):
    found = shown.evaluate(RENDER, "[here](https://a.example/x) ![a map](https://b.example/y.png)")
    assert found["text"] == "here (https://a.example/x) [picture: a map (https://b.example/y.png)]"
    assert not {"a", "img"} & set(found["tags"])


def test_nothing_of_the_corpus_becomes_more_than_text(shown):
    allowed = {"p", "strong", "em", "del", "code", "span", "hr", "blockquote", "ul", "ol", "li", "div", "pre", "button"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption"}
    for payload in (*hostile.PAYLOADS, hostile.TEXT):
        for around in (
            "{}",
            "**{}**",
            "[{}]({})",
            "![{}]({})",
            "> {}",
            "- {}",
            "| {} |\n|---|\n| {} |",
            "```{}\n{}\n```",
            "`{}`",
        ):
            found = shown.evaluate(RENDER, around.replace("{}", payload))
            assert set(found["tags"]) <= allowed, (payload, around)
    attributes = shown.evaluate(
        """async (text) => {
          const { markdownView } = await import("/static/markdown.js");
          const all = [...markdownView(text).querySelectorAll("*")];
          return [...new Set(all.flatMap((node) => [...node.attributes].map((one) => one.name)))];
        }""",
        hostile.TEXT,
    )
    assert set(attributes) <= {"class", "title", "start"}


@pytest.mark.parametrize(
    "unit",
    [
        "*", "**a", "_a_ ", "~~", "`", "` `` ", "```` `", "[", "[a](", "![", "](", "[a](b", "> ", ">", "- ", "  - a\n",
        "1. ", "|", "| a ", "|-", "a|\n|-|\n", "#", "# ", "\\", "<a", "<a>", "</", "```\n", "~~~\n", "*a _b ", "**a*",
        "\n", " ", "\t", "a\n>\n", "- a\n\n", '"', "'\\", "\u200b",
    ],
)  # fmt: skip
def test_no_text_takes_more_than_linear_time_or_makes_a_deep_tree(shown, unit):
    """A text eight times as long may take about eight times as long; the limit leaves room for a busy machine."""
    size = 120_000
    took_ms, depth = shown.evaluate(TIME, (unit * size)[:size])
    assert took_ms < 8000, f"{size} characters of {unit!r} took {took_ms:.0f} ms"
    assert depth < 40


def test_code_is_coloured_in_linear_time(shown):
    for unit in ('"', "'", "`", "\\", '"\\', "#", "//", "a", "1.", "'a", "\n"):
        text = "```python\n" + (unit * 90_000)[:90_000]
        assert shown.evaluate(TIME, text)[0] < 8000, unit


def test_a_rollout_is_rendered_and_t_shows_its_source(page, server, folder):
    run = address_of(folder, "evals", "explain--*", "*")
    open_page(page, server, f"#/run/{run}/rollout/0?q=", "article.message.assistant .markdown")
    if page.locator("article.message.assistant figure").count() == 0:
        page.keyboard.press("j")
        page.wait_for_selector("article.message.assistant figure")
    assert page.locator("article.message.assistant .heading.h2").inner_text() == "Why the sky is blue"
    assert page.locator("article.message.assistant td").count() == 6
    page.keyboard.press("t")
    page.wait_for_selector("article.message.assistant .text")
    assert making.EXPLANATION in text(page, "article.message.assistant .text").replace("\xa0", " ")


def test_json_that_a_tool_returned_is_set_as_code(page, server, folder):
    run = address_of(folder, "evals", "shop--*", "*")
    open_page(page, server, f"#/run/{run}/rollout/0", "article.message.tool figure")
    assert '"total": 13.5,\n' in text(page, "article.message.tool pre")
