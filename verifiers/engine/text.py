"""Token ids become text, whole or as they come: characters split over tokens wait, stop strings end a reply."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

CONTEXT = 4  # tokens of the prompt that a reply's first token is read after: some tokenizers eat a leading space
RECENT = 64  # texts whose ids are kept
LONGEST_CHAR = 4  # bytes, so tokens at most
BROKEN = "\ufffd"


class Codec:
    """Text ↔ ids with a copy of a tokenizer: truncation or padding that others switch on in theirs stays there."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast = _copy_of(getattr(tokenizer, "backend_tokenizer", None))
        self._special_ids = _special_ids(self._fast)
        self._is_bytewise = _is_bytewise(self._fast)
        self._enders: dict[str, frozenset[int] | None] = {}
        self._lock = threading.Lock()
        self._encode = lru_cache(RECENT)(self._encode_once)

    @cached_property
    def longest_token(self) -> int:
        """No token stands for more characters than this."""
        tokens = self._fast.get_vocab() if self._fast is not None else self.tokenizer.get_vocab()
        return max(map(len, tokens), default=1)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text; ``special`` adds what a text of its own begins and ends with (a BOS, say)."""
        if self._fast is not None:
            return list(self._encode(text, special))  # a group asks the same many times over
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def _encode_once(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self._fast.encode(text, add_special_tokens=special).ids)

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
        tail = list(before[-CONTEXT:])
        start = self.decode(tail, special=special)
        text = self.decode([*tail, *ids], special=special)
        if text.startswith(start) and not start.endswith(BROKEN):
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
        """Each token as a text of its own; part of a character shows as the replacement character."""
        return [self.decode([token], special=True) for token in ids]

    def enders(self, stop: str) -> frozenset[int] | None:
        """The tokens that can complete a stop string; None when it could be any."""
        last = stop[-1]
        with self._lock:
            if last not in self._enders:
                self._enders[last] = self._find_enders(last)
            return self._enders[last]

    def _find_enders(self, last: str) -> frozenset[int] | None:
        if self._fast is None or last.isspace():  # a space may come and go with its neighbours
            return None
        size = self._fast.get_vocab_size(with_added_tokens=True)
        texts = self._fast.decode_batch([[token] for token in range(size)], skip_special_tokens=True)
        return frozenset(token for token, text in enumerate(texts) if last in text or BROKEN in text)


def _copy_of(backend: Any) -> Any:
    if backend is None:
        return None
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _special_ids(backend: Any) -> frozenset[int] | None:
    """The ids that ``skip_special_tokens`` skips, where the tokenizer says which they are."""
    if backend is None:
        return None
    return frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)


def _is_bytewise(backend: Any) -> bool:
    """Is each token some bytes, whatever stands before it?"""
    if backend is None:
        return False
    from tokenizers.decoders import ByteLevel

    return isinstance(backend.decoder, ByteLevel)


def first_stop(text: str, stops: Iterable[str]) -> int:
    """Where the earliest stop string in a text begins; -1 without one.

    >>> first_stop("one. two; three", [";", "."]), first_stop("one", ["."])
    (3, -1)
    """
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)


def safe_length(text: str, stops: Iterable[str]) -> int:
    """How much of a text can be shown while a stop string may still be under way at its end.

    >>> safe_length("so far </ans", ["</answer>"])
    7
    """
    held = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:n]):
                held = n
                break
    return len(text) - held


class StopWatch:
    """Sees every token of one reply and says when a stop string is complete; decodes only where one can be."""

    def __init__(self, codec: Codec, stops: Sequence[str]) -> None:
        self._codec = codec
        self._stops = stops
        found = [codec.enders(stop) for stop in stops]
        known = [enders for enders in found if enders is not None]
        self._enders = frozenset().union(*known) if len(known) == len(found) else None
        self._window = 4 * max(map(len, stops)) + 8  # a character may take four tokens, one a byte
        self._ids: list[int] = []

    def __call__(self, token: int, logprob: float) -> bool:
        self._ids.append(token)
        if self._enders is not None and token not in self._enders:
            return False
        return first_stop(self._codec.decode(self._ids[-self._window :]), self._stops) >= 0


class TextStream:
    """Text as tokens come in: never half a character, never a part of what may become a stop string.

    ``push`` gives what can be shown now, ``finish`` the rest. A decoder that changes text already shown does not exist
    among those we know; should one, the text shown stays.
    """

    def __init__(self, codec: Codec, prompt_ids: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._codec = codec
        self._stops = stops
        self._ids = list(prompt_ids[-CONTEXT:])
        self._from = 0  # decoding starts here,
        self._to = len(self._ids)  # and this much of it has become text
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        if self.is_stopped:
            return ""
        self._ids.append(token)
        return self._show(self._decode())

    def finish(self) -> str:
        """What is left at the end of the reply, a broken character included."""
        if self.is_stopped:
            return ""
        shown = self._show(self._decode(is_last=True)) + self._held
        self._held, self.is_stopped = "", True
        return shown

    def _decode(self, *, is_last: bool = False) -> str:
        known = self._codec.decode(self._ids[self._from : self._to])
        text = self._codec.decode(self._ids[self._from :])
        may_mend = len(self._ids) - self._to < LONGEST_CHAR and text.endswith(BROKEN)
        if not is_last and (may_mend or len(text) <= len(known)):
            return ""
        self._from, self._to = self._to, len(self._ids)
        return text[len(known) :]

    def _show(self, new: str) -> str:
        self._held += new
        stop = first_stop(self._held, self._stops)
        if stop >= 0:
            self.is_stopped = True
            shown, self._held = self._held[:stop], ""
            return shown
        safe = safe_length(self._held, self._stops)
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown
