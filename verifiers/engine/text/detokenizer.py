"""Detokenize token by token. Incomplete characters are held back, and stop strings end a reply."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence

from verifiers.chat.codec import BROKEN, CONTEXT, Codec


def first_stop(text: str, stops: Iterable[str]) -> int:
    """The position of the earliest stop string in a text; -1 if there is none.

    >>> first_stop("one. two; three", [";", "."]), first_stop("one", ["."])
    (3, -1)
    """
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)


def safe_length(text: str, stops: Iterable[str]) -> int:
    """How many characters of a text can be shown. An end that may begin a stop string is held back.

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
    """An ``on_token`` that ends a reply at a complete stop string. Decodes only at tokens that can complete one."""

    def __init__(self, codec: Codec, stops: Sequence[str], prompt_ids: Sequence[int] = ()) -> None:
        self._codec = codec
        self._stops = stops
        found = [codec.enders(stop) for stop in stops]
        known = [enders for enders in found if enders is not None]
        self._enders = frozenset().union(*known) if len(known) == len(found) else None
        self._window = 4 * max(map(len, stops)) + 8  # a character may take four tokens, one per byte
        self._ids = list(prompt_ids[-CONTEXT:])
        self._first = len(self._ids)  # index of the reply's first token

    def __call__(self, token: int, logprob: float) -> bool:
        self._ids.append(token)
        if self._enders is not None and token not in self._enders:
            return False
        start = max(self._first, len(self._ids) - self._window)
        if not self._codec.is_bytewise:
            while start > self._first and self._codec.is_within_bytes(self._ids[start]):
                start -= 1
        text = self._codec.continuation(self._ids[max(start - CONTEXT, 0) : start], self._ids[start:])
        return first_stop(text, self._stops) >= 0


class TextStream:
    """Text as tokens arrive, without incomplete characters and without text that may become a stop string.

    ``push`` returns the text that can be shown now, ``finish`` the rest. Text that has been returned never changes.
    """

    def __init__(self, codec: Codec, prompt_ids: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._codec = codec
        self._stops = stops
        self._ids = list(prompt_ids[-CONTEXT:])  # the ids to decode: some earlier ones as context, and the newest
        self._before = len(self._ids)  # how many of these ids are context, already converted to text
        self._known = codec.decode(self._ids)  # the text of the context
        self._shown = len(self._known)  # characters of the text of all these ids that were already returned
        self._is_first = True  # whether the context is the prompt
        self._utf8 = getincrementaldecoder("utf-8")("replace") if codec.is_bytewise else None
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        if self.is_stopped:
            return ""
        if self._utf8 is not None:
            return self._show(self._utf8.decode(self._bytes(token)))
        self._ids.append(token)
        if self._codec.is_within_bytes(token):
            return ""
        return self._show(self._decode())

    def finish(self) -> str:
        """The rest of the text at the end of the reply, including an incomplete character."""
        if self.is_stopped:
            return ""
        left = self._decode(is_last=True) if self._utf8 is None else self._utf8.decode(b"", True)
        shown = self._show(left) + self._held
        self._held, self.is_stopped = "", True
        return shown

    def _bytes(self, token: int) -> bytes:
        text = self._codec.decode([token])
        found = self._codec.bytes_of(token, text)
        return text.encode() if found is None else found

    def _decode(self, *, is_last: bool = False) -> str:
        text = self._codec.decode(self._ids)
        if self._is_first and not text.startswith(self._known):  # as in `Codec.continuation`
            if not is_last and text.endswith(BROKEN):
                return ""
            del self._ids[: self._before]
            text, self._known, self._shown, self._before = self._codec.decode(self._ids), "", 0, 0
        end = len(text) - (text.endswith(BROKEN) and not is_last)  # BROKEN may be an incomplete character
        if end <= self._shown:
            return ""
        new, self._shown, self._is_first = text[self._shown : end], end, False
        if end == len(text):
            del self._ids[: self._before]
            self._before = len(self._ids)
            self._shown = len(self._codec.decode(self._ids))
        return new

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
