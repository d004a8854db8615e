"""A client and a file → a client that records completions, and replays them later."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from verifiers.clients.asking_for import asked_for
from verifiers.clients.protocol import Client, Completion, Request
from verifiers.clients.records import (
    completion_record,
    read_completion,
    read_json,
    record_key,
    request_record,
    write_json,
)
from verifiers.clients.resolve import as_client
from verifiers.clients.secrets import redact, secrets_in
from verifiers.errors import ModelError, OverlongPromptError
from verifiers.files import lines_of, open_regular

logger = logging.getLogger(__name__)

Mode = Literal["auto", "record", "replay"]
Outcome = Completion | OverlongPromptError


class NotRecordedError(ModelError):
    """A replayed cassette does not contain the requested completion."""


class Cassette:
    """A client that replays completions from a JSON-lines file, and records missing ones.

    ``auto`` replays recorded completions and asks ``client`` for the rest. ``record`` asks ``client`` for all of them.
    ``replay`` needs neither client nor network; a missing completion raises `NotRecordedError`. If a request was made
    several times, each rollout gets its own replies back; outside a run, and for rollouts that are not in the file,
    replies come in the order of recording. ``namespace`` separates models of the same name that share a file.
    """

    def __init__(self, path: str | Path, client: Any = None, *, mode: Mode = "auto", namespace: str = "") -> None:
        if mode not in ("auto", "record", "replay"):
            raise ValueError(f"mode must be auto, record or replay, not {mode!r}")
        if mode == "record" and client is None:
            raise ValueError("mode='record' needs a client: Cassette(path, client, mode='record')")
        self.path = Path(path)
        self.mode = mode
        self.namespace = namespace
        self.client: Client | None = None if client is None or mode == "replay" else as_client(client)
        self._lock = threading.Lock()
        self._is_repaired = False
        self._asked: Counter[str] = Counter()
        self._asked_by: Counter[tuple[str, str | None]] = Counter()
        self._kept: Counter[str] = Counter()
        self._outcomes: dict[str, list[Outcome]] = {}
        self._askers: dict[str, list[str | None]] = {}  # the rollout that each outcome was recorded for
        self._requests: dict[str, dict[str, Any]] = {}
        if mode == "replay" and not self.path.is_file():
            raise FileNotFoundError(f"no cassette to replay at {self.path}")
        if mode != "record":
            self._load()

    @property
    def base_url(self) -> str:
        return str(getattr(self.client, "base_url", "")) if self.client else f"cassette:{self.path}"

    async def complete(self, request: Request) -> Completion:
        record = request_record(request)
        key = record_key(record, salt=self.namespace)
        with self._lock:
            turn, outcome = self._kept_for(key, asked_for())
        if outcome is None:
            outcome = await self._ask(request, record, key, turn)
        if isinstance(outcome, OverlongPromptError):
            raise OverlongPromptError(*outcome.args)
        return outcome

    def _kept_for(self, key: str, asker: str | None) -> tuple[int, Outcome | None]:
        """How often this request was made before, and its recorded outcome: the rollout's own, else the next one."""
        turn, own_turn = self._asked[key], self._asked_by[key, asker]
        self._asked[key] += 1
        self._asked_by[key, asker] += 1
        if self.mode == "record":
            return turn, None
        kept, askers = self._outcomes.get(key, ()), self._askers.get(key, ())
        own = [] if asker is None else [i for i, name in enumerate(askers) if name == asker]
        if own:
            return turn, kept[own[own_turn]] if own_turn < len(own) else None
        return turn, kept[turn] if turn < len(kept) else None

    async def _ask(self, request: Request, record: dict[str, Any], key: str, turn: int) -> Outcome:
        if self.client is None:
            raise NotRecordedError(self._explain(record, key, turn))
        outcome: Outcome
        try:
            outcome = await self.client.complete(request)
        except OverlongPromptError as error:  # caused by the policy, so a replay must raise it as well
            outcome = error
        with self._lock:
            self._append(key, record, outcome, self._secrets(request))
        return outcome

    # --- the file -------------------------------------------------------------------------------------------------

    def _append(self, key: str, record: dict[str, Any], outcome: Outcome, keys: list[str]) -> None:
        # Numbered on arrival, so that a failed call leaves no gap. If two have the same number, the later one counts.
        turn = self._kept[key]
        entry: dict[str, Any] = {"key": key, "turn": turn, "for": asked_for(), "request": record}
        if isinstance(outcome, Completion):
            entry["completion"] = completion_record(outcome)
        else:
            entry["overlong"] = str(outcome)
        line = redact(write_json(entry).decode(), keys)
        if not self._is_repaired:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _repair(self.path)
            self._is_repaired = True
        _append_line(self.path, line.encode() + b"\n")
        self._kept[key] += 1
        self._outcomes.setdefault(key, []).append(outcome)
        self._askers.setdefault(key, []).append(asked_for())
        self._requests.setdefault(key, record)

    def _load(self) -> None:
        for number, entry in _lines(self.path):
            try:
                key, turn = entry["key"], entry["turn"]
                outcomes = self._outcomes.setdefault(key, [])
                outcome = _read_outcome(entry)
                outcomes[turn : turn + 1] = [outcome]
                self._askers.setdefault(key, [])[turn : turn + 1] = [entry.get("for")]
                self._requests[key] = entry["request"]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path}:{number} is not a cassette entry: {error!r}") from error
        self._kept.update({key: len(outcomes) for key, outcomes in self._outcomes.items()})

    def _secrets(self, request: Request) -> list[str]:
        """Secrets that must not be written even if the endpoint echoes them."""
        named: dict[str, str] = {}
        for source in (
            getattr(self.client, "headers", None),
            request.sampling.get("extra_headers"),
            request.sampling.get("extra_query"),
        ):
            if isinstance(source, Mapping):
                named |= {str(name): str(value) for name, value in source.items()}
        keys = getattr(self.client, "api_keys", None) or [getattr(self.client, "api_key", None)]
        return [key for key in keys if isinstance(key, str)] + secrets_in(named, self.base_url.split(","))

    # --- what is missing ------------------------------------------------------------------------------------------

    def _explain(self, record: dict[str, Any], key: str, turn: int) -> str:
        recorded = len(self._outcomes.get(key, ()))
        why = "" if self.mode == "replay" else ", and there is no client to ask"
        if recorded:
            return f"{self.path} has {recorded} replies to this request, but it was made {turn + 1} times{why}"
        if not self._requests:
            return f"{self.path} is empty{why}"
        nearest = max(self._requests.values(), key=lambda other: _similarity(record, other))
        return f"{self.path} does not contain this request{why}; from the most similar, {difference(record, nearest)}"


