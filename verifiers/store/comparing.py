"""The records of two runs → what B changed against A in each metric, and whether that can be said at all."""

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
    """The reward and the metrics of a record; None where it failed, and where another program wrote no number.

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
    """One of two runs that are compared: its scores by metric and example, and what was asked."""

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
    """Two runs compared in every metric; `refusal` says why there is no verdict, where there is none to give.

    `other_questions` are examples of the same id that ask something else in the other run.
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
    """Compare two runs; `only` names the one metric that gets a verdict, if it was chosen beforehand."""
    differing = [key for key in a.questions if key in b.questions and a.questions[key] != b.questions[key]]
    refusal = refusal_of(a, b, differing) if paired else None
    tested = () if refusal is not None else None if only is None else (only,)
    found = stats.compare_metrics(a.scores, b.scores, tested=tested, level=level, margin=margin, paired=paired)
    return RunComparison(metrics=found, other_questions=differing, refusal=refusal)


def refusal_of(a: Side, b: Side, differing: Sequence[Any]) -> str | None:
    """Why two runs cannot be compared example by example, if they cannot.

    >>> refusal_of(Side("gsm8k"), Side("wordle"), [])
    'A is a run of gsm8k and B one of wordle, and rewards of two environments do not mean the same'
    """
    if a.env_id and b.env_id and not is_same_environment(a.env_id, b.env_id):
        return f"A is a run of {a.env_id} and B one of {b.env_id}, and rewards of two environments do not mean the same"
    if differing:
        return (
            f"{len(differing)} of the examples that share an id ask{'s' * (len(differing) == 1)} something else in B "
            f"(first: {differing[0]}), so that they cannot be compared one by one"
        )
    return None if a.questions.keys() & b.questions.keys() else "the two runs share no example"


def question_of(prompt: Any) -> Any:
    """What is asked, apart from how the model was instructed: two system prompts may be compared on the same question.

    >>> question_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    [('user', '2+2?')]
    """
    if not isinstance(prompt, list):
        return prompt
    messages = [message for message in prompt if isinstance(message, Mapping)]
    asked = [(message.get("role"), message.get("content")) for message in messages if message.get("role") != "system"]
    return asked or [(message.get("role"), message.get("content")) for message in messages]
