"""Records → tables for other programs: parquet, a Hugging Face dataset, JSON lines."""

from __future__ import annotations

import importlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from verifiers.results import Results
from verifiers.store.disk import replace_file
from verifiers.store.plain import to_json
from verifiers.store.reading import read_records
from verifiers.store.record import Record, example_key, is_failed, to_record
from verifiers.store.run_dir import RunDir

Source = RunDir | Results | str | os.PathLike[str] | Iterable[Record]
ROWS_AT_ONCE = 2_000
_TEXT_FIELDS = ("role", "content", "name", "tool_call_id", "reasoning_content")
_MESSAGE_FIELDS = (*_TEXT_FIELDS, "tool_calls")
_INT64 = range(-(2**63), 2**63)
_MIXED = {frozenset(("int", "float")): "float", frozenset(("empty", "messages")): "messages"}
# Fixed types, so that the files of several runs have the same schema and can be read as one table.
_CORE_KINDS = {
    **dict.fromkeys(("reward", "generation_ms", "scoring_ms", "total_ms"), "float"),
    **dict.fromkeys(("info", "error", "metrics", "usage"), "json"),
    "stop_condition": "text",
    "is_truncated": "bool",
}


def export_parquet(source: Source, path: str | os.PathLike[str], *, include_failed: bool = False) -> int:
    """Write a run, or any records, as one parquet file; return the number of rows.

    Columns of one type keep that type, and messages become lists of structs. Columns whose types vary (``info``,
    ``metrics``, tool calls, mixed content) contain JSON text, and their field metadata says ``encoding: json``.
    """
    arrow, parquet = _need("pyarrow"), _need("pyarrow.parquet")
    records = _rereadable(source, include_failed)
    kinds, fields = _survey(records())
    schema = _schema(arrow, kinds, fields)
    target = Path(path)
    new = target.with_name(target.name + ".tmp")
    rows = 0
    try:
        with parquet.ParquetWriter(new, schema) as writer:
            for batch in _batches(records()):
                writer.write_table(_table(arrow, schema, kinds, batch))
                rows += len(batch)
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)
    return rows


def to_hf_dataset(source: Source, *, include_failed: bool = False) -> Any:
    """A ``datasets.Dataset`` of a run or of any records, with the columns of :func:`export_parquet`."""
    arrow, datasets = _need("pyarrow"), _need("datasets")
    records = _rereadable(source, include_failed)
    kinds, fields = _survey(records())
    schema = _schema(arrow, kinds, fields)
    tables = [_table(arrow, schema, kinds, batch) for batch in _batches(records())]
    table = arrow.concat_tables(tables) if tables else schema.empty_table()
    return datasets.Dataset(_need("datasets.table").InMemoryTable(table))


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> int:
    """Write rows as JSON lines, atomically; return their number."""
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        for row in rows:
            count += 1
            yield to_json(row) + b"\n"

    replace_file(Path(path), lines())
    return count


def records_of(source: Source) -> Iterable[Record]:
    """The records of a run directory, a path or results in memory; an iterable of records is returned as it is."""
    if isinstance(source, RunDir):
        return source.records()
    if isinstance(source, (str, os.PathLike)):
        return read_records(source)
    return _records_in(source) if isinstance(source, Results) else source


def _records_in(results: Results) -> Iterator[Record]:
    """The rollouts of results as the records that would be saved."""
    repeats: Counter[Any] = Counter()
    columns = results.metadata.get("state_columns") or ()
    for state in results.rollouts:
        example = example_key(state.get("example_id"))
        yield to_record(state, rollout=repeats[example], state_columns=columns)
        repeats[example] += 1


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"this export needs {name}; install it with: pip install 'verifiers[data]'") from error


def _rereadable(source: Source, include_failed: bool) -> Callable[[], Iterator[Record]]:
    """A function that iterates over the records, to be called twice: files are read twice, other sources copied."""
    if not isinstance(source, (RunDir, str, os.PathLike)):
        source = [msgspec.json.decode(to_json(record)) for record in records_of(source)]  # exactly as from a file
    return lambda: (record for record in records_of(source) if include_failed or not is_failed(record))


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(itertools.islice(records, ROWS_AT_ONCE)):
        yield batch


# --- column types -----------------------------------------------------------------------------------------------------


def _survey(records: Iterable[Record]) -> tuple[dict[str, str], list[str]]:
    """Each column with its kind (null, bool, int, float, text, empty, messages, json), and the fields of messages."""
    kinds: dict[str, str] = {}
    fields = {"role", "content"}
    for record in records:
        for name, value in record.items():
            known = kinds.get(name) or _CORE_KINDS.get(name, "null")
            kinds[name] = known = known if known == "json" else _join(known, _kind(value))
            if known == "messages":
                fields.update(field for message in value or () for field in message)
    return kinds, [field for field in _MESSAGE_FIELDS if field in fields]


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _INT64 else "json"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and all(map(_is_simple, value)):
        return "messages" if value else "empty"
    return "json"


def _join(one: str, other: str) -> str:
    """The kind that can represent both.

    >>> _join("null", "int"), _join("int", "float"), _join("text", "messages")
    ('int', 'float', 'json')
    """
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    return _MIXED.get(frozenset((one, other)), "json")


def _is_simple(message: Any) -> bool:
    """Whether a message fits the struct: a role, text, and optional tool calls."""
    if not isinstance(message, Mapping) or "role" not in message or not message.keys() <= set(_MESSAGE_FIELDS):
        return False
    return all(message.get(field) is None or isinstance(message[field], str) for field in _TEXT_FIELDS)


def _schema(arrow: Any, kinds: Mapping[str, str], fields: list[str]) -> Any:
    text = arrow.string()
    messages = arrow.list_(arrow.struct([(field, text) for field in fields]))
    types = {
        "null": arrow.null(),
        "bool": arrow.bool_(),
        "int": arrow.int64(),
        "float": arrow.float64(),
        "text": text,
        "messages": messages,
        "empty": messages,
        "json": text,
    }
    return arrow.schema(
        [
            arrow.field(name, types[kind], metadata={"encoding": "json"} if kind == "json" else None)
            for name, kind in kinds.items()
        ]
    )


def _table(arrow: Any, schema: Any, kinds: Mapping[str, str], batch: list[Record]) -> Any:
    columns = {name: [_cell(kind, record.get(name)) for record in batch] for name, kind in kinds.items()}
    return arrow.Table.from_pydict(columns, schema=schema)


def _cell(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "json":
        return to_json(value).decode()
    if kind == "messages":
        return [
            {**message, "tool_calls": to_json(message["tool_calls"]).decode()} if message.get("tool_calls") else message
            for message in value
        ]
    return value
