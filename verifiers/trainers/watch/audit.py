"""A finished training → a Markdown report: did the reward rise, and why? Does it look like reward hacking?"""

from __future__ import annotations

import heapq
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from verifiers.messages import messages_to_printable, role_of, text_of
from verifiers.stats import mean_interval
from verifiers.trainers.watch.journal import is_step_line
from verifiers.trainers.watch.wording import clean, is_filtered, number, variance

SHOWN = 5  # rollouts of each list
KEPT = 50  # candidates of each list that are kept in memory
EXCERPT_CHARS = 600
MAX_STEPS = 20  # at the start and at the end, whose mean rewards are compared
SHORT_SHARE = 0.1  # of the median length
HIGH_SHARE = 0.9  # of the range of rewards; rewards above it are high
REPETITIVE_CHARS, REPETITIVE_RATIO = 200, 0.15  # minimum length, maximum compression ratio
ERRORS = 2.0  # standard errors by which a metric must change to count as risen or fallen

_TAG = re.compile(r"<[A-Za-z_][\w-]*>")


@dataclass(slots=True)
class ReplyStats:
    """Features of replies, summed over rollouts."""

    count: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    openings: Counter[str] = field(default_factory=Counter)

    def add(self, record: Mapping[str, Any], reply: str) -> None:
        self.count += 1
        self.openings[" ".join(reply.split(None, 3)[:3])[:60]] += 1
        self.sums["characters"] += len(reply)
        self.sums["lines"] += len(reply.splitlines())
        for name, is_so in (
            ("is cut off", bool(record.get("is_truncated"))),
            ("is empty", not reply.strip()),
            ("repeats itself", is_repetitive(reply)),
            ("has XML tags", _TAG.search(reply) is not None),
            ("has a code block", "```" in reply),
            ("has a \\boxed answer", "\\boxed" in reply),
            ("is not plain ASCII", not reply.isascii()),
        ):
            self.sums[name] += is_so

    def mean(self, name: str) -> float:
        return self.sums[name] / self.count

    def same_opening(self) -> float:
        """The share of replies that begin with the most common three words."""
        return max(self.openings.values()) / self.count


