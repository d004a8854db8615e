"""The pages in a real browser: they show what they should, follow a run, obey keys, and obey no model.

The tests need a Chromium (Debian's package ``chromium``, or the path in ``VERIFIERS_CHROMIUM``) and the Python package
``playwright``; where one is absent they are skipped and say which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.viewer import hostile, making
from tests.viewer.browsing import address_of, open_page, text, wait_until
from verifiers.store import RunDir
from verifiers.viewer import Library, export_html
from verifiers.viewer.library import run_id_of

pytestmark = pytest.mark.timeout(300)


# --- pages ----------------------------------------------------------------------------------------------------------


def test_from_the_list_to_a_run_to_a_rollout_to_its_group_with_keys_only(page, server):
    open_page(page, server, "#/?env=arithmetic&model=org%2Ftwo", "tr.row")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("table.rollouts tr.row")
    page.wait_for_selector(".tile")
    assert "arithmetic" in text(page, "h1")
    assert page.locator("table.rollouts tr.row").count() == 50
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.message.user")
    assert "What is" in text(page, "article.message.user")
    page.keyboard.press("j")
    wait_until(page, "location.hash.includes('/rollout/2') && !document.body.classList.contains('loading')")
    page.keyboard.press("g")
    page.wait_for_selector(".side-by-side .column")
    assert page.locator(".side-by-side .column").count() == 4
    page.keyboard.press("Escape")
    page.wait_for_selector("table.rollouts")
    page.keyboard.press("r")
    page.wait_for_selector("table.runs")


def test_a_page_that_takes_long_says_so_and_nothing_more_once_it_was_left(page, server, folder):
    one, two = (address_of(folder, "evals", f"arithmetic--org--{name}", "*") for name in ("one", "two"))
    held: list[Any] = []
    page.route("**/api/compare/**", lambda route: route.continue_() if held else held.append(route))
    page.goto(f"{server.url}#/compare/{one}/{two}")
    page.wait_for_selector(".compare-layout", state="attached")
    page.wait_for_timeout(100)
    assert page.locator("body.loading").count() == 1
    page.goto(f"{server.url}#/run/{two}")
    page.wait_for_selector("table.rollouts tr.row")
    with page.expect_response("**/api/compare/*/*/example**"):  # the page that was left goes on to its end
        held[0].continue_()
    page.wait_for_timeout(300)
    assert text(page, "nav.crumbs").split() == ["runs", "/", "arithmetic"]
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.message.user")


def test_search_sort_filters_and_pages_are_in_the_address(page, server, folder):
    run = address_of(folder, "evals", "arithmetic--org--two", "*")
    open_page(page, server, f"#/run/{run}", "table.rollouts tr.row")
    page.keyboard.press("l")
    wait_until(page, "location.hash.includes('start=50')")
    page.click("button.sort:has-text('reward')")
    wait_until(page, "location.hash.includes('sort=reward') && !location.hash.includes('start')")
    page.keyboard.press("/")
    page.keyboard.type("check that again")
    wait_until(page, "document.querySelectorAll('table.rollouts tr.row').length < 40")
    assert "q=check" in page.evaluate("location.hash")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    wait_until(page, "document.querySelectorAll('table.rollouts tr.row').length === 50")
    page.keyboard.press("f")
    wait_until(page, "[...document.querySelectorAll('tr.row')].every((row) => row.classList.contains('failed'))")
    page.wait_for_selector("g.bar")
    page.keyboard.press("Escape")
    page.locator("g.bar").last.click()
    page.wait_for_selector(".chip.filter")
    assert "low=1.1" in page.evaluate("location.hash")
    page.go_back()
    page.wait_for_selector("table.rollouts")


def test_a_conversation_shows_tool_calls_reasoning_and_tokens_by_logprob(page, server, folder):
    run = address_of(folder, "evals", "shop--*", "*")
    open_page(page, server, f"#/run/{run}/rollout/0", "article.message")
    assert "find_order" in text(page, ".tool-call header")
    assert '"customer": "C-17"' in text(page, ".tool-call .text")
    assert "First the order." in text(page, ".reasoning")
    page.keyboard.press("t")
    page.wait_for_selector("article.message .text")
    page.keyboard.press("t")
    page.wait_for_selector("span.token.p0")
    assert page.locator("span.token:not(.swatch)").count() > 20
    assert "logprob" in page.locator("span.token:not(.swatch)").first.get_attribute("title")
    page.keyboard.press("t")
    page.wait_for_selector("span.token", state="detached")


def test_two_runs_are_side_by_side_with_the_first_difference_marked(page, server, folder):
    a, b = (address_of(folder, "evals", f"arithmetic--org--{name}", "*") for name in ("one", "two"))
    open_page(page, server, f"#/compare/{a}/{b}", ".side-by-side .column")
    assert page.locator(".side-by-side .column").count() == 2
    assert "B − A" in text(page, ".tiles")
    left, right = (page.locator(".column").nth(i).inner_text() for i in (0, 1))
    assert left != right
    page.wait_for_selector("#first-difference", state="attached")
    page.keyboard.press("j")
    wait_until(page, "location.hash.includes('example=')")


def test_a_training_shows_its_curves_and_the_samples_of_a_step(page, server, folder):
    run = address_of(folder, "train", "*", "warm-start")
    open_page(page, server, f"#/run/{run}/training", ".chart.lines path.line")
    titles = page.locator(".card h2").all_inner_texts()
    for title in ("Reward, with its 95% interval", "KL to the reference", "Entropy", "Completion length"):
        assert title in titles
    assert page.locator("polygon.band").count() == 1
    assert page.locator("g.eval").count() == 2
    assert "no group has any variance" in text(page, ".notices")
    assert "step 40" in text(page, ".step-control")
    page.keyboard.press("h")
    wait_until(page, "document.querySelector('.step-control b').textContent === 'step 35'")
    page.locator(".chart.lines svg").first.hover()
    page.wait_for_selector(".readout .step")


def test_light_and_dark_follow_the_system_until_one_chooses(browser, server, page):
    page.emulate_media(color_scheme="dark")
    open_page(page, server, "#/", "table.runs")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.keyboard.press("T")
    light = page.evaluate(colour)
    assert dark != light
    page.reload()
    page.wait_for_selector("table.runs")
    assert page.evaluate(colour) == light, "the choice is kept"


def test_the_keys_are_listed_behind_a_question_mark(page, server):
    open_page(page, server, "#/", "table.runs")
    page.keyboard.press("?")
    assert "next run" in text(page, "#help")
    page.keyboard.press("Escape")
    page.wait_for_selector("#help", state="detached")


def test_a_page_that_is_not_there_says_so(page, server):
    open_page(page, server, "#/no/such/page", ".empty")
    assert "no such page" in text(page, ".empty")


def test_a_run_that_is_not_there_says_so(page, server):
    open_page(page, server, "#/run/000000000000", ".empty")
    assert "there is no such run" in text(page, ".empty")
    page.troubles.clear()  # the browser logs every 404 by itself


def test_rollouts_appear_while_a_run_goes_on(page, server, folder):
    run = RunDir.create(folder / "live", env_id="live", model="m", config={})
    with run.appender() as out:
        out.append(making.record_of(0))
        out.flush()
        open_page(page, server, f"#/run/{run_id_of(run.path)}", "table.rollouts tr.row")
        page.wait_for_selector(".chip.live")
        for number in range(1, 4):
            out.append(making.record_of(number))
        out.flush()
        wait_until(page, "document.querySelectorAll('table.rollouts tr.row').length === 4")
    run.update_metadata({"num_rollouts": 4})
    page.wait_for_selector(".chip.live", state="detached")


def test_a_training_is_followed_too(page, server, folder):
    path = making.train(folder / "live", steps=6, finished=False, name="going")
    open_page(page, server, f"#/run/{run_id_of(path)}/training", "path.line")
    wait_until(page, "document.querySelector('.tiles').innerText.includes('step\\n6')")
    with open(path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 7, "reward": 0.5, "entropy": 1.0}\n{"step": 7, "notice": "the reward stands still"}\n')
    wait_until(page, "document.querySelector('.tiles').innerText.includes('step\\n7')")
    assert "the reward stands still" in text(page, ".notices")


def test_what_was_searched_for_is_marked_in_the_conversation(page, server, folder):
    run = address_of(folder, "evals", "shop--*", "*")
    open_page(page, server, f"#/run/{run}/rollout/0?q=us+DOLLARS", "mark.hit")
    assert page.locator("mark.hit").all_inner_texts() == ["US dollars"]
    open_page(page, server, f"#/run/{run}/rollout/0?q=(.*%2B", "article.message")
    page.wait_for_selector("mark.hit", state="detached")


def test_a_metric_shows_its_distribution(page, server, folder):
    run = address_of(folder, "evals", "arithmetic--org--two", "*")
    open_page(page, server, f"#/run/{run}", "table.metrics")
    page.click("table.metrics button:has-text('format')")
    page.wait_for_selector("h2:has-text('Distribution of format')")
    page.click("table.metrics button:has-text('reward')")
    page.wait_for_selector("h2:has-text('Distribution of format')", state="detached")


def test_the_first_difference_is_where_texts_part_and_never_inside_a_character(page, server):
    open_page(page, server, "#/", "table.runs")
    script = """async ([a, b]) => {
      const { firstDifference } = await import("/static/difference.js");
      const { messagesOf } = await import("/static/conversation.js");
      return firstDifference(messagesOf(a, "assistant"), messagesOf(b, "assistant"));
    }"""

    def said(*texts):
        return [{"role": "assistant", "content": text} for text in texts]

    def called(arguments):
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        ]

    cases = [
        (said("same"), said("same"), None),
        (said("abc"), said("abd"), (0, 0, 2)),
        (said("a", "b"), said("a"), (1, None, 0)),
        (said("x😀"), said("x😁"), (0, 0, 1)),
        (called('{"x":1}'), called('{ "x": 1 }'), None),
        (called('{"x": 1}'), called('{"x": 2}'), (0, 0, 9)),
    ]
    for a, b, expected in cases:
        found = page.evaluate(script, [a, b])
        assert (found and (found["message"], found["block"], found["offset"])) == expected


# --- hostile output -------------------------------------------------------------------------------------------------


def assert_harmless(page: Any, origin: str) -> None:
    page.wait_for_timeout(250)
    assert page.evaluate("window.hits") == 0
    assert [url for url in page.asked if not url.startswith((origin, "data:"))] == []
    foreign = "script:not([src]):not([type='application/json']), iframe, object, embed, base, form, link[href*=evil]"
    extra = page.evaluate("(selector) => document.querySelectorAll(selector).length", foreign)
    assert extra == (1 if origin.startswith("file") else 0), "the one script of an exported file is its own"
    assert page.evaluate(
        "[...document.querySelectorAll('*')].every((e) => [...e.attributes].every((a) => !/^on/i.test(a.name)))"
    )


def hostile_addresses(folder: Path) -> list[tuple[str, str]]:
    first, second = (run_id_of(path) for path in sorted((folder / "hostile").glob("hostile[03]/*")))
    training, other = (run_id_of(path) for path in sorted((folder / "hostile" / "hostile-training").glob("*")))
    rollouts = [(f"#/run/{first}/rollout/{i}", "article.message") for i in range(0, len(hostile.PAYLOADS), 9)]
    return [
        ("#/", "table.runs"),
        (f"#/run/{first}", "table.rollouts tr.row"),
        (f"#/run/{first}?q=script&sort=metric%3A{'%3Cscript%3Ehit()%3C%2Fscript%3E'}", "table.rollouts"),
        (f"#/run/{first}/rollout/2?view=logprob", "span.token"),
        (f"#/run/{first}/group?example=%22%3Cscript%3Ehit()%3C%2Fscript%3E0%22", ".column"),
        (f"#/compare/{first}/{second}", ".column"),
        (f"#/run/{training}/training", "path.line"),
        (f"#/run/{training}/training?axis=samples&smooth=0.5", ".chart.lines svg"),
        (f"#/run/{training}/rewards", "table.shares"),
        (f"#/run/{training}/rollout/2?view=ratio", "span.token"),
        (f"#/run/{first}/rewards", "table.shares"),
        (f"#/run/{first}/rollout/2?view=source", "article.message .text"),
        (f"#/compare/{training}/{other}?q=script", ".chart.lines svg"),
        *rollouts,
    ]


def test_no_text_of_a_run_runs_asks_or_opens_anything(page, server, folder):
    for hash_, selector in hostile_addresses(folder):
        open_page(page, server, hash_, selector)
        for summary in page.locator("summary").all()[:6]:
            summary.click()
        assert_harmless(page, server.url)
        assert "hit()" in page.inner_text("main")
        page.goto("about:blank")


def test_no_text_of_a_run_does_in_an_exported_file_either(page, folder, tmp_path):
    file = tmp_path / "hostile.html"
    export_html(Library([folder / "hostile"]), file)
    for hash_, selector in hostile_addresses(folder):
        page.goto(f"{file.as_uri()}{hash_}")
        page.wait_for_selector(selector)
        assert_harmless(page, file.as_uri())
        assert "hit()" in page.inner_text("main")
        page.goto("about:blank")


def test_invisible_and_reordering_characters_are_shown(page, server, folder):
    first = run_id_of(sorted((folder / "hostile").glob("hostile0/*"))[0])
    open_page(page, server, f"#/run/{first}/rollout/2", "article.message")
    names = set(page.locator(".message-body .hidden-character").all_inner_texts())
    assert {"RLO", "PDF", "LRI", "ZWSP", "BOM", "SHY", "ESC", "NUL", "BEL", "CR", "LS", "U+E0041", "U+009B"} <= names
    assert "ZWJ" not in names, "an emoji that is made of several stays one"
    shown = page.inner_text("main") + page.title()
    assert not set(shown) & set("\u202e\u202d\u2066\u2067\u200b\ufeff\x1b\x00")


def test_an_image_is_shown_only_if_it_is_part_of_the_record(page, server, folder):
    first = run_id_of(sorted((folder / "hostile").glob("hostile0/*"))[0])
    open_page(page, server, f"#/run/{first}/rollout/2", "img.picture")
    assert {image.get_attribute("src") for image in page.locator("img").all()} == {hostile.PIXEL}


# --- the exported file ----------------------------------------------------------------------------------------------


def test_an_exported_file_has_all_the_pages_and_asks_for_nothing(page, folder, tmp_path):
    file = tmp_path / "runs.html"
    export_html(Library([folder / "evals", folder / "train"]), file)
    page.goto(f"{file.as_uri()}#/?model=org%2Ftwo")
    page.wait_for_selector("tr.row")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("table.rollouts tr.row")
    page.wait_for_selector(".chart.histogram svg")
    page.click("button.sort:has-text('reward')")
    page.keyboard.press("/")
    page.keyboard.type("check that again")
    wait_until(page, "document.querySelectorAll('table.rollouts tr.row').length < 40")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.message")
    page.keyboard.press("g")
    page.wait_for_selector(".column")
    a, b = (address_of(folder, "evals", f"arithmetic--org--{name}", "*") for name in ("one", "two"))
    page.goto(f"{file.as_uri()}#/compare/{a}/{b}")
    page.wait_for_selector("#first-difference", state="attached")
    page.goto(f"{file.as_uri()}#/run/{address_of(folder, 'train', '*', 'warm-start')}/training")
    page.wait_for_selector("path.line")
    page.wait_for_selector("table.rollouts tr.row")
    assert [url for url in page.asked if not url.startswith((file.as_uri(), "data:"))] == []
