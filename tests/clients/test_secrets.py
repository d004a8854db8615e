"""Hiding keys: whatever a text looks like, the key is not in it afterwards."""

from __future__ import annotations

import json
from urllib.parse import quote

from hypothesis import given
from hypothesis import strategies as st

from verifiers.clients.secrets import HIDDEN, SHORTEST, mask, redact, secrets_in

keys = st.text(min_size=SHORTEST, max_size=40).filter(lambda key: key not in HIDDEN and key not in "[hidden][hidden]")


@given(key=keys, before=st.text(), after=st.text())
def test_no_spelling_of_a_key_survives(key: str, before: str, after: str) -> None:
    for spelling in (key, quote(key, safe=""), quote(key)):
        assert redact(f"{before}{spelling}{after}", [key]).count(HIDDEN) >= 1
        assert spelling not in redact(f"{spelling}", [key])


def test_a_key_inside_json_is_found_with_its_escapes() -> None:
    key = 'ä"b\\c/d-secret'
    assert "d-secret" not in redact(json.dumps({"echo": key}), [key])
    assert "d-secret" not in redact(json.dumps({"echo": key}).replace("/", "\\/"), [key])


def test_a_key_that_holds_another_key_is_hidden_whole() -> None:
    assert redact("Bearer sk-12345678 end", ["sk-1234", "sk-12345678"]) == f"Bearer {HIDDEN} end"


def test_stand_in_keys_of_local_servers_do_not_garble_messages() -> None:
    assert redact("EMPTY reply from x", ["EMPTY", "x", ""]) == "EMPTY reply from x"


def test_secrets_are_told_by_the_names_of_headers_and_query_arguments() -> None:
    headers = {"api-key": "k-123456", "X-Title": "my app", "Proxy-Authorization": "Basic abcdef"}
    found = secrets_in(headers, ["https://host/v1?subscription-key=q-123456&version=2"])
    assert set(found) == {"k-123456", "Basic abcdef", "abcdef", "q-123456"}


def test_a_mask_shows_no_more_than_a_vendors_prefix() -> None:
    assert [mask(key) for key in ("sk-proj-abcdef", "gsk_abcdef", "", None)] == ["sk-…", "…", "", ""]
