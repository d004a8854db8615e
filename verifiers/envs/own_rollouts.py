"""The calls of the model that a ``rollout`` of one's own made → the steps of its trajectory, with their exact tokens.

Each reply in the completion is looked up among the policy's calls; what else was asked (of a judge, or in vain) is not
the policy's reply and is left out. What cannot be found is never guessed: the state says why it cannot be learned from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifiers.clients.protocol import Request
from verifiers.clients.recording import CallReply, ModelCall, is_asked_through
from verifiers.messages import as_messages, called_functions, role_of, text_of
from verifiers.rollout import step_tokens
from verifiers.samples import NO_TOKENS, NotSampledError
from verifiers.types import ChatMessage, State, TrajectoryStep

_ADD_IT = "add it by add_model_response(state, prompt, response)"
_UNSEEN = "calls from threads of your own, or through a client that is not ours, are not seen"


def add_steps(state: State, made: Sequence[ModelCall], max_seq_len: int | None) -> None:
    """Fill the trajectory of a rollout that has none; where that is not possible, ``state.not_sampled`` says why."""
    if state.get("trajectory") or state.get("error") is not None or not (made or state.get("completion")):
        return
    try:
        steps = list(_steps(state, made, max_seq_len))
    except NotSampledError as error:
        state.not_sampled = str(error)
        return
    except (AttributeError, TypeError, ValueError) as error:  # an override may return anything as its completion
        state.not_sampled = f"its completion is neither a text nor messages ({type(error).__name__}: {error})"
        return
    state["trajectory"] = steps
    state["is_truncated"] = bool(state.get("is_truncated")) or any(step["is_truncated"] for step in steps)


@dataclass(eq=False, slots=True)
class _Said:
    """A reply of the policy, with the request that it was given to."""

    request: Request
    reply: CallReply
    is_used: bool = False


def _steps(state: State, made: Sequence[ModelCall], max_seq_len: int | None) -> Iterator[TrajectoryStep]:
    if not made:
        raise NotSampledError(f"no call of the model was seen in its rollout; {_UNSEEN}")
    policy = state.answerer.client
    calls = [call for call in made if is_asked_through(policy, call.client)]
    said = [_Said(call.request, reply) for call in calls for reply in call.replies]
    completion = state.get("completion") or []
    before = as_messages(state.get("prompt") or [])
    messages = as_messages(completion, role="assistant")
    if all(role_of(message) != "assistant" for message in messages):
        raise NotSampledError("its completion holds no reply of the model, though the model was asked")
    for message in messages:
        if role_of(message) == "assistant":
            found = _find(message, before[-1:], said)
            yield _step(state, found, completion if isinstance(completion, str) else [message], max_seq_len)
        before = [*before, message]


def _step(state: State, found: _Said, completion: Any, max_seq_len: int | None) -> TrajectoryStep:
    sampled = found.reply.tokens
    if sampled is not None and sampled.sampling is None:
        sampled = replace(sampled, sampling={"asked": found.request.sampling})
    tokens = step_tokens(sampled, max_seq_len)
    assert tokens is not None
    return TrajectoryStep(
        prompt=found.request.prompt,
        completion=completion,
        response=None,
        tokens=tokens,
        reward=None,
        advantage=None,
        is_truncated=found.reply.is_truncated or tokens["is_truncated"],
        trajectory_id=state["trajectory_id"],
        extras={},
    )


def _find(message: ChatMessage, before: Sequence[Any], said: Sequence[_Said]) -> _Said:
    """The call that gave a message of the completion: the first that has not given another one."""
    same = [one for one in said if not one.is_used and _is_same(one.reply.message, message)]
    if not same:
        raise NotSampledError(
            f"its completion holds a reply that no call of the policy gave: leave replies as they were sampled, or "
            f"{_ADD_IT}; {_UNSEEN}"
        )
    known = [one for one in same if one.reply.tokens is not None]
    if not known:
        raise NotSampledError(NO_TOKENS)
    prompts = {tuple(one.reply.tokens.prompt_ids) for one in known if one.reply.tokens is not None}
    if len(prompts) > 1:
        known = [one for one in known if _ends_with(one.request.prompt, before)]
    if not known:
        raise NotSampledError(
            "several calls with different prompts gave a reply in its completion, and it cannot be told which one is "
            f"meant: {_ADD_IT}"
        )
    known[0].is_used = True
    return known[0]


def _is_same(reply: ChatMessage, message: ChatMessage) -> bool:
    """Is this the same reply, but for space around it and the ids of its calls?"""
    is_same_text = text_of(reply).strip() == text_of(message).strip()
    return is_same_text and called_functions(reply) == called_functions(message)


def _ends_with(prompt: Any, before: Sequence[Any]) -> bool:
    """Does a prompt end with what stands before a reply in its rollout?"""
    if not isinstance(prompt, str) and any(isinstance(token, int) for token in prompt):
        return False
    last = as_messages(prompt)[-1:]
    return [(role_of(one), text_of(one)) for one in last] == [(role_of(one), text_of(one)) for one in before]
