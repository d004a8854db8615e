"""``org/name@version`` and the address of a hub → where the wheel of that environment is."""

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
MOST_WHEEL = 1 << 30  # bytes, packed


class HubError(Exception):
    """The hub did not give what was asked for; the message says what it gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubEntry:
    """One version of an environment on a hub: a wheel, or the index that has it."""

    name: str
    version: str | None
    wheel_url: str | None
    index_url: str | None
    further: tuple[str, ...] = ()


def look_up(hub: str, org: str, name: str, version: str | None) -> HubEntry:
    """Ask a hub for a version of an environment, the latest where none is named."""
    url = f"{hub.rstrip('/')}/{ROUTE}/{quote(org)}/{quote(name)}/@{quote(version or 'latest')}"
    asked = f"{org}/{name}@{version or 'latest'}"
    try:
        with _asked(url) as reply:
            found = json.loads(b"".join(_chunks(reply, url, MOST_ANSWER)))
    except urllib.error.HTTPError as error:
        error.close()
        said = "the hub has no such environment" if error.code == 404 else f"the hub answered {error.code}"
        raise HubError(f"{asked}: {said} ({url})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise HubError(f"{asked}: the hub at {hub} gave no answer to read: {error}") from error
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
        raise HubError(f"what the hub names is no wheel: {url}")
    target = folder / name
    try:
        with _asked(url) as reply, open(target, "wb") as file:
            for chunk in _chunks(reply, url, MOST_WHEEL):
                file.write(chunk)
    except OSError as error:
        raise HubError(f"{url} cannot be fetched: {error}") from error
    return target


def _asked(url: str) -> Any:
    if urlsplit(url).scheme not in ("http", "https"):
        raise HubError(f"{url} is no http address")
    request = urllib.request.Request(url, headers={"Accept": "*/*", "User-Agent": "verifiers"})
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def _chunks(reply: Any, url: str, most: int) -> Iterator[bytes]:
    """What a hub sends, as far as it may be long."""
    sent = 0
    while chunk := reply.read(1 << 20):
        sent += len(chunk)
        if sent > most:
            raise HubError(f"{url} sends more than {most >> 20} MiB; the rest was not read")
        yield chunk
