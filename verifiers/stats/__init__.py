"""Scores → what they show: intervals, pass@k, paired comparison, and how many examples a question needs."""

from verifiers.stats.intervals import Interval, mean_interval
from verifiers.stats.paired import Comparison, compare
from verifiers.stats.passk import PassAtK, pass_at_k
from verifiers.stats.power import examples_needed
from verifiers.stats.scores import by_example

__all__ = [
    "Comparison",
    "Interval",
    "PassAtK",
    "by_example",
    "compare",
    "examples_needed",
    "mean_interval",
    "pass_at_k",
]
