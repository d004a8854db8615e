"""The episode loop: a state goes turn by turn to its end, and says why it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar, overload

from verifiers.clients.protocol import Tokens
from verifiers.errors import Error, HookError, OverlongPromptError, ToolError, wrap
from verifiers.escapes import contained
from verifiers.types import Messages, State, TrajectoryStepTokens

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("verifiers.rollout")


class CleanedUp(Protocol):
    """What holds something for each rollout, and gives it back."""

    async def clean_up(self, state: State) -> None: ...


class Episode(CleanedUp, Protocol):
    """What the loop asks of an environment; each may be a user's override, sync or async."""

    async def start(self, state: State) -> State: ...
    async def ask_completed(self, state: State) -> bool: ...
    async def next_prompt(self, state: State) -> Messages: ...
    async def ask_model(self, state: State, prompt: Messages) -> None: ...
    async def finish(self, state: State) -> None: ...


async def take_turns(env: Episode, state: State) -> None:
    """The model speaks, the environment answers, until a stop condition is met."""
    while not await env.ask_completed(state):
        prompt = await env.next_prompt(state)
        if state.get("final_env_response") is not None:
            continue
        await env.ask_model(state, prompt)


async def run_episode(
    env: Episode, state: State, turns: Callable[[Any, State], Coroutine[Any, Any, None]] = take_turns
) -> State:
    """Play one rollout to its end. Whatever goes wrong ends up in the state; nothing but cancellation escapes."""
    try:
        state = await _started(env, state)
        await turns(env, state)
    except BaseException as error:  # foreign code runs in every step
        try:
            note_error(state, contained(error))
        except asyncio.CancelledError:
            await abandon(env, state)
            raise
    await _finish(env, state)
    return state


async def _started(env: Episode, state: State) -> State:
    """The first state. A tool that fails in there is not the policy's fault, which has not been asked yet."""
    try:
        return await env.start(state)
    except ToolError as error:
        raise HookError(f"before the model was asked, {type(error).__name__}: {error}") from error


async def abandon(env: CleanedUp, state: State) -> None:
    """The rollout is lost; what it holds (a sandbox, a game) is given back all the same."""
    try:
        await env.clean_up(state)
    except BaseException as error:  # foreign code, and nobody is left to read the state
        logger.error("cleaning up after a cancelled rollout", exc_info=contained(error))


async def _finish(env: Episode, state: State) -> None:
    state["is_completed"] = True
    try:
        is_cut = any(step["is_truncated"] for step in state["trajectory"])
    except (TypeError, KeyError):
        note_error(state, no_trajectory(state.get("trajectory")))
        state["trajectory"], is_cut = [], False
    state["is_truncated"] = bool(state.get("is_truncated")) or is_cut
    note_timing(state)
    try:
        await env.finish(state)
    except BaseException as error:  # foreign code: clean-up hooks and rendering
        note_error(state, contained(error))
    read_error(state)


def read_error(state: State) -> None:
    """A hook may have written ``state["error"]`` by itself: what the policy did is scored here too."""
    error = state.get("error")
    if error is None or (isinstance(error, Error) and error.blame != "policy"):
        return
    state["error"] = None
    note_error(state, error if isinstance(error, Exception) else HookError(f"the environment reported {error!r}"))


def note_error(state: State, error: Exception) -> None:
    """What the policy caused ends the rollout and is scored; anything else makes it failed."""
    wrapped = wrap(error, HookError, _where(error))
    if isinstance(wrapped, OverlongPromptError):
        state["prompt_too_long"] = True
        state["is_truncated"] = True
        state["stop_condition"] = "prompt_too_long"
    elif wrapped.blame == "policy":
        state["stop_condition"] = type(wrapped).__name__
    elif state.get("error") is None:
        state["error"] = wrapped
        state["stop_condition"] = "has_error"


