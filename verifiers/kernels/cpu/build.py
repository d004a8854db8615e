"""Compile a C source file for this processor and cache the shared library; None without a compiler.

``VERIFIERS_COMPILE=0`` disables this. ``VERIFIERS_SANITIZE=1`` compiles with AddressSanitizer and UBSan.
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
from contextlib import suppress
from functools import cache
from pathlib import Path

from verifiers.files import cache_folder
from verifiers.kernels.cpu.private import check_file, open_private_folder

logger = logging.getLogger("verifiers.kernels")

COMPILERS = ("cc", "gcc", "clang")
FAILED = "the C compiler failed"
# Sums are reassociated only where the source allows it (`omp simd reduction`). NaN is preserved.
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
# For `make sanitize`: an out-of-bounds access or undefined behaviour aborts the process.
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
PATIENCE_S = 600.0  # compiling takes a few seconds on an idle machine
HEADER = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """The compiled functions of a source file; None without a compiler that can compile it."""
    compiler = find_compiler()
    if compiler is None or ctypes.sizeof(ctypes.c_void_p) != 8 or sys.platform == "win32":
        return None
    text = _with_headers(source)
    checks = SANITIZE if os.environ.get("VERIFIERS_SANITIZE", "0") == "1" else []
    command = [compiler, *FLAGS, *_for_this_processor(), *checks, "-shared", "-fPIC"]
    key = hashlib.sha256(b"\0".join([text, " ".join(command).encode(), _machine().encode()])).hexdigest()[:20]
    name, build = f"{source.stem}-{key}.so", [*command, str(source), "-o"]
    try:
        try:
            folder = cache_folder() / "compiled"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _built(folder, name, build)
        except PermissionError as error:
            logger.warning("compiled code is not cached: %s", error)
        with tempfile.TemporaryDirectory(prefix="verifiers-") as own:  # removed once the library is loaded
            return _built(Path(own), name, build)
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None)
        reason = stderr.decode(errors="replace").strip()[-500:] if stderr else error
        logger.info("%s cannot be compiled, so slower PyTorch operations are used: %s", source.name, reason)
        return None


def _built(folder: Path, name: str, command: list[str]) -> ctypes.CDLL:
    """The library of this name in a folder that no other user can write to. Compiles it if needed."""
    handle = open_private_folder(folder)
    try:
        with suppress(OSError):  # missing, damaged, or writable by others: compile it again
            return _load(handle, name)
        _build(command, Path(os.path.realpath(folder)), name, handle)
        return _load(handle, name)
    finally:
        os.close(handle)


def _load(folder: int, name: str) -> ctypes.CDLL:
    """Open, check and load the open file. Its name could meanwhile refer to another file."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        check_file(file, name)
        opened = f"/proc/self/fd/{file}"
        if not os.path.exists(opened):  # not Linux: using the name is safe because the folder is private
            return ctypes.CDLL(f"{_path_of(folder)}/{name}")
        found = ctypes.CDLL(opened)
    except BaseException:
        os.close(file)
        raise
    return found  # keep the file open: the loader caches libraries by path, so the descriptor must not be reused


def _path_of(folder: int) -> str:
    import fcntl

    command = getattr(fcntl, "F_GETPATH", None)  # macOS
    if command is None:
        raise OSError("this system cannot report the path of an open folder")
    return fcntl.fcntl(folder, command, bytes(1024)).rstrip(b"\0").decode()


def find_compiler() -> str | None:
    """The C compiler: $CC or the first of COMPILERS that is found; None if there is none or VERIFIERS_COMPILE=0."""
    if os.environ.get("VERIFIERS_COMPILE", "1") == "0":
        return None
    own = os.environ.get("CC", "").split()
    return next((found for name in (*own[:1], *COMPILERS) if (found := shutil.which(name))), None)


def why_none() -> str:
    """Why there is no compiled library, in a few words."""
    if os.environ.get("VERIFIERS_COMPILE", "1") == "0":
        return "VERIFIERS_COMPILE=0"
    return "no C compiler" if find_compiler() is None else FAILED


def _with_headers(source: Path) -> bytes:
    """The text of a source file and of the headers that it includes by relative path."""
    text = source.read_bytes()
    return b"\0".join([text, *((source.parent / name.decode()).read_bytes() for name in HEADER.findall(text))])


def _build(command: list[str], folder: Path, name: str, handle: int) -> None:
    """Compile to a temporary file, then rename it, so that other processes see a complete library or none."""
    file, unfinished = tempfile.mkstemp(dir=folder, suffix=".part")
    os.close(file)
    part = Path(unfinished).name
    try:
        subprocess.run(
            [*command, unfinished, "-lm"], check=True, capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
        )
        os.chmod(part, 0o700, dir_fd=handle)  # independent of the umask
        os.replace(part, name, src_dir_fd=handle, dst_dir_fd=handle)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=handle)


def _for_this_processor() -> list[str]:
    return ["-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"]


def _machine() -> str:
    """Identifies the processor and C library, because different machines may share the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.platform()} {platform.processor()}"
    kinds = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join([*platform.libc_ver(), *kinds])
