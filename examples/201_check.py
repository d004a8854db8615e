"""201 · Checking an environment before paying for a run: a reward that can be hacked, and one that cannot.

python examples/201_check.py
"""

from __future__ import annotations

from typing import Any

import verifiers as vf

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40, 60)]


def mentioned(completion: vf.Messages, answer: str) -> float:
    """Can be hacked: a reply that lists every number earns the full reward."""
    return float(answer in completion[-1]["content"])


def exact(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def main() -> dict[str, Any]:
    reports = {}
    for reward in (mentioned, exact):
        env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([reward]))
        reports[reward.__name__] = report = vf.check_environment(env)
        print(f"{reward.__name__}: {'clean' if report.is_clean else 'not clean'}")
        for verdict in report.verdicts:
            if verdict.status in ("fail", "warn"):
                print(f"  {verdict.status}  {verdict.name}: {verdict.found}")
    return reports


if __name__ == "__main__":
    main()
