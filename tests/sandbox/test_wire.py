"""What goes over the socket is JSON like any other."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.sandbox.inside.wire import HEADER, framed, unframed

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.sampled_from(["do", "code", "value", "number"]), VALUES))
def test_a_message_says_what_the_encoder_would_and_its_header_how_long_it_is(message: dict[str, object]) -> None:
    sent = framed(message)
    assert HEADER.unpack_from(sent)[0] == len(sent) - HEADER.size
    assert sent[HEADER.size :] == json.dumps(message).encode()
    assert repr(unframed(sent[HEADER.size :])) == repr(json.loads(json.dumps(message)))


@pytest.mark.parametrize("garbled", [b"", b"{", b"{} {}", b"{}\n", b'"\xff"', b'"\xed\xa0\x80"', "{}".encode("utf-16")])
def test_what_is_not_one_message_is_refused(garbled: bytes) -> None:
    with pytest.raises(ValueError):
        unframed(garbled)
