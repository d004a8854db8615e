"""A reply → a score by an environment's rubric, for verl's own single-turn sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.calls import both
from verifiers.clients.fake import FakeClient
from verifiers.integrations.verl.environments import environment_of, row_of


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """``reward.custom_reward_function.path=pkg://verifiers.integrations.verl.rewards`` and ``name=compute_score``.

    ``score`` is the reward; the other keys are the rubric's metrics. A reply that cannot be scored raises.
    """
    scored: dict[str, float] = _scored(solution_str, extra_info or {})
    return scored


@both
async def _scored(reply: str, extra_info: Mapping[str, Any]) -> dict[str, float]:
    env = environment_of(extra_info)
    state = env.new_state(env.formatted(row_of(extra_info)), FakeClient(reply), "policy", None)
    message: Any = {"role": "assistant", "content": reply}
    state["completion"] = reply if env.message_type == "completion" else [message]
    state["is_completed"] = True
    score = await env.score_alone(state)
    if score.error is not None:
        raise score.error
    return {**{name: float(value) for name, value in score.metrics.items()}, "score": float(score.reward)}
