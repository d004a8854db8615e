"""What an environment is made with → mistakes that would only end in wrong scores."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from verifiers.rubrics import Rubric

ALIKE = 0.8  # of the letters of two words, above which one is taken for a slip of the other


def check_scorers(parser: Any, rubric: Any) -> None:
    """Refuse a function in the place of a rubric, and a class in the place of what it makes."""
    if isinstance(parser, type):
        raise TypeError(f"parser={parser.__name__} is a class; pass what it makes: {parser.__name__}(…)")
    if rubric is None or isinstance(rubric, Rubric):
        for one in (rubric, *getattr(rubric, "rubrics", ())):
            _check_is_asked(one)
        return
    if isinstance(rubric, type) or not hasattr(rubric, "score_rollout"):
        raise TypeError(f"rubric={rubric!r:.100} is no rubric; vf.Rubric(funcs=[…]) makes one of functions")


def _check_is_asked(rubric: Rubric | None) -> None:
    """Warn of a ``score_rollouts`` of one's own, by which environments of 0.1.5 scored, and these do not."""
    is_own = getattr(type(rubric), "score_rollouts", Rubric.score_rollouts) is not Rubric.score_rollouts
    if rubric is not None and is_own and not rubric.scores_its_own_way:
        name = f"{type(rubric).__name__}.score_rollouts"
        warnings.warn(f"{name} scores no rollout of an environment: define score_rollout or score_group", stacklevel=5)


def slips(cls: type, extra: Mapping[str, Any]) -> dict[str, str]:
    """Keywords that become attributes, being no parameter, and are nearly one: with what was meant."""
    known = {name for base in cls.__mro__ if "__init__" in vars(base) for name in _parameters(base)}
    found = {}
    for name in extra.keys() - known:
        close = difflib.get_close_matches(name, known, cutoff=ALIKE)
        if meant := next((one for one in close if abs(len(one) - len(name)) <= 2), None):
            found[name] = meant
    return found


def _parameters(cls: type) -> list[str]:
    try:
        found = inspect.signature(getattr(cls, "__init__")).parameters.values()  # noqa: B009
    except ValueError:  # a builtin does not say
        return []
    return [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
