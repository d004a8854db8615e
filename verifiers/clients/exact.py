"""Sampling arguments → the same arguments, plus those that request token ids and logprobs from vLLM or `vf serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.types import MessageType


def exact_tokens(sampling: Mapping[str, Any] | None = None, *, message_type: MessageType = "chat") -> dict[str, Any]:
    """Arguments with which completions have ``tokens``; values that are already set are kept.

    >>> exact_tokens({"temperature": 0.7})
    {'temperature': 0.7, 'logprobs': True, 'extra_body': {'return_token_ids': True}}
    """
    given = dict(sampling or {})
    extra = {"return_token_ids": True, **(given.pop("extra_body", None) or {})}
    if not given.get("logprobs"):
        given["logprobs"] = True if message_type == "chat" else 1
    return {**given, "extra_body": extra}
