"""A ``python`` tool that keeps its variables between calls, like a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

from verifiers.envs.sandbox_env import SandboxEnv
from verifiers.tools.programs import Language
from verifiers.tools.tool import Tool
from verifiers.types import Messages, SamplingArgs, State

PACKAGES = ("numpy", "sympy")


class PythonWorkerState(TypedDict):
    """The ``python_state`` argument of tools. The Python process of a rollout is always ready."""

    ready: bool
    execution_count: int
    ready_wait_time: float


class PythonEnv(SandboxEnv):
    """An environment with one tool, ``python``, in a sandbox that keeps its state during the rollout.

    ``packages`` are imported in advance if they are installed, so that cells do not wait for them.
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

    def new_state(self, row: Mapping[str, Any], client: Any, model: str, sampling_args: SamplingArgs | None) -> State:
        state = super().new_state(row, client, model, sampling_args)
        state["python_state"] = PythonWorkerState(ready=True, execution_count=0, ready_wait_time=0.0)
        return state

    def known_args(self, messages: Messages, state: State) -> dict[str, Any]:
        return {**super().known_args(messages, state), "python_state": state["python_state"]}

    async def python(
        self,
        code: str,
        sandbox_id: str | State | None = None,
        sandbox_state: Any = None,
        python_state: Any = None,
        state: State | None = None,
    ) -> str:
        """Run a cell of Python, as in a notebook: variables, functions and files stay for the next cell.

        Args:
            code: The cell.

        Returns:
            What it printed, then the value of its last expression, and its error if it failed.
        """
        return await self._run_cell(code, state, sandbox_id)
