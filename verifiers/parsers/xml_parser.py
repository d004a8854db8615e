"""A reply with ``<field>…</field>`` tags → its fields by name, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from verifiers.messages import text_of
from verifiers.parsers.parser import ExtractFn, Parser, identity, reply_text
from verifiers.types import Messages

Field = str | tuple[str, ...]


class XMLParser(Parser):
    """Reads named fields from a reply. A tuple of names is one field with alternative names.

    A field's text runs from its opening tag to the first closing tag of the same name, whatever is between. A tag
    that is never closed, or that has attributes, is not a field.

    >>> parser = XMLParser(["reasoning", ("tool", "answer")])
    >>> parser.parse("<reasoning>2+2</reasoning> <answer> 4 </answer>")
    namespace(reasoning='2+2', tool=None, answer='4')
    """

    def __init__(self, fields: Sequence[Field], answer_field: str = "answer", extract_fn: ExtractFn = identity) -> None:
        super().__init__(extract_fn=extract_fn)
        if not isinstance(answer_field, str):
            raise TypeError(f"answer_field must be a string, not {answer_field!r}")
        self.answer_field = answer_field
        self._fields = [(names[0], list(names)) for names in _checked(fields)]
        # The tags are built once, so that parsing a reply needs only str.find.
        self._tags = [[(name, f"<{name}>", f"</{name}>") for name in names] for _, names in self._fields]
        self._all_tags = [tags for field in self._tags for tags in field]
        self._first_opens = tuple(opening for _, opening, _ in self._tags[0])
        self._last_closes = tuple(closing for _, _, closing in self._tags[-1])

    def parse(self, text: Messages, strip: bool = True, last: bool = False) -> Any:
        """Every field name as an attribute, None if absent. If a field occurs twice, the first one, or the ``last``.

        >>> XMLParser(["answer"]).parse("<answer>3</answer> no, <answer>4</answer>", last=True).answer
        '4'
        """
        reply = text if isinstance(text, str) else reply_text(text)
        find = _find_last if last else _find_first
        found: dict[str, str | None] = {}
        for name, opening, closing in self._all_tags:
            inside = find(reply, opening, closing)
            found[name] = inside.strip() if strip and inside is not None else inside
        return SimpleNamespace(**found)

    def parse_answer(self, completion: Messages) -> str | None:
        """The answer field of the last assistant message that has one; in a string, the last one.

        >>> turns = [{"role": "assistant", "content": "<answer>4</answer>"}, {"role": "assistant", "content": "Bye!"}]
        >>> XMLParser(["answer"]).parse_answer(turns)
        '4'
        """
        if isinstance(completion, str):
            answer = getattr(self.parse(completion, last=True), self.answer_field, None)
            return None if answer is None else self._extract(answer)
        for reply in reversed(self.get_assistant_messages(completion)):
            answer = getattr(self.parse(text_of(reply)), self.answer_field, None)
            if answer is not None:
                return self._extract(answer)
        return None

    def get_fields(self) -> list[str]:
        """The first name of each field, in order."""
        return [name for name, _ in self._fields]

    def format(self, **values: Any) -> str:
        """A reply with these values, each under the first name of its field.

        >>> print(XMLParser(["answer"]).format(answer=4))
        <answer>
        4
        </answer>
        """
        return "\n".join(f"<{names[0]}>\n{_value_of(names, values)}\n</{names[0]}>" for _, names in self._fields)

    def get_format_str(self) -> str:
        """The format, as text for a prompt.

        >>> print(XMLParser([("tool", "answer")]).get_format_str())
        <[ tool | answer ]>
        ...
        </[ tool | answer ]>
        """
        shown = [names[0] if len(names) == 1 else f"[ {' | '.join(names)} ]" for _, names in self._fields]
        return "\n".join(f"<{name}>\n...\n</{name}>" for name in shown)

    def get_format_reward_func(self) -> Callable[..., float]:
        """A reward for following the format, from 0 to 1: the mean over the assistant messages.

        >>> XMLParser(["answer"]).get_format_reward_func()([{"role": "assistant", "content": "<answer>4</answer>"}])
        1.0
        """

        def format_reward_func(completion: Messages, **kwargs: Any) -> float:
            return self._mean_over_replies(self._format_score, completion)

        return format_reward_func

    def _format_score(self, text: str) -> float:
        n_seen, has_field = 0, False
        for field in self._tags:
            is_seen = False
            for _, opening, closing in field:
                # A single tag counts as an attempt, but only if some field of the reply is complete.
                if _find_first(text, opening, closing) is not None:
                    is_seen = has_field = True
                elif opening in text or closing in text:
                    is_seen = True
            n_seen += is_seen
        score = 0.4 * (n_seen / len(self._tags)) if has_field else 0.0
        score += 0.2  # for spacing: white space around a field's text is always accepted, so every reply gets this
        stripped = text.strip()
        if stripped.startswith(self._first_opens):
            score += 0.2
        if stripped.endswith(self._last_closes):
            score += 0.2
        return score


def _find_first(text: str, opening: str, closing: str) -> str | None:
    start = text.find(opening)
    if start < 0:
        return None
    start += len(opening)
    end = text.find(closing, start)
    return text[start:end] if end >= 0 else None


def _find_last(text: str, opening: str, closing: str) -> str | None:
    """Pair tags from the left, as ``_find_first`` does: a tag inside a field does not open a new one."""
    span, position = None, 0
    while (start := text.find(opening, position)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        span, position = slice(start, end), end + len(closing)
    return None if span is None else text[span]


def _value_of(names: list[str], values: dict[str, Any]) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise ValueError(f"Missing value for field {names[0]!r}; pass {' or '.join(f'{name}=…' for name in names)}")


def _checked(fields: Any) -> list[tuple[str, ...]]:
    """The names of each field. Raises if a name cannot be a tag or is used for two fields."""
    if isinstance(fields, str) or not isinstance(fields, Sequence):
        raise TypeError(f"fields must be a list of names or of tuples of names, not {fields!r}")
    if not fields:
        raise ValueError("fields is empty; name at least one field")
    checked = [(field,) if isinstance(field, str) else field for field in fields]
    seen: set[str] = set()
    for names in checked:
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"a field must be a name or a tuple of names, not {names!r}")
        if not names:
            raise ValueError("a field is an empty tuple; it needs at least one name")
        for name in names:
            if not name.strip() or name.startswith("/") or "<" in name or ">" in name:
                raise ValueError(f"field name {name!r} cannot be a tag")
            if name in seen:
                raise ValueError(f"Duplicate field name {name!r}; each name may be used for one field only")
            seen.add(name)
    return checked
