"""``workers=`` of a run → the player of its rollouts: the environment itself, or other processes."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from verifiers.envs.calling import Answerer
from verifiers.envs.remote.host import Terms
from verifiers.envs.run_steps import Player
from verifiers.types import SamplingArgs

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.envs.evaluation import Options

KINDS = {"ray": "verifiers.integrations.ray"}  # in a higher layer, and needs an extra, so it is imported on use


@dataclass(frozen=True, kw_only=True)
class Share:
    """How many rollouts of a run may run at once on all workers together; -1 and None mean no limit."""

    at_once: int = -1
    generation: int | None = None
    scoring: int | None = None


class WorkersPlayer(Player, Protocol):
    """A player that runs rollouts in other processes. Waiting rollouts can be withdrawn."""

    def withdraw(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Workers(Protocol):
    """Processes that run rollouts. They exist within a ``with`` block, and may serve several runs in it."""

    def __enter__(self) -> Workers: ...

    def __exit__(self, *error: Any) -> None: ...

    def player(self, env: Environment, answerer: Answerer, terms: Terms, share: Share) -> WorkersPlayer: ...


def check_workers(given: Any) -> None:
    """Refuse invalid workers before the run starts."""
    if given is None or isinstance(given, Workers):
        return
    kind, colon, address = given.partition(":") if isinstance(given, str) else ("", "", "")
    if kind not in KINDS or (colon and not address.strip()):
        raise ValueError(f"workers={given!r} must be 'ray', 'ray:HOST:PORT' or a RayWorkers(...) object")


def check_installed(given: Any) -> None:
    """Refuse workers whose package is not installed, or too old, before anything is loaded."""
    if isinstance(given, str):
        importlib.import_module(f"{KINDS[given.partition(':')[0]]}.cluster").import_ray()


def as_workers(given: Any) -> Workers:
    """The workers for ``ray``, ``ray:HOST:PORT`` or an object of workers, not started yet."""
    check_workers(given)
    if not isinstance(given, str):
        workers: Workers = given
        return workers
    kind, _, address = given.partition(":")
    made: Workers = importlib.import_module(KINDS[kind]).RayWorkers(address or None)
    return made


@asynccontextmanager
async def open_player(
    env: Environment, answerer: Answerer, sampling: SamplingArgs, options: Options, *, is_scored: bool
) -> AsyncIterator[Player]:
    """The player of a run, within the block."""
    if options.workers is None:
        yield env.player(is_scored=is_scored)
        return
    workers: AbstractContextManager[Workers] = as_workers(options.workers)
    terms = Terms(
        model=answerer.model,
        sampling=sampling,
        is_scored=is_scored,
        reward_timeout_s=options.reward_timeout_s,
        hook_timeout_s=options.hook_timeout_s,
    )
    share = Share(
        at_once=options.max_concurrent,
        generation=options.max_concurrent_generation,
        scoring=options.max_concurrent_scoring,
    )
    opened = await asyncio.to_thread(workers.__enter__)  # starting a cluster takes seconds
    try:
        player = opened.player(env, answerer, terms, share)
        try:
            yield player
        finally:
            player.close()
    finally:
        await asyncio.to_thread(workers.__exit__, None, None, None)
