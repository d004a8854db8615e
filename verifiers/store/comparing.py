"""The records of two runs → the change from A to B in each metric, and whether the runs are comparable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers import stats
from verifiers.results import listed_as
from verifiers.store.config import is_same_environment
from verifiers.store.record import Record, example_key, is_failed, is_usable

COLUMNS = ("example_id", "reward", "error", "metrics", "prompt")


def scores_of(record: Record) -> dict[str, float | None]:
    """The reward and the metrics of a record; None if the rollout failed or the value is not a number.

    >>> scores_of({"reward": 1, "error": None, "metrics": {"exact": True, "said": "yes"}})
    {'reward': 1.0, 'exact': 1.0, 'said': None}
    """
    metrics = record["metrics"] if isinstance(record["metrics"], dict) else {}
    found = {"reward": record["reward"], **{listed_as(name): value for name, value in metrics.items()}}
    has_failed = is_failed(record)
    return {
        name: None if has_failed or value is None or not is_usable(value) else float(value)
        for name, value in found.items()
    }


class Side:
    """One of two compared runs: its scores by metric and example, and its questions."""

    def __init__(self, env_id: str | None = None) -> None:
        self.env_id = env_id
        self.questions: dict[Any, Any] = {}
        self.scores: dict[str, dict[Any, list[float | None]]] = {"reward": {}}

    @classmethod
    def of(cls, records: Iterable[Record], env_id: str | None = None) -> Side:
        side = cls(env_id)
        for record in records:
            key = example_key(record["example_id"])
            side.ask(key, record["prompt"])
            for name, value in scores_of(record).items():
                side.score(name, key, value)
        return side

    def ask(self, example: Any, prompt: Any) -> None:
        self.questions.setdefault(example, question_of(prompt))

    def score(self, metric: str, example: Any, value: float | None) -> None:
        self.scores.setdefault(metric, {}).setdefault(example, []).append(value)

    @property
    def metrics(self) -> list[str]:
        return [name for name in self.scores if name != "reward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two runs compared in every metric; `refusal` says why there is no verdict, or is None.

    `other_questions` lists the ids whose examples ask different questions in the two runs.
    """

    metrics: dict[str, stats.Comparison]
    other_questions: list[Any]
    refusal: str | None


def compare_sides(
    a: Side,
    b: Side,
    *,
    only: str | None = None,
    level: float = 0.95,
    margin: float | None = None,
    paired: bool = True,
) -> RunComparison:
    """Compare two runs; `only` names the one metric to test, if it was chosen before looking at the results."""
    differing = [key for key in a.questions if key in b.questions and a.questions[key] != b.questions[key]]
    refusal = refusal_of(a, b, differing) if paired else None
    tested = () if refusal is not None else None if only is None else (only,)
    found = stats.compare_metrics(a.scores, b.scores, tested=tested, level=level, margin=margin, paired=paired)
    return RunComparison(metrics=found, other_questions=differing, refusal=refusal)


def refusal_of(a: Side, b: Side, differing: Sequence[Any]) -> str | None:
    """Why two runs cannot be compared example by example; None if they can.

    >>> refusal_of(Side("gsm8k"), Side("wordle"), [])
    'A is a run of gsm8k and B of wordle; rewards of different environments are not comparable'
    """
    if a.env_id and b.env_id and not is_same_environment(a.env_id, b.env_id):
        return f"A is a run of {a.env_id} and B of {b.env_id}; rewards of different environments are not comparable"
    if differing:
        return (
            f"{len(differing)} of the examples with the same id ask{'s' * (len(differing) == 1)} something else in B "
            f"(first: {differing[0]}), so they cannot be compared example by example"
        )
    return None if a.questions.keys() & b.questions.keys() else "the two runs share no example"


def question_of(prompt: Any) -> Any:
    """The prompt without its system messages: runs with different system prompts may share a question.

    >>> question_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    [('user', '2+2?')]
    """
    if not isinstance(prompt, list):
        return prompt
    messages = [message for message in prompt if isinstance(message, Mapping)]
    asked = [(message.get("role"), message.get("content")) for message in messages if message.get("role") != "system"]
    return asked or [(message.get("role"), message.get("content")) for message in messages]
