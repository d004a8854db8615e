"""The episode loop: runs a rollout turn by turn to its end, and records why it ended."""

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
    """Holds resources per rollout, and releases them."""

    async def clean_up(self, state: State) -> None: ...


class Episode(CleanedUp, Protocol):
    """What the loop needs from an environment. Behind each method may be a user's override, sync or async."""

    async def start(self, state: State) -> State: ...
    async def ask_completed(self, state: State) -> bool: ...
    async def next_prompt(self, state: State) -> Messages: ...
    async def ask_model(self, state: State, prompt: Messages) -> None: ...
    async def finish(self, state: State) -> None: ...


async def take_turns(env: Episode, state: State) -> None:
    """Alternate between the environment's prompt and the model's reply until a stop condition is met."""
    while not await env.ask_completed(state):
        prompt = await env.next_prompt(state)
        if state.get("final_env_response") is not None:
            continue
        await env.ask_model(state, prompt)


async def run_episode(
    env: Episode, state: State, turns: Callable[[Any, State], Coroutine[Any, Any, None]] = take_turns
) -> State:
    """Run one rollout to its end. Errors are recorded in the state; only cancellation is raised."""
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
    """The first state. A tool error here is not the policy's fault, because the model was not called yet."""
    try:
        return await env.start(state)
    except ToolError as error:
        raise HookError(f"before the first request to the model, {type(error).__name__}: {error}") from error


async def abandon(env: CleanedUp, state: State) -> None:
    """Release the resources of a cancelled rollout (a sandbox, a game)."""
    try:
        await env.clean_up(state)
    except BaseException as error:  # foreign code; logged, because the state is discarded
        logger.error("the clean-up of a cancelled rollout failed", exc_info=contained(error))


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
    """Apply `note_error` to an error that a hook wrote into ``state["error"]`` itself."""
    error = state.get("error")
    if error is None or (isinstance(error, Error) and error.blame != "policy"):
        return
    state["error"] = None
    note_error(state, error if isinstance(error, Exception) else HookError(f"the environment reported {error!r}"))


def note_error(state: State, error: Exception) -> None:
    """Record an error: one that the policy caused ends the rollout, which is scored; any other makes it failed."""
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
    """The hook that an error came from: the first function in the traceback that is not ours."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not str(trace.tb_frame.f_globals.get("__name__", "")).startswith(("verifiers", "asyncio")):
            return code.co_qualname.replace(".<locals>", "")
        trace = trace.tb_next
    return "an environment hook"


def note_timing(state: State) -> None:
    """Write how long generation took. A state that was created by hand has no start time."""
    timing = state.get("timing") or {}
    if "start_time" not in timing:
        return
    began = getattr(state, "began_at", None)  # monotonic, since the system clock may be set back
    took_s = time.time() - timing["start_time"] if began is None else time.perf_counter() - began
    timing["generation_ms"] = max(took_s, 0.0) * 1000
    timing["total_ms"] = timing["generation_ms"] + timing.get("scoring_ms", 0.0)


def merge_state(state: State, update: Mapping[str, Any] | None) -> None:
    """Merge what a hook returned into the state: the state itself, another one, or only the changed keys."""
    if update is None or update is state:
        return
    if not isinstance(update, Mapping):
        raise HookError(f"a hook returned {update!r:.100}; it must return the state, a dict of changes, or None")
    if not isinstance(steps := update.get("trajectory", []), list):
        raise no_trajectory(steps)
    for key, value in update.items():
        state[key] = value


def no_trajectory(found: Any) -> HookError:
    return HookError(
        f"state['trajectory'] must be the list of the rollout's turns, which the library keeps, not {found!r:.100}: do "
        "not return it from an agent or a hook"
    )


def split_response(result: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """Split the return value of ``env_response`` into messages and a state update.

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
    """The tokens of one turn for a trajectory step, truncated to ``max_seq_len``.

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


# --- decorators of methods ----------------------------------------------------------------------------------------


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
    """Mark a method ``(self, state)`` as a stop condition; the highest priority is checked first."""
    return _mark("stop", function, priority)


@overload
def cleanup(function: F, /) -> F: ...
@overload
def cleanup(*, priority: int = 0) -> Callable[[F], F]: ...
def cleanup(function: F | None = None, /, *, priority: int = 0) -> Any:
    """Mark a method ``(self, state)`` to run when a rollout ends, even if it failed."""
    return _mark("cleanup", function, priority)


@overload
def teardown(function: F, /) -> F: ...
@overload
def teardown(*, priority: int = 0) -> Callable[[F], F]: ...
def teardown(function: F | None = None, /, *, priority: int = 0) -> Any:
    """Mark a method ``(self)`` to run when the environment is no longer used."""
    return _mark("teardown", function, priority)


def marked(obj: Any, kind: str) -> list[Callable[..., Any]]:
    """The methods of an object with a mark, highest priority first."""
    found = {}
    for cls in reversed(type(obj).__mro__):
        for name, value in vars(cls).items():
            if getattr(value, kind, False) is True:
                found[name] = getattr(obj, name)
            else:
                found.pop(name, None)
    return sorted(found.values(), key=lambda m: (-getattr(m, f"{kind}_priority", 0), m.__name__))
