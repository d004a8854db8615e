"""A completion and the right mathematical answer → 1 or 0: plain numbers directly, all else by math-verify.

Whatever a model writes is equal or not equal: it cannot block, crash or time out the comparison.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from verifiers.errors import GraderError
from verifiers.parsers import MaybeThinkParser, Parser, extract_boxed_answer
from verifiers.rubrics.plain_answers import compare_plainly, readings
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.shipping import InWorker
from verifiers.rubrics.workers import call_in_worker
from verifiers.types import Messages, RewardFunc

MAX_REMEMBERED = 4096
MAX_REMEMBERED_CHARS = 1000
MAX_ANSWER_CHARS = 10_000
STALL_S = 60.0
"""Wall-clock limit of a comparison, which needs a fraction of a second of CPU time: if exceeded, the worker stalled."""

_compare_answers = InWorker("verifiers.rubrics.math_check", "compare_answers")


class MathRubric(Rubric):
    """Whether the parsed answer equals the right one. Reward functions in ``funcs`` count besides ``correct_answer``.

    math-verify runs in worker processes. An answer that it cannot compare within ``timeout_seconds`` of CPU time is not
    equal, however busy the machine is. A right answer that it cannot parse fails the rollout.

    >>> rubric = MathRubric()
    >>> rubric.score_rollout_sync("1/2 + 1/4?", "So it is \\\\boxed{0.75}.", "3/4", {})
    {'correct_answer': 1.0, 'reward': 1.0}
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        max_workers: int | None = None,
        timeout_seconds: float = 0.1,
        class_objects: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathRubric compares expressions with math-verify: pip install 'verifiers[math]'")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds!r} must be a number above 0")
        if max_workers is not None:
            warnings.warn(
                "max_workers has no effect: all rubrics share one pool of worker processes, one per core",
                stacklevel=2,
            )
        parser = parser or MaybeThinkParser(extract_fn=extract_boxed_answer)
        super().__init__(funcs=funcs, weights=weights, parser=parser, class_objects=class_objects)
        self.timeout_seconds = timeout_seconds
        self._remembered: dict[tuple[str, str], bool] = {}
        self.add_reward_func(self.correct_answer)

    async def correct_answer(self, parser: Parser, completion: Messages, answer: Any, **_: Any) -> float:
        """1.0 if the answer that the parser finds in the completion equals the right one, else 0.0.

        Reward functions may pass on all their arguments; those not needed are ignored.
        """
        right, response = _as_text(answer), _as_text(parser.parse_answer(completion))
        if not right:
            raise GraderError("the row has no answer to compare with")
        if not response:
            return 0.0
        verdict = compare_plainly(right, response)
        if verdict is None:
            verdict = await self._compare(right, response)
        return float(verdict)

    async def _compare(self, right: str, response: str) -> bool:
        if len(response) > max(MAX_ANSWER_CHARS, 2 * len(right)):
            return False
        key = (right, response)
        if key in self._remembered:
            return self._remembered[key]
        verdict = await self._ask_worker(right, response)
        if len(right) + len(response) <= MAX_REMEMBERED_CHARS:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = verdict
        return verdict

    async def _ask_worker(self, right: str, response: str) -> bool:
        arguments = {"answers": readings(right), "responses": readings(response), "limit_s": self.timeout_seconds}
        try:
            try:
                verdict = await call_in_worker(_compare_answers, arguments, timeout_s=STALL_S)
            except GraderError:  # the worker stalled or was killed, so try another one
                verdict = await call_in_worker(_compare_answers, arguments, timeout_s=STALL_S)
        except GraderError as error:
            raise GraderError(f"comparing {response!r:.100} with {right!r:.100}: {error}") from error
        if verdict is None:
            raise GraderError(f"the row's answer {right!r:.100} cannot be parsed as mathematics; correct the data set")
        return bool(verdict)


def _as_text(answer: Any) -> str:
    if isinstance(answer, float):
        return f"{Decimal(repr(answer)):f}"  # 1e-300 would be parsed as a product
    return "" if answer is None else str(answer).strip()
