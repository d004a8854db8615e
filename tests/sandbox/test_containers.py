"""Sandbox backends: containers by an engine's command line (a stand-in notes and runs it), and one of somebody's own.

There is no engine on every machine: the tests marked slow use the real one where it answers.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from tests.support.doc_blocks import unrun_blocks
from verifiers.errors import ToolError
from verifiers.sandbox import ContainerSandbox, Result, SandboxError

STAND_IN = Path(__file__).with_name("stand_in_engine.py")
Calls = Callable[[], list[list[str]]]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A ``docker`` on the path that is the stand-in; gives the command lines that it was called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} {tmp_path} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin")
    return lambda: [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]


def test_a_container_has_no_network_no_rights_and_limits(engine: Calls) -> None:
    with ContainerSandbox(
        engine="docker", image="python:3.12-slim", memory_mb=256, disk_mb=32, processes=16
    ) as sandbox:
        assert sandbox.run("6 * 7").value == "42"
    started, *_ = engine()
    assert started[0] == "run"
    assert {"--interactive", "--rm", "--network=none", "--cap-drop=ALL", "--read-only"} <= set(started)
    assert {"--memory=256m", "--memory-swap=256m", "--pids-limit=16", "--user=65534:65534"} <= set(started)
    assert {"--security-opt=no-new-privileges", "--tmpfs=/work:rw,exec,mode=1777,size=32m"} <= set(started)
    assert "python:3.12-slim" in started


def test_cells_keep_their_state_and_say_what_they_did(engine: Calls) -> None:
    with ContainerSandbox(engine="docker", files={"n.txt": "1 2"}, output_kb=1) as sandbox:
        session = sandbox.session()
        first = session.run("print('hello'); x = open('n.txt').read()")
        assert (first.status, first.stdout, first.is_fresh) == ("ok", "hello\n", True)
        second = session.run("x")
        assert (second.value, second.is_fresh) == ("'1 2'", False)
        failed = session.run("import sys; print('so', file=sys.stderr); 1 / 0")
        assert failed.status == "error"
        assert failed.stderr == "so\n"
        assert "ZeroDivisionError" in failed.error
        assert session.run("print('y' * 5000)").status == "output"
        assert session.run("while True: pass", timeout_s=0.2).status == "timeout"
        assert session.run("x").value == "'1 2'"  # a cell out of time costs nothing but its time
        assert session.run("import os; os._exit(3)").status == "killed"
        again = session.run("'x' in globals()")
        assert (again.value, again.is_fresh) == ("False", True)
    assert [call[0] for call in engine()].count("run") == 2


@pytest.mark.parametrize(
    "forged",
    [
        '{"bogus": 1}',
        '{"number": 2, "status": ["ok"], "stdout": 5}',
        '{"number": 2, "errno": 99999}',
        '{"status": "ok", "stdout": "", "stderr": ""}',
        '{"ended": {"why": "memory"}}',
        "null",
        "[" * 100_000,
        "not JSON",
    ],
    ids=lambda text: text[:40],
)
def test_a_forged_reply_ends_its_container_and_raises_nothing(forged: str, engine: Calls) -> None:
    line = f"{forged}\n".encode()
    write = f"import os\nfor fd in range(3, 12):\n  try: os.write(fd, {line!r})\n  except OSError: pass"
    with ContainerSandbox(engine="docker") as sandbox:
        session = sandbox.session()
        assert session.run(write).status == "killed"
        session.write("a", "1")
        assert session.files() == ["a"]
        assert session.run("print('real')\n3").stdout == "real\n"


def test_a_forged_reply_to_a_request_for_files_is_an_error_of_the_code(engine: Calls) -> None:
    late = (
        "import os, threading, time\n"
        "def forge():\n  time.sleep(0.3)\n  for fd in range(3, 12):\n"
        "    try: os.write(fd, b'{}\\n')\n    except OSError: pass\n"
        "threading.Thread(target=forge).start()"
    )
    with ContainerSandbox(engine="docker") as sandbox:
        session = sandbox.session()
        assert session.run(late).status == "ok"
        time.sleep(1)
        with pytest.raises(ToolError):
            session.files()
        assert session.run("3").value == "3"


def test_output_that_a_cell_replaces_or_closes_is_kept_and_the_next_cell_has_its_own(engine: Calls) -> None:
    wrapped = "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint('é')"
    with ContainerSandbox(engine="docker") as sandbox:
        session = sandbox.session()
        for code in (
            wrapped,
            "import sys\nprint('é')\nsys.stdout.close()",
            "import os\nprint('é', flush=True)\nos.close(1)",
        ):
            assert (result := session.run(code)).stdout == "é\n", result
            after = session.run("print('next')\n3")
            assert (after.stdout, after.value, after.is_fresh) == ("next\n", "3", False)
        assert session.run("import sys\nsys.stdout = None\n4").value == "4"


def test_a_value_is_cut_to_the_output_limit(engine: Calls) -> None:
    with ContainerSandbox(engine="docker", output_kb=1) as sandbox:
        value = sandbox.run("'x' * 5000").value
    assert len(value) < 1100
    assert value.endswith("... (5002 characters)")


def test_files_go_in_and_out(engine: Calls) -> None:
    with ContainerSandbox(engine="docker") as sandbox:
        session = sandbox.session()
        session.write("folder/in.bin", b"\x00\x01")
        session.run("open('out.txt', 'w').write(repr(open('folder/in.bin', 'rb').read()))")
        assert session.read("out.txt") == b"b'\\x00\\x01'"
        assert session.files() == ["folder/in.bin", "out.txt"]
        with pytest.raises(FileNotFoundError):
            session.read("nothing")


def test_bash_keeps_its_folder_and_variables_until_it_exits(engine: Calls) -> None:
    with ContainerSandbox(engine="docker", language="bash") as sandbox:
        session = sandbox.session()
        assert session.run("x=5; mkdir -p a; cd a").exit_code == 0
        assert session.run("echo $x; basename $PWD").stdout == "5\na\n"
        assert session.run("false").exit_code == 1
        assert session.run("sleep 60", timeout_s=0.3).status == "timeout"
        after = session.run("echo [$x]; exit 3")
        assert (after.stdout, after.exit_code, after.is_fresh) == ("[]\n", 3, True)
        assert session.run("sleep 60 & exit 4").exit_code == 4


def test_a_cell_that_does_not_heed_its_alarm_loses_its_container(engine: Calls, monkeypatch: Any) -> None:
    monkeypatch.setattr("verifiers.sandbox.containers.GRACE_S", 0.3)
    with ContainerSandbox(engine="docker") as sandbox:
        session = sandbox.session()
        code = "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: time.sleep(1)"
        assert session.run(code, timeout_s=0.2).status == "timeout"
        assert session.run("1").is_fresh


def test_a_container_that_ended_by_itself_is_not_late_however_long_its_engine_takes(
    engine: Calls, monkeypatch: Any
) -> None:
    monkeypatch.setattr("verifiers.sandbox.containers.GRACE_S", 0.3)
    with ContainerSandbox(engine="docker", image="slow-engine") as sandbox:
        result = sandbox.run("import os; os.kill(os.getpid(), 9)", timeout_s=0.2)
    assert result.status == "memory", result


def test_what_cannot_be_started_is_a_sandbox_that_does_not_work(engine: Calls) -> None:
    with pytest.raises(SandboxError, match="Unable to find image"):
        ContainerSandbox(engine="docker", image="no-such-image").run("1")
    with pytest.raises(SandboxError, match="podman is not installed"):
        ContainerSandbox(engine="podman").run("1")
    with pytest.raises(ValueError, match="memory_mb"):
        ContainerSandbox(memory_mb=0)


def called(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def play(env: vf.Environment, *replies: Any) -> vf.State:
    client = vf.FakeClient(list(replies))
    (state,) = env.evaluate(client=client, model="m", use_tqdm=False).rollouts
    assert state["error"] is None, state["error"]
    return state


ROWS = [{"question": "go", "answer": "", "info": {"files": {"n.txt": "20"}}}]


def test_environments_run_code_in_containers(engine: Calls) -> None:
    env = vf.PythonEnv(dataset=ROWS, backend="docker", collect=["out.txt"])
    state = play(env, called("python", code="n = int(open('n.txt').read())"), called("python", code=WRITE), "done")
    assert [message["content"] for message in state["completion"] if message["role"] == "tool"][-1] == "2"
    assert state["files"] == {"out.txt": "21"}
    shell = vf.SandboxEnv(dataset=ROWS, backend=functools.partial(ContainerSandbox, engine="docker", image="mine"))
    state = play(shell, called("bash", command="cat n.txt"), "done")
    assert state["completion"][1]["content"] == "20"
    assert "mine" in engine()[-2]


WRITE = "open('out.txt', 'w').write(str(n + 1))"


class Elsewhere:
    """A backend of somebody's own: what a service that rents machines would be wrapped in."""

    def __init__(self, *, language: str, files: Any, memory_mb: int, timeout_s: float, packages: Any) -> None:
        self.opened, self.held = 0, dict(files)

    def session(self) -> Any:
        self.opened += 1
        return self

    async def run(self, code: str, *, timeout_s: float | None = None) -> Result:
        await asyncio.sleep(0)
        return Result(status="ok", stdout=f"ran {code} far away")

    async def read(self, name: str) -> bytes:
        return str(self.held[name]).encode()

    async def write(self, name: str, content: Any) -> None:
        self.held[name] = content

    async def files(self) -> list[str]:
        return list(self.held)

    def close(self) -> None:
        self.opened = 0


