"""A data set in any form → formatted rows: prompt, answer, info, task, example_id."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

import msgspec

from verifiers.messages import as_messages
from verifiers.types import ChatMessage, MessageType, Row

MOST_STREAMED = 10_000_000  # the largest number of rows from a generator


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How raw rows are formatted. Formatting a formatted row changes nothing."""

    message_type: MessageType = "chat"
    system_prompt: str | list[ChatMessage] | None = None
    few_shot: tuple[ChatMessage, ...] = ()
    task: str = "default"

    def __post_init__(self) -> None:
        prompt: Any = self.system_prompt
        is_parts = isinstance(prompt, list) and all(isinstance(part, Mapping) and "type" in part for part in prompt)
        if not (prompt is None or isinstance(prompt, str) or (is_parts and self.message_type == "chat")):
            raise TypeError(
                f"system_prompt must be a string, or for chats a list of content parts; got {prompt!r:.100}. "
                "A prompt of several messages goes into the 'prompt' of each row"
            )

    def apply(self, raw: Mapping[str, Any], position: int, *, keep_ids: bool) -> Row:
        """One formatted row. The raw row is not changed."""
        row = dict(raw)
        row["prompt"] = self.prompt_of(row, position)
        if not keep_ids:
            if "example_id" in row:
                row["src_id"] = row["example_id"]
            row["example_id"] = position
        if row.get("task") is None:
            row["task"] = self.task
        return row

    def prompt_of(self, row: Mapping[str, Any], position: int) -> Any:
        """The prompt of a row: its own, or one from its question."""
        given = row.get("prompt")
        if given is None:
            given = row.get("question")
        if given is None:
            columns = ", ".join(map(str, row)) or "none"
            raise ValueError(
                f"row {position} of the dataset has no 'prompt' and no 'question' (its columns: {columns})"
            )
        if hasattr(given, "tolist"):
            given = given.tolist()
        if self.message_type == "completion":
            return self._text_prompt(given, position)
        return self._chat_prompt(given, position)

    def _text_prompt(self, given: Any, position: int) -> str:
        if not isinstance(given, str):
            raise ValueError(
                f"row {position}: with message_type='completion' a prompt must be a string, got {type(given).__name__}"
            )
        shots = [f"{message.get('content', '')}" for message in self.few_shot]
        head = "".join(f"{text}\n\n" for text in ([self.system_prompt] if self.system_prompt else []) + shots)
        return given if given.startswith(head) else head + given

    def _chat_prompt(self, given: Any, position: int) -> list[ChatMessage]:
        if type(given) is str:  # the common case
            head = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            if not self.few_shot:
                return [*head, {"role": "user", "content": given}]
        try:
            messages = [_without_none_keys(message) for message in as_messages(given)]
        except TypeError:
            raise ValueError(
                f"row {position}: a prompt must be a string, a message or a list of messages, "
                f"got {type(given).__name__}"
            ) from None
        if any("role" not in message for message in messages):
            raise ValueError(f"row {position}: each message of a prompt needs a 'role'")
        if isinstance(given, str):  # a prompt of messages gets no few-shot examples
            messages = [*map(dict, self.few_shot), *messages]
        if self.system_prompt and not (messages and messages[0]["role"] == "system"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages


def _without_none_keys(message: Mapping[str, Any]) -> ChatMessage:
    """Drop keys with None, which columnar data sets add for keys that a message does not have."""
    if None not in message.values():
        return dict(message)
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def few_shot_messages(examples: Iterable[Any] | None) -> tuple[ChatMessage, ...]:
    """Few-shot examples as messages, from messages or question/answer pairs.

    >>> few_shot_messages([{"question": "1+1?", "answer": "2"}])
    ({'role': 'user', 'content': '1+1?'}, {'role': 'assistant', 'content': '2'})
    """
    messages: list[ChatMessage] = []
    for i, example in enumerate(examples or ()):
        if isinstance(example, Mapping) and "role" in example:
            messages.append(dict(example))
            continue
        if isinstance(example, Mapping):
            question = example.get("question", example.get("prompt"))
            answer = example.get("answer", example.get("completion"))
        else:
            question, answer = example
        if question is None or answer is None:
            raise ValueError(f"few-shot example {i} is neither a message nor a question with an answer: {example!r}")
        messages += [*as_messages(question), *as_messages(answer, role="assistant")]
    return tuple(messages)


class Rows(Sequence[Row]):
    """Formatted rows of any source. Rows are formatted on access; the source is loaded on first use.

    >>> rows = Rows([{"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}], RowFormat())
    >>> [row["answer"] for row in rows[:1]], rows["answer"]
    (['4'], ['4', '6'])
    """

    def __init__(self, source: Any, row_format: RowFormat, *, picks: Sequence[int] | None = None) -> None:
        self._given = source
        self._format = row_format
        self._picks = picks
        self._loaded: tuple[Sequence[Any], bool] | None = None
        if not _is_lazy(source):
            self._source()

    def _source(self) -> tuple[Sequence[Any], bool]:
        """The raw rows, and whether their own example ids are used."""
        if self._loaded is None:
            raw = _load(self._given)
            self._loaded = raw, _check(raw, self._format)
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        """Load a source that can be read only once before it is pickled."""
        if self._loaded is None and not (callable(self._given) or isinstance(self._given, str | Path)):
            self._source()
        return {**vars(self), "_given": self._given if self._loaded is None else self._loaded[0]}

    def __len__(self) -> int:
        return len(self._source()[0]) if self._picks is None else len(self._picks)

    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> Rows: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, slice):
            return self.select(range(len(self))[key])
        if isinstance(key, str):
            return self._column(key)
        position = range(len(self))[key]
        raw, keep_ids = self._source()
        at = position if self._picks is None else self._picks[position]
        return self._format.apply(raw[at], at, keep_ids=keep_ids)

    def _column(self, name: str) -> list[Any]:
        """One column. Rows that lack it (of other members of a group) have None."""
        if len(self) and name not in self.column_names:
            raise KeyError(f"no row has {name!r}; the columns are {', '.join(self.column_names)}")
        return [row.get(name) for row in self]

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        if self._loaded is None:
            return "Rows(not loaded yet)"
        return f"Rows({len(self)} rows: {', '.join(self.column_names)})"

    @property
    def column_names(self) -> list[str]:
        if not len(self):
            return []
        raw, _ = self._source()
        if hasattr(raw, "column_names"):
            return list(self[0])
        picks = range(len(raw)) if self._picks is None else self._picks
        return list(dict.fromkeys([*self[0], *(name for i in picks for name in raw[i])]))

    def example_id(self, position: int) -> Any:
        """The id of a row, even if the row cannot be formatted."""
        raw, keep_ids = self._source()
        at = position if self._picks is None else self._picks[position]
        return raw[at]["example_id"] if keep_ids else at

    def select(self, positions: Iterable[int]) -> Rows:
        """The rows at these positions, in this order."""
        picks = list(positions)
        here = Rows.__new__(Rows)
        here._given, here._format, here._loaded = self._given, self._format, self._source()
        here._picks = picks if self._picks is None else [self._picks[i] for i in picks]
        return here

    def shuffle(self, seed: int | None = None) -> Rows:
        """The same rows in random order, as a new object."""
        order = list(range(len(self)))
        random.Random(seed).shuffle(order)
        return self.select(order)

    def to_list(self) -> list[Row]:
        return list(self)

    def to_hf(self) -> Any:
        """The rows as a Hugging Face ``Dataset``."""
        try:
            from datasets import Dataset
        except ImportError:
            raise ImportError("a Hugging Face Dataset needs: pip install 'verifiers[data]'") from None
        columns = self.column_names
        return Dataset.from_list([{name: row.get(name) for name in columns} for row in self])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.to_hf(), name)


