"""Mathematics with Python: the model writes code in ``<code>`` tags, reads its output, and answers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from verifiers import calls
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.envs.python_env import PACKAGES
from verifiers.envs.sandbox_sessions import Sessions, cell_metrics
from verifiers.messages import last_reply
from verifiers.parsers import Parser, XMLParser
from verifiers.rollout import cleanup, stop, teardown
from verifiers.rubrics import MathRubric, Rubric
from verifiers.types import Messages, State

SYSTEM_PROMPT = """Solve the problem step by step. In each step think first, then either run Python or give your answer:

<reasoning>
your thoughts
</reasoning>
<code>
a cell of Python; variables stay for the next cell, and what it prints comes back in <output> tags
</code>

<reasoning>
your thoughts
</reasoning>
<answer>
the final answer and nothing else
</answer>"""
MAX_OUTPUT_CHARS = 20_000


class CodeMathEnv(MultiTurnEnv):
    """An environment in which the model computes with Python: ``<code>`` runs in the sandbox, ``<answer>`` ends it.

    Without a rubric, a `MathRubric` compares the answer with the row's.
    """

    def __init__(
        self,
        dataset: Any = None,
        system_prompt: str | None = SYSTEM_PROMPT,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        max_turns: int = 10,
        *,
        memory_mb: int = 512,
        timeout_s: float = 30.0,
        packages: Iterable[str] = PACKAGES,
        allow_unsafe: bool = False,
        **kwargs: Any,
    ) -> None:
        parser = parser or XMLParser(["reasoning", ("code", "answer")])
        if not hasattr(parser.parse(""), "code"):
            raise ValueError(
                'the parser of a CodeMathEnv needs a code field: XMLParser(["reasoning", ("code", "answer")])'
            )
        if rubric is None and importlib.util.find_spec("math_verify") is not None:
            rubric = MathRubric(parser=parser)
        self.sessions = Sessions(
            "python", memory_mb=memory_mb, timeout_s=timeout_s, packages=packages, allow_unsafe=allow_unsafe
        )
        super().__init__(
            max_turns=max_turns, dataset=dataset, system_prompt=system_prompt, parser=parser, rubric=rubric, **kwargs
        )

    @stop(priority=10)
    async def answer_given(self, state: State) -> bool:
        """Whether the last reply has an answer."""
        return bool(state["trajectory"]) and self.parser.parse_answer(state["trajectory"][-1]["completion"]) is not None

    async def _env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Run the code of the last reply. If it has none, say so."""
        code = self.parser.parse(last_reply(state["trajectory"][-1]["completion"])).code
        if not code:
            return "There is neither a <code> nor an <answer> in your reply. Write one of them, closing tag included."
        shown = await self.sessions.run(code, state)
        if len(shown) > MAX_OUTPUT_CHARS:
            shown = f"{shown[:MAX_OUTPUT_CHARS]}\n[cut: {len(shown):,} characters]"
        return f"<output>\n{shown}\n</output>"

    env_response = calls.both(_env_response)  # type: ignore[arg-type]

    @cleanup(priority=-100)
    async def destroy_sandbox(self, state: State) -> None:
        """End the rollout's sandbox."""
        await self.sessions.finish(state)

    @teardown
    async def destroy_all_sandboxes(self) -> None:
        """End every sandbox of this environment."""
        self.sessions.close()

    def own_metrics(self, state: State) -> dict[str, float]:
        return {**super().own_metrics(state), **cell_metrics(state)}
