"""The arguments of an environment → errors for mistakes that would otherwise only show as wrong scores."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from verifiers.rollout import marked
from verifiers.rubrics import Rubric
from verifiers.signatures import signature_of

ALIKE = 0.8  # similarity (difflib) above which one word counts as a misspelling of the other


def check_scorers(parser: Any, rubric: Any) -> None:
    """Refuse a function instead of a rubric, and a class instead of an instance."""
    if isinstance(parser, type):
        raise TypeError(f"parser={parser.__name__} is a class; pass an instance: {parser.__name__}(…)")
    if rubric is None or isinstance(rubric, Rubric):
        for one in (rubric, *getattr(rubric, "rubrics", ())):
            _warn_if_unused(one)
            _warn_of_clean_up(one)
        if rubric is not None:
            rubric.check_arguments()
        return
    if isinstance(rubric, type) or not hasattr(rubric, "score_rollout"):
        raise TypeError(f"rubric={rubric!r:.100} is not a rubric; vf.Rubric(funcs=[…]) creates one from functions")


def _warn_if_unused(rubric: Rubric | None) -> None:
    """Warn of an overridden ``score_rollouts``, which environments of 0.1.5 called, and these do not."""
    is_own = getattr(type(rubric), "score_rollouts", Rubric.score_rollouts) is not Rubric.score_rollouts
    if rubric is not None and is_own and not rubric.scores_its_own_way:
        name = f"{type(rubric).__name__}.score_rollouts"
        warnings.warn(f"environments do not call {name}: define score_rollout or score_group", stacklevel=5)


def _warn_of_clean_up(rubric: Rubric | None) -> None:
    """Warn of methods of a rubric with ``@vf.cleanup`` or ``@vf.teardown``, which 0.1.14 calls after scoring."""
    if names := [method.__name__ for kind in ("cleanup", "teardown") for method in marked(rubric, kind)]:
        rest = "is not called: a rubric has no clean-up here; decorate a method of the environment"
        warnings.warn(f"{type(rubric).__name__}.{names[0]} {rest}", stacklevel=5)


def either(**given: Any) -> Any:
    """The value of an argument that has two names; only one of them may be used.

    >>> either(oai_tools=None, tool_defs=[])
    []
    """
    used = [value for value in given.values() if value is not None]
    if len(used) > 1:
        raise TypeError(f"{' and '.join(given)} are two names for the same argument; pass one")
    return used[0] if used else None


def misspelled(cls: type, extra: Mapping[str, Any]) -> dict[str, str]:
    """Extra keywords that are similar to a parameter, each with the name of that parameter."""
    known = {name for base in cls.__mro__ if "__init__" in vars(base) for name in _parameters(base)}
    found = {}
    for name in extra.keys() - known:
        close = difflib.get_close_matches(name, known, cutoff=ALIKE)
        if meant := next((one for one in close if abs(len(one) - len(name)) <= 2), None):
            found[name] = meant
    return found


def warn_of_time_limit(extra: Mapping[str, Any]) -> None:
    """Warn of the time limit of a rollout, a keyword from 0.1.12 on, which would only become an attribute here."""
    if extra.get("timeout_seconds") is not None:
        message = "timeout_seconds does not limit a rollout here: timeout= limits a request, hook_timeout_s= a hook"
        warnings.warn(message, stacklevel=4)


def _parameters(cls: type) -> list[str]:
    try:
        found = signature_of(getattr(cls, "__init__")).parameters.values()  # noqa: B009
    except ValueError:  # a builtin does not say
        return []
    return [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
