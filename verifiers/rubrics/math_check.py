"""Two mathematical answers → are they equal, by math-verify. Only worker processes import this: it costs sympy."""

from __future__ import annotations

import logging

from math_verify import parse, verify

for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.CRITICAL)


def compare_answers(answer: str, response: str) -> bool:
    """Are they equal? Without math-verify's own limits: they are signals, and the pool has a better one."""
    gold, target = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, response))
    return bool(verify(gold, target, timeout_seconds=None))


compare_answers("\\frac{1}{2}", "x")  # builds the grammar's tables, so that no call is charged for it
