"""A registry file (``endpoints.toml``, or the classic ``endpoints.py``) → endpoints by name → a client and a model."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from verifiers.clients.protocol import Client
from verifiers.clients.replicas import ReplicaClient
from verifiers.clients.resolve import OUR_DEFAULT_RETRIES, as_client, http_client
from verifiers.clients.secrets import hide_in_url
from verifiers.types import Endpoint, Endpoints

logger = logging.getLogger(__name__)

FOLDER = "configs"
FILES = ("endpoints.toml", "endpoints.py")
REPLICA_RETRIES = 2  # few, because the next replica is tried soon
TYPES = {
    "openai": "openai",
    "openai_chat_completions": "openai",
    "openai_completions": "openai",
    "anthropic": "anthropic",
    "anthropic_messages": "anthropic",
    "responses": "responses",
    "openai_responses": "responses",
}
FIELDS = ("model", "url", "key", "type", "prices", "headers", "down_after_s", "max_reply_bytes")
NO_KEY = ("", "EMPTY", "NONE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One server that serves one model. ``key`` is the name of an environment variable, never the key itself."""

    name: str
    model: str
    url: str
    key: str = ""
    type: str = "openai"
    prices: Mapping[str, float] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    down_after_s: float | None = None
    max_reply_bytes: int | None = None

    def __post_init__(self) -> None:
        for attribute in ("model", "url", "key", "type"):
            if not isinstance(getattr(self, attribute), str):
                raise ValueError(f"endpoint {self.name!r}: {attribute} must be a text")
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(
                f"endpoint {self.name!r}: url must begin with http:// or https://, not {hide_in_url(self.url)!r}"
            )
        if self.type not in TYPES:
            raise ValueError(f"endpoint {self.name!r}: type must be openai, anthropic or responses, not {self.type!r}")
        if self.key and not is_local(self.url) and not _is_variable(self.key):  # not shown: it probably is a key
            raise ValueError(
                f"endpoint {self.name!r}: key must be the name of an environment variable, such as OPENAI_API_KEY"
            )
        bounds: tuple[object, ...] = (self.down_after_s, self.max_reply_bytes)
        for bound in bounds:
            if bound is not None and (not isinstance(bound, int | float) or not bound > 0):
                raise ValueError(
                    f"endpoint {self.name!r}: down_after_s and max_reply_bytes must be numbers above 0, not {bound!r}"
                )
        if unknown := set(self.prices) - {"prompt", "completion"}:
            raise ValueError(f"endpoint {self.name!r}: unknown prices {sorted(unknown)}; use prompt and completion")

    def api_key(self) -> str | None:
        """The key, read from the environment now. Servers on private addresses do not need one."""
        if self.key.upper() in NO_KEY or not _is_variable(self.key):
            return None
        key = os.environ.get(self.key)
        if not key and not is_local(self.url):
            raise ValueError(f"endpoint {self.name!r} needs the environment variable {self.key}, which is not set")
        return key or None

    def client(self, *, max_retries: int | None = None, **bounds: float | int | None) -> Client:
        """The HTTP client for this server; ``bounds`` override the entry's own."""
        own = {"down_after_s": self.down_after_s, "max_reply_bytes": self.max_reply_bytes}
        said = {name: value for name, value in bounds.items() if value is not None}
        bounds = {name: value for name, value in {**own, **said}.items() if value is not None}
        return http_client(
            TYPES[self.type],
            self.url,
            self.api_key(),
            headers=tuple(self.headers.items()),
            prices=tuple(self.prices.items()),
            max_retries=OUR_DEFAULT_RETRIES if max_retries is None else max_retries,
            **bounds,
        )

    def entry(self) -> dict[str, Any]:
        """The classic entry; fields beyond the classic three only if they were given."""
        entry: dict[str, Any] = {"model": self.model, "url": self.url, "key": self.key}
        if self.type != "openai":
            entry["type"] = self.type
        if self.prices:
            entry["prices"] = dict(self.prices)
        if self.headers:
            entry["headers"] = dict(self.headers)
        for bound in ("down_after_s", "max_reply_bytes"):
            if getattr(self, bound) is not None:
                entry[bound] = getattr(self, bound)
        return entry


