"""Classic import path: Gymnasium environments."""

from verifiers.envs.gym_env import EpisodicSumRubric, GymEnv, sum_step_rewards

__all__ = ["EpisodicSumRubric", "GymEnv", "sum_step_rewards"]
