"""What an environment is made with → refused, in a sentence, where it could only end in wrong scores."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any

from verifiers.rubrics import Rubric

ALIKE = 0.8  # of the letters of two words, above which one is taken for a slip of the other


def check_scorers(parser: Any, rubric: Any) -> None:
    """Refuse a function in the place of a rubric, and a class in the place of what it makes."""
    if isinstance(parser, type):
        raise TypeError(f"parser={parser.__name__} is a class; pass what it makes: {parser.__name__}(…)")
    if rubric is None or isinstance(rubric, Rubric):
        return
    if isinstance(rubric, type) or not hasattr(rubric, "score_rollout"):
        raise TypeError(f"rubric={rubric!r:.100} is no rubric; vf.Rubric(funcs=[…]) makes one of functions")


def check_names(cls: type, extra: Mapping[str, Any]) -> None:
    """Refuse a keyword that is most likely a slip of one that there is: it would be an attribute nobody reads."""
    known = {name for base in cls.__mro__ if "__init__" in vars(base) for name in _parameters(base)}
    for name in extra.keys() - known:  # a subclass's own parameter may be passed on to be an attribute
        meant = [one for one in difflib.get_close_matches(name, known, cutoff=ALIKE) if abs(len(one) - len(name)) <= 2]
        if meant and not any(_reads(base, name) for base in cls.__mro__):
            raise TypeError(f"{cls.__name__}() has no keyword {name!r}; did you mean {meant[0]!r}?")


def _parameters(cls: type) -> list[str]:
    found = inspect.signature(vars(cls)["__init__"]).parameters.values()
    return [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def _reads(cls: type, name: str) -> bool:
    """Does a class that is not ours read an attribute of this name in its own code?"""
    if cls.__module__.partition(".")[0] == "verifiers":
        return False
    functions = (getattr(one, "fget", None) or getattr(one, "__func__", one) for one in vars(cls).values())
    codes = [getattr(inspect.unwrap(one), "__code__", None) for one in functions if callable(one)]
    for code in codes:  # grows by the functions within
        if code is not None:
            codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    return any(code is not None and name in code.co_names for code in codes)
