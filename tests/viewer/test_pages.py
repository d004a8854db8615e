"""Pages in a real browser: curves over one another, tables of runs, shares, links, and all of it on a narrow screen."""

from __future__ import annotations

import json
import re

import pytest

from tests.viewer import making
from tests.viewer.browsing import address_of, open_page, text, wait_until
from verifiers.viewer import InlineView, Library, export_html
from verifiers.viewer.library import run_id_of
from verifiers.viewer.server import ViewerServer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")  # once for all in the folder, in whatever order the tests are shared out
def trainings(folder):
    second = making.train(folder / "train", steps=30, name="second")
    third = making.train(folder / "train", steps=30, name="third", seed=8, pace=20)
    return [run_id_of(second), run_id_of(third), address_of(folder, "train", "*", "warm-start")]


def evaluations(folder):
    return [address_of(folder, "evals", f"arithmetic--org--{name}", "*") for name in ("one", "two", "three")]


# --- trainings ------------------------------------------------------------------------------------------------------


def test_several_trainings_are_curves_over_one_another_and_nobody_is_called_better(page, server, trainings):
    open_page(page, server, f"#/compare/{'/'.join(trainings)}", ".chart.lines path.line")
    assert page.locator(".versus").count() == 3
    first = page.locator(".card", has_text="Reward").first
    assert first.locator("path.line").count() == 3
    assert {path.get_attribute("class").split()[1] for path in first.locator("path.line").all()} == {"a", "b", "c"}
    shown = page.inner_text("main").lower()
    assert "better" not in shown
    assert "worse" not in shown
    assert "only more seeds show" in shown


def test_axis_smoothing_and_zoom_are_in_the_address_and_on_every_chart(page, server, trainings):
    open_page(page, server, f"#/compare/{'/'.join(trainings)}", "path.line")
    page.click(".chart-controls button:has-text('Tokens')")
    wait_until(page, "location.hash.includes('axis=tokens')")
    wait_until(
        page, "[...document.querySelectorAll('.chart.lines text.tick')].some((t) => t.textContent.includes('K'))"
    )
    page.locator(".smoothing input").fill("0.8")
    wait_until(page, "location.hash.includes('smooth=0.8') && document.querySelector('path.line.raw')")
    box = page.locator(".chart.lines svg").first.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 60, steps=4)
    page.mouse.up()
    wait_until(page, "location.hash.includes('from=') && document.querySelector('.reset-zoom')")
    zoomed = page.evaluate("location.hash")
    page.reload()
    page.wait_for_selector(".reset-zoom")
    assert page.evaluate("location.hash") == zoomed
    page.locator(".chart.lines svg").first.dblclick()
    wait_until(page, "!location.hash.includes('from=')")


def test_smoothing_keeps_what_is_missing_and_does_not_pull_towards_zero(page, server):
    open_page(page, server, "#/", "table.runs")
    smooth = """async ([values, weight]) => (await import("/static/lines.js")).smoothed(values, weight)"""
    assert page.evaluate(smooth, [[1, None, 1, 1], 0.9]) == pytest.approx([1, None, 1, 1])
    assert page.evaluate(smooth, [[0, 1], 0.5]) == pytest.approx([0, 2 / 3])
    assert page.evaluate(smooth, [[0, 1], 0]) == [0, 1]


def test_the_settings_in_which_trainings_differ_are_listed(page, server, folder, trainings):
    open_page(page, server, f"#/compare/{trainings[0]}/{trainings[1]}", ".card h2")
    page.wait_for_selector("h2:has-text('Settings that differ')")
    assert page.locator("table.settings tbody td.word").all_inner_texts() == ["seed", "temperature"]
    assert "learning_rate" not in text(page, "table.settings")


def test_charts_are_filtered_by_name(page, server, trainings):
    open_page(page, server, f"#/compare/{trainings[0]}/{trainings[1]}?q=entropy", "path.line")
    assert page.locator(".chart-grid h2").all_inner_texts() == ["Entropy"]


