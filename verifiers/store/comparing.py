"""The records of two runs → what B changed against A in each metric, and whether that can be said at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers import stats
from verifiers.results import listed_as
from verifiers.store.config import is_same_environment
from verifiers.store.record import Record, is_failed

COLUMNS = ("example_id", "reward", "error", "metrics", "prompt")


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
            key = record["example_id"]
            side.ask(key, record["prompt"])
            metrics = {listed_as(name): value for name, value in (record["metrics"] or {}).items()}
            for name, value in {"reward": record["reward"], **metrics}.items():
                is_known = not is_failed(record) and isinstance(value, int | float)
                side.score(name, key, float(value) if is_known else None)
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
