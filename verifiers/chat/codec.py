"""Text ↔ token ids, with a copy of a tokenizer."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

CONTEXT = 4  # prompt tokens to decode together with a reply: some tokenizers drop the space of a leading token
RECENT = 64  # texts whose ids are cached
BROKEN = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # the name of a byte token in tokenizers with byte fallback


class Codec:
    """Text ↔ ids with a copy of a tokenizer, so that truncation or padding set on the original has no effect."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast = _copy_of(getattr(tokenizer, "backend_tokenizer", None))
        self._special_ids = _special_ids(self._fast)
        self._is_bytewise = _is_bytewise(self._fast)
        self._enders: dict[str, frozenset[int] | None] = {}
        self._lock = threading.Lock()
        self._encode = lru_cache(RECENT)(self._encode_once)
        self._decode_context = lru_cache(RECENT)(self._decode_once)

    @cached_property
    def longest_token(self) -> int:
        """The maximum number of characters that a token stands for."""
        tokens = self._fast.get_vocab() if self._fast is not None else self.tokenizer.get_vocab()
        return max(map(len, tokens), default=1)

    @property
    def written(self) -> str | None:
        """The tokenizer's JSON; None if it has none."""
        return None if self._fast is None else str(self._fast.to_str())

    @property
    def is_bytewise(self) -> bool:
        """Whether each token stands for fixed bytes, whatever precedes it."""
        return self._is_bytewise

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens, which decoded text omits."""
        if self._special_ids is None:
            return frozenset(getattr(self.tokenizer, "all_special_ids", ()))
        return self._special_ids

    def whole_pieces(self) -> list[str] | None:
        """The text of every token; None if the text of several tokens is not the concatenation of theirs."""
        if self._fast is None:
            return None
        ids = list(range(self._fast.get_vocab_size(with_added_tokens=True)))
        pieces = self.pieces(ids)
        is_plain = BROKEN not in "".join(pieces) and self.decode(ids, special=True) == "".join(pieces)
        return pieces if is_plain else None

    def special_pieces(self, text: str) -> list[tuple[int | None, str]]:
        """Split a text into special tokens, with their ids, and the text between them, with None."""
        found: list[tuple[int | None, str]] = [(None, text)]
        for token in self._special_ids or ():
            mark = self.decode([token], special=True)
            if not mark or mark not in text:
                continue
            split: list[tuple[int | None, str]] = []
            for known, piece in found:
                if known is not None:
                    split.append((known, piece))
                    continue
                for i, part in enumerate(piece.split(mark)):
                    split += ([(token, mark)] if i else []) + ([(None, part)] if part else [])
            found = split
        return found

    def without_special(self, text: str) -> str:
        """A text without the special tokens that it spells out."""
        return "".join(piece for token, piece in self.special_pieces(text) if token is None)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text; ``special`` adds special tokens at its beginning and end (a BOS, for example)."""
        if self._fast is not None:
            return list(self._encode(text, special))  # cached, because a group encodes the same text many times
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def encode_after(self, before: str, text: str) -> list[int]:
        """The ids of a text that continues another one. Some tokenizers put a space before a separate text."""
        if not self._is_bytewise:
            start = self.encode(before, special=False)
            whole = self.encode(before + text, special=False)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return self.encode(text, special=False)

    def _encode_once(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self._fast.encode(text, add_special_tokens=special).ids)

    def _decode_once(self, ids: tuple[int, ...], special: bool) -> str:
        return self.decode(list(ids), special=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids, with or without special tokens."""
        if self._fast is not None:
            text: str = self._fast.decode(ids, skip_special_tokens=not special)
            return text
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def continuation(self, before: Sequence[int], ids: Sequence[int], *, special: bool = False) -> str:
        """The text that ``ids`` add after the ids ``before``."""
        if self._is_bytewise:
            return self.decode(ids, special=special)
        tail = tuple(before[-CONTEXT:])
        start = self._decode_context(tail, special)
        text = self.decode([*tail, *ids], special=special)
        if text.startswith(start):
            return text[len(start) :]
        return self.decode(ids, special=special)

    def continuations(self, before: Sequence[int], ids: Sequence[int]) -> tuple[str, str]:
        """The text that ``ids`` add after the ids ``before``: without special tokens, and with them."""
        text = self.continuation(before, ids)
        seen = ids if self._is_bytewise else [*before[-CONTEXT:], *ids]
        if self._special_ids is not None and self._special_ids.isdisjoint(seen):
            return text, text
        return text, self.continuation(before, ids, special=True)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each token on its own. Part of a character becomes the replacement character."""
        return [self.decode([token], special=True) for token in ids]

    def bytes_of(self, token: int, text: str) -> bytes | None:
        """The bytes of a token that adds this text; None for part of a character whose bytes are unknown."""
        if BROKEN not in text:
            return text.encode()
        name = self._name(token)
        if found := _BYTE.fullmatch(name or ""):
            return bytes([int(found[1], 16)])
        if self._is_bytewise and name is not None and all(one in _bytes_by_name() for one in name):
            return bytes(_bytes_by_name()[one] for one in name)
        return None

    def is_within_bytes(self, token: int) -> bool:
        """Whether a run of byte-fallback bytes, which is decoded as a whole, may continue with or after this token."""
        name = self._name(token)
        return name is None or token in self.special_ids or _BYTE.fullmatch(name) is not None

    def _name(self, token: int) -> str | None:
        named = self.tokenizer.convert_ids_to_tokens if self._fast is None else self._fast.id_to_token
        name: str | None = named(token)
        return name

    def enders(self, stop: str) -> frozenset[int] | None:
        """The tokens that can complete a stop string; None if any token could."""
        last = stop[-1]
        with self._lock:
            if last not in self._enders:
                self._enders[last] = self._find_enders(last)
            return self._enders[last]

    def _find_enders(self, last: str) -> frozenset[int] | None:
        if self._fast is None or last.isspace():  # spaces may appear or vanish depending on adjacent tokens
            return None
        size = self._fast.get_vocab_size(with_added_tokens=True)
        texts = self._fast.decode_batch([[token] for token in range(size)], skip_special_tokens=True)
        return frozenset(token for token, text in enumerate(texts) if last in text or BROKEN in text)


@lru_cache(1)
def _bytes_by_name() -> dict[str, int]:
    """The byte that each character stands for in the vocabulary of a byte-level tokenizer. Printable bytes stand for
    themselves; the others are mapped in order from U+0100 on.

    >>> [_bytes_by_name()[one] for one in "aĠé"]
    [97, 32, 233]
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _copy_of(backend: Any) -> Any:
    if backend is None:
        return None
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _special_ids(backend: Any) -> frozenset[int] | None:
    """The ids that ``skip_special_tokens`` skips; None if the tokenizer does not list them."""
    if backend is None:
        return None
    return frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)


def _is_bytewise(backend: Any) -> bool:
    """Whether each token stands for fixed bytes, whatever precedes it."""
    if backend is None:
        return False
    from tokenizers.decoders import ByteLevel

    return isinstance(backend.decoder, ByteLevel)
