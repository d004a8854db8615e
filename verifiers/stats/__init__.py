"""Scores → what they show: intervals, pass@k, comparisons, when to stop, and how many examples a question needs."""

from verifiers.stats.intervals import Interval, mean_interval
from verifiers.stats.paired import Comparison, compare, compare_metrics, is_count
from verifiers.stats.passk import PassAtK, pass_at_k, pass_hat_k
from verifiers.stats.power import examples_needed, examples_to_compare
from verifiers.stats.scores import by_example, with_failures
from verifiers.stats.sequence import ConfidenceSequence

__all__ = [
    "Comparison",
    "ConfidenceSequence",
    "Interval",
    "PassAtK",
    "by_example",
    "compare",
    "compare_metrics",
    "examples_needed",
    "examples_to_compare",
    "is_count",
    "mean_interval",
    "pass_at_k",
    "pass_hat_k",
    "with_failures",
]
