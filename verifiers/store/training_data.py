"""Records → rows for SFT and preference pairs for DPO; failed rollouts are left out."""

from __future__ import annotations

import heapq
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from verifiers.messages import as_messages, template_settings, tools_of, with_argument_objects
from verifiers.store.export import Source, records_of
from verifiers.store.plain import to_json
from verifiers.store.record import Record, is_failed

_REMEDY = 'add them to each row as "tools"'


def to_sft(
    source: Source, *, min_reward: float | None = None, top_k_per_example: int | None = None
) -> list[dict[str, Any]]:
    """Rows for supervised fine-tuning: ``messages`` for chat, ``prompt`` and ``completion`` for text.

    With tools, ``tools`` lists those available to the model, and calls have their arguments as objects, as the chat
    templates of other trainers (TRL) expect.

    >>> rollout = {"example_id": 0, "prompt": "2+2=", "completion": "4", "reward": 1.0, "error": None}
    >>> to_sft([rollout, {**rollout, "completion": "5", "reward": 0.0}], min_reward=0.5)
    [{'prompt': '2+2=', 'completion': '4', 'example_id': 0, 'task': None, 'reward': 1.0}]
    """
    if top_k_per_example is not None and top_k_per_example < 1:
        raise ValueError(f"top_k_per_example is {top_k_per_example}; it must be at least 1, or None for all")
    wanted = [record for record in _usable(source) if min_reward is None or _reward(record) >= min_reward]
    if top_k_per_example is not None:
        groups = _groups(wanted)
        wanted = [best for group in groups for best in heapq.nlargest(top_k_per_example, group, key=_reward)]
    note_missing_tools(wanted, _REMEDY)
    return [_sft_row(record) for record in wanted]


def to_dpo(source: Source, *, min_margin: float = 0.0, max_pairs_per_example: int | None = 1) -> list[dict[str, Any]]:
    """Pairs of rollouts of one prompt, the better as ``chosen`` and the worse as ``rejected``, widest margin first.

    Tools and their calls have the same form as in `to_sft`.

    >>> rollout = {"example_id": 0, "prompt": "2+2=", "completion": "4", "reward": 1.0, "error": None}
    >>> pair = to_dpo([rollout, {**rollout, "completion": "5", "reward": 0.0}])[0]
    >>> pair["prompt"], pair["chosen"], pair["rejected"]
    ('2+2=', '4', '5')
    """
    if min_margin < 0:
        raise ValueError(f"min_margin is {min_margin}; it must be at least 0: the chosen rollout is the better one")
    scored = [record for record in _usable(source) if record.get("reward") is not None]
    note_missing_tools(scored, _REMEDY)
    return [
        _dpo_row(chosen, rejected)
        for group in _groups(scored)
        for chosen, rejected in itertools.islice(_pairs(group, min_margin), max_pairs_per_example)
    ]


def _usable(source: Source) -> Iterator[Record]:
    """Rollouts that did not fail and have a completion, whatever their score."""
    return (record for record in records_of(source) if not is_failed(record) and record.get("completion"))


def _reward(record: Record) -> float:
    reward = record.get("reward")
    return float("-inf") if reward is None else float(reward)


def _groups(records: Iterable[Record]) -> Iterable[list[Record]]:
    """Rollouts grouped by example and prompt: the records may be from several runs."""
    groups: dict[bytes, list[Record]] = {}
    for record in records:
        key = to_json([record.get("task"), record.get("example_id"), record.get("prompt")])
        groups.setdefault(key, []).append(record)
    return groups.values()


def _pairs(group: list[Record], min_margin: float) -> list[tuple[Record, Record]]:
    ranked = sorted(group, key=_reward, reverse=True)
    pairs = [
        (better, worse)
        for better, worse in itertools.combinations(ranked, 2)
        if _margin(better, worse) > 0
        and _margin(better, worse) >= min_margin
        and better["completion"] != worse["completion"]  # the same completion with two scores is no preference
    ]
    return sorted(pairs, key=lambda pair: _margin(*pair), reverse=True)


def _margin(better: Record, worse: Record) -> float:
    return _reward(better) - _reward(worse)


def _is_text(record: Record) -> bool:
    return isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str)


def _sft_row(record: Record) -> dict[str, Any]:
    about = {"example_id": record.get("example_id"), "task": record.get("task"), "reward": record.get("reward")}
    if _is_text(record):
        return {"prompt": record["prompt"], "completion": record["completion"], **about}
    return {"messages": _prompt(record) + _reply(record), **_written_with(record), **about}


def _dpo_row(chosen: Record, rejected: Record) -> dict[str, Any]:
    is_text = _is_text(chosen) and _is_text(rejected)
    return {
        "prompt": chosen["prompt"] if is_text else _prompt(chosen),
        "chosen": chosen["completion"] if is_text else _reply(chosen),
        "rejected": rejected["completion"] if is_text else _reply(rejected),
        **_written_with(chosen),
        "example_id": chosen.get("example_id"),
        "task": chosen.get("task"),
        "chosen_reward": chosen["reward"],
        "rejected_reward": rejected["reward"],
    }


def _prompt(record: Record) -> list[dict[str, Any]]:
    return _messages(record, "prompt", role="user") if record.get("prompt") else []


def _reply(record: Record) -> list[dict[str, Any]]:
    return _messages(record, "completion", role="assistant")


def _messages(record: Record, column: str, *, role: str) -> list[dict[str, Any]]:
    try:
        return [with_argument_objects(message) for message in as_messages(record[column], role=role)]
    except TypeError:
        raise ValueError(
            f"the {column} of a rollout of example {record.get('example_id')!r} is neither text nor messages: "
            f"{record[column]!r:.80}"
        ) from None


def _written_with(record: Record) -> dict[str, Any]:
    """The available tools, and the variables passed to the chat template, under the names that TRL uses."""
    tools, settings = tools_of(record), template_settings(record)
    return {**({"tools": tools} if tools else {}), **({"chat_template_kwargs": settings} if settings else {})}


def note_missing_tools(records: Iterable[Mapping[str, Any]], remedy: str) -> None:
    """Warn if rollouts call tools but do not say which were available, as in runs saved by older versions."""
    count = sum(_calls_tools(record) and tools_of(record) is None for record in records)
    if count:
        warnings.warn(
            f"{count} rollouts call tools but do not say which tools were available (they were saved by an older "
            f"version, or by another program): they are written without tools; {remedy}",
            stacklevel=3,
        )


def _calls_tools(record: Mapping[str, Any]) -> bool:
    completion = record.get("completion") or record.get("messages")
    return isinstance(completion, list) and any(isinstance(m, dict) and m.get("tool_calls") for m in completion)
