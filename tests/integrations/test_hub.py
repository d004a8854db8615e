"""Data sets and environments to a hub and back, against a stand-in of its API on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_hub import Hub, serve_hub
from tests.support.venvs import ROOT, python_with

AGAIN = """
import json, datasets, verifiers as vf
rows = datasets.load_dataset("me/capitals-runs", split="train")
asked = rows.select_columns(["prompt", "answer"])
env = vf.SingleTurnEnv(eval_dataset=asked, rubric=vf.Rubric([lambda answer: 1.0]))
again = env.evaluate(client=vf.FakeClient("Paris"), model="fake", use_tqdm=False)
found = {"columns": rows.column_names, "again": [again["answer"], again["prompt"]]}
print(json.dumps(found | {name: list(rows[name]) for name in ("reward", "answer", "prompt")}))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as hub:
        yield hub


def environment_of(hub: Hub, home: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "HF_TOKEN": "hf_" + "x" * 34,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(ROOT),
    }


def run(command: list[str], env: dict[str, str], folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_evaluation_is_pushed_as_a_data_set_that_loads_again_and_is_evaluated_again(
    hub: Hub, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    env = environment_of(hub, tmp_path)
    command = [sys.executable, "-m", "verifiers", "eval", "capitals", "-m", "fake", "-n", "3", "-r", "2"]
    shown = run([*command, "-H", "-D", "me/capitals-runs"], env, tmp_path)
    assert "pushed to the hub as me/capitals-runs" in shown
    assert [path for path in hub.repos["me/capitals-runs"] if path.endswith(".parquet")]
    (saved,) = tmp_path.glob("outputs/evals/*/*/results.jsonl")
    records = [json.loads(line) for line in saved.read_text().splitlines()]
    found = json.loads(run([sys.executable, "-c", AGAIN], env, tmp_path).splitlines()[-1])
    assert len(found["reward"]) == 6
    assert sorted(found["reward"]) == sorted(record["reward"] for record in records)
    assert sorted(found["answer"]) == sorted(record["answer"] for record in records)
    assert {"completion", "example_id", "metrics", "prompt", "reward"} <= set(found["columns"])
    assert found["again"] == [found["answer"], found["prompt"]]
    assert hub.unknown == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (401, "the hub answered 401; the token is invalid: set HF_TOKEN, or run `hf auth login`"),
        (403, "the hub answered 403; this token lacks the permission"),
        (404, "the hub answered 404; there is no such repository, or this token has no access to it"),
        (500, "the hub answered 500; it had a server error: try again later"),
        (0, "the hub cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_sentence_and_nothing_is_lost(
    hub: Hub, fault: int, said: str, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    hub.fault = fault
    script = (
        "import verifiers as vf, huggingface_hub.utils._http as http\n"
        "http.time.sleep = lambda seconds: None\n"  # its client tries again for half a minute
        "env = vf.SingleTurnEnv(eval_dataset=[{'question': 'q', 'answer': 'a'}], rubric=vf.Rubric([lambda: 1.0]))\n"
        "results = env.evaluate(client=vf.FakeClient('a'), model='fake', use_tqdm=False)\n"
        "for run in (lambda: env.make_dataset(results, push_to_hub=True, hub_name='me/x'), vf.load_example_dataset):\n"
        "    try:\n"
        "        run()\n"
        "    except vf.InfraError as error:\n"
        "        print(error)\n"
        "print(results['reward'])\n"
    )
    shown = run([sys.executable, "-c", script], environment_of(hub, tmp_path), tmp_path).splitlines()
    assert shown[-3].startswith(f"the data set 'me/x' was not pushed: {said}")
    assert shown[-2].startswith(f"the data set 'openai/gsm8k' cannot be loaded: {said}")
    assert shown[-1] == "[1.0]"


def test_a_run_whose_push_failed_is_on_disk_and_is_pushed_by_the_command_that_is_told(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub.fault = 403
    env = environment_of(hub, tmp_path)
    command = [sys.executable, "-m", "verifiers", "eval", "capitals", "-m", "fake", "-n", "2", "-r", "1"]
    done = subprocess.run(
        [*command, "-H", "-D", "me/x"], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "Error: the data set 'me/x' was not pushed: the hub answered 403" in done.stderr
    again = done.stderr.split("push them again with: vf ")[1].strip()
    hub.fault = None
    assert "pushed to the hub as me/x" in run([sys.executable, "-m", "verifiers", *again.split()], env, tmp_path)
    assert [path for path in hub.repos["me/x"] if path.endswith(".parquet")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_published_wheel_is_installed_by_prime_and_evaluated(tmp_path: Path) -> None:
    python = python_with("prime", "prime==0.18.0")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PRIME_API_KEY": "none"}
    vf = [sys.executable, "-m", "verifiers"]
    run([*vf, "init", "wheel-of-mine"], env, tmp_path)
    run([*vf, "publish", "wheel-of-mine", "-o", "dist"], env, tmp_path)
    ours = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(ROOT)]
    run(ours, env, tmp_path)  # what the environment asks for by name is this package
    with serve_hub(tmp_path / "dist") as hub:
        env |= {"PRIME_API_BASE_URL": hub.url, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        env["VIRTUAL_ENV"] = str(python.parents[1])
        run([str(python.parent / "prime"), "env", "install", "me/wheel-of-mine", "--with", "pip"], env, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shown = run([str(python), "-m", "verifiers", "eval", "wheel-of-mine", "-m", "fake", "-n", "2"], env, elsewhere)
    assert "wheel-of-mine" in shown
    run([str(python), "-m", "pip", "uninstall", "--yes", "wheel-of-mine"], env, tmp_path)
