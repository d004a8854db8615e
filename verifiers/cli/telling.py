"""Shows the log and warnings on stderr while a command runs."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

QUIET = ("WARNING", "ERROR", "CRITICAL")


@contextmanager
def told(verbose: bool) -> Iterator[None]:
    """Within this context, the log goes to stderr and warnings are single lines."""
    from verifiers.logs import setup_logging

    logger = logging.getLogger("verifiers")
    handlers, level = list(logger.handlers), logger.level
    level_name = "DEBUG" if verbose else os.environ.get("VF_LOG_LEVEL", "WARNING")
    # Times and module names are shown only at a verbose level.
    setup_logging(level_name, "notice: %(message)s" if level_name.upper() in QUIET else None)
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
