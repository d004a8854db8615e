"""Statistics of scores: intervals, pass@k, comparisons, when to stop, and how many examples to run."""

from verifiers.stats.aggregates import Aggregate, aggregate, aggregate_difference, as_aggregates, f1_of
from verifiers.stats.intervals import Interval, mean_interval
from verifiers.stats.labels import accuracy, balanced_accuracy, f1, macro_f1, precision, recall
from verifiers.stats.paired import Comparison, compare, compare_metrics, is_count
from verifiers.stats.passk import PassAtK, pass_at_k, pass_hat_k
from verifiers.stats.power import examples_needed, examples_to_compare
from verifiers.stats.scores import by_example, with_failures
from verifiers.stats.sequence import ConfidenceSequence

__all__ = [
    "Aggregate",
    "Comparison",
    "ConfidenceSequence",
    "Interval",
    "PassAtK",
    "accuracy",
    "aggregate",
    "aggregate_difference",
    "as_aggregates",
    "balanced_accuracy",
    "by_example",
    "compare",
    "compare_metrics",
    "examples_needed",
    "examples_to_compare",
    "f1",
    "f1_of",
    "is_count",
    "macro_f1",
    "mean_interval",
    "pass_at_k",
    "pass_hat_k",
    "precision",
    "recall",
    "with_failures",
]
