"""Classic import path: games of TextArena."""

from verifiers.envs.textarena_env import TextArenaEnv

__all__ = ["TextArenaEnv"]
