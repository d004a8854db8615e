"""Constrained decoding: the tokens that a grammar allows next, for replies that match a JSON schema or call a function.

llguidance computes the token masks. Its resources are limited, because an untrusted schema may be large, recursive or
highly ambiguous. A schema that exceeds a limit is refused when it is compiled (in a thread), or fails only its request.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from verifiers.chat.codec import Codec
from verifiers.chat.lru import LRU
from verifiers.chat.tool_calls import CLOSE, HARMONY, HARMONY_MESSAGE, MISTRAL, OPEN, TAGS, Style
from verifiers.errors import InfraError, RequestRefusedError

T = TypeVar("T")

MOST_CHARS = 128 << 10  # of a grammar. OpenAI accepts schemas of up to 120,000 characters
MOST_DEPTH = 64  # of nested values in a schema
MOST_WIDTH = 1000  # values in one object or list of a schema: time is quadratic in the optional properties
MASK_CPU_S = 0.5  # CPU time for one step's mask: a slower grammar delays the whole batch
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
}
# The whitespace of `json.dumps`: it is common in training data, and fixed, so a model cannot emit spaces forever.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ConstraintError(RequestRefusedError):
    """A grammar that cannot be used: it is invalid or too large, or no text matches it."""


class Matcher:
    """The parser state of one reply."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._consumed = 0

    def allowed(self, ids: Sequence[int], vocabulary: int) -> np.ndarray:
        """Mask of the tokens that may follow the reply ``ids``, including stop tokens where the reply may end."""
        started = time.thread_time()
        for token in ids[self._consumed :]:
            self._matcher.consume_token(int(token))
        self._consumed = len(ids)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ConstraintError(f"the grammar of the reply cannot be followed: {_said(self._matcher)}")
        if time.thread_time() - started > MASK_CPU_S:
            raise ConstraintError(f"the reply's grammar takes more than {MASK_CPU_S:g} s per token; simplify it")
        allowed_V = np.zeros(vocabulary, bool)
        bits = np.unpackbits(mask, bitorder="little")[:vocabulary]
        allowed_V[: len(bits)] = bits
        if not allowed_V.any():
            raise ConstraintError("the reply's grammar allows no further token of the model's vocabulary")
        return allowed_V


class Constraint:
    """A compiled grammar, for any number of replies."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()

    def start(self) -> Matcher:
        with self._lock:
            return Matcher(self._matcher.deep_copy())


class Constraints:
    """Compiles grammars for one model's vocabulary and caches recent ones. Compiling is slow: use `submit`."""

    def __init__(self, codec: Codec, *, vocabulary: int, stop_ids: frozenset[int]) -> None:
        self._codec, self._vocabulary, self._stop_ids = codec, vocabulary, stop_ids
        self._recent: LRU[Constraint] = LRU()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="verifiers-grammars")  # starts its thread on demand
        self._is_closed = False

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run work that compiles in a dedicated thread, so that slow grammars delay only other grammars."""
        try:
            return self._pool.submit(self._unless_closed, work, *args)
        except RuntimeError as error:  # the pool was shut down
            raise InfraError("the model is closed") from error

    def _unless_closed(self, work: Callable[..., T], *args: Any) -> T:
        if self._is_closed:  # raise, because a cancelled future would look like a cancelled task
            raise InfraError("the model is closed")
        return work(*args)

    def close(self) -> None:
        self._is_closed = True
        self._pool.shutdown(wait=False)

    def compile(self, grammar: str) -> Constraint:
        """Compile a grammar in llguidance's syntax (see `schema_grammar`, `call_grammar`)."""
        with self._lock:
            found = self._recent.get(grammar)
            if found is None:
                found = self._compile(grammar)
                self._recent.put(grammar, found)
            return found

    def _compile(self, grammar: str) -> Constraint:
        library = _llguidance()
        limits = library.LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = library.LLMatcher(
            self._tokenizer, library.LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits
        )
        if matcher.is_error():
            raise ConstraintError(f"the schema cannot be compiled: {_said(matcher)}")
        constraint = Constraint(matcher)
        constraint.start().allowed((), self._vocabulary)  # raises if no text matches the grammar or it is too slow
        return constraint

    @cached_property
    def _tokenizer(self) -> Any:
        written = self._codec.written
        if written is None:
            raise ConstraintError("constrained replies need a tokenizer of the tokenizers library")
        stop_ids = sorted(token for token in self._stop_ids if token < self._vocabulary)
        if not stop_ids:
            raise ConstraintError("the model has no end-of-reply token, so its replies cannot be constrained")
        known: Any = written
        if not self._codec.is_bytewise and (pieces := self._codec.whole_pieces()) is not None:
            known = _Pieces(self._codec, pieces, stop_ids)  # llguidance does not support every decoder
        try:
            return _llguidance().LLTokenizer(known, n_vocab=self._vocabulary, eos_token=stop_ids)
        except ValueError as error:
            raise ConstraintError(f"replies cannot be constrained with this tokenizer: {error}") from error