def test_a_single_training_can_be_zoomed_and_smoothed_too(page, server, trainings):
    open_page(page, server, f"#/run/{trainings[0]}/training?axis=seconds&smooth=0.5&from=10&to=30", "path.line.raw")
    assert "show all" in text(page, ".reset-zoom")
    page.click(".reset-zoom")
    wait_until(page, "!location.hash.includes('from=')")


def test_tokens_of_a_training_are_coloured_by_logprob_advantage_and_ratio(page, server, trainings):
    open_page(page, server, f"#/run/{trainings[0]}/rollout/3?view=ratio", "span.token")
    assert page.locator(".choice button").all_inner_texts() == ["Rendered", "Source", "Logprob", "Advantage", "Ratio"]
    titles = page.locator("article.message.assistant span.token").first.get_attribute("title")
    for words in ("logprob", "advantage", "ratio"):
        assert words in titles
    classes = {one.get_attribute("class").split()[1] for one in page.locator("article.message span.token").all()}
    assert classes & {"up1", "up2", "up3"}
    assert classes & {"down1", "down2", "down3"}
    page.click(".choice button:has-text('Advantage')")
    wait_until(page, "new Set([...document.querySelectorAll('article span.token')].map((t) => t.className)).size === 1")


# --- evaluations ----------------------------------------------------------------------------------------------------


def test_more_than_two_runs_are_chosen_in_the_list_and_compared_in_a_table(page, server):
    open_page(page, server, "#/?env=arithmetic&kind=evaluation", "tr.row")
    for box in page.locator("td.check input").all():
        box.click()
    page.click("a:has-text('Compare 3')")
    page.wait_for_selector("table.many")
    assert page.locator("table.many").first.locator("tbody tr").count() == 3
    assert "the others are compared with this one" in page.inner_text("main")
    page.select_option(".metric-choice select", "correct")
    wait_until(page, "location.hash.includes('metric=correct')")
    page.wait_for_selector("th:has-text('correct')")
    page.click("a:has-text('Examples') >> nth=0")
    page.wait_for_selector(".side-by-side .column")


def test_the_metric_of_a_comparison_is_chosen(page, server, folder):
    one, two, _ = evaluations(folder)
    open_page(page, server, f"#/compare/{one}/{two}", ".metric-choice select")
    before = text(page, ".tiles")
    page.select_option(".metric-choice select", "format_reward_func")
    wait_until(page, "document.querySelector('.tiles').innerText.includes('B − A in format_reward_func')")
    assert text(page, ".tiles") != before


def test_two_environments_are_shown_side_by_side_without_a_verdict_or_a_difference(page, server, folder):
    one = evaluations(folder)[0]
    other = address_of(folder, "evals", "explain--*", "*")
    open_page(page, server, f"#/compare/{one}/{other}", ".notice-line")
    assert "rewards of different environments are not comparable" in text(page, ".notice-line")
    tiles = text(page, ".tiles")
    assert "No verdict" in tiles
    shown = text(page, "main")
    assert "B − A" not in shown
    assert "won" not in shown
    assert "B higher" in shown
    whole = page.locator(".versus .figure").first.inner_text()
    open_page(page, server, f"#/run/{one}", ".tile.main")
    assert whole == page.inner_text(".tile.main .tile-value"), (
        "the mean of the run, not of the examples that share a name"
    )


def test_a_training_and_an_evaluation_are_not_compared(page, server, folder, trainings):
    open_page(page, server, f"#/compare/{trainings[0]}/{evaluations(folder)[0]}", ".empty")
    assert "choose runs of one kind" in text(page, ".empty")


def test_the_list_is_sorted_by_any_column_and_keeps_it_in_the_address(page, server):
    open_page(page, server, "#/?kind=evaluation&env=arithmetic", "tr.row")
    page.click("th button:has-text('reward')")
    wait_until(page, "location.hash.includes('sort=reward')")
    rewards = [float(one) for one in page.locator("td.reward-column b").all_inner_texts()]
    assert rewards == sorted(rewards, reverse=True)
    page.click("th button:has-text('reward')")
    wait_until(page, "location.hash.includes('desc=0')")
    assert [float(one) for one in page.locator("td.reward-column b").all_inner_texts()] == sorted(rewards)
    for name in ("environment", "model", "run", "status", "rollouts", "failed", "duration", "made"):
        page.click(f"th button:has-text('{name}')")
        wait_until(page, f"document.querySelector('button.sorted').innerText.includes('{name}')")
    assert page.locator("td .range").count() == 3, "each mean has its interval"


