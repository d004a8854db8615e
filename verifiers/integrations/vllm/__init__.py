"""vLLM: `vf-vllm` starts it, `VLLMServer` loads new weights, `exact_tokens` requests token ids and logprobs."""

from __future__ import annotations

from verifiers.clients.exact import exact_tokens
from verifiers.integrations.vllm.server import VLLMServer

__all__ = ["VLLMServer", "exact_tokens"]
