"""An environment → verl's agent loop, which runs rollouts on verl's server with exact tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from verifiers.clients.token_client import Sampled, TokenClient
from verifiers.errors import OverlongPromptError
from verifiers.integrations.verl.environments import environment_of, row_of
from verifiers.integrations.verl.export import AGENT
from verifiers.integrations.verl.output import fit, last_sample
from verifiers.types import State


@register(AGENT)
class VerifiersAgentLoop(AgentLoopBase):  # type: ignore[misc, unused-ignore]
    """Plays the row in ``extra_info``. A failed rollout raises, as in verl's own loops."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        extra_info = kwargs["extra_info"]
        env = environment_of(extra_info)
        length = self.rollout_config.response_length
        server = _Server(self.server_manager, sampling_params, length)
        client = TokenClient(self.tokenizer, server.generate, template=self.apply_chat_template_kwargs)
        began = time.perf_counter()
        state: State = await env.run_rollout(row_of(extra_info), client, "policy", gen_sampling_args={}, score=True)
        spent = time.perf_counter() - began
        sample = fit(last_sample(state), length)
        return AgentLoopOutput(
            prompt_ids=sample.prompt_ids,
            response_ids=sample.completion_ids,
            response_mask=sample.completion_mask,
            response_logprobs=sample.completion_logprobs,
            reward_score=float(state["reward"]),
            num_turns=2 * len(state["trajectory"]),
            metrics=AgentLoopMetrics(generate_sequences=server.spent_s, tool_calls=max(0.0, spent - server.spent_s)),
            extra_fields={
                **server.extra_fields,
                "reward_extra_info": {name: float(value) for name, value in state["metrics"].items()},
            },
        )


class _Server:
    """verl's server, with one request id per rollout, so that all its turns go to the same replica."""

    def __init__(self, server: Any, sampling: Mapping[str, Any], length: int) -> None:
        self._server, self._sampling, self._length = server, sampling, length
        self._request_id = uuid4().hex
        self._first_prompt: int | None = None
        self.spent_s = 0.0
        self.extra_fields: dict[str, Any] = {}  # the first and last weight versions that sampled, for verl's trainer

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Sampled:
        if self._first_prompt is None:
            self._first_prompt = len(prompt_ids)
        room = self._length - (len(prompt_ids) - self._first_prompt)
        if room < 1:
            raise OverlongPromptError(f"the turns so far use all {self._length} tokens of a response")
        limit = sampling.get("max_completion_tokens") or sampling.get("max_tokens") or room
        asked = {**self._sampling, "logprobs": True, "max_tokens": min(limit, room)}
        began = time.perf_counter()
        output = await self._server.generate(request_id=self._request_id, prompt_ids=prompt_ids, sampling_params=asked)
        self.spent_s += time.perf_counter() - began
        if output.log_probs is None:
            raise RuntimeError("the server sent no logprobs: set actor_rollout_ref.rollout.calculate_log_probs=True")
        newest = output.extra_fields.get("max_global_steps")
        self.extra_fields = {**output.extra_fields, **self.extra_fields}
        if newest is not None:
            self.extra_fields["max_global_steps"] = newest
        return Sampled(ids=output.token_ids, logprobs=output.log_probs)
