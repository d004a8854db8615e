"""JSON on the wire: whatever text there is can be sent, and what servers write loosely can be read."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.clients import wire
from verifiers.errors import RequestRefusedError
from verifiers.views import View

any_text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates too
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_any_value_is_sent_and_only_half_surrogates_change(value: Any) -> None:
    sent = wire.encode({"value": value})
    assert wire.decode(sent) == json.loads(sent)
    if json.dumps(value, ensure_ascii=False).isascii():
        assert wire.decode(sent) == {"value": value}


@given(values)
def test_whatever_python_servers_write_is_read(value: Any) -> None:
    read = wire.decode(json.dumps(value).encode())
    wire.encode(read)  # and can be stored again


@given(st.binary(max_size=60))
def test_bytes_that_are_no_json_are_a_value_error(body: bytes) -> None:
    try:
        wire.decode(body)
    except ValueError:
        pass


@pytest.mark.parametrize("body", [b"", b"{", b"<html>", b"[" * 100_000, b'{"a":NaN,"b":' + b"[" * 100_000])
def test_broken_bodies_are_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        wire.decode(body)


def test_loose_json_is_read() -> None:
    assert wire.decode(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert wire.decode(b'{"a": "\\ud83d"}') == {"a": "\ufffd"}
    assert math.isnan(wire.decode(b'{"a": NaN}')["a"])


def test_foreign_values_are_sent_as_what_they_stand_for() -> None:
    class Model:
        def model_dump(self, **_: Any) -> dict[str, Any]:
            return {"role": "user"}

    assert json.loads(wire.encode({"a": Model(), "b": View({"c": (1, 2)})})) == {
        "a": {"role": "user"},
        "b": {"c": [1, 2]},
    }
    with pytest.raises(RequestRefusedError, match="object is not JSON"):
        wire.encode({"a": object()})


def test_a_call_shows_nothing_that_a_key_could_be_in() -> None:
    call = wire.Call(
        url="http://h?key=secret", headers={"a": "secret"}, body=b"secret", timeout_s=1.0, secrets=("secret",)
    )
    assert repr(call) == "Call(timeout_s=1.0)"


@pytest.mark.parametrize(
    "body", [b'{"a": "4\xff"}', b'{"a": "\\ud83d", "b": "\xff"}', b'{"a": "\xc3"}', b"\xff\xfe{\x00}\x00"]
)
def test_bytes_that_are_not_utf_8_are_damage_and_never_replacement_characters(body: bytes) -> None:
    with pytest.raises(UnicodeDecodeError):
        wire.decode(body)