class RolloutStats:
    """Statistics from one pass over the rollouts, and the records of candidates to show."""

    def __init__(self, last_step: int) -> None:
        self.last_step = max(last_step, 1)
        self.count = self.failed = 0
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.first, self.last = ReplyStats(), ReplyStats()  # of the first and last quarter of the steps
        self._best: list[tuple[float, int, Mapping[str, Any]]] = []
        self._shortest: list[tuple[float, int, int, Mapping[str, Any]]] = []
        self._repetitive: list[tuple[float, int, Mapping[str, Any]]] = []

    def add(self, record: Mapping[str, Any]) -> None:
        self.count += 1
        reward = number(record.get("reward"))
        if reward is None:
            self.failed += 1
            return
        reply = reply_of(record)
        self.rewards.append(reward)
        self.lengths.append(len(reply.strip()))
        if (step := number(record.get("step"))) is not None:
            quarter = math.ceil(step / self.last_step * 4)
            if quarter <= 1 or quarter >= 4:
                (self.first if quarter <= 1 else self.last).add(record, reply)
        if (advantage := number(record.get("advantage"))) is not None:
            _push(self._best, (advantage, self.count, record))
        _push(self._shortest, (reward, -len(reply.strip()), self.count, record))
        if is_repetitive(reply):
            _push(self._repetitive, (reward, self.count, record))

    def best(self) -> list[Mapping[str, Any]]:
        """The rollouts with the highest advantages, one per example."""
        seen: dict[Any, Mapping[str, Any]] = {}
        for _, _, record in sorted(self._best, key=lambda item: item[:2], reverse=True):
            seen.setdefault(record.get("example_id"), record)
        return list(seen.values())[:SHOWN]

    def suspicious(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Highly rewarded rollouts whose replies are empty, very short or repetitive."""
        if not self.rewards or max(self.rewards) == min(self.rewards):
            return []
        low, high = min(self.rewards), max(self.rewards)
        threshold = low + HIGH_SHARE * (high - low)
        usual = sorted(self.lengths)[len(self.lengths) // 2]
        found: list[tuple[float, int, str, Mapping[str, Any]]] = []
        for reward, negative, order, record in self._shortest:
            if reward >= threshold and (negative == 0 or -negative < SHORT_SHARE * usual):
                why = "the reply is empty" if negative == 0 else f"{-negative} characters where {usual} are usual"
                found.append((reward, order, why, record))
        found += [
            (reward, order, "it repeats itself", record)
            for reward, order, record in self._repetitive
            if reward >= threshold
        ]
        found.sort(key=lambda item: (-item[0], item[1]))
        return [(why, record) for _, _, why, record in found[:SHOWN]]


def audit(steps: Iterable[Mapping[str, Any]], rollouts: Iterable[Mapping[str, Any]]) -> str:
    """A report in Markdown about a training, from the lines of its ``metrics.jsonl`` and its sampled rollouts.

    Model output is indented as code, so that nothing in it can become a heading, a link or a tag.

    >>> page = audit([{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.75}], [])
    >>> print(page.splitlines()[4])
    The mean reward went from 0.250 (step 1) to 0.750 (step 2).
    """
    lines = list(steps)
    made = [line for line in lines if is_step_line(line)]
    numbers = [int(line["step"]) for line in made]
    stats = RolloutStats(max(numbers, default=1))
    for record in rollouts:
        stats.add(record)
    parts = [
        ["# Audit of a training", "", "This report is for a person to judge; nothing in it is a verdict."],
        _reward_part(made, [line for line in lines if isinstance(line.get("eval"), Mapping)]),
        _metrics_part(made),
        _notices_part([line for line in lines if isinstance(line.get("notice"), str)]),
        _suspicious_part(stats),
        _best_part(stats),
        _drift_part(stats),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


# --- sections -----------------------------------------------------------------------------------------------------


def _reward_part(made: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> list[str]:
    scored = [line for line in made if number(line.get("reward")) is not None]
    if not scored:
        return ["No step has a reward."]
    k = max(1, min(MAX_STEPS, len(scored) // 10))
    start, end = _reward_words(scored[:k]), _reward_words(scored[-k:])
    lines = [f"The mean reward went from {start} to {end}."]
    if any(map(is_filtered, scored)):
        whole = [line for line in scored if number(line.get("reward_sampled")) is not None]
        start, end = (_reward_words(part, "reward_sampled") for part in (whole[:k], whole[-k:]))
        lines.append(f"That is of the rollouts trained on; of all sampled rollouts it went from {start} to {end}.")
    evals = [line for line in evals if any(number(line["eval"].get(name)) is not None for name in ("reward", "failed"))]
    for line in [evals[0], evals[-1]] if len(evals) > 1 else evals:
        reward, low, high, failed = (number(line["eval"].get(name)) for name in ("reward", "low", "high", "failed"))
        found = "no reward" if reward is None else f"{reward:.3f}"
        found += "" if low is None or high is None else f" (interval {low:.3f} to {high:.3f})"
        found += f"; {failed:.0f} of its rollouts failed" if failed else ""
        lines.append(f"Evaluated after step {line.get('step')}: {found}.")
    return lines


def _reward_words(lines: Sequence[Mapping[str, Any]], name: str = "reward") -> str:
    first, last = lines[0]["step"], lines[-1]["step"]
    where = f"step {first}" if first == last else f"steps {first} to {last}"
    if len(lines) == 1:
        mean, low, high = (number(lines[0].get(one)) for one in (name, f"{name}_low", f"{name}_high"))
    else:
        found = mean_interval([line[name] for line in lines])
        mean, low, high = found.mean, found.low, found.high
    between = "" if low is None or high is None else f", interval {low:.3f} to {high:.3f}"
    return f"{mean:.3f} ({where}{between})"


def _metrics_part(made: Sequence[Mapping[str, Any]]) -> list[str]:
    """Reward functions and metrics in the first and in the last quarter of the steps."""
    rows, rose, fell = list[str](), list[str](), list[str]()
    found = [_mapping(line.get("metrics")) for line in made]
    for name in sorted({name for metrics in found for name in metrics}):
        known = [value for metrics in found if (value := number(metrics.get(name))) is not None]
        if len(known) < 2:
            continue
        quarter = max(1, len(known) // 4)
        before, after = known[:quarter], known[-quarter:]
        change = fmean(after) - fmean(before)
        error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
        if change and abs(change) > ERRORS * error:
            (rose if change > 0 else fell).append(_inline(name))
        rows.append(f"| {_inline(name)} | {fmean(before):.3f} | {fmean(after):.3f} | {change:+.3f} |")
    if not rows:
        return []
    head = ["## Reward functions and metrics", ""]
    table = ["| name | first quarter | last quarter | change |", "|---|---|---|---|", *rows]
    if rose and fell:
        table += ["", f"While {', '.join(rose)} rose, {', '.join(fell)} fell: is this at the expense of the other?"]
    return head + table


def _notices_part(notices: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [f"- step {line.get('step')}: {_inline(line['notice'])}" for line in notices]
    return ["## Notices given", "", *found] if found else []


def _suspicious_part(stats: RolloutStats) -> list[str]:
    if not stats.count:
        return []
    found = [line for why, record in stats.suspicious() for line in _rollout(record, why)]
    nothing = ["No highly rewarded rollout is empty, very short or repetitive."]
    return ["## Suspicious rollouts", "", *(found or nothing)]


def _best_part(stats: RolloutStats) -> list[str]:
    found = [line for record in stats.best() for line in _rollout(record)]
    head = ["## What was reinforced most", "", "The rollouts with the highest advantages, one of each example.", ""]
    return head + found if found else []


def _drift_part(stats: RolloutStats) -> list[str]:
    first, last = stats.first, stats.last
    if not first.count or not last.count:
        return []
    counts = f"{first.count} and {last.count} sampled rollouts"
    lines = ["## Drift of replies", "", f"From the first to the last quarter of the steps ({counts})."]
    lines += ["", "| a reply | first quarter | last quarter |", "|---|---|---|"]
    for name in ("characters", "lines"):
        lines.append(f"| {name} | {first.mean(name):.1f} | {last.mean(name):.1f} |")
    others = [name for name in first.sums | last.sums if name not in ("characters", "lines")]
    shares = [(name, first.mean(name), last.mean(name)) for name in others]
    shares.append(("has the most common beginning", first.same_opening(), last.same_opening()))
    lines += [f"| {name} | {before:.0%} | {after:.0%} |" for name, before, after in shares if before or after]
    opening, count = last.openings.most_common(1)[0]
    lines += ["", f"The most common beginning at the end ({count} of {last.count}):", "", *block(opening)]
    return lines


# --- rollouts -----------------------------------------------------------------------------------------------------


def _rollout(record: Mapping[str, Any], why: str = "") -> Iterator[str]:
    reward, advantage = number(record.get("reward")), number(record.get("advantage"))
    parts = [f"example {_inline(str(record.get('example_id')))}"]
    if number(record.get("step")) is not None:
        parts.append(f"step {record['step']}")
    parts.append("no reward" if reward is None else f"reward {reward:.3f}")
    if advantage is not None:
        parts.append(f"advantage {advantage:+.3f}")
    yield f"**{', '.join(parts)}**{f': {why}' if why else ''}"
    yield ""
    metrics = [(name, number(value)) for name, value in _mapping(record.get("metrics")).items()]
    if metrics:
        yield ", ".join(f"{_inline(name)} {'–' if value is None else f'{value:.3g}'}" for name, value in metrics)
        yield ""
    for head, text in (("Prompt:", _last_prompt(record)), ("Reply:", reply_of(record))):
        yield head
        yield ""
        yield from block(excerpt(text))
        yield ""


def reply_of(record: Mapping[str, Any]) -> str:
    """The text of all of the model's messages in a rollout.

    >>> reply_of({"completion": [{"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]})
    '4'
    """
    completion = record.get("completion")
    if isinstance(completion, list):
        return "\n".join(text_of(message) for message in completion if role_of(message) == "assistant")
    return completion if isinstance(completion, str) else ""


def _last_prompt(record: Mapping[str, Any]) -> str:
    prompt = record.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        return text_of(messages_to_printable(prompt)[-1])
    return prompt if isinstance(prompt, str) else ""


def excerpt(text: str, chars: int = EXCERPT_CHARS) -> str:
    """Text, shortened in the middle to about this many characters.

    >>> excerpt("abcdefghij", 4)
    'ab … (6 characters) … ij'
    """
    text = text.strip()
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters) … {text[-half:]}"


def block(text: str) -> list[str]:
    r"""Text as an indented code block, which its content cannot end.

    >>> block("a\n```\n\n# b\x1b[31m")
    ['    a', '    ```', '    ', '    # b']
    """
    return [f"    {clean(line)}" for line in text.splitlines()] or ["    (nothing)"]


def _inline(text: str) -> str:
    """Text for a sentence or a table cell, with Markdown characters escaped."""
    return re.sub(r"([\\`*_\[\]<>|#&!])", r"\\\1", clean(text))


def is_repetitive(text: str) -> bool:
    """Whether a long text compresses so well that it must repeat itself.

    >>> is_repetitive("and so on, " * 60), is_repetitive("short short short")
    (True, False)
    """
    if len(text) < REPETITIVE_CHARS:
        return False
    raw = text[:20_000].encode("utf-8", "replace")
    return len(zlib.compress(raw, 1)) < REPETITIVE_RATIO * len(raw)


def _push(heap: list[Any], item: tuple[Any, ...]) -> None:
    """Keep the KEPT largest items. A unique count before the record prevents comparisons of records."""
    (heapq.heappush if len(heap) < KEPT else heapq.heappushpop)(heap, item)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
