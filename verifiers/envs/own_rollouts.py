"""The model calls of an overridden rollout → steps of its trajectory, with exact tokens.

Each reply in the completion is looked up in the trajectory that the library recorded, if any, and else among the
policy's calls. Other calls (to a judge, or with unused replies) are left out. If a reply is not found, nothing is
guessed: the state says why it cannot be trained on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from verifiers.clients.protocol import Request
from verifiers.clients.recording import CallReply, ModelCall, is_asked_through
from verifiers.messages import as_messages, called_functions, role_of, text_of
from verifiers.rollout import step_tokens
from verifiers.samples import NO_TOKENS, NotSampledError
from verifiers.types import ChatMessage, State, TrajectoryStep, TrajectoryStepTokens

SPEAKING_HOOKS = ("env_response", "get_prompt_messages", "add_model_response", "render_completion")
"""Hooks that can add replies of the model to a rollout besides the library's turns."""
_ADD_IT = "add it by add_model_response(state, prompt, response)"
_UNSEEN = "calls from your own threads, or through a client that is not ours, are not recorded"
_NOT_GIVEN = (
    "its completion contains a reply that no call of the policy returned: do not change sampled replies, or "
    f"{_ADD_IT}; {_UNSEEN}"
)


def add_steps(state: State, made: Sequence[ModelCall], max_seq_len: int | None, *, is_own: bool = True) -> None:
    """Add calls that the library did not record to the trajectory; if that fails, set ``state.not_sampled``.

    ``is_own``: a user's ``rollout`` made the calls. Otherwise only the user's hooks may have made additional calls.
    """
    if state.get("error") is not None or not (made or state.get("completion")):
        return
    kept = state.get("trajectory") or []
    if kept and all(step.get("tokens") is None for step in kept):
        return
    if not is_own and (len(made) <= len(kept) or isinstance(state.get("completion"), str)):
        return
    try:
        steps = _steps(state, made, max_seq_len)
    except NotSampledError as error:
        _refuse(state, str(error))
    except (AttributeError, TypeError, ValueError) as error:  # an override may return anything as its completion
        _refuse(state, f"its completion is neither a text nor messages ({type(error).__name__}: {error})")
    else:
        state["trajectory"] = steps
        state["is_truncated"] = bool(state.get("is_truncated")) or any(step["is_truncated"] for step in steps)


def _refuse(state: State, reason: str) -> None:
    """Remove the tokens from the trajectory, because it is incomplete."""
    state.not_sampled = reason
    state["trajectory"] = [type(step)({**step, "tokens": None}) for step in state.get("trajectory") or ()]


@dataclass(eq=False, slots=True)
class _Reply:
    """A reply of the policy: a step in the trajectory, or a call that is not in it."""

    prompt: Any
    reply: ChatMessage
    tokens: TrajectoryStepTokens | None
    call: tuple[Request, CallReply] | None = None
    step: TrajectoryStep | None = None
    is_used: bool = False


def _steps(state: State, made: Sequence[ModelCall], max_seq_len: int | None) -> list[TrajectoryStep]:
    kept = state.get("trajectory") or []
    if not made and not kept:
        raise NotSampledError(f"no model call was recorded in its rollout; {_UNSEEN}")
    replies = _policy_replies(state, made, max_seq_len)
    completion = state.get("completion") or []
    if kept and isinstance(completion, str):
        _look_up_text(completion, replies)
    else:
        _look_up_messages(completion, as_messages(state.get("prompt") or []), replies)
    used = [one for one in replies if one.step is not None or one.is_used]
    return [one.step or _step(state, one, completion, max_seq_len) for one in used]


def _policy_replies(state: State, made: Sequence[ModelCall], max_seq_len: int | None) -> list[_Reply]:
    """The replies of the policy in the order of the calls. Steps without a call (from a cache) follow earlier steps."""
    policy = state.answerer.client
    calls: list[_Reply] = []
    of_others: set[Any] = set()
    for call in made:
        cut = [step_tokens(reply.tokens, max_seq_len) for reply in call.replies]
        if is_asked_through(policy, call.client):
            pairs = zip(call.replies, cut, strict=True)
            calls += [_Reply(call.request.prompt, one.message, ids, call=(call.request, one)) for one, ids in pairs]
        else:
            of_others |= {_ids(ids) for ids in cut if ids is not None}
    unmatched: dict[Any, list[_Reply]] = defaultdict(list)
    for one in reversed(calls):
        unmatched[_ids(one.tokens)].append(one)
    first: list[_Reply] = []
    for step in state.get("trajectory") or ():
        ids = _ids(step.get("tokens"))
        replies = [m for m in as_messages(step["completion"], role="assistant") if role_of(m) == "assistant"]
        reply = replies[-1] if replies else {"role": "assistant", "content": None}
        given = unmatched[ids].pop() if ids is not None and unmatched[ids] else None
        if given is not None:
            given.prompt, given.reply, given.step = step["prompt"], reply, step
        elif ids in of_others:
            raise NotSampledError("a step of its trajectory is a reply of a client other than the policy's")
        else:
            known = [i for i, one in enumerate(calls) if one.step is not None]
            late = _Reply(step["prompt"], reply, step.get("tokens"), step=step)
            first.append(late) if not known else calls.insert(known[-1] + 1, late)
    return [*first, *calls]


