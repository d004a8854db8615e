"""A folder and the verdict of its check → a wheel that contains the verdict and digests of the checked files."""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
import zipfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verifiers.packages.install import InstallError, Program, find_program, run_program
from verifiers.packages.source import NotAnEnvironmentError, read_wheel

VERDICT = "verifiers-check.json"
MOST_VERDICT = 1 << 20  # bytes


def publish(
    folder: str | Path, output: str | Path, verdict: Mapping[str, Any], *, program: Program | None = None
) -> Path:
    """Build the wheel of a folder with its own build backend, and put the verdict into it."""
    with tempfile.TemporaryDirectory(prefix="vf-publish-") as work:
        program = find_program(program)
        words = ["wheel", "--no-deps", "--wheel-dir", work] if program == "pip" else ["build", "--wheel", "-o", work]
        run_program(program, [*words, str(Path(folder).resolve())])
        (built,) = Path(work).glob("*.whl")
        try:
            read_wheel(built)
        except NotAnEnvironmentError as error:
            raise InstallError(str(error)) from error
        Path(output).mkdir(parents=True, exist_ok=True)
        target = Path(output) / built.name
        _with_verdict(built, target, verdict)
    return target


def read_verdict(wheel: str | Path) -> dict[str, Any] | None:
    """The verdict in a wheel, or None. ``is_current`` says whether the digests match the files in the wheel."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(f".dist-info/{VERDICT}")]
        if not names or packed.getinfo(names[0]).file_size > MOST_VERDICT:
            return None
        try:
            found = json.loads(packed.read(names[0]))
        except ValueError:
            return None
        if not isinstance(found, dict):
            return None
        return {**found, "is_current": found.get("files") == _digests(packed)}


def in_words(verdict: Mapping[str, Any]) -> str:
    """A verdict in one line.

    >>> in_words({"counts": {"ok": 17, "warn": 1}, "verifiers_version": "0.2.0", "is_current": True})
    'checked with verifiers 0.2.0: 17 passed, 1 warning'
    """
    found = verdict.get("counts")
    counts = found if isinstance(found, dict) else {}
    words = {"fail": "failed", "ok": "passed", "warn": "warning"}
    result = ", ".join(f"{counts[key]} {word}" for key, word in words.items() if counts.get(key))
    if not verdict.get("is_current", True):
        return "its check was made for other files and does not apply to these"
    return f"checked with verifiers {verdict.get('verifiers_version')}: {result or 'nothing'}"


def _with_verdict(built: Path, target: Path, verdict: Mapping[str, Any]) -> None:
    with zipfile.ZipFile(built) as old:
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        counts: dict[str, int] = {}
        for one in verdict.get("verdicts", ()):
            counts[one["status"]] = counts.get(one["status"], 0) + 1
        about = {
            **verdict,
            "counts": counts,
            "verifiers_version": _own_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": _digests(old),
        }
        name, text = record.replace("RECORD", VERDICT), json.dumps(about, ensure_ascii=False, indent=1).encode()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
            for info in old.infolist():
                if info.filename not in (record, name):
                    new.writestr(info, old.read(info))
            new.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
            lines = old.read(record).decode().rstrip("\n")
            new.writestr(record, f"{lines}\n{name},sha256={digest},{len(text)}\n".lstrip("\n"))


def _digests(wheel: zipfile.ZipFile) -> dict[str, str]:
    """SHA-256 digests of the files that are installed, without the wheel's metadata."""
    return {
        name: hashlib.sha256(wheel.read(name)).hexdigest()
        for name in sorted(wheel.namelist())
        if ".dist-info/" not in name
    }


def _own_version() -> str | None:
    try:
        return version("verifiers")
    except PackageNotFoundError:
        return None
