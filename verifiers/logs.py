"""Output to a terminal: log lines and a sample of rollouts, without control characters."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from contextlib import ContextDecorator
from typing import Any

from verifiers.messages import messages_to_printable, role_of, text_of

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # the last two: text direction
_HANDLER_NAME = "verifiers"
_LOGGER = logging.getLogger("verifiers")


def setup_logging(level: str | int = "INFO", log_format: str | None = None, date_format: str | None = None) -> None:
    """Show the library's log on stderr. Nothing is shown unless this is called (or ``logging`` is configured)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(
        logging.Formatter(log_format or "%(asctime)s %(name)s %(levelname)s %(message)s", date_format or "%H:%M:%S")
    )
    for other in [h for h in _LOGGER.handlers if h.get_name() == _HANDLER_NAME]:
        _LOGGER.removeHandler(other)
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(level.upper() if isinstance(level, str) else level)


class log_level(ContextDecorator):  # lower case, because users call it like a function: `with vf.log_level("DEBUG"):`
    """Within the block the library logs messages of this level or above. Blocks may be nested."""

    def __init__(self, level: str | int) -> None:
        self._level = level.upper() if isinstance(level, str) else level
        self._outer: list[int] = []  # levels to restore

    def __enter__(self) -> None:
        self._outer.append(_LOGGER.level)
        _LOGGER.setLevel(self._level)

    def __exit__(self, *_: object) -> None:
        _LOGGER.setLevel(self._outer.pop())


def quiet_verifiers() -> log_level:
    """Within the block only warnings and errors are logged: ``with vf.quiet_verifiers(): …``."""
    return log_level(logging.WARNING)


def printable(text: str) -> str:
    r"""Make model output safe for a terminal: control characters (and so escape sequences) are shown as text.

    >>> printable("a\x1b[31mb"), printable("gnp\u202e.exe")
    ('a\\x1b[31mb', 'gnp\\u202e.exe')
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_prompt_completions_sample(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rewards: Sequence[Any],
    step: Any = 0,
    num_samples: int = 1,
    errors: Any = None,
) -> None:
    """Print the first rollouts: prompt, completion and reward."""
    if isinstance(step, Sequence):  # positional as in 0.1.9: prompts, completions, errors, rewards, step, num_samples
        errors, rewards, step, num_samples = rewards, step, num_samples, errors or 1
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"step {step}" if step else None, show_lines=True)
    for column in ("prompt", "completion", "reward"):
        table.add_column(column)
    for i in range(min(num_samples, len(prompts))):
        shown = _score_text(rewards[i], errors[i] if errors else None)
        table.add_row(Text(_as_text(prompts[i])), Text(_as_text(completions[i])), Text(shown))
    Console().print(table)


def _score_text(reward: Any, error: Any) -> str:
    if error is not None:
        return f"failed: {printable(str(error))}"
    return "–" if reward is None else f"{reward:.3f}"


def _as_text(messages: Any) -> str:
    if isinstance(messages, str):
        return printable(messages)
    return printable("\n\n".join(f"{role_of(m)}: {text_of(m)}" for m in messages_to_printable(messages or [])))
