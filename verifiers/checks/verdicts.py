"""The results of checks, for a table, a script and an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One question about an environment, and its answer."""

    name: str
    status: Status
    found: str = ""


@dataclass(kw_only=True, slots=True)
class Report:
    """All verdicts on an environment, in order.

    >>> report = Report(env_id="toy", verdicts=[Verdict("it loads", "ok"), Verdict("gold answers", "fail", "0.2")])
    >>> report.is_clean, report.counts["fail"]
    (False, 1)
    """

    env_id: str
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, name: str, status: Status, found: str = "") -> None:
        self.verdicts.append(Verdict(name, status, found))

    @property
    def counts(self) -> Counter[Status]:
        return Counter(verdict.status for verdict in self.verdicts)

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed; warnings are allowed."""
        return not self.counts["fail"]

    def named(self, name: str) -> Iterator[Verdict]:
        return (verdict for verdict in self.verdicts if verdict.name == name)

    def as_data(self) -> dict[str, Any]:
        return {
            "env_id": self.env_id,
            "is_clean": self.is_clean,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }
