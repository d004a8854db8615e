"""Puzzles of Reasoning Gym as rows, and its own scorers as the reward."""

from __future__ import annotations

import ast
import difflib
import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.envs.reasoning_gym_scoring import Scorer
from verifiers.envs.singleturn_env import SingleTurnEnv
from verifiers.parsers import Parser, XMLParser
from verifiers.rollout import teardown
from verifiers.rubrics import Rubric
from verifiers.types import Info, Messages, Row

SYSTEM_PROMPT = "Solve the puzzle. Give your final answer, and nothing else, in <answer> tags."
EVAL_SEEDS_FROM = 1_000_003


@dataclass(frozen=True, slots=True)
class Source:
    """One data set of Reasoning Gym: its name, its share of the rows, its configuration."""

    name: str
    weight: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)


class ReasoningGymEnv(SingleTurnEnv):
    """Puzzles made by Reasoning Gym: ``gym`` is the name of a data set, or several of them.

    Several are a list of names or of dicts with ``name``, ``weight`` and ``config``; ``config`` alone configures a
    single one. The row's ``task`` is the name of its data set. Scorers that compare texts run here, all others in the
    sandbox, for ``scoring_timeout`` seconds at most: some of them evaluate the answer as Python.

    >>> env = ReasoningGymEnv("spell_backward", num_train_examples=2)
    >>> env.dataset[0]["task"], len(env.dataset)
    ('spell_backward', 2)
    """

    def __init__(
        self,
        gym: str | Sequence[str | Mapping[str, Any]],
        num_train_examples: int = 1000,
        num_eval_examples: int = 100,
        system_prompt: str | None = SYSTEM_PROMPT,
        parser: Parser | None = None,
        seed: int = 0,
        *,
        config: Mapping[str, Any] | None = None,
        scoring_timeout: float = 20.0,
        rubric: Rubric | None = None,
        **kwargs: Any,
    ) -> None:
        self.gym = gym
        self.sources = read_sources(gym, config)
        check_sources(self.sources)
        self.scorer = Scorer(scoring_timeout)
        parser = parser or XMLParser(["answer"])
        super().__init__(
            dataset=functools.partial(make_rows, self.sources, num_train_examples, seed),
            eval_dataset=functools.partial(make_rows, self.sources, num_eval_examples, seed + EVAL_SEEDS_FROM),
            system_prompt=system_prompt,
            parser=parser,
            rubric=rubric or Rubric([puzzle_score], parser=parser, class_objects={"scorer": self.scorer}),
            **kwargs,
        )

    @teardown
    def close_scorer(self) -> None:
        """End the processes that score."""
        self.scorer.close()


async def puzzle_score(parser: Parser, completion: Messages, answer: str, info: Info, scorer: Scorer) -> float:
    """What the puzzle's own scorer gives the answer, from 0 to 1."""
    said = parser.parse_answer(completion)
    if not said:
        return 0.0
    name, config, entry = (str(info[key]) for key in ("gym", "config", "entry"))
    if compares_texts(name):
        return float(gym_dataset(name, config).score_answer(said, {"answer": answer}))
    return await scorer.score(name, config, entry, said, right=answer)


def read_sources(gym: str | Sequence[str | Mapping[str, Any]], config: Mapping[str, Any] | None = None) -> list[Source]:
    """``gym`` in any of its forms, as data sets with weights.

    >>> read_sources(["gcd", {"name": "lcm", "weight": 3}])
    [Source(name='gcd', weight=1.0, config={}), Source(name='lcm', weight=3.0, config={})]
    """
    if isinstance(gym, str):
        return [Source(gym, config=dict(config or {}))]
    if config:
        raise ValueError("config= goes with one data set; with several, give each its own: {'name': …, 'config': …}")
    sources = [_read_source(item) for item in gym]
    if not sources or not all(source.weight > 0 for source in sources):
        raise ValueError(f"gym needs at least one data set, each with a weight above 0; got {gym!r}")
    return sources


def _read_source(item: str | Mapping[str, Any]) -> Source:
    given: dict[str, Any] = {"name": item} if isinstance(item, str) else dict(item)
    if "name" not in given or not given.keys() <= {"name", "weight", "config"}:
        raise ValueError(f"a data set is a name or a dict with name, weight and config; got {item!r}")
    return Source(given["name"], float(given.get("weight", 1.0)), dict(given.get("config") or {}))


def check_sources(sources: Sequence[Source]) -> None:
    """Raise where Reasoning Gym is not installed, has no such data set, or refuses a configuration."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ImportError("ReasoningGymEnv takes its puzzles from there: pip install 'verifiers[games]'") from None
    for source in sources:
        if source.name not in DATASETS:
            close = difflib.get_close_matches(source.name, DATASETS, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ValueError(f"Reasoning Gym has no data set {source.name!r}{hint}")
        if taken := source.config.keys() & {"seed", "size"}:
            raise ValueError(
                f"{' and '.join(sorted(taken))} of {source.name!r} follow from the environment's arguments"
            )
        try:
            settings = DATASETS[source.name][1](**source.config)
            if hasattr(settings, "validate"):
                settings.validate()
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"Reasoning Gym's {source.name!r} refuses {source.config!r}: {error}") from error


def make_rows(sources: Sequence[Source], n: int, seed: int) -> list[Row]:
    """``n`` puzzles, each from a data set drawn by the weights."""
    names = [source.name for source in sources]
    picks = random.Random(seed).choices(range(len(sources)), [source.weight for source in sources], k=n)
    makers = [_puzzles(source, picks.count(i), seed + i) for i, source in enumerate(sources)]
    return [{**next(makers[i]), "task": names[i]} for i in picks]


def _puzzles(source: Source, n: int, seed: int) -> Any:
    config = json.dumps({**source.config, "seed": seed, "size": max(n, 1)})
    dataset = gym_dataset(source.name, config)
    for i in range(n):
        puzzle = dataset[i]
        info = {"gym": source.name, "config": config, "entry": write_entry(puzzle)}
        yield {"question": puzzle["question"], "answer": str(puzzle["answer"] or ""), "info": info}


def write_entry(puzzle: Mapping[str, Any]) -> str:
    """A puzzle as text, for the scorer: as Python's literals, which keep tuples and whole-number keys, or as JSON."""
    text = repr(puzzle)
    try:
        if ast.literal_eval(text) == puzzle:
            return text
    except (ValueError, SyntaxError):
        pass
    return json.dumps(puzzle, default=str)


@functools.lru_cache(32)
def gym_dataset(name: str, config: str) -> Any:
    """A data set by its name and its configuration as JSON."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


def compares_texts(name: str) -> bool:
    """Has this data set no scorer of its own? Then the one that compares texts is used, and no answer is evaluated."""
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    return bool(DATASETS[name][0].score_answer is ProceduralDataset.score_answer)
