"""The log of a training on disk: metrics in ``metrics.jsonl``, sampled rollouts in ``results.jsonl``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from verifiers.files import lines_of, open_regular
from verifiers.store import Appender, Record, RunDir, example_key, read_records, to_record
from verifiers.store.checksum import is_intact
from verifiers.store.disk import append_missing, replace_file
from verifiers.store.mending import DAMAGED, mend_last_line

METRICS = "metrics.jsonl"
DIGITS = 5  # of logprobs and ratios of tokens, which are for display only
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Journal:
    """The log of a training in its run directory, which is locked for other writers until the log is closed.

    >>> import tempfile
    >>> run = RunDir.create(tempfile.mkdtemp(), env_id="sums", model="tiny", config={})
    >>> with Journal(run) as journal:
    ...     journal.write_step({"step": 1, "reward": 0.25, "kl": float("nan")})
    ...     journal.write_notice(1, "every reply is cut off")
    >>> [(line["step"], line["reward"], line["kl"]) for line in journal.steps()]
    [(1, 0.25, None)]
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.path = run_dir.path / METRICS
        self._metrics: Appender | None = None
        self._rollouts: Appender | None = None
        self._next_rollout: dict[int | str, int] | None = None

    def open(self) -> Journal:
        """Lock the run directory, or raise RunInUseError; without this call, the first write locks it."""
        if self._rollouts is None:
            self._rollouts = self.run_dir.appender()
        if self._metrics is None:
            try:
                self._metrics = Appender(self.path)
            except BaseException:
                self.close()
                raise
        return self

    def close(self) -> None:
        """Sync to disk and unlock the run directory; a line written later locks it again."""
        appenders = [appender for appender in (self._rollouts, self._metrics) if appender is not None]
        self._metrics = self._rollouts = None
        with ExitStack() as closing:  # each is closed even if closing another fails
            for appender in appenders:
                closing.callback(appender.close)

    def __enter__(self) -> Journal:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_step(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one optimizer step; ``step`` must be among them."""
        if not _is_step(metrics.get("step")):
            raise ValueError(f"the metrics of a step need its number, got step={metrics.get('step')!r}")
        self._append({"step": metrics["step"], "time": time.time(), **metrics})

    def write_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        """Append the metrics of an evaluation made after a step."""
        self._append({"step": step, "time": time.time(), "eval": dict(figures)})

    def write_notice(self, step: int, text: str) -> None:
        """Append a notice from `Watch` about a step."""
        self._append({"step": step, "time": time.time(), "notice": text})

    def write_records(self, records: Sequence[Record]) -> None:
        """Append records that `record_of` made, in this process or another."""
        out = self.open()._rollouts
        assert out is not None
        for record in records:
            out.append({**record, "rollout": self._take_number(record.get("example_id"))})

    def _append(self, line: Record) -> None:
        out = self.open()._metrics
        assert out is not None
        out.append(line)

    def _take_number(self, example_id: Any) -> int:
        """The next free rollout number of an example, counting those that are already on disk."""
        if self._next_rollout is None:
            self._next_rollout = {}
            for example, rollout in self.run_dir.load_index():
                self._next_rollout[example] = max(rollout + 1, self._next_rollout.get(example, 0))
        example = example_key(example_id)
        number = self._next_rollout.get(example, 0)
        self._next_rollout[example] = number + 1
        return number

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps, to resume from a checkpoint; each file is replaced atomically."""
        with self.run_dir.lock():
            was_open = self._rollouts is not None
            self.close()
            _keep_until(step, self.path)
            _keep_until(step, self.run_dir.results_path)
            self._next_rollout = None
            if was_open:
                self.open()

    def lines(self) -> Iterator[Record]:
        """All complete lines of ``metrics.jsonl`` in order; also while it is being written."""
        return read_records(self.path) if self.path.exists() else iter(())

    def steps(self) -> Iterator[Record]:
        """The metrics of the steps."""
        return (line for line in self.lines() if is_step_line(line))

    def evals(self) -> Iterator[Record]:
        """The evaluations: ``{"step": 12, "time": …, "eval": {"reward": 0.5, …}}``."""
        return (line for line in self.lines() if isinstance(line.get("eval"), dict))

    def notices(self) -> Iterator[Record]:
        """The notices of the `Watch`: ``{"step": 12, "time": …, "notice": "…"}``."""
        return (line for line in self.lines() if isinstance(line.get("notice"), str))


def record_of(
    step: int, state: Mapping[str, Any], advantage: float | None, ratios: Sequence[float] | None = None
) -> Record:
    """A rollout as a line of ``results.jsonl``, without its number; ``ratios`` has one entry per sampled token."""
    record = to_record(state, rollout=0)
    if tokens := sampled_tokens(state, ratios):
        record["sampled_tokens"] = tokens
    # Set last, because a state or a metric may use these names for something else.
    record["step"] = step
    record["advantage"] = None if advantage is None else float(advantage)
    return record


def sampled_tokens(state: Mapping[str, Any], ratios: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """Sampled tokens by turn: ids, logprobs, importance ratios and, if weights were updated during the rollout, the
    weight version of each token.

    >>> tokens = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_logprobs": [-0.5, -0.25]}
    >>> sampled_tokens({"trajectory": [{"tokens": tokens}]}, [1.0, 1.5])
    [{'prompt_tokens': 2, 'ids': [3, 4], 'logprobs': [-0.5, -0.25], 'ratios': [1.0, 1.5]}]
    """
    steps = state.get("trajectory")
    found = [step.get("tokens") if isinstance(step, Mapping) else None for step in steps or ()]
    turns = [{} if tokens is None else tokens for tokens in found]
    if not any(turns):
        return []
    lengths = [len(tokens.get("completion_ids", ())) for tokens in turns]
    has_ratios = ratios is not None and len(ratios) == sum(lengths)
    versions = {span[0] for tokens in turns for span in tokens.get("weight_versions") or ()}
    return [
        {
            "prompt_tokens": len(tokens.get("prompt_ids", ())),
            "ids": list(tokens.get("completion_ids", ())),
            "logprobs": [round(value, DIGITS) for value in tokens.get("completion_logprobs", ())],
            **({"ratios": [round(value, DIGITS) for value in (ratios or ())[end - n : end]]} if has_ratios else {}),
            **({"weight_versions": list(map(list, spans))} if spans and len(versions) > 1 else {}),
        }
        for tokens, n, end in zip(turns, lengths, accumulate(lengths), strict=True)
        for spans in [tokens.get("weight_versions")]
    ]


def is_step_line(line: Mapping[str, Any]) -> bool:
    """Whether a line of ``metrics.jsonl`` holds the metrics of a step.

    >>> is_step_line({"step": 3, "reward": 0.5}), is_step_line({"step": 3, "eval": {"reward": 0.5}})
    (True, False)
    """
    return _is_step(line.get("step")) and "eval" not in line and "notice" not in line


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _keep_until(step: int, path: Path) -> None:
    """Keep the lines of a file up to a step; move unreadable lines to the file of damaged lines."""
    if not path.exists():
        return
    mend_last_line(path)
    with open_regular(path) as file:
        replace_file(path, _lines_until(step, file, path.with_name(DAMAGED)))


def _lines_until(step: int, file: BinaryIO, damaged: Path) -> Iterator[bytes]:
    decode = msgspec.json.Decoder(_StepOnly).decode
    for line in lines_of(file):
        try:
            if not is_intact(line):
                raise msgspec.DecodeError
            found = decode(line).step
        except _UNREADABLE:
            append_missing(damaged, [line])
            continue
        if not (_is_step(found) and found > step):
            yield line


class _StepOnly(msgspec.Struct):
    """The only field of a line that is decoded."""

    step: Any = None
