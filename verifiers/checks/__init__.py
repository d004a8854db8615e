"""An environment → a verdict on each thing that goes wrong with environments, before anyone pays for a run."""

from verifiers.checks.check import check_environment
from verifiers.checks.static import Finding, read_findings
from verifiers.checks.verdicts import Report, Verdict

__all__ = ["Finding", "Report", "Verdict", "check_environment", "read_findings"]
