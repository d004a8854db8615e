"""A question → the reply of another model, as a tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verifiers.clients import as_client
from verifiers.clients.protocol import Request
from verifiers.errors import ToolCallError
from verifiers.tools.tool import Tool, as_tool
from verifiers.types import ChatMessage, SamplingArgs

MAX_QUESTION_CHARS = 100_000


@dataclass(frozen=True)
class _Ask:
    """The tool's function; a class, so that environments with this tool can be pickled."""

    model: str
    client: Any
    system_prompt: str | None
    sampling_args: SamplingArgs
    timeout_s: float

    async def __call__(self, question: str) -> str:
        """Ask another language model a question. It sees nothing but this question.

        Args:
            question: The question, with everything that is needed to answer it.

        Returns:
            Its reply.
        """
        if len(question) > MAX_QUESTION_CHARS:
            said = f"the question has {len(question):,} characters; at most {MAX_QUESTION_CHARS:,} are allowed"
            raise ToolCallError(said)
        prompt: list[ChatMessage] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        prompt.append({"role": "user", "content": question})
        request = Request(model=self.model, prompt=prompt, sampling=self.sampling_args, timeout_s=self.timeout_s)
        return (await as_client(self.client).complete(request)).text


def ask(
    model: str,
    client: Any = None,
    *,
    name: str = "ask",
    system_prompt: str | None = None,
    sampling_args: SamplingArgs | None = None,
    timeout_s: float = 300.0,
) -> Tool:
    """A tool that asks another model. If its endpoint stays unreachable, the rollout fails.

    >>> from verifiers.clients import FakeClient
    >>> import asyncio
    >>> tool = ask("helper", FakeClient("Lund."))
    >>> asyncio.run(tool.function("Which town?"))
    'Lund.'
    """
    if client is not None:
        as_client(client)  # so that an invalid client raises here, not in the first rollout
    function = _Ask(model, client, system_prompt, dict(sampling_args or {}), timeout_s)
    return as_tool(function, name=name, timeout_s=timeout_s + 5)