def _read_outcome(entry: dict[str, Any]) -> Outcome:
    if "overlong" in entry:
        return OverlongPromptError(entry["overlong"])
    return read_completion(entry["completion"])


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The entries of a file with their line numbers. A last line without a newline may be incomplete."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file), 1):
            try:
                yield number, read_json(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}:{number} is not JSON: {error}") from error
                logger.warning("%s: the last line is incomplete and is ignored", path)


def _append_line(path: Path, line: bytes) -> None:
    """Write a whole line or, if the disk is full, nothing: the next line would be appended to a partial one."""
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
        except BaseException:
            file.truncate(end)
            raise


def _repair(path: Path) -> None:
    """Make the file end with a newline: add it to a complete last line, remove an incomplete one."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        content = file.read()
        last = content[content.rfind(b"\n") + 1 :]
        if not last:
            return
        try:
            read_json(last)
            file.write(b"\n")
        except ValueError:
            file.truncate(len(content) - len(last))


# --- the most similar request, and how it differs -----------------------------------------------------------------


def _similarity(asked: dict[str, Any], other: dict[str, Any]) -> tuple[int, int]:
    same = sum(asked[field] == other.get(field) for field in asked)
    return same, _common_prefix(asked["prompt"], other.get("prompt") or "")


def _common_prefix(asked: Sequence[Any], recorded: Sequence[Any]) -> int:
    """The length of the common prefix of two prompts, in messages (or characters)."""
    pairs = zip(asked, recorded, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(asked), len(recorded)))


def difference(asked: dict[str, Any], recorded: dict[str, Any]) -> str:
    """The first way in which two requests differ, in words.

    >>> difference({"model": "a", "prompt": "hi"}, {"model": "b", "prompt": "hi"})
    "the model differs: 'a' asked, 'b' recorded"
    """
    for field in ("message_type", "model"):
        if asked.get(field) != recorded.get(field):
            return f"the {field} differs: {asked.get(field)!r} asked, {recorded.get(field)!r} recorded"
    if asked.get("prompt") != recorded.get("prompt"):
        return _prompt_difference(asked.get("prompt"), recorded.get("prompt"))
    ours, theirs = asked.get("sampling") or {}, recorded.get("sampling") or {}
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name):
            return f"the sampling argument {name} differs: {ours.get(name)!r} asked, {theirs.get(name)!r} recorded"
    return "the tools differ"


def _prompt_difference(asked: Any, recorded: Any) -> str:
    if not isinstance(asked, list) or not isinstance(recorded, list):
        return f"the prompt differs: {asked!r:.200} asked, {recorded!r:.200} recorded"
    same = _common_prefix(asked, recorded)
    if same in (len(asked), len(recorded)):
        return f"the number of messages differs: {len(asked)} asked, {len(recorded)} recorded"
    ours, theirs = asked[same], recorded[same]
    return f"message {same + 1} differs: {ours!r:.200} asked, {theirs!r:.200} recorded"