def test_runs_are_filtered_by_tag_and_status(page, server):
    open_page(page, server, "#/", "tr.row")
    page.click("a.chip.tag:has-text('paper') >> nth=0")
    wait_until(page, "location.hash.includes('tag=paper')")
    wait_until(page, "document.querySelectorAll('tr.row').length === 1")
    assert "explain" in text(page, "tr.row")
    page.select_option("select[aria-label='Every status']", "unfinished")
    wait_until(page, "document.querySelectorAll('tr.row').length === 0")


def test_the_judges_reply_and_what_it_was_asked_are_on_the_page_of_a_rollout(page, server, folder):
    run = address_of(folder, "evals", "explain--*", "*")
    open_page(page, server, f"#/run/{run}/rollout/0", "article.message.judge")
    assert "It names" in text(page, "article.message.judge .markdown")
    page.click("article.message.judge summary")
    assert "Why is the sky blue?" in text(page, "article.message.judge details .text")


def test_a_page_says_what_each_reward_function_adds_to_the_mean(page, server, folder, trainings):
    open_page(page, server, f"#/run/{trainings[0]}/rewards", "table.shares")
    assert page.locator(".chart.lines path.line").count() >= 3
    assert "weight × mean score" in page.inner_text("main")
    rows = page.locator("table.shares tbody tr").all_inner_texts()
    assert rows[0].startswith("correct")
    run = evaluations(folder)[0]
    open_page(page, server, f"#/run/{run}", "table.rollouts tr.row")  # of the new page: only the fragment changed
    page.click("nav.tabs a:has-text('Reward functions')")
    page.wait_for_selector("table.shares td:has-text('format_reward_func')")


# --- links ----------------------------------------------------------------------------------------------------------


def test_a_link_to_a_rollout_is_copied_and_opens_it_here_and_in_an_exported_file(
    page, browser, server, folder, tmp_path
):
    run = evaluations(folder)[0]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_page(page, server, f"#/run/{run}/rollout/5", "button.share")
    title = text(page, "h1")
    page.keyboard.press("y")
    wait_until(page, "document.querySelector('button.share').textContent === 'Copied'")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{server.url}#/link?env=arithmetic&run=")
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("button.share")
    assert text(page, "h1") == title
    file = tmp_path / "runs.html"
    export_html(Library([folder / "evals"]), file)
    page.goto(f"{file.as_uri()}{link[link.index('#') :]}")
    page.wait_for_selector("button.share")
    assert text(page, "h1") == title
    page.goto("about:blank")
    page.goto(f"{server.url}#/link?run=nobody")
    page.wait_for_selector(".empty")
    assert "there is no run 'nobody'" in text(page, ".empty")
    page.troubles.clear()  # the browser logs every 404 by itself


# --- narrow screens -------------------------------------------------------------------------------------------------


def test_aggregate_metrics_are_shown_with_their_intervals_and_their_failures(page, server, folder):
    one = address_of(folder, "labels", "multiples--org--labels", "*")
    better = address_of(folder, "labels", "multiples--org--better", "*")
    open_page(page, server, f"#/run/{one}", "table.aggregates")
    assert page.locator("table.aggregates td.word").all_inner_texts() == ["balanced", "f1", "others"]
    figures = page.locator("table.aggregates td.figure").all_inner_texts()
    assert re.fullmatch(r"0\.\d{3}\n0\.\d{3} – \d\.\d{3}", figures[0])
    assert figures[2].strip() == "failed"
    assert page.locator("table.aggregates [title]").get_attribute("title") == "ZeroDivisionError: division by zero"
    open_page(page, server, f"#/compare/{one}/{better}", ".figures-box table.aggregates")
    assert page.locator("table.aggregates thead th").all_inner_texts() == ["", "A", "B"]
    assert page.locator("table.aggregates td.figure").nth(1).inner_text().startswith("1.000")
    open_page(page, server, f"#/compare/{one}/{better}/{one}", "table.aggregates th:text-is('org/better')")
    assert page.locator("table.aggregates thead th.figure").count() == 3


