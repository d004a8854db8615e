"""Text that may contain an API key → the same text without it."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, quote, unquote, urlsplit

HIDDEN = "[hidden]"
SHORTEST = 6  # shorter values ("EMPTY", "x") are not secrets, and hiding them would garble every message
_SECRET_WORDS = ("auth", "key", "token", "secret", "cookie", "password", "credential", "signature")


def redact(text: str, keys: Iterable[str]) -> str:
    """Replace every occurrence of a key with a placeholder: as it is, JSON-escaped or URL-quoted.

    >>> redact("Incorrect API key provided: sk-abc123", ["sk-abc123"])
    'Incorrect API key provided: [hidden]'
    """
    for key in sorted(set(keys), key=len, reverse=True):  # longest first: a key may contain another one
        if len(key) >= SHORTEST:
            for spelling in _spellings(key):
                text = text.replace(spelling, HIDDEN)
    return text


def _spellings(key: str) -> set[str]:
    in_json = {json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1]}
    in_urls = {quote(key, safe="", errors="replace"), quote(key, errors="replace")}
    return {key, *in_urls, *in_json, *(text.replace("/", "\\/") for text in in_json)}


def hide_in_url(url: str) -> str:
    """A URL, or the comma-separated URLs of replicas, without passwords and keys.

    >>> hide_in_url("http://me:pass99@host/v1?api_key=xyz789,http://me:word12@other/v1")
    'http://me:[hidden]@host/v1?api_key=[hidden],http://me:[hidden]@other/v1'
    """
    return ",".join(redact(one, secrets_in({}, [one])) for one in re.split(r",(?=https?://)", url))


def mask(key: str | None) -> str:
    """What a repr may show of a key: that it exists, and its vendor's prefix.

    >>> mask("sk-abc123"), mask("hunter2"), mask(None)
    ('sk-…', '…', '')
    """
    if not key:
        return ""
    return "sk-…" if key.startswith("sk-") else "…"


def secrets_in(headers: Mapping[str, str], urls: Iterable[str] = ()) -> list[str]:
    """The secrets in headers and URL queries (recognised by the field names) and the passwords in URLs.

    >>> secrets_in({"Authorization": "Bearer abc123", "X-Title": "mine"}, ["http://me:pass99@host/v1?api_key=xyz789"])
    ['Bearer abc123', 'abc123', 'pass99', 'bWU6cGFzczk5', 'xyz789']
    """
    found = []
    for name, value in headers.items():
        if _names_secret(name):
            text = str(value)
            found += [text, text.split(" ", 1)[1]] if " " in text else [text]
    for url in urls:
        parts = urlsplit(url)
        if parts.password:
            user, password = unquote(parts.username or ""), unquote(parts.password)
            found += [parts.password, password, b64encode(f"{user}:{password}".encode()).decode()]
        found += [value for name, value in parse_qsl(parts.query) if _names_secret(name)]
    return list(dict.fromkeys(found))


def _names_secret(name: str) -> bool:
    lowered = name.lower()
    return any(word in lowered for word in _SECRET_WORDS)
