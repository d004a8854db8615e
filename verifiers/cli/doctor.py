"""``vf doctor``: shows what is installed, what this machine can do and how fast, and what to run next."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from verifiers.cli.answering import check_extra
from verifiers.cli.main import own_version
from verifiers.cli.tables import fitted, some
from verifiers.packages import list_environments

PROBE_TIMEOUT_S = 120
CPU_FEATURES = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
NOT_SHOWN = ("classic", "dev", "docs")  # extras that combine others, or are for developing this library
PROGRAMS = ("git", "uv")
COMPILED = "there is one: models on the CPU are run in C, and small ones are trained in C"
NOT_COMPILED = "there is none: with cc, gcc or clang, models on the CPU would run in C, which is faster"
KEYS = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "HF_TOKEN")


@click.command("doctor", short_help="Show what is installed and what this machine can do.")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
@click.option("--no-probe", is_flag=True, help="Skip what takes a few seconds: torch, measurements, the sandbox.")
def doctor(model: str | None, as_json: bool, no_probe: bool) -> None:
    """Show what is installed, what this machine can do, and what to run next.

    With a MODEL (a folder, a GGUF file, a name on the hub, smollm2): load it, and show which backend runs it here.
    """
    if model is not None:
        shown = examine_model(model)
        click.echo(json.dumps(shown) if as_json else "\n".join(f"{name:<11}{value}" for name, value in shown.items()))
        return
    found = examine(with_probe=not no_probe)
    click.echo(json.dumps(found) if as_json else "\n".join(describe(found)))


def examine(*, with_probe: bool = True) -> dict[str, Any]:
    """The whole report of ``vf doctor``, as plain data."""
    extras = read_extras()
    found: dict[str, Any] = {
        "verifiers": own_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_features": cpu_features(),
        "memory_bytes": memory_bytes(),
        "extras": extras,
        "keys": {name: bool(os.environ.get(name)) for name in KEYS},
        "programs": {name: shutil.which(name) for name in PROGRAMS},
        "environments": sum(listed.is_local for listed in list_environments()),
        "sandbox": sandbox_level() if with_probe else None,
    }
    has_torch = _version("torch") is not None
    found["engine"] = run_probe() if has_torch and with_probe else None
    found["next"] = advise(found, has_torch=has_torch)
    return found


def examine_model(name: str) -> dict[str, Any]:
    """How a model is run and trained on this machine, and, if it is not the fastest way, why."""
    check_extra()
    try:
        from verifiers.engine.local_model import LocalModel
        from verifiers.kernels import autograd

        with LocalModel(name) as local:
            engine = local.engine
            return {
                "model": name,
                "sampled": str(local.backend),
                "learns": autograd.describe(engine.model),
                "device": str(engine.device),
                "type": str(engine.dtype).removeprefix("torch."),
                "rows": engine.rows,
                "length": engine.length,
            }
    except (ImportError, ValueError, OSError) as error:
        raise click.ClickException(f"{name} cannot be run here: {error}") from error


def read_extras() -> dict[str, dict[str, str | None]]:
    """The libraries of each extra of this package, with their installed version, or None."""
    extras: dict[str, dict[str, str | None]] = {}
    for extra, need in _needs():
        name = re.match(r"[\w.-]+", need)
        if name is not None and extra not in NOT_SHOWN and name[0] != "verifiers":
            extras.setdefault(extra, {})[name[0]] = _version(name[0])
    return extras


def _needs() -> Iterator[tuple[str, str]]:
    """Pairs (extra, requirement) of the installed package, or from pyproject.toml in an uninstalled source tree."""
    try:
        needs = importlib.metadata.requires("verifiers") or []
    except importlib.metadata.PackageNotFoundError:
        source = Path(__file__).resolve().parents[2] / "pyproject.toml"
        table = tomllib.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
        for extra, needs in table.get("project", {}).get("optional-dependencies", {}).items():
            yield from ((extra, need) for need in needs)
        return
    for need in needs:
        marker = re.search(r"extra == ['\"]([\w-]+)['\"]", need)
        if marker is not None:
            yield marker[1], need


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_features() -> list[str]:
    """The features of this processor that matter for a model's arithmetic."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return []
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    words = set(flags[1].split()) if flags else set()
    return [name for name in CPU_FEATURES if name in words]


