"""A function that a user wrote → its parameters and type hints, also if some annotations cannot be evaluated.

Since Python 3.14, annotations are evaluated when they are first read. One may name what exists for type checkers only
(``if TYPE_CHECKING:``), and reading it then raises NameError. Earlier Pythons keep such annotations as strings.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from typing import Any

if sys.version_info >= (3, 14):
    from annotationlib import Format, get_annotations

    signature_of = functools.partial(inspect.signature, annotation_format=Format.FORWARDREF)
    _annotations = functools.partial(get_annotations, format=Format.FORWARDREF)
else:
    signature_of = inspect.signature
    _annotations = inspect.get_annotations


def hints_of(function: Any) -> dict[str, Any]:
    """The type hints of a function, without those that cannot be evaluated.

    >>> def look_up(word: str, where: "Dictionary", page: int = 1) -> str: ...
    >>> hints_of(look_up)
    {'word': <class 'str'>, 'page': <class 'int'>, 'return': <class 'str'>}
    """
    names, type_params = getattr(function, "__globals__", {}), getattr(function, "__type_params__", ())
    hints: dict[str, Any] = {}
    for name, annotation in _annotations(function).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation}, __type_params__=type_params)
        try:
            hints |= typing.get_type_hints(alone, names, include_extras=True)
        except (NameError, TypeError, AttributeError, SyntaxError):  # it names what exists elsewhere, or is no type
            continue
    return hints
