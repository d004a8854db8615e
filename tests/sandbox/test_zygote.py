"""The first process: how it starts, is shared, fails and ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sandbox.arena import ROOT, descendants, wait_until
from verifiers.errors import SandboxError
from verifiers.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("full_level")


def test_a_sandbox_whose_zygote_is_gone_raises_and_then_starts_anew() -> None:
    with Sandbox(level="full", packages=("fractions",)) as sandbox, sandbox.session() as session:
        session.run("x = 1")
        assert sandbox._host is not None
        assert sandbox._host._popen is not None
        sandbox._host._popen.kill()
        assert wait_until(lambda: not sandbox._host.is_alive())  # type: ignore[union-attr]
        with pytest.raises(SandboxError, match="the sandbox's first process is gone"):
            session.run("x")
        assert session.run("1 + 1").value == "2"
        assert sandbox.run("1 + 1").value == "2"


def test_a_zygote_that_cannot_start_is_an_error_of_the_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Sandbox(packages=("decimal",)) as sandbox, pytest.raises(SandboxError, match="could not be started") as caught:
        sandbox.run("1")
    assert caught.value.blame == "infrastructure"


def test_a_zygote_that_breaks_at_once_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.sandbox.host.BOOT", "raise RuntimeError('broken on purpose')")
    with Sandbox(packages=("statistics",)) as sandbox, pytest.raises(SandboxError, match="broken on purpose"):
        sandbox.run("1")


def test_running_out_of_descriptors_is_an_error_of_the_infrastructure_and_passes() -> None:
    code = """
import os, resource
from verifiers.sandbox import Sandbox, SandboxError
with Sandbox(warm=0) as sandbox:
    sandbox.start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, limits[1]))
    for _ in range(3):
        try: sandbox.run("1")
        except SandboxError as error: print("Too many open files" in str(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(sandbox.run("1 + 1").value, sandbox._host.places.is_busy())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "2", "False"], done


def test_closing_ends_every_process_and_using_it_again_starts_anew() -> None:
    sandbox = Sandbox(packages=("heapq",), warm=2)
    sandbox.start()
    before = set(descendants(os.getpid()))
    session = sandbox.session()
    session.run("x = 1")
    sandbox.close()
    sandbox.close()
    assert wait_until(lambda: set(descendants(os.getpid())) < before)
    assert session.run("'x' in globals()").value == "False"
    assert sandbox.run("1 + 1").value == "2"
    sandbox.close()


def test_a_few_zygotes_that_nobody_uses_are_kept_for_the_next_sandbox() -> None:
    hosts = []
    for name in ("bisect", "calendar", "colorsys", "csv"):
        with Sandbox(packages=(name,), warm=0) as sandbox:
            sandbox.start()
            hosts.append(sandbox._host)
    assert [host is not None and host.is_alive() for host in hosts] == [False, False, True, True]
    with Sandbox(packages=("csv",), warm=0) as sandbox:
        sandbox.start()
        assert sandbox._host is hosts[-1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # other tests left idle threads
def test_a_fork_of_the_application_uses_a_zygote_of_its_own() -> None:
    with Sandbox() as sandbox, sandbox.session() as session:
        session.run("x = 1")
        child = os.fork()
        if child == 0:
            try:
                works = sandbox.run("2").value == "2"
                session.close()
                sandbox.close()
                os._exit(0 if works else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert session.run("x").value == "1"


def test_importing_starts_nothing_and_is_quick() -> None:
    code = (
        "import sys, time, asyncio; before = time.process_time(); import verifiers.sandbox;"
        "print(time.process_time() - before, 'numpy' in sys.modules, 'ctypes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    took_s, *loaded = done.stdout.split()
    assert loaded == ["False", "False"]
    assert float(took_s) < 0.5
