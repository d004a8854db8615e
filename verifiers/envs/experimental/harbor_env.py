"""Classic import path: tasks of Harbor; see `HarborEnv`."""

from verifiers.envs.agent_stand_ins import HarborEnv

__all__ = ["HarborEnv"]
