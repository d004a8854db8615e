"""Formats results for the end of ``vf eval``, as text or as plain data."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import Any

from verifiers import stats
from verifiers.cli.tables import fitted
from verifiers.logs import printable
from verifiers.messages import called_functions, messages_to_printable, role_of, text_of
from verifiers.results import Results
from verifiers.types import State

SHOWN_EXAMPLES = 3
SHOWN_LINES = 14
LINE_CHARS = 100
MAX_BINS = 10
FEW_VALUES = 5  # distinct rewards that are listed one by one
BLOCKS = " ▁▂▃▄▅▆▇█"
OTHER_LINES = 5  # lines of the screen before and after the report
LEAST_LINES = 4  # of a rollout
WORTH_TELLING_S = 0.1


def report(results: Results, height: int | None = None) -> list[str]:
    """The lines of the report, without control characters. In a terminal, it fits on one screen."""
    parts = str(results).splitlines()
    last = [line for line in parts if line.startswith(("tokens: ", "saved in "))]
    parts = [line for line in parts if line not in last]
    if results.scored:
        parts += [*_pass_at_k(results), *_stops(results), *_rewards(results), *_examples(results)]
    below = fitted(printable(line) for line in (*parts, *last))
    room = _height() if height is None else height
    above = fitted(_one_rollout(results)) if results.scored else []
    if room is not None and len(above) > (left := max(room - len(below) - OTHER_LINES, LEAST_LINES)):
        above = [*above[: left - 1], "  …"]
    return ["", *above, *([""] if above else []), *below]


def _height() -> int | None:
    """The height of the terminal; None if stdout is not one."""
    return shutil.get_terminal_size((80, 24)).lines if sys.stdout.isatty() else None


def brief(results: Results) -> list[str]:
    """A short report for one of several evaluations: the number of rollouts, failures and causes, and the path."""
    from verifiers.results import counts_and_causes

    path = results.metadata.get("path_to_save")
    lines = [*counts_and_causes(results), *([f"saved in {path}"] if path is not None else [])]
    return fitted(printable(line) for line in lines)


def summary(results: Results) -> dict[str, Any]:
    """The report as plain data."""
    metadata, usage = results.metadata, results.usage
    return {
        "env_id": metadata.get("env_id"),
        "env_args": metadata.get("env_args"),
        "model": metadata.get("model"),
        "base_url": metadata.get("base_url"),
        "sampling_args": metadata.get("sampling_args"),
        "examples": len({state.get("example_id") for state in results.rollouts}),
        "rollouts": len(results.rollouts),
        "failed": len(results.failed),
        "causes": results.causes,
        "ended_early": metadata.get("ended_early"),
        "mean_with_failures": results.mean_with_failures if results.failed else None,
        "until": metadata.get("until"),
        "reward": _figures(results, "reward"),
        "metrics": {name: _figures(results, name) for name in results.metric_names},
        "aggregates": {name: dataclasses.asdict(one) for name, one in results.aggregates.items()},
        "pass_at_k": _pass_data(_pass_table(results)),
        "pass_hat_k": _pass_data(_pass_table(results, is_all=True)),
        "stop_conditions": dict(_stop_counts(results)),
        "histogram": dict(histogram([reward for reward in results["reward"] if reward is not None])),
        "truncated": sum(map(bool, results["is_truncated"])),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cost_usd": usage.cost_usd,
        },
        "time_s": round(metadata.get("time_ms", 0.0) / 1000, 3),
        "path": None if metadata.get("path_to_save") is None else str(metadata["path_to_save"]),
    }


def _figures(results: Results, name: str) -> dict[str, float | None]:
    found = results.interval(name)
    if stats.is_count(name):
        return {"mean": found.mean, "low": None, "high": None}
    return {"mean": found.mean, "low": found.low, "high": found.high}


# --- the parts ----------------------------------------------------------------------------------------------------


def _pass_table(results: Results, *, is_all: bool = False) -> dict[str, list[stats.PassAtK]]:
    """pass@k, or pass^k, of the reward if it is right-or-wrong, else of each metric that is."""
    if results.metadata.get("rollouts_per_example") == 1:
        return {}
    repeats = max(Counter(results["example_id"]).values(), default=0)
    if repeats < 2:
        return {}
    names = [
        name for name in ("reward", *results.metric_names) if not stats.is_count(name) and _is_binary(results[name])
    ]
    if "reward" in names:
        names = ["reward"]
    ks = (
        range(1, repeats + 1)
        if repeats <= 4
        else sorted({1, 2, 4, *(k for k in (8, 16, 32, 64) if k < repeats), repeats})
    )
    ids = results["example_id"]
    find = stats.pass_hat_k if is_all else stats.pass_at_k
    return {name: [find(results[name], ids, k=k) for k in ks] for name in names}


def _pass_data(table: dict[str, list[stats.PassAtK]]) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        name: {
            str(found.k): {
                "mean": found.mean,
                "low": found.low,
                "high": found.high,
                "examples": found.examples,
                "left_out": len(found.left_out),
            }
            for found in row
        }
        for name, row in table.items()
    }


def _is_binary(values: Sequence[float | None]) -> bool:
    return set(values) <= {0.0, 1.0}


def _pass_at_k(results: Results) -> Iterator[str]:
    """pass@k and pass^k for the largest k, if the reward is right-or-wrong."""
    row, every = (_pass_table(results, is_all=is_all).get("reward", []) for is_all in (False, True))
    for found in (*row[-1:], *every[-1:]):
        interval = "" if found.low is None else f"  [{found.low:.3f}, {found.high:.3f}]"
        counts = f"  of {found.counts}" if found.left_out else ""
        if found.mean is not None:
            yield f"{found.name}  {found.mean:.3f}{interval}{counts}"


def _stop_counts(results: Results) -> list[tuple[str, int]]:
    counts = Counter(results["stop_condition"]).most_common()
    return [(str(stop or "no reason given"), count) for stop, count in counts]


def _stops(results: Results) -> Iterator[str]:
    cut = sum(map(bool, results["is_truncated"]))
    reasons = ", ".join(f"{reason} {count}" for reason, count in _stop_counts(results))
    yield f"stopped by: {reasons}" + (f"; {cut} cut off at the token limit" if cut else "")


def _rewards(results: Results) -> Iterator[str]:
    """The distribution of rewards in one line: values with their counts if there are few, else a row of blocks."""
    rewards = [reward for reward in results["reward"] if reward is not None]
    bins = histogram(rewards)
    if not bins:
        return
    if len(bins) <= FEW_VALUES:
        yield f"rewards: {', '.join(f'{label} × {count:,}' for label, count in bins)}"
    else:
        most = max(count for _, count in bins)
        blocks = "".join(BLOCKS[-(-count * (len(BLOCKS) - 1) // most)] for _, count in bins)
        yield f"rewards: {min(rewards):.3f} {blocks} {max(rewards):.3f}"


def histogram(values: Sequence[float]) -> list[tuple[str, int]]:
    """Counts by value if there are few values, else in ten equal ranges.

    >>> histogram([0, 1, 1, 0.5])
    [('0.000', 1), ('0.500', 1), ('1.000', 2)]
    """
    rounded = Counter(f"{value + 0.0:.3f}" for value in values)
    if len(rounded) <= MAX_BINS:
        return sorted(rounded.items(), key=lambda item: float(item[0]))
    low, high = min(values), max(values)
    step = (high - low) / MAX_BINS
    counts = Counter(min(int((value - low) / step), MAX_BINS - 1) for value in values)
    return [(f"{low + i * step:.3f} to {low + (i + 1) * step:.3f}", counts[i]) for i in range(MAX_BINS)]


def _examples(results: Results) -> Iterator[str]:
    """The slowest and the worst examples, if they differ from the rest."""
    states: dict[Any, State] = {}  # separate dicts of numbers: thousands of lists would trigger the garbage collector
    times: dict[Any, float] = {}
    sums: dict[Any, float] = {}
    counts: dict[Any, int] = {}
    for key, reward, state in zip(results["example_id"], results["reward"], results.scored, strict=True):
        states.setdefault(key, state)
        seconds = _seconds(state)
        times[key] = max(seconds, times.get(key, 0.0))
        if reward is not None:
            sums[key] = sums.get(key, 0.0) + reward
            counts[key] = counts.get(key, 0) + 1
    if len(states) < 2:
        return
    slowest = nlargest(SHOWN_EXAMPLES, times, key=times.__getitem__)
    if times[slowest[0]] >= WORTH_TELLING_S:
        yield f"slowest: {', '.join(f'example {key} {times[key]:.1f} s' for key in slowest)}"
    means = {key: total / counts[key] for key, total in sums.items()}
    if not means or min(means.values()) == max(means.values()):
        return
    worst = nsmallest(SHOWN_EXAMPLES, means, key=means.__getitem__)
    yield f"worst: {', '.join(f'example {key} {means[key]:.3f}' for key in worst)}"


def _seconds(state: State) -> float:
    return float(state.peek_timing().get("total_ms") or 0.0) / 1000


def _one_rollout(results: Results) -> list[str]:
    state = results.scored[0]
    reward = "–" if state.get("reward") is None else f"{state['reward']:.3f}"
    prompt, completion = state.get("prompt"), state.get("completion")
    asked = prompt[-1:] if isinstance(prompt, list) else prompt
    return [
        f"one rollout (example {state.get('example_id')}, reward {reward}):",
        *conversation(asked),
        *conversation(completion, role="model"),
    ]


def conversation(messages: Any, *, role: str = "prompt") -> list[str]:
    """Messages as indented lines, long ones truncated; tool calls in Python syntax."""
    messages = messages or []
    if isinstance(messages, list | tuple) and all(isinstance(message, Mapping) for message in messages):
        pairs = [(role_of(message) or role, _text(message)) for message in messages_to_printable(list(messages))]
    else:
        pairs = [(role, str(messages))]
    shown = []
    for speaker, text in pairs:
        lines = text.strip().splitlines() or ["(nothing)"]
        if len(lines) > SHOWN_LINES:
            lines = [*lines[:SHOWN_LINES], f"… ({len(lines) - SHOWN_LINES} more lines)"]
        shown += [f"  {speaker}: {_cut(lines[0])}", *(f"    {_cut(line)}" for line in lines[1:])]
    return [printable(line) for line in shown]


def _text(message: Any) -> str:
    """The text of a message, followed by its tool calls."""
    calls = [_call_text(function) for function in called_functions(message)] if isinstance(message, dict) else []
    return "\n".join([*([text] if (text := text_of(message)).strip() else []), *calls])


def _call_text(function: Mapping[str, Any]) -> str:
    """A tool call in one line.

    >>> _call_text({"name": "light", "arguments": {"on": True, "room": "hall"}})
    "→ light(on=True, room='hall')"
    """
    given = function.get("arguments")
    words = [f"{name}={value!r}" for name, value in given.items()] if isinstance(given, Mapping) else [f"{given}"]
    return f"→ {function.get('name')}({', '.join(words)})"


def _cut(line: str, chars: int = 4 * LINE_CHARS) -> str:
    return line if len(line) <= chars else f"{line[:chars]}…"
