"""Gymnasium's spaces: their description in words, a text → an action, an observation → text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LISTED = 16  # numbers of an observation that are described one by one

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]{0,40}[A-Za-z]")
_MARKED = re.compile(r"\x1b\[([0-9;]{1,40})m([^\x1b]{1,400})\x1b\[0?m")


class BadActionError(Exception):
    """A reply is not a valid action; the message is for the model."""


def describe_space(space: Any, names: Sequence[str] | None = None) -> str:
    """The possible actions, in words.

    >>> from gymnasium.spaces import Box, Discrete
    >>> describe_space(Discrete(4)), describe_space(Box(-1, 1, (2,)))
    ('a whole number from 0 to 3', 'a JSON list of 2 numbers from -1 to 1')
    """
    kind = type(space).__name__
    if names is not None:
        _check_names(space, names)
        return ", ".join(names)
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if kind == "Box":
        bounds = f"from {float(space.low.min()):g} to {float(space.high.max()):g}"
        return f"a JSON list {_shape(space.shape)} numbers {bounds}" if space.shape else f"a number {bounds}"
    if kind == "MultiDiscrete":
        return f"a JSON list {_shape(space.shape)} whole numbers from 0, below {_listed(space.nvec)}"
    if kind == "MultiBinary":
        return f"a JSON list {_shape(space.shape)} zeros and ones"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    raise TypeError(f"there is no standard text form for actions of {space}; pass action_parser= and description=")


def describe_observation(space: Any) -> str:
    """The form of an observation, in words; "" if the space does not tell, or is an image.

    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete, Tuple
    >>> describe_observation(Tuple([Discrete(32), Discrete(2)]))
    'a list of 2: a whole number from 0 to 31; a whole number from 0 to 1'
    >>> describe_observation(Box(np.float32([-4.8, -np.inf]), np.float32([4.8, np.inf])))
    'a list of 2 numbers: from -4.8 to 4.8; any'
    """
    kind = type(space).__name__
    if kind == "Tuple":
        return f"a list of {len(space.spaces)}: " + "; ".join(describe_observation(one) for one in space.spaces)
    if kind == "Dict":
        return "; ".join(f"{name}: {describe_observation(one)}" for name, one in space.spaces.items())
    if kind == "Box" and len(space.shape) == 1 and space.shape[0] <= MAX_LISTED:
        ranges = [_range(low, high) for low, high in zip(space.low.tolist(), space.high.tolist(), strict=True)]
        return f"a list of {len(ranges)} numbers: {'; '.join(ranges)}"
    if kind in ("Discrete", "MultiDiscrete", "MultiBinary"):
        return describe_space(space).replace("a JSON list", "a list")
    return ""


def _range(low: float, high: float) -> str:
    return "any" if not (math.isfinite(low) and math.isfinite(high)) else f"from {low:g} to {high:g}"


def without_escapes(text: str) -> str:
    """A screen without escape sequences: coloured text is in brackets, with a list of its colours below.

    >>> print(without_escapes("\x1b[41mS\x1b[0mFFF"))
    [S]FFF
    (in brackets: S red)
    """
    marked: dict[str, str] = {}

    def bracketed(found: re.Match[str]) -> str:
        colour = _colour(found[1])
        if colour is None:
            return found[2]
        marked.setdefault(found[2].strip() or "blank", colour)
        return f"[{found[2]}]"

    plain = _ESCAPE.sub("", _MARKED.sub(bracketed, text))
    if not marked:
        return plain
    listed = ", ".join(f"{what} {colour}" for what, colour in marked.items())
    return f"{plain.rstrip(chr(10))}\n(in brackets: {listed})"


def _colour(codes: str) -> str | None:
    """The foreground or background colour that an escape sequence sets."""
    for code in codes.split(";"):
        tens, unit = divmod(int(code or 0), 10)
        if tens in (3, 4, 9, 10) and unit < 8:
            return _COLOURS[unit]
    return None


def _shape(shape: Sequence[int]) -> str:
    return "of " + " lists of ".join(map(str, shape))


def _listed(values: Any) -> str:
    return json.dumps(values.tolist())


def _check_names(space: Any, names: Sequence[str]) -> None:
    count = int(space.n) if type(space).__name__ == "Discrete" else None
    if count != len(names):
        raise ValueError(f"action_names has {len(names)} names, but the actions are {space}")


def read_action(space: Any, text: str, names: Sequence[str] | None = None) -> Any:
    """The action that a text names; raises `BadActionError` if it names none.

    >>> from gymnasium.spaces import Discrete
    >>> read_action(Discrete(4), " 2 "), read_action(Discrete(2), "Stay", ["go", "stay"])
    (2, 1)
    """
    text = text.strip()
    action = _by_name(space, text, names) if names is not None else _read(space, text)
    if action is None or not space.contains(action):
        raise BadActionError(f"{text!r:.100} is not an action. Give {describe_space(space, names)}.")
    return action


def _by_name(space: Any, text: str, names: Sequence[str]) -> int | None:
    places = {name.lower(): i for i, name in enumerate(names)}
    place = places.get(text.lower())
    return None if place is None else int(space.start) + place


def _read(space: Any, text: str) -> Any:
    kind = type(space).__name__
    if kind == "Text":
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if kind == "Discrete":
        return value if type(value) is int else None
    return _as_array(space, value)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a valid number for an action")


def _as_array(space: Any, value: Any) -> Any:
    import numpy

    try:
        array = numpy.asarray(value)
        is_lossy = array.dtype.kind not in "biu" and space.dtype.kind != "f"
        with numpy.errstate(over="ignore"):  # a value that overflows is not in the space
            return None if is_lossy else array.astype(space.dtype).reshape(space.shape)
    except (TypeError, ValueError, OverflowError):
        return None


def show(seen: Any) -> str:
    """An observation as text: texts as they are, arrays as lists, and a dict with one line per entry.

    >>> show({"position": (3, 4), "goal": "north"})
    'position: [3, 4]\\ngoal: north'
    """
    if isinstance(seen, str):
        return seen
    if isinstance(seen, Mapping):
        return "\n".join(f"{name}: {show(value)}" for name, value in seen.items())
    return json.dumps(_plain(seen))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
