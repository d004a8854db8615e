"""Names of environment variables → an error that lists those that are not set."""

from __future__ import annotations

import os
from collections.abc import Iterable


class MissingKeyError(ValueError):
    """Environment variables that an environment needs are not set, or are empty. ``keys`` has their names, in order."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = [*keys]
        names = ", ".join(self.keys)
        super().__init__(
            f"this environment needs {names}: set {'them' if len(self.keys) > 1 else 'it'} (export NAME=…)"
        )

    def __reduce__(self) -> tuple[type[MissingKeyError], tuple[list[str]]]:
        return type(self), (self.keys,)  # by default pickle would pass the message


def ensure_keys(keys: Iterable[str]) -> None:
    """Raise `MissingKeyError` unless all variables are set. Call it at the beginning of ``load_environment``.

    >>> ensure_keys(["NO_SUCH_KEY", "PATH"])
    Traceback (most recent call last):
    verifiers.envs.keys.MissingKeyError: this environment needs NO_SUCH_KEY: set it (export NAME=…)
    """
    have = {name for name, value in os.environ.items() if value}
    lacking = [name for name in dict.fromkeys(keys) if name not in have]
    if lacking:
        raise MissingKeyError(lacking)
