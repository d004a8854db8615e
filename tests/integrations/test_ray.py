"""Runs on Ray workers: what can be said without Ray, and (slow) a real cluster of two nodes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

import verifiers as vf
from tests.support.venvs import ROOT, python_with
from verifiers.integrations.ray import cluster

CONTRACT = ROOT / "tests" / "integrations" / "contracts" / "ray_contract.py"
SENTENCES = re.findall(r"^def (test_\w+)", CONTRACT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The contract, run once by pytest in an environment that has Ray and sees the packages of this one."""
    python = os.environ.get("VERIFIERS_RAY_PYTHON") or python_with("ray", "ray==2.60.0")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]]),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_raylet_start_wait_time_s": "90",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [str(python), "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--noconftest", "--timeout", "600"]
    folder = tmp_path_factory.mktemp("ray")
    done = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(ROOT), "--basetemp", str(folder / "tmp"), str(CONTRACT)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=1700,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sentence", SENTENCES)
def test_on_a_real_cluster(sentence: str, outcomes: str) -> None:
    told = outcomes[outcomes.find(f" {sentence} ") :]
    assert re.search(rf"^PASSED .*::{sentence}$", outcomes, re.MULTILINE), told[:8000]


def test_workers_that_are_not_known_are_refused_before_anything_is_begun() -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match="'ray', 'ray:HOST:PORT'"):
        env.evaluate(client=vf.FakeClient("a"), model="m", workers="slurm")
    for wrong in ("dask", "ray:"):
        with pytest.raises(ValueError, match=f"workers='{wrong}'"):
            vf.GRPOConfig(workers=wrong).check()


def test_without_ray_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    env = vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}])
    with pytest.raises(ImportError, match=r"pip install 'verifiers\[ray\]'"):
        env.evaluate(client=vf.FakeClient("a"), model="m", workers="ray", use_tqdm=False)


def test_a_ray_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="1.13.0"))
    with pytest.raises(ValueError, match=r"Ray 1\.13\.0 is too old"):
        cluster.import_ray()


def test_a_cluster_of_another_version_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1"

    def init(**given: object) -> None:
        raise RuntimeError(said)

    ended: list[bool] = []
    fake = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: ended.append(True))
    monkeypatch.setattr(cluster, "check_address", lambda address: None)
    with pytest.raises(ValueError, match=r"the Ray cluster at far:6379 cannot be used: Version mismatch: .* 2\.50\.0"):
        cluster.connect(fake, "far:6379")
    assert ended, "nothing is left behind"


def test_a_port_where_something_else_listens_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER_S", 0.2)
    with vf.FakeServer("x") as server, pytest.raises(ValueError, match="is not a Ray cluster"):
        cluster.check_address(f"127.0.0.1:{server.port}")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ValueError, match="is not a Ray cluster"):
            cluster.check_address(f"127.0.0.1:{silent.getsockname()[1]}")


def test_the_core_does_not_import_ray() -> None:
    code = "import sys, verifiers as vf; vf.Environment, vf.load_environment; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(ROOT), check=False).returncode == 0
