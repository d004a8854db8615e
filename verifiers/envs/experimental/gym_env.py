"""Classic import path: Gymnasium environments."""

from verifiers.envs.gym_env import GymEnv

__all__ = ["GymEnv"]
