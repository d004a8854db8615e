"""``org/name@version`` and the address of a hub → the location of that environment's wheel."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

HUB_VARIABLE = "VF_HUB_URL"
TIMEOUT_S = 60
ROUTE = "api/v1/environmentshub"
MOST_ANSWER = 4 << 20  # bytes
MOST_WHEEL = 1 << 30  # bytes, compressed


class HubError(Exception):
    """The hub did not return what was requested; the message says what it returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubEntry:
    """One version of an environment on a hub: its wheel, or an index that has it."""

    name: str
    version: str | None
    wheel_url: str | None
    index_url: str | None
    further: tuple[str, ...] = ()


def look_up(hub: str, org: str, name: str, version: str | None) -> HubEntry:
    """Ask a hub for a version of an environment, by default the latest."""
    url = f"{hub.rstrip('/')}/{ROUTE}/{quote(org)}/{quote(name)}/@{quote(version or 'latest')}"
    asked = f"{org}/{name}@{version or 'latest'}"
    try:
        with _open(url) as reply:
            found = json.loads(b"".join(_chunks(reply, url, MOST_ANSWER)))
    except urllib.error.HTTPError as error:
        error.close()
        cause = "the hub has no such environment" if error.code == 404 else f"the hub answered {error.code}"
        raise HubError(f"{asked}: {cause} ({url})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise HubError(f"{asked}: the hub at {hub} gave no valid answer: {error}") from error
    return _entry(found, asked, name)


def _entry(found: Any, asked: str, name: str) -> HubEntry:
    data = found.get("data") if isinstance(found, dict) else None
    if not isinstance(data, dict):
        raise HubError(f"{asked}: the hub's answer has no 'data': {json.dumps(found):.120}")
    wheel_url, index_url = data.get("wheel_url"), data.get("simple_index_url")
    if not wheel_url and not index_url:
        raise HubError(f"{asked}: the hub names neither a wheel nor an index; it may be private")
    return HubEntry(
        name=str(data.get("name") or name),
        version=data.get("semantic_version"),
        wheel_url=wheel_url,
        index_url=index_url,
        further=tuple(map(str, data.get("url_dependencies") or ())),
    )


def fetch(url: str, folder: Path) -> Path:
    """Fetch a wheel into a folder."""
    name = Path(urlsplit(url).path).name
    if not name.endswith(".whl"):
        raise HubError(f"the URL from the hub is not a wheel: {url}")
    target = folder / name
    try:
        with _open(url) as reply, open(target, "wb") as file:
            for chunk in _chunks(reply, url, MOST_WHEEL):
                file.write(chunk)
    except OSError as error:
        raise HubError(f"{url} cannot be fetched: {error}") from error
    return target


def _open(url: str) -> Any:
    if urlsplit(url).scheme not in ("http", "https"):
        raise HubError(f"{url} is not an http or https URL")
    request = urllib.request.Request(url, headers={"Accept": "*/*", "User-Agent": "verifiers"})
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def _chunks(reply: Any, url: str, most: int) -> Iterator[bytes]:
    """The content of a reply; raises if it is longer than ``most`` bytes."""
    sent = 0
    while chunk := reply.read(1 << 20):
        sent += len(chunk)
        if sent > most:
            raise HubError(f"{url} sends more than the limit of {most >> 20} MiB")
        yield chunk
