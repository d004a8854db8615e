"""An environment → a verdict on each common fault of environments, before a run costs anything."""

from verifiers.checks.check import check_environment
from verifiers.checks.static import Finding, read_findings
from verifiers.checks.verdicts import Report, Verdict

__all__ = ["Finding", "Report", "Verdict", "check_environment", "read_findings"]