def _where(error: Exception) -> str:
    """The hook an error came out of: the first function on its way that is not ours."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not str(trace.tb_frame.f_globals.get("__name__", "")).startswith(("verifiers", "asyncio")):
            return code.co_qualname.replace(".<locals>", "")
        trace = trace.tb_next
    return "an environment hook"


def note_timing(state: State) -> None:
    """Write how long generation took; a state that was made by hand does not know when it began."""
    timing = state.get("timing") or {}
    if "start_time" not in timing:
        return
    began = getattr(state, "began_at", None)  # the clock of the day may be set back meanwhile
    took_s = time.time() - timing["start_time"] if began is None else time.perf_counter() - began
    timing["generation_ms"] = max(took_s, 0.0) * 1000
    timing["total_ms"] = timing["generation_ms"] + timing.get("scoring_ms", 0.0)


def merge_state(state: State, update: Mapping[str, Any] | None) -> None:
    """Take over what a hook returned as the state: the whole one, another one, or only what changed."""
    if update is None or update is state:
        return
    if not isinstance(update, Mapping):
        raise HookError(f"a hook returned {update!r:.100}; it returns the state, a dict of what changes, or nothing")
    if not isinstance(steps := update.get("trajectory", []), list):
        raise no_trajectory(steps)
    for key, value in update.items():
        state[key] = value


def no_trajectory(found: Any) -> HookError:
    return HookError(
        f"state['trajectory'] is the list of a rollout's turns, which are kept here, and not {found!r:.100}: leave it "
        "out of what an agent or a hook returns"
    )


def split_response(result: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """What ``env_response`` returned, as messages and a state update.

    >>> split_response(("Correct!", {"completed": True}))
    ('Correct!', {'completed': True})
    >>> split_response("Try again.")
    ('Try again.', None)
    """
    if isinstance(result, tuple) and len(result) == 2 and (result[1] is None or isinstance(result[1], Mapping)):
        first, second = result
        if second is None or not (isinstance(first, Mapping) and "role" in first and "role" in second):
            return first, second
    return result, None


def step_tokens(tokens: Tokens | None, max_seq_len: int | None = None) -> TrajectoryStepTokens | None:
    """One turn's tokens as a trajectory step keeps them, cut to the longest sequence that may be trained on.

    >>> step = step_tokens(Tokens(prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-0.1, -0.2]), max_seq_len=3)
    >>> step["completion_ids"], step["completion_mask"], step["is_truncated"]
    ([3], [1], True)
    """
    if tokens is None:
        return None
    prompt, reply, logprobs = tokens.prompt_ids, tokens.completion_ids, tokens.logprobs
    is_overlong = is_cut = False
    if max_seq_len is not None and len(prompt) + len(reply) > max_seq_len:
        is_overlong = len(prompt) > max_seq_len
        kept = max(max_seq_len - len(prompt), 0)
        is_cut = is_overlong or kept < len(reply)
        prompt, reply, logprobs = prompt[:max_seq_len], reply[:kept], logprobs[:kept]
    step: TrajectoryStepTokens = {
        "prompt_ids": prompt,
        "prompt_mask": [0] * len(prompt),
        "completion_ids": reply,
        "completion_mask": [1] * len(reply),
        "completion_logprobs": logprobs,
        "overlong_prompt": is_overlong,
        "is_truncated": is_cut,
    }
    if tokens.sampling is not None:
        step["sampling"] = dict(tokens.sampling)
    if tokens.weight_versions:
        spans = list(tokens.weight_versions)
        if spans[-1].end > len(reply):
            spans = [one._replace(end=min(one.end, len(reply))) for one in spans if one.start < len(reply)]
        step["weight_versions"] = spans
    return step


# --- marks on methods ---------------------------------------------------------------------------------------------


def _mark(kind: str, function: F | None, priority: int) -> Any:
    def mark(method: F) -> F:
        setattr(method, kind, True)
        setattr(method, f"{kind}_priority", priority)
        return method

    return mark if function is None else mark(function)


@overload
def stop(function: F, /) -> F: ...
@overload
def stop(*, priority: int = 0) -> Callable[[F], F]: ...
def stop(function: F | None = None, /, *, priority: int = 0) -> Any:
    """Mark a method ``(self, state)`` as a stop condition; the highest priority is asked first."""
    return _mark("stop", function, priority)


@overload
def cleanup(function: F, /) -> F: ...
@overload
def cleanup(*, priority: int = 0) -> Callable[[F], F]: ...
def cleanup(function: F | None = None, /, *, priority: int = 0) -> Any:
    """Mark a method ``(self, state)`` to run when a rollout ends, however it ended."""
    return _mark("cleanup", function, priority)


@overload
def teardown(function: F, /) -> F: ...
@overload
def teardown(*, priority: int = 0) -> Callable[[F], F]: ...
def teardown(function: F | None = None, /, *, priority: int = 0) -> Any:
    """Mark a method ``(self)`` to run when the environment is no longer used."""
    return _mark("teardown", function, priority)


def marked(obj: Any, kind: str) -> list[Callable[..., Any]]:
    """The methods of an object that carry a mark, highest priority first."""
    found = {}
    for cls in reversed(type(obj).__mro__):
        for name, value in vars(cls).items():
            if getattr(value, kind, False) is True:
                found[name] = getattr(obj, name)
            else:
                found.pop(name, None)
    return sorted(found.values(), key=lambda m: (-getattr(m, f"{kind}_priority", 0), m.__name__))
