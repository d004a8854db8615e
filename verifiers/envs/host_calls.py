"""Calls of other trainers, with the signatures of 0.1.8 to 0.1.10 → rollouts to train on."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.envs.calling import Answerer, find_answerer, merge_sampling
from verifiers.errors import Error, GraderError, describe
from verifiers.rubrics.score import forget_score
from verifiers.store import safe_name, to_record
from verifiers.types import RolloutOutput, SamplingArgs, State, unique_id

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment

logger = logging.getLogger("verifiers.envs")

_SHAPE = ("client", "model", "gen_sampling_args", "gen_sem", "score_sem", "score", "max_retries", "state_columns")
_NEWER_SHAPE = ("client", "model", "sampling_args", "max_retries", "state_columns", "env_client")
_OLDER_SHAPE = ("gen_sem", "input", "client", "model", "gen_sampling_args")


class Group(list[Any]):
    """The scored rollouts of one group, each with a reward. Failed ones are in ``failed``, with their errors."""

    def __init__(self, scored: Iterable[Any] = (), failed: Sequence[State] = ()) -> None:
        super().__init__(scored)
        self.failed = list(failed)

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            if not self.failed:
                raise
            error = self.failed[0]["error"]
            raise IndexError(f"only {len(self)} rollouts of the group were scored; one failed with: {error}") from error


@dataclass(frozen=True, kw_only=True)
class HostCall:
    """The arguments of one call of ``run_group`` or ``run_rollout``; ``score`` is None if it was not passed."""

    client: Any = None
    model: Any = None
    sampling_args: SamplingArgs | None = None
    gen_sem: Any = None
    score_sem: Any = None
    score: bool | None = None
    max_retries: int = 0
    state_columns: Sequence[str] | None = None
    is_newer: bool = False

    def __post_init__(self) -> None:
        if type(self.max_retries) is not int or self.max_retries < 0:
            raise ValueError(f"max_retries={self.max_retries!r} must be a whole number, 0 or more")
        if isinstance(self.state_columns, str):
            raise TypeError(f"state_columns must be a list of names, not the text {self.state_columns!r}")


def read_host_call(where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, HostCall]:
    """The input (rows, or one row) and the other arguments of a call.

    0.1.9 has ``(input, client, model, gen_sampling_args, gen_sem, score_sem, score)``, 0.1.10 ``(input, client, model,
    sampling_args, max_retries, state_columns)``, and ``run_rollout`` of 0.1.8 ``(semaphore, input, client, model,
    sampling_args)``.

    >>> row, call = read_host_call("run_rollout", ({"prompt": "2+2?"}, "client", "m", {"n": 1}, 2), {})
    >>> row, call.sampling_args, call.max_retries
    ({'prompt': '2+2?'}, {'n': 1}, 2)
    """
    played = "group_inputs" if where == "run_group" else "input"
    given = _by_name(where, _names(played, args, kwargs), args, kwargs)
    if played not in given:
        raise TypeError(f"{where}() needs {played}=…")
    plain, generation = given.pop("sampling_args", None), given.pop("gen_sampling_args", None)
    if plain is not None and generation is not None and plain != generation:
        raise TypeError("sampling_args= and gen_sampling_args= are two names for the same argument; pass one")
    new_names = kwargs.keys() & {"sampling_args", "max_retries", "state_columns"}
    is_newer = given.get("gen_sem") is None and (bool(new_names) or "env_client" in given or _has_retries(args))
    row = given.pop(played)
    if played == "group_inputs" and (isinstance(row, str | Mapping) or not isinstance(row, Iterable)):
        raise TypeError(f"group_inputs must be a list of rows, not {row!r:.80}")
    known = {name: given.pop(name) for name in list(given) if name in HostCall.__dataclass_fields__}
    for name, value in given.items():
        if value is not None:
            warnings.warn(f"{where}: {name}= has no effect here", stacklevel=4)
    if known.get("max_retries", 0) is None:
        known["max_retries"] = 0
    return row, HostCall(**known, sampling_args=plain if generation is None else generation, is_newer=is_newer)


def _has_retries(args: Sequence[Any]) -> bool:
    """Whether the fifth argument is a number of retries rather than a semaphore."""
    return len(args) > 4 and isinstance(args[4], int)


def _names(played: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    if played == "input" and args and not isinstance(args[0], Mapping) and "input" not in kwargs:
        return _OLDER_SHAPE
    return (played, *(_NEWER_SHAPE if _has_retries(args) else _SHAPE))


def _by_name(where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(args) > len(names):
        raise TypeError(f"{where}() takes at most {', '.join(names)} as positional arguments")
    given = dict(zip(names, args, strict=False))
    named = {"gen_sem" if name == "sem" else name: value for name, value in kwargs.items()}
    if twice := given.keys() & named.keys():
        raise TypeError(f"{where}() got {sorted(twice)[0]!r} twice, by position and by name")
    return {**given, **named}


# --- rollouts -----------------------------------------------------------------------------------------------------


async def run_for_host(env: Environment, rows: Sequence[Mapping[str, Any]], call: HostCall) -> Group:
    """Run the rollouts of one group. Each scored one has a reward; failed ones are separate.

    Without scoring (``score=False``) all states are in the order of the rows, with their errors if they failed.
    """
    from verifiers.envs.evaluation import run_group

    answerer = find_answerer(
        call.client if call.client is not None else env.client, call.model if call.model is not None else env.model
    )
    sampling = merge_sampling(env.sampling_args, call.sampling_args)
    is_scored = call.score is not False and env.score_rollouts
    states = await run_group(
        env, rows, answerer.given, answerer.model, call.sampling_args, call.gen_sem, call.score_sem, False
    )
    states = await _play_failed_again(env, rows, states, answerer, sampling, call)
    if not is_scored:
        if call.score is not False:  # `set_score_rollouts(False)`: the host expects a number anyway
            _write_zeros(states)
        return Group(_as_wanted(states, call))
    await _score(env, states, call)
    failed = [state for state in states if state.get("error") is not None]
    for state in failed:
        logger.warning("a rollout of example %s failed and is left out: %s", state.get("example_id"), state["error"])
    return Group(_as_wanted([state for state in states if state.get("error") is None], call), failed)


async def _play_failed_again(
    env: Environment,
    rows: Sequence[Mapping[str, Any]],
    states: list[State],
    answerer: Answerer,
    sampling: SamplingArgs,
    call: HostCall,
) -> list[State]:
    async def play_again(i: int) -> None:
        async with call.gen_sem or nullcontext():
            states[i] = await env.run_row(env.formatted(rows[i]), answerer, sampling)

    for _ in range(call.max_retries):
        await asyncio.gather(*(play_again(i) for i, state in enumerate(states) if state.get("error") is not None))
    return states


async def _score(env: Environment, states: Sequence[State], call: HostCall) -> None:
    from verifiers.envs.evaluation import score_states

    for left in range(call.max_retries, -1, -1):
        async with call.score_sem or nullcontext():
            await score_states(env, states)
        unscored = [state for state in states if isinstance(state.get("error"), GraderError)]
        if not unscored or not left:
            return
        for state in states:  # score the whole group again, because group rewards depend on all its rollouts
            if state.get("error") is None or isinstance(state["error"], GraderError):
                forget_score(state)


def _write_zeros(states: Sequence[State]) -> None:
    for state in states:
        if state.get("error") is None:
            state.update(reward=0.0, metrics=state.get("metrics") or {})
            for step in state.get("trajectory") or ():
                step["reward"] = 0.0


def single_rollout(group: Group, call: HostCall) -> Any:
    """The rollout of a group of one. If it should be scored and failed, its error is raised.

    Hosts that call as in 0.1.10 gather many rollouts and read the ``error`` of each, so they get a failed rollout,
    without a reward.
    """
    if not group.failed:
        return group[0]
    if not call.is_newer:
        raise group.failed[0]["error"]
    return _as_wanted(group.failed, call)[0]


def get_results_path(env_id: str, model: str, base_path: Path = Path("outputs")) -> Path:
    """A new folder name: ``{base_path}/evals/{env}--{model}/{8 hex digits}``."""
    return Path(base_path) / "evals" / safe_name(f"{env_id}--{model}") / unique_id()[:8]


# --- plain data ---------------------------------------------------------------------------------------------------


def _as_wanted(states: Sequence[State], call: HostCall) -> Sequence[Any]:
    if call.state_columns is None:
        return states
    return [to_output(state, call.state_columns) for state in states]


def to_output(state: State, state_columns: Sequence[str] = ()) -> RolloutOutput:
    """One rollout as plain data: the core columns, its timing and usage, and the named columns of its state."""
    output = RolloutOutput(to_record(state, rollout=0, state_columns=state_columns))
    output.pop("rollout")
    output["timing"] = dict(state.get("timing") or {})
    output["is_completed"] = bool(state.get("is_completed"))
    output.setdefault("oai_tools", None)
    if usage := state.peek_usage():
        output["token_usage"] = {
            "input_tokens": float(usage.prompt_tokens),
            "output_tokens": float(usage.completion_tokens),
        }
    error = state.get("error")
    if isinstance(error, Error):
        chain = describe(error)
        output["error"] = {
            **(output["error"] or {}),
            "error": type(error).__name__,
            "error_chain_repr": repr(error),
            "error_chain_str": str(chain.get("message") or error),
        }
    return output