def memory_bytes() -> dict[str, int | None]:
    """The total and available memory of the machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return {"total": total, "available": None}
    available = re.search(r"^MemAvailable:\s*(\d+) kB", text, flags=re.MULTILINE)
    return {"total": total, "available": int(available[1]) * 1024 if available else None}


def sandbox_level() -> dict[str, Any]:
    """How well the sandbox isolates code here; it is tried out."""
    from verifiers.errors import Error
    from verifiers.sandbox import level

    try:
        found = level()
    except (Error, OSError) as error:
        return {"level": "none", "reasons": [str(error)]}
    return {"level": found.name, "reasons": list(found.reasons)}


def run_probe() -> dict[str, Any]:
    """What torch can do here, measured in a separate process; ``{"error": …}`` if it does not start."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "verifiers.cli.probe"],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch took longer than {PROBE_TIMEOUT_S} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": f"torch does not start: {last[0]}"}
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def advise(found: dict[str, Any], *, has_torch: bool) -> list[str]:
    """Commands to run next, the easiest first."""
    lines = ["vf eval arithmetic -m fake              a trial run, without a model"]
    if has_torch and "error" not in (found["engine"] or {}):
        lines.append("vf eval capitals -m smollm2             a small real model in this process")
    else:
        lines.append("pip install 'verifiers[local]'          a model in this process")
    if found["keys"]["OPENAI_API_KEY"]:
        lines.append("vf eval arithmetic -m gpt-4.1-mini      the endpoint of your key")
    else:
        lines.append("export OPENAI_API_KEY=…                 a hosted model, or -b URL")
    if not found["environments"]:
        lines.append("vf init my-env                          an environment of your own")
    else:
        lines.append("vf list                                 environments, with their arguments")
    return lines


# --- as text ------------------------------------------------------------------------------------------------------


def describe(found: dict[str, Any]) -> list[str]:
    """The report as text."""
    memory = found["memory_bytes"]
    free = "" if memory["available"] is None else f", {_gib(memory['available'])} free"
    features = f" ({', '.join(found['cpu_features'])})" if found["cpu_features"] else ""
    set_keys = [name for name, is_set in found["keys"].items() if is_set]
    lines = [
        f"verifiers  {found['verifiers']} on Python {found['python']}, {found['platform']}",
        f"machine    {found['cpus']} CPUs{features}, {_gib(memory['total'])} of memory{free}",
        *_describe_extras(found["extras"]),
        *_describe_engine(found["engine"]),
        f"keys       {', '.join(set_keys) or 'none is set'}",
        f"sandbox    {_describe_sandbox(found['sandbox'])}",
        f"programs   {', '.join(name for name, path in found['programs'].items() if path) or 'neither git nor uv'}",
        f"here       {some(found['environments'], 'environment')} in ./environments",
    ]
    return [*fitted(lines, indent=11), "next", *fitted(f"  {line}" for line in found["next"])]


def _describe_extras(extras: dict[str, dict[str, str | None]]) -> list[str]:
    """The installed libraries, the complete extras, and the missing extras (or libraries of incomplete ones)."""
    there = {name: version for libraries in extras.values() for name, version in libraries.items() if version}
    whole = [extra for extra, libraries in extras.items() if all(libraries.values())]
    lacking = []
    for extra, libraries in extras.items():
        missing = [name for name, version in libraries.items() if version is None]
        is_in_part = 0 < len(missing) < len(libraries)
        lacking += [f"{extra} ({', '.join(missing)})" if is_in_part else extra] if missing else []
    return [
        f"libraries  {', '.join(f'{name} {version}' for name, version in sorted(there.items())) or 'the core alone'}",
        f"extras     {', '.join(whole) or 'none'}",
        *([f"missing    {', '.join(lacking)}: pip install 'verifiers[NAME]'"] if lacking else []),
    ]


def _describe_sandbox(sandbox: dict[str, Any] | None) -> str:
    if sandbox is None:
        return "not tried"
    words = {
        "full": "full: model-written code runs in its own namespaces",
        "reduced": "reduced: model-written code is isolated, but less strictly than at the full level",
        "none": "none: model-written code cannot be isolated here, and is refused",
    }
    reasons = f" ({'; '.join(sandbox['reasons'])})" if sandbox["reasons"] else ""
    return f"{words.get(sandbox['level'], sandbox['level'])}{reasons}"


def _describe_engine(engine: dict[str, Any] | None) -> list[str]:
    if engine is None:
        return ["engine     not tried"]
    if "error" in engine:
        return [f"engine     {engine['error']}"]
    device = "CPU" if engine["device"] == "cpu" else f"{engine['gpus']} × {engine['gpu']}, {_gib(engine['gpu_bytes'])}"
    speeds = ", ".join(f"{name} {speed:,}" for name, speed in engine["tokens_per_s"].items())
    return [
        f"engine     torch {engine['torch']} on {device}, {engine['threads']} threads, {engine['dtype']}",
        f"speed      up to {engine['tokens_per_s'][engine['dtype']]:,} tokens/s with SmolLM2-135M, {engine['rows']} "
        f"rollouts at once (its matrix products, measured: {speeds})",
        f"compiler   {COMPILED if engine['is_compiled'] else NOT_COMPILED}",
    ]


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
