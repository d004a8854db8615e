"""The model is asked to check its answer before it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers import calls
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.escapes import raise_if_escaped
from verifiers.messages import role_of
from verifiers.parsers import Parser
from verifiers.types import Messages, State

ARE_YOU_SURE = "Are you sure? Check your answer, and then give your final answer in the same form as before."


class DoubleCheckEnv(MultiTurnEnv):
    """An environment that asks the model to check its answer before it is scored. ``checks`` has one message per check.

    Parsers read the last reply with an answer, so the rubric scores the final one. The metric ``changed_answer`` is 1
    if it differs from the first.

    >>> from verifiers.clients import FakeClient
    >>> env = DoubleCheckEnv(dataset=[{"question": "2+2?", "answer": "4"}], checks="Sure?")
    >>> completion, _ = env.rollout(FakeClient(["5", "4"]), "fake", "2+2?", "4")
    >>> [message["content"] for message in completion]
    ['5', 'Sure?', '4']
    """

    def __init__(self, dataset: Any = None, *, checks: str | Sequence[str] = ARE_YOU_SURE, **kwargs: Any) -> None:
        self.checks = [checks] if isinstance(checks, str) else list(checks)
        if not self.checks or not all(str(check).strip() for check in self.checks):
            raise ValueError(f"checks must be a message to the model or a list of messages, not {checks!r}")
        super().__init__(max_turns=1 + len(self.checks), dataset=dataset, **kwargs)

    async def _env_response(self, messages: Messages, state: State, **kwargs: Any) -> str:
        """The next check."""
        return self.checks[len(state["trajectory"]) - 1]

    env_response = calls.both(_env_response)  # type: ignore[arg-type]

    def own_metrics(self, state: State) -> dict[str, float]:
        first, last = (_answer(self.parser, reply) for reply in _first_and_last(state))
        return {**super().own_metrics(state), "changed_answer": float(first != last)}


def _first_and_last(state: State) -> tuple[Messages, Messages]:
    completion = state["completion"]
    if isinstance(completion, str):  # plain text has no roles, so take the replies from the turns
        replies = [step["completion"] for step in state["trajectory"]]
    else:
        replies = [[message] for message in completion if role_of(message) == "assistant"]
    return (replies[0], replies[-1]) if replies else ([], [])


def _answer(parser: Parser, reply: Messages) -> Any:
    try:
        return parser.parse_answer(reply)
    except BaseException as error:  # a user's own parser
        raise_if_escaped(error)
        return None
