"""The exported file: everything inside, a policy for its own script only, and nothing that ends the data early."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from tests.viewer import making
from verifiers.viewer import Library, export_html


def test_the_file_holds_the_runs_and_lets_only_its_own_script_run(make_run, make_record, root, tmp_path):
    make_run(make_record(0, answer="</script><!-- <script>"), make_record(1, fails=True))
    file = tmp_path / "runs.html"
    size = export_html(Library([root]), file)
    text = file.read_text(encoding="utf-8")
    assert size == len(text.encode())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1]
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    for tag in ('script type="module"', "style"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    [embedded] = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', text, flags=re.DOTALL)
    assert "<" not in embedded
    [rollouts] = json.loads(embedded)["rollouts"].values()
    assert rollouts[0]["answer"] == "</script><!-- <script>"
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_a_large_run_is_cut_and_says_so_but_its_figures_are_whole(make_run, make_record, root, tmp_path):
    make_run(*(make_record(i, reward=i / 10) for i in range(10)))
    file = tmp_path / "runs.html"
    export_html(Library([root]), file, limit=3)
    [embedded] = re.findall(r'id="embedded">(.*?)</script>', file.read_text(encoding="utf-8"), flags=re.DOTALL)
    data = json.loads(embedded)
    [run] = data["runs"]
    assert len(data["rollouts"][run["id"]]) == 3
    assert run["notices"] == ["this file has the first 3 of 10 rollouts; metrics are over all"]
    assert data["figures"][run["id"]]["figures"][0]["n"] == 10


def test_nothing_to_export_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="there is no run to export; pass one: vf view PATH"):
        export_html(Library([tmp_path]), tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_a_training_that_is_cut_offers_only_the_steps_whose_samples_are_in_the_file(root, tmp_path):
    making.train(root, steps=40)
    file = tmp_path / "runs.html"
    export_html(Library([root]), file, limit=32)
    [embedded] = re.findall(r'id="embedded">(.*?)</script>', file.read_text(encoding="utf-8"), flags=re.DOTALL)
    [run] = json.loads(embedded)["runs"]
    assert run["steps"] == [[5, 16], [10, 16]]