def test_the_numbers_beside_a_chart_are_whole_and_a_flat_line_has_room(page, server, trainings):
    """Smoothing leaves dust in the last digits of what is constant."""
    open_page(page, server, f"#/compare/{'/'.join(trainings)}?smooth=0.6", ".chart.lines path.line")
    wait_until(page, "document.querySelectorAll('text.tick.side').length > 40")
    left = "[...document.querySelectorAll('text.tick.side')].every((text) => text.getBBox().x >= 0)"
    assert page.evaluate(left)
    texts = page.locator("text.tick.side").all_text_contents()
    assert max(map(len, texts)) <= 6, texts


def test_no_page_is_wider_than_a_telephone_and_rewards_are_in_sight(page, server, folder, trainings):
    page.set_viewport_size({"width": 390, "height": 844})
    one, two, three = evaluations(folder)
    judged = address_of(folder, "evals", "explain--*", "*")
    pages = {
        "#/": "td.reward-column",
        f"#/run/{one}": "td.reward",
        f"#/run/{one}/rollout/0": ".big",
        f"#/run/{judged}/rollout/0": "article.message",
        f"#/run/{one}/group?example=7": ".reward-cell",
        f"#/run/{one}/rewards": ".scroll-box",
        f"#/compare/{one}/{two}": ".versus .figure",
        f"#/compare/{one}/{two}/{three}": "table.many td.figure",
        f"#/compare/{'/'.join(trainings)}": ".versus .figure",
        f"#/run/{trainings[0]}/training": ".tile",
    }
    for hash_, selector in pages.items():
        open_page(page, server, hash_, selector)
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, hash_
        box = page.locator(selector).first.bounding_box()
        assert box["x"] >= 0, hash_
        assert box["x"] + box["width"] <= 391, hash_
        assert box["height"] < 120 or selector in ("article.message", ".scroll-box"), "figures are on one line"
    open_page(page, server, f"#/run/{trainings[0]}/rewards", "table.shares")
    last = page.locator("table.shares tbody td").last.bounding_box()
    assert last["x"] + last["width"] <= 391, "every column of the shares"
    open_page(page, server, f"#/compare/{one}/{two}", ".versus .figure")
    assert all(one.bounding_box()["height"] < 40 for one in page.locator(".versus .figure").all()), (
        "digits side by side"
    )


def test_on_a_narrow_screen_every_run_of_a_comparison_and_the_name_of_every_training_are_in_sight(
    page, server, folder, trainings
):
    page.set_viewport_size({"width": 390, "height": 844})
    open_page(page, server, f"#/compare/{'/'.join(evaluations(folder))}", "table.stacked td.figure")
    for cell in page.locator("table.many td.figure").all():
        box = cell.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 391
    label = "getComputedStyle(document.querySelector('table.stacked td[data-name]'), '::before').content"
    assert "org/one" in page.evaluate(label)
    open_page(page, server, "#/", "table.runs")
    names = page.locator("table.runs tr.row td.id")
    assert {"second", "third", "warm-start"} <= set(names.all_inner_texts())
    assert all(name.is_visible() for name in names.all())


def test_on_a_narrow_screen_the_model_of_every_run_is_below_its_environment(page, server):
    """Short names of a model stood beside the reward, and the id began a line of its own at the margin."""
    page.set_viewport_size({"width": 420, "height": 900})
    open_page(page, server, "#/", "table.runs")
    rows = page.locator("table.runs tr.row")
    for row in rows.all():
        reward, model = (row.locator(cell).bounding_box() for cell in ("td.reward-column", "td.model-cell"))
        assert model["y"] >= reward["y"] + 10, row.inner_text()
    lefts = {round(row.locator("td.model-cell").bounding_box()["x"]) for row in rows.all()}
    assert len(lefts) == 1


