"""Environments of 0.1.9 that are not here, by name: what uses them is told what there is instead."""

from __future__ import annotations

from typing import Any

from verifiers.envs.multiturn_env import MultiTurnEnv

_INSTEAD = (
    "it runs a program in a rented container, and reads its calls to the model through a tunnel. Here, "
    "vf.AgentEnv(run='…') runs a command line on this machine and records its calls of the model, and a SandboxEnv "
    "gives the model a shell"
)


class CliAgentEnv(MultiTurnEnv):
    """Stands for 0.1.9's environment of this name; making one says what to use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"there is no {type(self).__name__} here: {_INSTEAD}")


class HarborEnv(CliAgentEnv):
    """Stands for 0.1.9's environment of this name; making one says what to use."""
