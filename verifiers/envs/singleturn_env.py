"""Rollouts with one turn: one prompt, one reply."""

from __future__ import annotations

from typing import Any

from verifiers.envs.multiturn_env import MultiTurnEnv


class SingleTurnEnv(MultiTurnEnv):
    """An environment in which the model replies once.

    >>> from verifiers.clients import FakeClient
    >>> env = SingleTurnEnv(dataset=[{"question": "2+2?", "answer": "4"}])
    >>> completion, state = env.rollout(FakeClient(lambda messages: "4"), "fake", "2+2?", "4")
    >>> completion
    [{'role': 'assistant', 'content': '4'}]
    """

    def __init__(self, dataset: Any = None, **kwargs: Any) -> None:
        super().__init__(max_turns=kwargs.pop("max_turns", 1), dataset=dataset, **kwargs)