def load_endpoints(endpoints_path: str | Path = FOLDER, *, execute: bool = False) -> Endpoints:
    """The endpoints by name of a registry file, or of the one in a folder; empty if there is no file.

    An entry has ``model``, ``url`` and ``key``. A name that occurs several times also has ``replicas``, a list of all
    its entries. A classic ``.py`` file is parsed, not executed; ``execute=True`` executes it.
    """
    path = _find(Path(endpoints_path))
    if path is None:
        logger.warning("no endpoint registry at %s: model names are used as they are", endpoints_path)
        return {}
    registry: dict[str, list[dict[str, Any]]] = {}
    for name, entry in _entries(path, execute=execute):
        target = _target(name, entry, where=str(path))
        registry.setdefault(name, []).append(target.entry())
    endpoints = {}
    for name, entries in registry.items():
        endpoints[name] = entries[0] if len(entries) == 1 else {**entries[0], "replicas": entries}
    return cast(Endpoints, endpoints)


def resolve_endpoint(name: str, endpoints: str | Path | Mapping[str, Any] | None = None) -> tuple[Client, str]:
    """The client and the model of a name in the registry; any other name is a model of the default endpoint.

    ``endpoints`` is the result of `load_endpoints`, or the path to load it from (default: ``configs/``).
    """
    if endpoints is None:
        endpoints = load_endpoints() if _find(Path(FOLDER)) else {}
    elif not isinstance(endpoints, Mapping):
        endpoints = load_endpoints(endpoints)
    entry: Endpoint | None = endpoints.get(name)
    if entry is None:
        return as_client(None), name
    entries = cast(dict[str, Any], entry).get("replicas") or [entry]
    targets = [_target(name, one, where="the endpoint registry") for one in entries]
    if len(targets) == 1:
        return targets[0].client(), targets[0].model
    clients = [target.client(max_retries=REPLICA_RETRIES) for target in targets]
    return ReplicaClient(clients, models=[target.model for target in targets]), targets[0].model


def _is_variable(key: str) -> bool:
    return re.fullmatch(r"[A-Z_][A-Z0-9_]*|[a-z_]+", key) is not None


def is_local(url: str) -> bool:
    """Is this a server on this machine or a private network?

    >>> is_local("http://localhost:8000/v1"), is_local("http://10.0.0.7/v1"), is_local("https://api.example.com/v1")
    (True, True, False)
    """
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host or host.endswith((".local", ".localhost", ".internal"))


def _find(path: Path) -> Path | None:
    candidates = [path / name for name in FILES] if path.is_dir() else [path]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _entries(path: Path, *, execute: bool) -> Iterable[tuple[str, Any]]:
    if path.suffix == ".py":
        from verifiers.clients.classic_registry import read_registry

        return read_registry(path, execute=execute).items()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    if unknown := set(table) - {"endpoint"}:
        raise ValueError(f"{path}: unknown {sorted(unknown)}; a registry only has [[endpoint]] tables")
    entries = []
    for number, entry in enumerate(table.get("endpoint", []), 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("endpoint_id"), str):
            raise ValueError(f"{path}: [[endpoint]] number {number} has no endpoint_id")
        entries.append((entry.pop("endpoint_id"), entry))
    return entries


def _target(name: str, entry: Any, *, where: str) -> Target:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: endpoint {name!r} must be a table with model, url and key")
    entry = {key: value for key, value in entry.items() if key != "replicas"}
    if missing := {"model", "url"} - set(entry):
        raise ValueError(f"{where}: endpoint {name!r} has no {' and no '.join(sorted(missing))}")
    if unknown := set(entry) - set(FIELDS):
        raise ValueError(f"{where}: endpoint {name!r} has unknown {sorted(unknown)}; it can have {', '.join(FIELDS)}")
    return Target(name=name, **entry)
