"""Classic import path (0.1.8): puzzles of Reasoning Gym."""

from verifiers.envs.reasoning_gym_env import ReasoningGymEnv

__all__ = ["ReasoningGymEnv"]
