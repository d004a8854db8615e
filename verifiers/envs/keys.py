"""Names of environment variables → one error that lists those that are not set."""

from __future__ import annotations

import os
from collections.abc import Iterable


class MissingKeyError(ValueError):
    """Variables that an environment needs are not set; ``keys`` names them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = list(keys)
        super().__init__(f"not set in the environment: {', '.join(self.keys)}")

    def __reduce__(self) -> tuple[type[MissingKeyError], tuple[list[str]]]:
        return type(self), (self.keys,)


def ensure_keys(keys: Iterable[str]) -> None:
    """Raise `MissingKeyError` unless each variable is set; for the first lines of a ``load_environment``.

    >>> ensure_keys(["NO_SUCH_KEY", "PATH"])
    Traceback (most recent call last):
    verifiers.envs.keys.MissingKeyError: not set in the environment: NO_SUCH_KEY
    """
    if missing := [key for key in keys if not os.environ.get(key)]:
        raise MissingKeyError(missing)
