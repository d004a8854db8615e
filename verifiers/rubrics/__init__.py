"""Rollouts → scores: reward functions with weights, groups, judges, mathematics."""

from verifiers.rubrics.judge_rubric import JudgeRubric
from verifiers.rubrics.math_rubric import MathRubric
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.rubric_group import RubricGroup
from verifiers.rubrics.signature import cpu_bound, group_reward
from verifiers.rubrics.tool_rubric import ToolRubric

__all__ = ["JudgeRubric", "MathRubric", "Rubric", "RubricGroup", "ToolRubric", "cpu_bound", "group_reward"]
