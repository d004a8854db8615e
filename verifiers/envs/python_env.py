"""A notebook for the model: a python tool whose variables live on from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from verifiers.envs.sandbox_env import SandboxEnv
from verifiers.tools.programs import Language
from verifiers.tools.tool import Tool
from verifiers.types import State

PACKAGES = ("numpy", "sympy")


class PythonEnv(SandboxEnv):
    """An environment with one tool, ``python``, in a sandbox that keeps its state through the rollout.

    ``packages`` are imported beforehand, where they are installed, so that a cell need not wait for them.
    """

    language: ClassVar[Language] = "python"

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool] | None = None,
        max_turns: int = 10,
        *,
        packages: Iterable[str] = PACKAGES,
        **kwargs: Any,
    ) -> None:
        super().__init__(tools=tools, max_turns=max_turns, packages=packages, **kwargs)

    @property
    def sandbox_tool(self) -> Callable[..., Any]:
        return self.python

    async def python(self, code: str, state: State) -> str:
        """Run a cell of Python, as in a notebook: variables, functions and files stay for the next cell.

        Args:
            code: The cell.

        Returns:
            What it printed, then the value of its last expression, and its error if it failed.
        """
        return await self.sessions.run(code, state)
