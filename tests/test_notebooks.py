"""In a notebook: a bar, a report as HTML, a live learning curve, runs in a cell; and no text of a model as markup."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
import venv
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from tests.viewer import hostile
from verifiers import calls
from verifiers.notebooks import bar_html, figures_html, image_html, is_notebook, page_html
from verifiers.progress import NotebookBar, make_progress
from verifiers.viewer import Library, show

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {"style", "div", "table", "tr", "th", "td", "b", "span", "details", "summary", "pre", "img"}


class Tags(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def environment(reply: Any = "4", **row: Any) -> tuple[Any, Any]:
    rows = [{"question": f"{i}+{i}?", "answer": str(2 * i), **row} for i in range(4)]

    def correct(completion: Any, answer: Any) -> float:
        return float(answer in completion[-1]["content"])

    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([correct])), vf.FakeClient(reply)


def test_results_are_a_report_with_intervals_and_rollouts_to_open():
    env, client = environment("The answer is 4.")
    found = Tags(env.evaluate(client, "fake", rollouts_per_example=2, use_tqdm=False)._repr_html_())
    assert set(found.tags) <= ALLOWED
    assert "8 rollouts of 4 examples, 0 failed" in found.text
    assert "reward" in found.text
    assert "95% interval" in found.text
    assert found.tags.count("details") == 5
    assert "The answer is 4." in found.text


def test_a_report_says_why_rollouts_failed():
    env, client = environment(ConnectionError("nobody is there"))
    html = env.evaluate(client, "fake", use_tqdm=False)._repr_html_()
    assert "4 failed" in html
    assert "the fake reply raised ConnectionError" in html


def test_no_text_of_a_run_is_markup_in_a_report():
    rows = [{"question": payload, "answer": payload, "task": payload} for payload in hostile.PAYLOADS]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda: 1.0]))
    results = env.evaluate(vf.FakeClient(hostile.TEXT), hostile.TEXT, use_tqdm=False)
    found = Tags(results._repr_html_())
    assert set(found.tags) <= ALLOWED
    assert {name for name, _ in found.attributes} <= {"class", "style"}
    assert "hit()" in found.text


def test_a_call_as_the_last_line_of_a_cell_runs_and_is_shown():
    env, client = environment()

    async def cell() -> dict[str, str]:
        last = env.evaluate(client, "fake", use_tqdm=False)
        assert isinstance(last, calls.Deferred)
        return last._repr_mimebundle_()

    shown = asyncio.run(cell())
    assert shown["text/plain"].startswith("4 rollouts of 4 examples")
    assert "<table>" in shown["text/html"]


def test_what_has_no_html_is_shown_as_text():
    env, client = environment()

    async def cell() -> dict[str, str]:
        return env.rollout({"prompt": "2+2?", "answer": "4"}, client, "fake")._repr_mimebundle_()

    assert list(asyncio.run(cell())) == ["text/plain"]


def test_outside_of_a_notebook_nothing_changes():
    assert not is_notebook()
    assert not isinstance(make_progress(True), NotebookBar)


def test_a_bar_counts_and_notes():
    assert 'style="width: 25.0%"' in bar_html(1, 4, "one")
    assert 'style="width: 0.0%"' in bar_html(0, 0, "none")
    bar = NotebookBar()
    bar.total, bar.done, bar.notes = 4, 2, ["<b>slow</b>"]
    assert "2/4 rollouts" in bar.html()
    assert "&lt;b&gt;slow&lt;/b&gt;" in bar.html()


def test_figures_are_drawn_within_their_line_whatever_they_are():
    html = figures_html([("a", -3.0, -5.0, 1.0), ("b", 7.0, None, None), ("c", None, None, None)])
    places = [float(part.split("%")[0]) for part in html.split("left: ")[1:]]
    assert all(0 <= place <= 100 for place in places)
    assert "–" in html


def test_a_drawing_is_a_picture_of_its_own_so_that_its_styles_stay_inside():
    found = Tags(page_html(image_html("<svg><style>*{display:none}</style></svg>", '"><script>')))
    assert found.tags == ["style", "div", "img"]


def test_a_training_shows_its_curve_and_its_notices(tmp_path):
    pytest.importorskip("torch")
    from tests.trainers import making
    from verifiers.trainers.watch.display import TrainingDisplay
    from verifiers.trainers.watch.notebook_panel import NotebookPanel

    report = making.trainer(tmp_path, max_steps=2).train()
    found = Tags(report._repr_html_())
    assert "Report(2 steps" in found.text
    assert found.tags.count("img") == 1
    display = TrainingDisplay(show=False)
    display.start(4, "sums")
    panel = NotebookPanel(display)
    assert "sums: 4 steps" in panel.html()
    display.update({"step": 1, "reward": 0.25})
    display.eval({"reward": 0.5, "low": 0.4, "high": 0.6, "n": 9})
    panel.notices.append("<i>every reply is cut off</i>")
    drawn = Tags(panel.html())
    assert drawn.tags.count("img") == 1
    assert "step 1/4" in drawn.text
    assert "<i>every reply is cut off</i>" in drawn.text


def test_what_a_run_says_and_what_it_does_is_shown_in_a_notebook_too(monkeypatch):
    pytest.importorskip("torch")
    cell = types.ModuleType("IPython.display")  # a kernel's
    cell.display = lambda shown, **_: types.SimpleNamespace(update=lambda shown: None)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", cell)
    from verifiers.trainers.watch.display import TrainingDisplay
    from verifiers.trainers.watch.notebook_panel import NotebookPanel

    display = TrainingDisplay(show=False)
    display.start(4, "sums")
    panel = display._live = NotebookPanel(display)
    display.counted().note("stopping: [bold]rollouts[/] under way are finished")
    display.say("a line")
    display.notice("every reply is cut off")
    display.enter("learning from 16 rollouts")
    said = Tags(panel.html()).text
    assert "stopping: [bold]rollouts[/] under way are finished" in said
    assert "a line" in said
    assert "! every reply is cut off" in said
    assert "learning from 16 rollouts" in said
    display.stop()
    assert "learning from" not in panel.html()


def test_runs_in_a_cell_are_a_frame_that_reaches_nothing(tmp_path):
    env, client = environment()
    env.evaluate(client, "fake", results_path=tmp_path / "one", use_tqdm=False)
    html = show(tmp_path / "one")._repr_html_()
    found = Tags(html)
    assert found.tags == ["iframe"]
    assert ("sandbox", "allow-scripts") in found.attributes
    with pytest.raises(ValueError, match="there is no run under"):
        show(roots=[tmp_path / "none"])
    assert Library([tmp_path]).runs()


def test_inline_needs_a_notebook_and_says_how():
    done = subprocess.run(
        [sys.executable, "-m", "verifiers", "view", "--inline", "--root", "."], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert "%load_ext verifiers" in done.stderr


# --- with a real kernel ---------------------------------------------------------------------------------------------

CELLS = (
    "import verifiers as vf",
    'env = vf.SingleTurnEnv(dataset=[{"question": f"{i}?", "answer": str(i % 2)} for i in range(6)], '
    'rubric=vf.Rubric([lambda completion, answer: float(completion[-1]["content"] == answer)]))',
    'env.evaluate(vf.FakeClient("1"), "fake", rollouts_per_example=2, results_path="runs/one")',
    'results = env.evaluate(vf.FakeClient("1"), "fake", results_path="runs/two")',
    "prompts, completions, rewards = results\nrewards",
    'results = await env.evaluate(vf.FakeClient("1"), "fake")\nresults',
    "%load_ext verifiers",
    "%vf view --inline runs/one runs/two",
    "%vf view --inline nowhere",
    "%vf eval arithmetic",
)
RUN = """
import json, sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.v4.new_notebook()
notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
NotebookClient(notebook, timeout=300).execute()
print(json.dumps([[dict(one) for one in cell.outputs] for cell in notebook.cells]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cells_in_a_real_kernel(tmp_path):
    """In an environment of its own, made here: nbclient and ipykernel are no dependencies of ours."""
    import json
    import os

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    needed = ["nbclient", "ipykernel", "nbformat", "aiohttp", "click", "msgspec", "rich"]
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *needed], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"no package registry: {installed.stderr.strip().splitlines()[-1:]}")
    done = subprocess.run(
        [python, "-W", "ignore", "-c", RUN],
        input=json.dumps(CELLS),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = json.loads(done.stdout.splitlines()[-1])
    bar, report = outputs[2]
    assert "12/12 rollouts" in bar["data"]["text/html"]
    assert bar["output_type"] == "display_data"
    assert "12 rollouts of 6 examples" in report["data"]["text/html"]
    assert outputs[3] == [], "a call that nobody looks at has not run yet"
    assert outputs[4][-1]["data"]["text/plain"] == "[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]"
    assert "6 rollouts of 6 examples" in outputs[5][-1]["data"]["text/html"]
    assert outputs[7][0]["data"]["text/html"].startswith("<iframe")
    assert "there is no run 'nowhere'" in outputs[8][0]["text"]
    assert "!vf eval arithmetic" in outputs[9][0]["text"]
