"""A file of C becomes functions, where there is a compiler: between small operations Python takes longer than they do.

Compiled once for this processor and kept in the cache folder. Whoever asks has another way for where there is none:
``VERIFIERS_COMPILE=0`` says to take it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from verifiers.engine.smollm2 import cache_folder

logger = logging.getLogger("verifiers.engine")

COMPILERS = ("cc", "gcc", "clang")
# Sums may be taken by parts where the source says so; what is not a number stays so.
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
PATIENCE_S = 120.0
HEADER = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """The functions of a source file; None without a compiler that can make something of it."""
    compiler = find_compiler()
    if compiler is None or ctypes.sizeof(ctypes.c_void_p) != 8 or sys.platform == "win32":
        return None
    text = _with_headers(source)
    command = [compiler, *FLAGS, *_for_this_processor(), "-shared", "-fPIC"]
    key = hashlib.sha256(b"\0".join([text, " ".join(command).encode(), _machine().encode()])).hexdigest()[:20]
    try:
        folder = _folder()
        built = folder / f"{source.stem}-{key}.so"
        if not built.exists():
            _build([*command, str(source), "-o"], built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("%s is not compiled, and done without: %s", source.name, _reason(error))
        return None


def find_compiler() -> str | None:
    """The C compiler that is used, unless it is switched off."""
    if os.environ.get("VERIFIERS_COMPILE", "1") == "0":
        return None
    own = os.environ.get("CC", "").split()
    return next((found for name in (*own[:1], *COMPILERS) if (found := shutil.which(name))), None)


def _with_headers(source: Path) -> bytes:
    """What will be compiled: the source and the files beside it that it names."""
    text = source.read_bytes()
    return b"\0".join([text, *((source.parent / name.decode()).read_bytes() for name in HEADER.findall(text))])


def _build(command: list[str], built: Path) -> None:
    """Compiled beside its place and then put there: whoever comes at the same time finds all of it or nothing."""
    handle, unfinished = tempfile.mkstemp(dir=built.parent, suffix=".part")
    os.close(handle)
    try:
        subprocess.run(
            [*command, unfinished, "-lm"], check=True, capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
        )
        os.replace(unfinished, built)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _folder() -> Path:
    """Where compiled code is kept: a folder that nobody else can write to, since it will be run."""
    folder = cache_folder() / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not yours alone to write to")
    return folder


def _for_this_processor() -> list[str]:
    return ["-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"]


def _machine() -> str:
    """What tells this machine from others: the folder may be shared by some that are not alike."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.platform()} {platform.processor()}"
    kinds = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join([*platform.libc_ver(), *kinds])


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return said.decode(errors="replace").strip()[-500:] if said else str(error)