def test_the_rollouts_of_a_training_fit_a_window_of_1180(page, server, trainings):
    page.set_viewport_size({"width": 1180, "height": 900})
    open_page(page, server, f"#/run/{trainings[0]}", "table.rollouts tr.row")
    assert page.evaluate("(box => box.scrollWidth - box.clientWidth)(document.querySelector('.table-box'))") <= 0


def test_a_finished_run_without_rollouts_is_not_waiting_for_any(page, tmp_path):
    """Supervised training has none."""
    folder = tmp_path / "runs" / "sft" / "one"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"kind": "training", "env_id": "sums", "finished": True}))
    (folder / "results.jsonl").touch()
    with ViewerServer(Library([tmp_path / "runs"])) as server:
        open_page(page, server, f"#/run/{run_id_of(folder)}", "table.rollouts")
        shown = page.locator("main").inner_text()
    assert "Waiting for" not in shown
    assert " yet" not in shown
    assert shown.count("There are no rollouts.") == 3


# --- the exported file ----------------------------------------------------------------------------------------------


def test_an_exported_file_has_the_new_pages_too(page, folder, tmp_path, trainings):
    file = tmp_path / "runs.html"
    compared = sorted((folder / "evals").glob("arithmetic--*/*"))
    export_html(Library([folder / "train"], compared), file)
    one, two, three = evaluations(folder)
    for hash_, selector in (
        (f"#/compare/{one}/{two}/{three}", "table.many"),
        (f"#/compare/{three}/{one}/{two}?metric=correct", "table.many"),
        (f"#/compare/{one}/{two}?metric=correct", ".side-by-side .column"),
        (f"#/compare/{'/'.join(trainings)}", "path.line"),
        (f"#/run/{trainings[0]}/rewards", "table.shares"),
    ):
        page.goto("about:blank")
        page.goto(f"{file.as_uri()}{hash_}")
        page.wait_for_selector(selector)
    assert [url for url in page.asked if not url.startswith((file.as_uri(), "data:", "about:"))] == []


# --- in a notebook --------------------------------------------------------------------------------------------------


def test_the_pages_in_a_cell_are_walked_through_without_leaving_the_notebook(page, folder, tmp_path):
    compared = sorted((folder / "evals").glob("arithmetic--*/*"))
    notebook = tmp_path / "notebook.html"
    cell = InlineView(Library([folder / "train"], compared), limit=60)._repr_html_()
    notebook.write_text(f"<!doctype html><meta charset=utf-8><h1>a notebook</h1>{cell}", encoding="utf-8")
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("table.runs tr.row").first.wait_for()
    frame.locator("tr.row", has_text="org/one").locator("a.open").click()
    frame.locator("table.rollouts tr.row").first.wait_for()
    frame.locator("button.sort", has_text="reward").first.click()
    frame.locator("button.sort.sorted", has_text="reward").first.wait_for()
    frame.locator("table.rollouts a.open").first.click()
    frame.locator("article.message").first.wait_for()
    frame.locator(".choice button", has_text="Source").click()
    frame.locator("article.message .text").first.wait_for()
    frame.locator(".crumbs a", has_text="runs").click()
    frame.locator("table.runs tr.row").first.wait_for()
    assert page.url == notebook.as_uri()
    assert page.locator("h1").first.inner_text() == "a notebook"
    assert [url for url in page.asked if not url.startswith((notebook.as_uri(), "data:", "about:"))] == []


def test_the_first_page_in_a_cell_is_that_of_the_runs_that_were_named(page, folder, tmp_path):
    one, two = sorted((folder / "evals").glob("arithmetic--*/*"))[:2]
    first = f"#/compare/{run_id_of(one)}/{run_id_of(two)}"
    notebook = tmp_path / "notebook.html"
    cell = InlineView(Library([], [one, two]), first_page=first)._repr_html_()
    notebook.write_text(f"<!doctype html><meta charset=utf-8>{cell}", encoding="utf-8")
    page.goto(notebook.as_uri())
    page.frame_locator("iframe").locator(".side-by-side .column").first.wait_for()