class _Pieces:
    """A tokenizer whose text is the concatenation of its tokens, with the interface that llguidance expects."""

    is_tokenizer_wrapper = True

    def __init__(self, codec: Codec, pieces: Sequence[str], stop_ids: Sequence[int]) -> None:
        self._codec = codec
        self.eos_token_id, self.bos_token_id = stop_ids[0], None
        self.tokens = [piece.encode() for piece in pieces]
        self.special_token_ids = sorted(codec.special_ids | set(stop_ids))

    def __call__(self, text: str | bytes) -> list[int]:
        return self._codec.encode(text if isinstance(text, str) else text.decode(), special=False)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestRefusedError(
            "structured output and forced tool calls need llguidance: pip install 'verifiers[local]'"
        ) from error
    return llguidance


def _said(matcher: Any) -> str:
    text = " ".join(str(matcher.get_error()).replace("<non-verbose/>", "").split())
    return text[:300] or "no text matches it"


# --- grammars -----------------------------------------------------------------------------------------------------


def schema_grammar(schema: Any, *, strict: bool) -> str:
    """The grammar of values that match a JSON schema. Unsupported keywords are ignored unless ``strict``.

    >>> schema_grammar({"type": "integer"}, strict=True)[:50]
    'start: %json {"type": "integer", "x-guidance": {"w'
    """
    return _checked(f"start: {_json_rule(schema, strict=strict)}")


def call_grammar(
    tools: Sequence[Mapping[str, Any]], style: Style, codec: Codec, *, schema: Any = None, strict: bool = False
) -> str:
    """The grammar of a call of one of these functions, in the model's style. With a ``schema``, a value that matches
    it is allowed instead of a call."""
    opening, key, closing = {
        "hermes": (f"{OPEN}\n", "arguments", f"\n{CLOSE}"),
        "llama3": ("", "parameters", ""),
        "mistral": (f"{MISTRAL}[", "arguments", "]"),
        "harmony": (f"<|channel|>commentary {HARMONY} {HARMONY_MESSAGE}", "arguments", ""),
    }.get(style) or (TAGS[style][0], "arguments", TAGS[style][1])
    calls, rules = [], []
    for i, tool in enumerate(tools):
        function = tool.get("function", tool)
        parameters = function.get("parameters") or NO_PARAMETERS
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        calls.append(f"c{i}")
        rules.append(f"c{i}: {_text_rule(head, codec)} a{i} {_text_rule('}', codec)}")
        rules.append(f"a{i}: {_json_rule(parameters, strict=function.get('strict') is True)}")
    sides = [_text_rule(side, codec) for side in (opening, closing)]
    start = ["start: call" if schema is None else "start: call | value"]
    if schema is not None:
        rules.append(f"value: {_json_rule(schema, strict=strict)}")
    return _checked("\n".join([*start, f"call: {sides[0]} one {sides[1]}", f"one: {' | '.join(calls)}", *rules]))


def _json_rule(schema: Any, *, strict: bool) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ConstraintError(f"a JSON schema must be an object, not {schema!r:.100}")
    _check_size(schema)
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': {**JSON_STYLE, 'lenient': not strict}}, allow_nan=False)}"
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from error


def _check_size(schema: Any) -> None:
    """Reject a schema that is too deep or too wide. No recursion, because the schema is untrusted."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ConstraintError(f"the schema nests values more than {MOST_DEPTH} deep")
        if (widest := max(map(len, level))) > MOST_WIDTH:
            raise ConstraintError(
                f"one object or list of the schema has {widest:,} parts; at most {MOST_WIDTH:,} are supported"
            )
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, Mapping) else one)
            if isinstance(inner, (Mapping, list, tuple))
        ]


def _text_rule(text: str, codec: Codec) -> str:
    """A text as a grammar rule, with special tokens written as their ids."""
    parts: list[str] = []
    for is_text, pieces in groupby(codec.special_pieces(text), key=lambda piece: piece[0] is None):
        if not is_text:
            parts += [f"<[{token}]>" for token, _ in pieces]
        elif plain := "".join(piece for _, piece in pieces):
            parts.append(json.dumps(plain))
    return " ".join(parts) or '""'


def _checked(grammar: str) -> str:
    if len(grammar) > MOST_CHARS:
        raise ConstraintError(f"the schema has {len(grammar):,} characters; at most {MOST_CHARS:,} are supported")
    return grammar
