"""vLLM: `vf-vllm` starts it, `VLLMServer` gives it new weights, `exact_tokens` asks it for ids and logprobs."""

from __future__ import annotations

from verifiers.clients.exact import exact_tokens
from verifiers.integrations.vllm.server import VLLMServer

__all__ = ["VLLMServer", "exact_tokens"]
