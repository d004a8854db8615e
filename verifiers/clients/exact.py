"""Sampling arguments → the same, asking vLLM (or `vf serve`) for the ids and logprobs of every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.types import MessageType


def exact_tokens(sampling: Mapping[str, Any] | None = None, *, message_type: MessageType = "chat") -> dict[str, Any]:
    """The arguments with which a completion's ``tokens`` come out; what is already set in them stays.

    >>> exact_tokens({"temperature": 0.7})
    {'temperature': 0.7, 'logprobs': True, 'extra_body': {'return_token_ids': True}}
    """
    given = dict(sampling or {})
    extra = {"return_token_ids": True, **(given.pop("extra_body", None) or {})}
    if not given.get("logprobs"):
        given["logprobs"] = True if message_type == "chat" else 1
    return {**given, "extra_body": extra}
