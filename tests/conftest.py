"""Every test sees the same bare machine: no keys, no proxies, no network beyond loopback, caches of its own."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


# Set at import, before any test module can import `datasets` or `openai`, and inherited by the processes tests start.
for name in list(os.environ):
    if name.upper().endswith(("_API_KEY", "_PROXY", "_BASE_URL")) or name in {"HF_TOKEN", "OPENAI_ORG_ID"}:
        del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
if not any(Path(f"/dev/{name}").exists() for name in ("nvidia0", "dxg", "kfd")):
    os.environ["TRITON_INTERPRET"] = "1"  # no card: kernels run on the CPU; read when Triton is imported
# A suite started in the background (`nohup make test &`) ignores these signals, and so would the programs of its tests.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
_caches = tempfile.TemporaryDirectory(prefix="verifiers-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _caches.name


def _is_here(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost") or str(host).endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


@pytest.fixture(scope="session", autouse=True)
def only_loopback() -> Iterator[None]:
    """Any other host looks as it does with the cable out, so that no test passes only on a connected machine."""
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def resolve_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_here(host):
            raise socket.gaierror(socket.EAI_NONAME, f"tests reach this machine only, not {host!r}")
        return resolve(host, *args, **kwargs)

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_here(address[0]):
            raise OSError(errno.ENETUNREACH, f"tests reach this machine only, not {address[0]!r}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve_here)
        patch.setattr(socket.socket, "connect", connect_here)
        yield


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many blocks of the documentation ran, and name each that did not."""
    notes = [
        (key, value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for key, value in report.user_properties
    ]
    ran = sum(value for key, value in notes if key == "blocks_run")
    not_run = sorted(value for key, value in notes if key == "block_not_run")
    if ran or not_run:
        terminalreporter.write_line(f"documentation: {ran} blocks run, {len(not_run)} not run")
        for line in not_run:
            terminalreporter.write_line(f"  {line}")