def _ids(tokens: TrajectoryStepTokens | None) -> Any:
    return None if tokens is None else (tuple(tokens["prompt_ids"]), tuple(tokens["completion_ids"]))


def _prompt_ids(one: _Reply) -> Any:
    return None if one.tokens is None else tuple(one.tokens["prompt_ids"])


def _look_up_messages(completion: Any, prompt: list[ChatMessage], replies: Sequence[_Reply]) -> None:
    """Mark the replies in the completion as used. An unknown reply is an edit of a recorded one, or an error."""
    unknown: list[ChatMessage] = []
    before, messages = prompt, as_messages(completion, role="assistant")
    steps = [one for one in replies if one.step is not None]
    if not steps and all(role_of(message) != "assistant" for message in messages):
        raise NotSampledError("its completion contains no reply of the model, although the model was called")
    for message in messages:
        if role_of(message) == "assistant":
            found = _find(message, before[-1:], replies)
            if found is None:
                unknown.append(message)
            else:
                found.is_used = True
        before = [*before, message]
    shown = [message for one in steps for message in as_messages(one.prompt) if role_of(message) == "assistant"]
    edited = [message for message in unknown if not any(_is_same(one, message) for one in shown)]
    if (unknown and _has_spare(replies)) or len(edited) > sum(not one.is_used for one in steps):
        raise NotSampledError(_NOT_GIVEN)


def _look_up_text(completion: str, replies: Sequence[_Reply]) -> None:
    """The same for a completion that is one text: first look up the steps in order, then other calls in the rest."""
    rest = completion
    for one in sorted(replies, key=lambda one: one.step is None):
        text = text_of(one.reply).strip()
        if text and text in rest:
            one.is_used = True
            rest = rest.replace(text, "\0", 1)
    last = [one for one in replies if one.step is not None][-1]
    if completion not in f"{text_of(last.prompt)}{text_of(last.reply)}" and _has_spare(replies):
        raise NotSampledError(_NOT_GIVEN)


def _has_spare(replies: Sequence[_Reply]) -> bool:
    """Whether the reply of some call is not in the completion, and so may be there in an edited form."""
    asked = {_prompt_ids(one) for one in replies if one.step is not None}  # a retry of a turn: its reply was dropped
    return any(one.step is None and not one.is_used and _prompt_ids(one) not in asked for one in replies)


def _step(state: State, found: _Reply, completion: Any, max_seq_len: int | None) -> TrajectoryStep:
    assert found.call is not None
    request, reply = found.call
    sampled = reply.tokens
    if sampled is None:
        raise NotSampledError(NO_TOKENS)
    if sampled.sampling is None:
        sampled = replace(sampled, sampling={"asked": request.sampling})
    tokens = cast(TrajectoryStepTokens, step_tokens(sampled, max_seq_len))
    return TrajectoryStep(
        prompt=request.prompt,
        completion=text_of(found.reply) if isinstance(completion, str) else [found.reply],
        response=None,
        tokens=tokens,
        reward=None,
        advantage=None,
        is_truncated=reply.is_truncated or tokens["is_truncated"],
        trajectory_id=state["trajectory_id"],
        extras={},
    )


def _find(message: ChatMessage, before: Sequence[Any], replies: Sequence[_Reply]) -> _Reply | None:
    """The unused reply that is this message of the completion: preferably a step, else a call."""
    same = [one for one in replies if not one.is_used and _is_same(one.reply, message)]
    if not same:
        return None
    kept = [one for one in same if one.step is not None]
    known = [one for one in same if one.step is None and one.tokens is not None]
    here = [one for one in (*kept, *known) if _ends_with(one.prompt, before)]
    if first := here or kept:
        return first[0]
    if not known:
        raise NotSampledError(NO_TOKENS)
    if len({_prompt_ids(one) for one in known}) > 1:
        raise NotSampledError(
            "several calls with different prompts returned the same reply, so it is not clear which one is in its "
            f"completion: {_ADD_IT}"
        )
    return known[0]


def _is_same(reply: ChatMessage, message: ChatMessage) -> bool:
    """Whether two replies are equal except for surrounding white space and the ids of tool calls."""
    is_same_text = text_of(reply).strip() == text_of(message).strip()
    return is_same_text and called_functions(reply) == called_functions(message)


def _ends_with(prompt: Any, before: Sequence[Any]) -> bool:
    """Whether a prompt ends with the message before a reply in its rollout."""
    if not isinstance(prompt, str) and any(isinstance(token, int) for token in prompt):
        return False
    last = as_messages(prompt)[-1:]
    return [(role_of(one), text_of(one)) for one in last] == [(role_of(one), text_of(one)) for one in before]
