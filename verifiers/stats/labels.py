"""Classification metrics from true and predicted labels; a completion without a label (None) counts as wrong."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

Labels = Sequence[Hashable]
Predicted = Sequence[Hashable | None]


def accuracy(truth: Labels, predicted: Predicted) -> float | None:
    """The share of right labels; None if there are none.

    >>> accuracy(["a", "a", "b", "b"], ["a", "b", "b", None])
    0.5
    """
    pairs = _pairs(truth, predicted)
    return sum(one == other for one, other in pairs) / len(pairs) if pairs else None


def balanced_accuracy(truth: Labels, predicted: Predicted) -> float | None:
    """The mean recall over the true labels, for which always guessing the most common label scores low.

    >>> balanced_accuracy(["a", "a", "a", "b"], ["a", "a", "a", "a"])
    0.5
    """
    pairs = _pairs(truth, predicted)
    there, found = Counter(one for one, _ in pairs), Counter(one for one, other in pairs if one == other)
    return math.fsum(found[label] / count for label, count in there.items()) / len(there) if there else None


def precision(truth: Labels, predicted: Predicted, positive: Hashable) -> float | None:
    """The share of predicted positives that are positive; None if none was predicted."""
    named = [one for one, other in _pairs(truth, predicted) if other == positive]
    return sum(one == positive for one in named) / len(named) if named else None


def recall(truth: Labels, predicted: Predicted, positive: Hashable) -> float | None:
    """The share of positives that were predicted as such; None if there are none."""
    there = [other for one, other in _pairs(truth, predicted) if one == positive]
    return sum(other == positive for other in there) / len(there) if there else None


def f1(truth: Labels, predicted: Predicted, positive: Hashable) -> float | None:
    """The harmonic mean of precision and recall; None if no label is positive, true or predicted.

    >>> f1(["yes", "yes", "no", "no"], ["yes", "no", "yes", "no"], "yes")
    0.5
    """
    pairs = _pairs(truth, predicted)
    both = sum(one == other == positive for one, other in pairs)
    either = sum((one == positive) + (other == positive) for one, other in pairs)
    return 2 * both / either if either else None


def macro_f1(truth: Labels, predicted: Predicted) -> float | None:
    """The mean of F1 over the true labels.

    >>> macro_f1(["a", "a", "b", "b"], ["a", "a", "b", "b"])
    1.0
    """
    labels = dict.fromkeys(truth)
    scores = [score for label in labels if (score := f1(truth, predicted, label)) is not None]
    return math.fsum(scores) / len(scores) if scores else None


def _pairs(truth: Labels, predicted: Predicted) -> list[tuple[Hashable, Hashable | None]]:
    if len(truth) != len(predicted):
        raise ValueError(f"{len(truth)} true labels but {len(predicted)} predicted ones")
    return list(zip(truth, predicted, strict=True))
