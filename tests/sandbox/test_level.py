"""The level is what the machine can give, found out by trying: other tests skip where it is too low, not this one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.sandbox.arena import ROOT, why_not
from verifiers.errors import SandboxError
from verifiers.sandbox import Level, Sandbox, level


def can_unshare() -> bool:
    """Does the system's own tool get the namespaces that the full level needs?"""
    tool = shutil.which("unshare")
    if tool is None:
        return False
    command = [tool, "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_machine_that_has_namespaces_gives_the_full_level() -> None:
    if not can_unshare():
        pytest.skip("namespaces cannot be made here, not even by the system's own tool")
    found = level()
    assert found.name == "full", found


@pytest.mark.usefixtures("full_level")
def test_the_level_is_known() -> None:
    found = level()
    assert found.name == "full"
    assert found.reasons == () or not found.landlock
    assert str(Level(name="none", reasons=("a", "b"))) == "none: a; b"


@pytest.mark.usefixtures("full_level")
@pytest.mark.parametrize("name", ["reduced", "none"])
def test_bash_is_refused_where_processes_cannot_be_held(name: str) -> None:
    if name == "reduced" and (reason := why_not("reduced")):
        pytest.skip(reason)
    with (
        Sandbox(language="bash", level=name, allow_unsafe=True) as sandbox,
        pytest.raises(SandboxError, match="bash starts processes"),
    ):
        sandbox.run("echo")


@pytest.mark.usefixtures("full_level")
def test_without_isolation_code_runs_only_when_asked_for_by_name() -> None:
    with Sandbox(level="none", allow_unsafe=True) as sandbox:
        assert sandbox.start().name == "none"
        assert sandbox.run("6 * 7").value == "42"
        assert sandbox.run("while True: pass", timeout_s=0.2).status == "timeout"


WITHOUT_PROC = """
import sys
sys.path.insert(0, sys.argv[1])
from verifiers.errors import SandboxError
from verifiers.sandbox import Sandbox
for arguments in ({}, {"level": "none", "allow_unsafe": True}):
    try:
        Sandbox(**arguments).run("1")
    except SandboxError as error:
        print(error)
"""


def test_on_a_machine_without_proc_the_error_names_it() -> None:
    unshare = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none /proc && exec "$@"',
        "sh",
    ]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces cannot be made here, not even by the system's own tool")
    command = [*unshare, sys.executable, "-c", WITHOUT_PROC, str(ROOT)]
    refused, failed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "this machine cannot isolate untrusted code" in refused
    assert "No such file or directory: /proc/" in refused
    assert "No such file or directory: '/proc/" in failed


WITHOUT_KERNEL_HELP = """
import sys
import verifiers.sandbox.host as host
host.BOOT = host.BOOT.replace("main(config)", '''
from verifiers.sandbox.inside import kernel, namespaces
def no(*args): raise PermissionError(1, "forbidden here")
namespaces.enter = no
if {no_landlock}: kernel.landlock_version = lambda: 0
main(config)
''')
from verifiers.sandbox import Sandbox, SandboxError, level
try:
    with Sandbox(allow_unsafe={allow_unsafe}) as sandbox:
        print(sandbox.start(), sandbox.run("1 + 1").value)
except SandboxError as error:
    print("refused:", error)
"""


@pytest.mark.usefixtures("full_level")
@pytest.mark.parametrize(
    ("no_landlock", "allow_unsafe", "said"),
    [
        (False, False, "reduced: namespaces cannot be used (forbidden here)"),
        (True, False, "refused: this machine cannot isolate untrusted code (namespaces cannot be used"),
        (True, True, "none: namespaces cannot be used (forbidden here); this kernel has no Landlock"),
    ],
)
def test_what_a_machine_lacks_lowers_the_level_and_never_silently(
    no_landlock: bool, allow_unsafe: bool, said: str
) -> None:
    code = WITHOUT_KERNEL_HELP.format(no_landlock=no_landlock, allow_unsafe=allow_unsafe)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said), done.stdout
    assert allow_unsafe or "allow_unsafe=True" in done.stdout or done.stdout.strip().endswith("2")


WITHOUT_LISTENER = """
import verifiers.sandbox.host as host
host.BOOT = host.BOOT.replace("main(config)", '''
from verifiers.sandbox.inside import locks
locks.listen = lambda: -1
main(config)
''')
from verifiers.sandbox import Sandbox
code = "import fcntl, os\\nfd = os.open('/usr/bin/env', os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX); print('went on')"
with Sandbox() as sandbox, sandbox.session() as session:
    print(sandbox.start().name, session.run(code).stdout, end="")
    import fcntl
    fcntl.flock(open("/usr/bin/env"), fcntl.LOCK_EX | fcntl.LOCK_NB)
with Sandbox(language="bash") as sandbox:
    print(sandbox.run("touch own; flock own echo went on; flock /usr/bin/env echo went on").stdout, end="")
"""


@pytest.mark.usefixtures("full_level")
def test_where_something_else_listens_to_system_calls_locks_are_granted_and_do_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LISTENER], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "full went on\nwent on\nwent on\n", done
