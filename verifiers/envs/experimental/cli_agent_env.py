"""Classic import path: an agent program in a container; see `CliAgentEnv`."""

from verifiers.envs.agent_stand_ins import CliAgentEnv

__all__ = ["CliAgentEnv"]
