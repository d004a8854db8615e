"""An environment or its id → all checks, in order of their dependencies."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verifiers.checks.packaging import check_package, check_static, sources_of
from verifiers.checks.robust import check_judges, check_pickles, check_tools
from verifiers.checks.rows import check_rows
from verifiers.checks.scoring import check_repeats, check_scores
from verifiers.checks.verdicts import Report
from verifiers.envs.environment import Environment
from verifiers.envs.loading import find_module, load_environment
from verifiers.signatures import signature_of

EXAMPLES = 8


def check_environment(
    env: str | Environment,
    *,
    env_args: Mapping[str, Any] | None = None,
    environments_dir: str | Path = "environments",
    examples: int = EXAMPLES,
) -> Report:
    """Check an environment: it loads, its rows are valid, only right answers get a high reward, and so on.

    >>> from verifiers.envs import SingleTurnEnv
    >>> from verifiers.rubrics import Rubric
    >>> def lenient(completion, answer): return answer in completion[-1]["content"]
    >>> rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(40, 60)]
    >>> report = check_environment(SingleTurnEnv(dataset=rows, rubric=Rubric([lenient])))
    >>> [verdict.name for verdict in report.verdicts if verdict.status == "fail"]
    ['stuffed answers']
    """
    if isinstance(env, Environment):
        report = Report(env_id=env.env_id or type(env).__name__)
        report.add("it loads", "ok", type(env).__name__)
        module = type(env).__module__ if type(env).__module__.partition(".")[0] != "verifiers" else ""
        return _check(report, env, None, module, examples)
    report = Report(env_id=env)
    began = time.perf_counter()
    loaded = load_environment(env, environments_dir=environments_dir, **(env_args or {}))
    took = time.perf_counter() - began
    report.add("it loads", "ok", f"{type(loaded).__name__}, in {took:.1f} s")

    def again() -> Environment:
        return load_environment(env, environments_dir=environments_dir, **(env_args or {}))

    return _check(report, loaded, again, find_module(env, environments_dir).__name__, examples)


def _check(
    report: Report, env: Environment, again: Callable[[], Environment] | None, module: str, examples: int
) -> Report:
    rows = check_rows(report, env, examples)
    if rows:
        solve = getattr(sys.modules.get(module), "solve", None) if module else None
        gold = check_scores(report, env, rows, solve if callable(solve) and _takes_two(solve) else None)
        check_repeats(report, env, None if again is None else again(), rows, gold)
        check_tools(report, env, rows)
        check_judges(report, env, rows)
    check_pickles(report, env)
    if module:
        files = sources_of(module)
        check_static(report, files)
        check_package(report, files)
    return report


def _takes_two(solve: Any) -> bool:
    try:
        signature_of(solve).bind([], {})
    except (TypeError, ValueError):
        return False
    return True
