"""What a person is told while a command runs: the log on stderr, and warnings as single lines."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def told(verbose: bool) -> Iterator[None]:
    """The log on stderr and warnings as single lines, for as long as the command lasts."""
    from verifiers.logs import setup_logging

    logger = logging.getLogger("verifiers")
    handlers, level = list(logger.handlers), logger.level
    setup_logging("DEBUG" if verbose else os.environ.get("VF_LOG_LEVEL", "WARNING"))
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _warn
        try:
            yield
        finally:
            logger.handlers[:] = handlers
            logger.setLevel(level)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    from verifiers.logs import printable

    print(f"warning: {printable(str(message))}", file=sys.stderr)