def as_rows(source: Any, row_format: RowFormat) -> Rows:
    """Convert any data set into rows: a list of dicts, columns, a ``Dataset``, a generator, a callable, a path."""
    if isinstance(source, Rows) and source._format == row_format:
        return source
    if isinstance(source, str | Path) and not Path(source).exists():
        raise FileNotFoundError(f"there is no dataset file {str(source)!r}")
    return Rows(source, row_format)


def _is_lazy(source: Any) -> bool:
    """Whether reading this source takes time (a file, a download, a stream), so that it is read on first use."""
    if isinstance(source, str | Path) or callable(source):
        return True
    is_at_hand = isinstance(source, Sequence | Mapping) or hasattr(source, "select") or hasattr(source, "to_dict")
    return isinstance(source, Iterable) and not is_at_hand


def _load(source: Any) -> Sequence[Any]:
    if isinstance(source, str | Path):
        return _load_file(Path(source))
    if callable(source):
        return _load(source())
    if isinstance(source, Mapping) and hasattr(source, "column_names"):
        raise ValueError(f"the dataset has several splits ({', '.join(source)}); pass one of them")
    if hasattr(source, "column_names") and hasattr(source, "select"):
        return source  # type: ignore[no-any-return]
    if isinstance(source, Mapping):
        return from_columns(source)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return list(source.to_dict("records"))
    if isinstance(source, Iterable):
        return source if isinstance(source, list) else _drained(source)
    raise TypeError(
        f"a dataset must be a list of dicts, a Dataset, a generator, a callable that returns one, or a path to a "
        f".jsonl, .csv or .parquet file; got {type(source).__name__}"
    )


