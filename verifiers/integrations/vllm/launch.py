"""``vf-vllm``: flags → a vLLM server that replaces this process and accepts new weights from a trainer."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click

MODULE = "vllm.entrypoints.openai.api_server"
HELP_TIMEOUT_S = 300.0
INTERRUPTED = 130  # the exit code of a program ended by Ctrl-C
WORKER, WORKER_FOLDER = "verifiers_gloo.Worker", Path(__file__).parent / "worker"
SERVER = WORKER_FOLDER / "verifiers_vllm.py"  # runs MODULE with the weight version of each token added to replies
LOOPBACK = ("127.0.0.1", "::1", "localhost")
USAGE = """\
Usage: vf-vllm --model MODEL [--python PATH] [FLAGS OF VLLM]

Start vLLM's OpenAI server such that a trainer can give it new weights.

  --model MODEL    a hub name or a folder
  --python PATH    the Python that has vLLM, if it is in another environment
  --host, --port   default: 127.0.0.1 and 8000; with 0.0.0.0 others can replace
                   the weights, too

Every other flag goes to vLLM: --tensor-parallel-size, --data-parallel-size,
--max-model-len, --dtype, --gpu-memory-utilization, --enforce-eager,
--enable-prefix-caching, --enable-lora, … (all of them: vf-vllm --help=all)
"""


@dataclass(frozen=True, slots=True)
class Retired:
    """A flag of older vLLM versions: its replacement (None: not needed), and whether it has a value."""

    now: str | None
    has_value: bool = False


RETIRED = {
    "--disable-log-requests": Retired("--no-enable-log-requests"),
    "--no-enable-log-requests": Retired("--disable-log-requests"),
    "--guided-decoding-backend": Retired("--structured-outputs-config.backend", has_value=True),
    "--worker-use-ray": Retired("--distributed-executor-backend=ray"),
    "--device": Retired(None, has_value=True),
    "--num-scheduler-steps": Retired(None, has_value=True),
    "--swap-space": Retired(None, has_value=True),
    "--use-v2-block-manager": Retired(None),
}


class LaunchError(Exception):
    """The server cannot be started; the message is shown to the user."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point of ``vf-vllm``. The process becomes the server, so signals and exit code are the server's."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if not flags or flags[0] in ("-h", "--help"):
        click.echo(USAGE, nl=False)
        sys.exit(0 if flags else 2)
    try:
        python, flags = take_python(flags)
        known = ask_options(python)
        check_port(flags)
        takes_weights = "--weight-transfer-config" in (known or ())  # then its engine also tracks weight versions
        flags, notices = prepare(flags, known, has_card=not takes_weights or has_card(python))
    except LaunchError as error:
        click.echo(f"vf-vllm: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    for notice in notices:
        click.echo(f"vf-vllm: {notice}", err=True)
    env = environment(flags, os.environ)
    if warning := exposure(flags, env):
        click.echo(f"vf-vllm: {warning}", err=True)
    sys.stderr.flush()
    os.execve(python, [python, *([str(SERVER)] if takes_weights else ["-m", MODULE]), *flags], env)


def take_python(flags: Sequence[str]) -> tuple[str, list[str]]:
    """The Python to run vLLM with, and the flags without ``--python``."""
    wanted = value_of("--python", flags)
    if wanted is None:
        return sys.executable, list(flags)
    found = shutil.which(os.path.expanduser(wanted))
    if found is None:
        raise LaunchError(f"--python {wanted}: there is no such program")
    return found, _without("--python", flags, has_value=True)


def ask_options(python: str) -> set[str] | None:
    """The options of the installed vLLM; None if its help fails, in which case starting it shows why."""
    try:
        asked = subprocess.run(
            [python, "-m", MODULE, "--help"], capture_output=True, text=True, timeout=HELP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{python} -m {MODULE} --help does not work: {error}") from error
    if asked.returncode and re.search(r"No module named '?vllm'?(?![.\w])", asked.stderr):
        raise LaunchError(
            f"vLLM is not installed for {python}; run `pip install vllm`, or pass the Python that has it with --python"
        )
    return None if asked.returncode else set(re.findall(r"(?<![\w-])--[a-z0-9][\w-]*", asked.stdout))


def names_of(flags: Sequence[str]) -> set[str]:
    return {_name(flag) for flag in flags if flag.startswith("--")}


def has_card(python: str) -> bool:
    """Does that Python's PyTorch see a GPU? vLLM on CPUs cannot receive weights by NCCL."""
    code = "import torch; print(torch.cuda.is_available())"
    try:
        asked = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=HELP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{python} cannot import torch: {error}") from error
    return "False" not in asked.stdout


def check_port(flags: Sequence[str]) -> None:
    """Raise if the port is in use, before a model is loaded for minutes."""
    if "--config" in names_of(flags) or value_of("--uds", flags) is not None:
        return
    host, port = value_of("--host", flags) or LOOPBACK[0], value_of("--port", flags) or "8000"
    if not port.isdecimal() or port == "0":
        return
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def prepare(
    flags: Sequence[str], known: AbstractSet[str] | None, *, has_card: bool = True
) -> tuple[list[str], list[str]]:
    """The flags in the spelling of the installed vLLM, with our defaults, and notices for the user.

    >>> known = {"--model", "--host", "--no-enable-log-requests"}
    >>> flags, notices = prepare(["--model", "m", "--host", "::1", "--disable-log-requests"], known)
    >>> flags
    ['--model', 'm', '--host', '::1', '--no-enable-log-requests']
    >>> notices
    ['this vLLM no longer knows --disable-log-requests; it is started with --no-enable-log-requests instead']
    """
    names = names_of(flags)
    if "--help" in names:
        return list(flags), []
    if not names & {"--model", "--config"}:
        raise LaunchError("--model is missing: a hub name or a folder")
    ready, notices = list(flags), []
    for name in sorted(names - (known or names)):
        if name in RETIRED:
            ready, notice = _replace(name, ready, known or set())
            notices.append(notice)
        elif not any(option.startswith(name) for option in known or ()):  # argparse accepts a prefix of an option
            raise LaunchError(_unknown(name, known or set()))
    if "--config" not in names:  # flags added here would override the file
        if not names & {"--host", "--uds"}:
            ready += ["--host", "127.0.0.1"]
        if "--logprobs-mode" in (known or ()) and "--logprobs-mode" not in names:
            ready += ["--logprobs-mode", "processed_logprobs"]  # of the sampling distribution
        ready += _transfer(names, known or set(), has_card=has_card)
    return ready, notices


def _transfer(names: AbstractSet[str], known: AbstractSet[str], *, has_card: bool) -> list[str]:
    """Flags for receiving weights: vLLM's own NCCL backend on GPUs, else our gloo backend for its workers."""
    if "--weight-transfer-config" in names or "--weight-transfer-config" not in known:
        return []
    if has_card:
        return ["--weight-transfer-config", '{"backend": "nccl"}']
    if "--worker-extension-cls" in names:  # the user's own, which must not be replaced
        return []
    return ["--weight-transfer-config", '{"backend": "gloo"}', "--worker-extension-cls", WORKER]


def environment(flags: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """The server's environment variables. The endpoints for new weights are on, unless the caller turned them off.

    >>> environment(["--model", "m"], {"VLLM_SERVER_DEV_MODE": "0"})
    {'VLLM_SERVER_DEV_MODE': '0'}
    """
    wanted = {"VLLM_SERVER_DEV_MODE": "1"}
    if any(_name(flag) == "--enable-lora" for flag in flags):
        wanted["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    found = {**wanted, **env}
    if WORKER in flags:  # the worker's Python may not have this package
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WORKER_FOLDER), env.get("PYTHONPATH")]))
    return found


