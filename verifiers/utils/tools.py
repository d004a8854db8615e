"""Classic import path: ready-made tools."""

from verifiers.tools.arithmetic import calculator
from verifiers.tools.programs import bash, python, python_executor

__all__ = ["bash", "calculator", "python", "python_executor"]
