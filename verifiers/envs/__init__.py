"""The environment classes."""

from __future__ import annotations

import importlib
from typing import Any

from verifiers.envs.env_group import EnvGroup
from verifiers.envs.environment import Environment
from verifiers.envs.loading import load_environment
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.envs.singleturn_env import SingleTurnEnv

# Classes that need tools or the sandbox are imported on first use.
_LATER = {
    "AgentEnv": "agent_env",
    "CodeMathEnv": "code_math_env",
    "DoubleCheckEnv": "double_check_env",
    "GymEnv": "gym_env",
    "MCPEnv": "mcp_env",
    "PythonEnv": "python_env",
    "ReasoningGymEnv": "reasoning_gym_env",
    "SandboxEnv": "sandbox_env",
    "SmolToolEnv": "smol_tool_env",
    "StatefulToolEnv": "stateful_tool_env",
    "TextArenaEnv": "textarena_env",
    "ToolEnv": "tool_env",
}

__all__ = [
    "AgentEnv",
    "CodeMathEnv",
    "DoubleCheckEnv",
    "EnvGroup",
    "Environment",
    "GymEnv",
    "MCPEnv",
    "MultiTurnEnv",
    "PythonEnv",
    "ReasoningGymEnv",
    "SandboxEnv",
    "SingleTurnEnv",
    "SmolToolEnv",
    "StatefulToolEnv",
    "TextArenaEnv",
    "ToolEnv",
    "load_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'verifiers.envs' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"verifiers.envs.{_LATER[name]}"), name)
    globals()[name] = value
    return value