def exposure(flags: Sequence[str], env: Mapping[str, str]) -> str | None:
    """A warning if other machines can replace the weights."""
    host = value_of("--host", flags)
    if host is None or host in LOOPBACK or env.get("VLLM_SERVER_DEV_MODE") == "0":
        return None
    return (
        f"anyone who can reach {host} can replace the weights, even with --api-key; "
        "keep it inside a trusted network, or set VLLM_SERVER_DEV_MODE=0 to turn this off"
    )


def value_of(name: str, flags: Sequence[str]) -> str | None:
    """The last value given for a flag.

    >>> value_of("--host", ["--host", "a", "--port", "1", "--host=b"])
    'b'
    """
    found = None
    for flag, following in zip(flags, [*flags[1:], None], strict=True):
        if flag.startswith("--") and _name(flag) == name:
            found = flag.split("=", 1)[1] if "=" in flag else following
    return found


def _name(flag: str) -> str:
    """The option name: ``--max-model-len`` of ``--max_model_len=8``, ``--hf-overrides`` of ``--hf-overrides.key``."""
    return flag.split("=", 1)[0].split(".", 1)[0].replace("_", "-")


def _without(name: str, flags: Sequence[str], *, has_value: bool) -> list[str]:
    kept: list[str] = []
    rest = iter(flags)
    for flag in rest:
        if not flag.startswith("--") or _name(flag) != name:
            kept.append(flag)
        elif has_value and "=" not in flag:
            next(rest, None)
    return kept


def _replace(name: str, flags: list[str], known: AbstractSet[str]) -> tuple[list[str], str]:
    retired = RETIRED[name]
    if retired.now is None:
        dropped = _without(name, flags, has_value=retired.has_value)
        return dropped, f"this vLLM no longer knows {name}, and does not need it; it is left out"
    if _name(retired.now) not in known:
        raise LaunchError(_unknown(name, known))
    value = value_of(name, flags) if retired.has_value else None
    new = retired.now if value is None else f"{retired.now}={value}"
    ready = [*_without(name, flags, has_value=retired.has_value), new]
    return ready, f"this vLLM no longer knows {name}; it is started with {new} instead"


def _unknown(name: str, known: AbstractSet[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"did you mean {close[0]}?" if close else "see `vf-vllm --help=all`"
    return f"this vLLM does not know {name}; {hint}"


if __name__ == "__main__":
    main()
