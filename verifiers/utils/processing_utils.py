"""Classic import path: the tokens of a response, and rollouts as one batch for a custom training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.clients.protocol import Tokens
from verifiers.clients.reading import read_response
from verifiers.samples import one_batch
from verifiers.types import MessageType, ProcessedOutputs, State

__all__ = [
    "parse_chat_completion_logprobs",
    "parse_chat_completion_tokens",
    "parse_completion_logprobs",
    "parse_completion_tokens",
    "process_env_results_vllm",
]


def _tokens(response: Any, message_type: MessageType) -> Tokens:
    tokens = read_response(response, message_type).tokens
    if tokens is None:
        raise ValueError(
            "the response has no token ids with logprobs; request logprobs and return_token_ids from a vLLM server"
        )
    return tokens


def parse_chat_completion_tokens(chat_completion: Any) -> list[int]:
    return _tokens(chat_completion, "chat").completion_ids


def parse_chat_completion_logprobs(chat_completion: Any) -> list[float]:
    return _tokens(chat_completion, "chat").logprobs


def parse_completion_tokens(completion: Any) -> list[int]:
    return _tokens(completion, "completion").completion_ids


def parse_completion_logprobs(completion: Any) -> list[float]:
    return _tokens(completion, "completion").logprobs


def process_env_results_vllm(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    states: Sequence[State],
    rewards: Sequence[float],
    processing_class: Any = None,
    max_seq_len: int | None = None,
    mask_env_responses: bool = True,
    mask_truncated_completions: bool = False,
    zero_truncated_completions: bool = False,
) -> ProcessedOutputs:
    """All rollouts as one batch; the mask is 1 only for tokens that the model sampled."""
    rollouts = zip(prompts, completions, states, rewards, strict=True)
    return one_batch(
        rollouts,
        processing_class,
        max_seq_len=max_seq_len,
        mask_env_responses=mask_env_responses,
        mask_truncated_completions=mask_truncated_completions,
        zero_truncated_completions=zero_truncated_completions,
    )
