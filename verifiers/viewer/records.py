"""The data for the page of one rollout: the record with long texts shortened, and tokens with logprobs by turn."""

from __future__ import annotations

import importlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from verifiers.files import cache_folder
from verifiers.store import CORE_COLUMNS, Record
from verifiers.viewer.library import Run
from verifiers.viewer.numbers import as_number, known
from verifiers.viewer.rows import facts_of

MAX_TEXT = 200_000  # characters of one text
MAX_ITEMS = 5_000  # of one list
MAX_DEPTH = 40
MAX_TOKENS = 20_000  # of one turn
MOST_TOKENIZER = 256 << 20  # bytes
MAX_JUDGED = 200  # prompts to judges
_OWN = {*CORE_COLUMNS, "trajectory", "sampled_tokens", "judge_response", "step", "advantage"}


def rollout_page(run: Run, number: int) -> dict[str, Any]:
    """One rollout: its record, its data in the index, and its turns with tokens if they were saved."""
    index = run.index
    with index.lock:
        record = index.record(number)
        facts = facts_of(index, number)
    metrics = record.get("metrics")
    own = _OWN | (metrics.keys() if isinstance(metrics, dict) else set())
    return {
        **facts,
        **{name: shorten(record.get(name)) for name in ("prompt", "completion", "answer", "info", "error", "usage")},
        "generation_ms": _finite(record.get("generation_ms")),
        "scoring_ms": _finite(record.get("scoring_ms")),
        "turns": turns_of(record, run),
        "judged": judged_of(record.get("judge_response")),
        "columns": {name: shorten(value) for name, value in record.items() if name not in own},
    }


def turns_of(record: Record, run: Run) -> list[dict[str, Any]]:
    """The model's turns with tokens; empty if the run saved neither trajectory nor sampled tokens."""
    steps = record.get("trajectory")
    if not isinstance(steps, list):
        steps = [_as_step(turn) for turn in _list(record.get("sampled_tokens"))]
    steps = [step if isinstance(step, dict) else {} for step in steps[:MAX_ITEMS]]
    tokenizer = find_tokenizer(run) if any(isinstance(step.get("tokens"), dict) for step in steps) else None
    return [_turn(step, tokenizer) for step in steps]


def _as_step(turn: Any) -> Any:
    """A turn of a training's ``sampled_tokens`` in the form of a trajectory step."""
    if not isinstance(turn, dict):
        return {}
    names = {"ids": "completion_ids", "logprobs": "completion_logprobs", "ratios": "ratios", "prompt_tokens": "prompt"}
    return {"tokens": {name: turn.get(short) for short, name in names.items()}}


def _turn(step: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    tokens = step.get("tokens")
    tokens = tokens if isinstance(tokens, dict) else {}
    ids = [value for value in _list(tokens.get("completion_ids")) if type(value) is int][:MAX_TOKENS]
    prompt = tokens.get("prompt_ids")
    return {
        "ids": ids,
        "logprobs": _numbers(tokens.get("completion_logprobs"), len(ids)),
        "ratios": _numbers(tokens.get("ratios"), len(ids)),
        "pieces": pieces_of(tokenizer, ids) if tokenizer is not None else None,
        "prompt_tokens": len(prompt) if isinstance(prompt, list) else _finite(tokens.get("prompt")),
        "reward": _finite(step.get("reward")),
        "advantage": _finite(step.get("advantage")),
        "is_truncated": step.get("is_truncated") is True,
    }


def judged_of(found: Any) -> list[dict[str, Any]]:
    """The prompts to judges about a rollout, and their replies."""
    if not isinstance(found, dict):
        return []
    pairs = list(found.items())[:MAX_JUDGED]
    return [{"asked": shorten(asked), "replied": shorten(replied)} for asked, replied in pairs]


def shorten(value: Any, depth: int = 0) -> Any:
    """The value with long texts and lists shortened, with a note on what was left out.

    >>> shorten(["a" * 200_002])[0][-21:]
    '… (2 more characters)'
    """
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… ({len(value) - MAX_TEXT:,} more characters)"
    if isinstance(value, (dict, list)) and depth >= MAX_DEPTH:
        return "… (nested too deep to show)"
    if isinstance(value, dict):
        return {key: shorten(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        shown = [shorten(item, depth + 1) for item in value[:MAX_ITEMS]]
        return shown if len(value) <= MAX_ITEMS else [*shown, f"… ({len(value) - MAX_ITEMS:,} more)"]
    return value


# --- the text of tokens -----------------------------------------------------------------------------------------------


def find_tokenizer(run: Run) -> Any:
    """The tokenizer of the run's model, if its file is on this machine and `tokenizers` is installed."""
    for folder in _tokenizer_folders(run):
        path = folder / "tokenizer.json"
        if path.is_file() and path.stat().st_size <= MOST_TOKENIZER:
            return _load_tokenizer(path, path.stat().st_mtime_ns)
    return None


def _tokenizer_folders(run: Run) -> list[Path]:
    cache = cache_folder()
    folders = sorted((run.path / "checkpoints").glob("step-*"), reverse=True)[:1]
    config = run.metadata.get("config")
    names = [run.metadata.get("model"), config.get("model") if isinstance(config, dict) else None]
    for name in names:
        if name in ("smollm2", "local"):
            folders.append(cache / "models" / "smollm2")
        elif isinstance(name, str) and name and "\0" not in name:
            folders.append(Path(name))
    return [folder for folder in folders if folder.is_dir()]


@lru_cache(maxsize=2)
def _load_tokenizer(path: Path, _stamp: int) -> Any:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # the library raises plain Exception; without a tokenizer the page shows only token ids
        return None


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each token adds; the bytes of a split character are attributed to its last token."""
    pieces, pending = [], []
    for token in ids:
        pending.append(token)
        text: str = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(pending) < 4:
            pieces.append("")
            continue
        pieces.append(text)
        pending = []
    return pieces


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(values: Any, n: int) -> list[float | None]:
    return [_finite(value) for value in _list(values)[:n]]


def _finite(value: Any) -> float | None:
    return None if type(value) is bool else known(as_number(value))