def test_a_backend_of_ones_own_is_a_class_with_a_session() -> None:
    state = play(
        vf.SandboxEnv(dataset=ROWS, backend=Elsewhere, collect=["n.txt"]), called("bash", command="ls"), "done"
    )
    assert state["completion"][1]["content"] == "ran ls far away"
    assert state["files"] == {"n.txt": "20"}
    with pytest.raises(ValueError, match="backend must be 'local', 'docker', 'podman'"):
        vf.SandboxEnv(dataset=ROWS, backend="cloud")


def working_engines() -> list[str]:
    found = [name for name in ("docker", "podman") if shutil.which(name)]
    return [name for name in found if subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0]


@pytest.mark.slow
@pytest.mark.parametrize("language", ["python", "bash"])
def test_a_real_engine_holds_what_code_does(language: Any) -> None:
    engines = working_engines()
    if not engines:
        pytest.skip("neither docker nor podman answers here")
    with ContainerSandbox(engine=engines[0], language=language, memory_mb=64) as sandbox:
        session = sandbox.session()
        if language == "bash":
            assert session.run("x=5; id -u").stdout == "65534\n"
            assert session.run("echo $x; touch /etc/x").exit_code != 0
            return
        assert session.run("x = 20").status == "ok"
        assert session.run("x + 1").value == "21"
        assert session.run("import socket; socket.create_connection(('192.0.2.1', 80), 2)").status == "error"
        assert session.run("b'x' * (1 << 30)").status in ("memory", "error")
        assert session.run("open('/etc/x', 'w')").status == "error"


@pytest.mark.slow
def test_the_block_of_the_page_plays_an_environment_in_containers() -> None:
    engines = working_engines()
    if not engines:
        pytest.skip("neither docker nor podman answers here")
    put = {'image="my/science:1"': f'engine="{engines[0]}"'}
    (code,) = unrun_blocks("sandbox.md", "needs Docker or Podman", put)
    names: dict[str, Any] = {"rows": ROWS}
    exec(code, names)
    state = play(names["env"], called("python", code="6 * 7"), "done")
    assert state["completion"][1]["content"] == "42"
