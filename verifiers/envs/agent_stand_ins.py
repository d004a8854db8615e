"""Stand-ins for environments of 0.1.9 that this library does not have; their errors name the replacements."""

from __future__ import annotations

from typing import Any

from verifiers.envs.multiturn_env import MultiTurnEnv

_INSTEAD = (
    "it runs a program in a rented container and gets its model calls through a tunnel. Instead, "
    "vf.AgentEnv(run='…') runs a command line on this machine and records its model calls, and a SandboxEnv "
    "gives the model a shell"
)


class CliAgentEnv(MultiTurnEnv):
    """Stand-in for 0.1.9's environment of this name. Creating one raises an error that says what to use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"there is no {type(self).__name__} here: {_INSTEAD}")


class HarborEnv(CliAgentEnv):
    """Stand-in for 0.1.9's environment of this name. Creating one raises an error that says what to use."""
