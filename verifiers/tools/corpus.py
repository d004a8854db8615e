"""Documents → a tool that searches them with a full-text index of SQLite, in memory or in a file."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.tools.tool import Tool, as_tool

SNIPPET_TOKENS = 64
MAX_QUERY_CHARS = 1_000
_WORD = re.compile(r"\w+")
_SUFFIXES = (".txt", ".md", ".rst")


class Corpus:
    """Documents with a full-text index, built on first use.

    ``documents`` is a list of texts, of (title, text) pairs or of dicts with ``title`` and ``text``; a ``.jsonl`` file
    of such dicts; or a folder of text files. With ``path`` the index is a file that is built once and reused.

    >>> corpus = Corpus([("Lund", "A town in Scania."), ("Kiruna", "A town in Lapland, north of the circle.")])
    >>> [title for title, _ in corpus.search("where is lapland?", limit=1)]
    ['Kiruna']
    """

    def __init__(self, documents: Any, *, path: str | Path | None = None) -> None:
        if isinstance(documents, (str, Path)) and not Path(documents).exists():
            raise FileNotFoundError(f"no such folder or file: {str(documents)!r}")
        self._documents = documents
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the index; an unpickled corpus builds or opens it again."""
        return {**vars(self), "_lock": None, "_connection": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def search(self, query: str, limit: int = 5) -> list[tuple[str, str]]:
        """The best documents for a query, as title and excerpt. Any text is a valid query."""
        words = dict.fromkeys(word.lower() for word in _WORD.findall(query[:MAX_QUERY_CHARS]))
        if not words or limit < 1:
            return []
        asked = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            found = self._index().execute(
                "SELECT title, snippet(documents, 1, '', '', '…', ?) FROM documents WHERE documents MATCH ? "
                "ORDER BY bm25(documents, 3.0, 1.0), rowid LIMIT ?",
                (SNIPPET_TOKENS, asked, limit),
            )
            return [(str(title), str(excerpt)) for title, excerpt in found]

    def close(self) -> None:
        """Close the index; the next search builds or opens it again."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _index(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(str(self._path or ":memory:"), check_same_thread=False)
            try:
                self._fill(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
            weakref.finalize(self, connection.close)  # Python 3.13 and later warn about connections that nobody closed
        return self._connection

    def _fill(self, connection: sqlite3.Connection) -> None:
        with connection:  # one transaction, so that an index is either complete or empty
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'documents'").fetchone():
                return
            connection.execute("BEGIN")
            connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')")
            connection.executemany("INSERT INTO documents VALUES (?, ?)", read_documents(self._documents))


def read_documents(source: Any) -> Iterator[tuple[str, str]]:
    """The title and text of each document, from any form of corpus.

    >>> list(read_documents(["one text", ("a title", "another"), {"title": "t", "text": "third"}]))
    [('', 'one text'), ('a title', 'another'), ('t', 'third')]
    """
    if isinstance(source, (str, Path)):
        yield from _read_path(Path(source))
        return
    if not isinstance(source, Iterable):
        raise TypeError(f"a corpus must be a list of texts, a .jsonl file or a folder, not {source!r:.100}")
    for number, document in enumerate(source):
        if isinstance(document, str):
            yield "", document
        elif isinstance(document, Mapping) and isinstance(document.get("text"), str):
            yield str(document.get("title") or ""), document["text"]
        elif isinstance(document, (tuple, list)) and len(document) == 2:
            yield str(document[0]), str(document[1])
        else:
            raise ValueError(f"document {number} is not a text, a (title, text) pair or a dict: {document!r:.100}")


def _read_path(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix in _SUFFIXES and file.is_file():
                yield str(file.relative_to(path)), file.read_text(encoding="utf-8", errors="replace")
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from read_documents(json.loads(line) for line in lines if line.strip())
    else:
        yield path.name, path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class _Search:
    """The tool's function; a class, so that environments with this tool can be pickled."""

    corpus: Corpus
    limit: int

    def __call__(self, query: str) -> str:
        """Search the documents for words and return the best excerpts.

        Args:
            query: Words to look for; the more of them a document has, the better it fits.

        Returns:
            Excerpts with the titles of their documents, the best first.
        """
        found = self.corpus.search(query, self.limit)
        if not found:
            return "Nothing was found; try other words."
        lines = (f"{title}: {excerpt}" if title else excerpt for title, excerpt in found)
        return "\n\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def search(documents: Any, *, name: str = "search", path: str | Path | None = None, limit: int = 5) -> Tool:
    """A tool that searches documents (in any form that `Corpus` accepts) and returns the best excerpts.

    >>> tool = search(["Otters eat fish.", "Hares eat grass."], limit=1)
    >>> print(tool.function("what do otters eat"))
    1. Otters eat fish.
    """
    return as_tool(_Search(Corpus(documents, path=path), limit), name=name)