def _drained(source: Iterable[Any]) -> list[Any]:
    """All rows of a finite stream."""
    rows = list(islice(source, MOST_STREAMED + 1))
    if len(rows) > MOST_STREAMED:
        raise ValueError(
            f"the dataset has more than {MOST_STREAMED:,} rows, and all are kept in memory; if it is infinite, limit "
            "it with itertools.islice(rows, 1000)"
        )
    return rows


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the dataset's columns differ in length: {lengths}")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _load_file(path: Path) -> Sequence[Any]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise ImportError("reading parquet needs: pip install 'verifiers[data]'") from None
        return list(parquet.read_table(path).to_pylist())
    if path.suffix == ".json":
        return _load(msgspec.json.decode(path.read_bytes()))
    if path.suffix == ".csv":
        return _load_csv(path)
    if path.suffix != ".jsonl":
        raise ValueError(f"cannot read {path.name!r} as a dataset: use .jsonl, .json, .csv or .parquet")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append(msgspec.json.decode(line))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from None
    return rows


def _load_csv(path: Path) -> list[Row]:
    """Rows of text by the names in the first line; spreadsheets begin the file with a byte order mark."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names, rows = next(reader, []), []
            if len(set(names)) < len(names):
                raise ValueError(f"{path}:1 names a column twice: {', '.join(names)}")
            for values in filter(None, reader):
                if len(values) != len(names):
                    raise ValueError(f"{path}:{reader.line_num} has {len(values)} values for {len(names)} columns")
                rows.append(dict(zip(names, values, strict=True)))
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num} is not CSV: {error}") from None
    return rows


def _check(raw: Sequence[Any], row_format: RowFormat) -> bool:
    """Raise for the first invalid row. Returns whether the rows' own example ids are used."""
    if hasattr(raw, "column_names"):
        columns = raw.column_names
        if len(raw) and "prompt" not in columns and "question" not in columns:
            row_format.prompt_of(dict.fromkeys(columns), 0)
        ids = raw["example_id"] if "example_id" in columns else []  # type: ignore[call-overload]
        return _check_ids(list(ids), len(raw))
    for position, row in enumerate(raw):
        if not isinstance(row, Mapping):
            raise TypeError(f"row {position} of the dataset is {type(row).__name__}, not a dict")
        row_format.prompt_of(row, position)
    return _check_ids([row["example_id"] for row in raw if row.get("example_id") is not None], len(raw))


def _check_ids(ids: Sequence[Any], n: int) -> bool:
    if len(ids) != n:
        return False
    first: dict[Any, int] = {}
    for position, value in enumerate(ids):
        if not isinstance(value, int | str):
            return False
        if value in first:
            raise ValueError(f"example_id {value!r} is in rows {first[value]} and {position}; ids must be unique")
        first[value] = position
    return all(type(value) is int for value in ids)


Source = Sequence[Mapping[str, Any]] | Callable[[], Any] | Iterable[Mapping[str, Any]] | str | Path
