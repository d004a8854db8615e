"""The client protocol: a request → a completion with its message, tokens, usage and finish reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from verifiers.types import ChatMessage, MessageType, Usage, VersionSpan
from verifiers.views import View

OF_REQUESTS = ("model", "messages", "prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to a model. ``prompt`` is messages for a chat, a string for a completion."""

    model: str
    prompt: str | list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    message_type: MessageType = "chat"
    timeout_s: float | None = None


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise if sampling arguments would replace the model or the prompt of a request, or ask for several replies.

    >>> check_sampling({"temperature": 0.7, "extra_body": {"model": "another"}})
    Traceback (most recent call last):
    ValueError: the sampling arguments contain 'model', which every request has already; pass it as model=
    """
    extra = sampling.get("extra_body")
    given = {**sampling, **extra} if isinstance(extra, Mapping) else sampling
    for name in OF_REQUESTS:
        if name in given:
            hint = "pass it as model=" if name == "model" else "it comes from the row"
            raise ValueError(f"the sampling arguments contain {name!r}, which every request has already; {hint}")
    n = given.get("n")
    if n not in (None, 1):
        raise ValueError(f"n={n!r}: a request has one reply; for several rollouts use rollouts_per_example={n!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Ids and sampling logprobs of one reply, exactly as the engine produced them.

    ``sampling`` has the sampling arguments that the engine reported, or ``{"asked": the request's arguments}``.
    ``weight_versions`` has the version of the weights that sampled each token, if the engine reports it.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    sampling: Mapping[str, Any] | None = None
    weight_versions: tuple[VersionSpan, ...] = ()

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.completion_ids)} tokens but {len(self.logprobs)} logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One reply, parsed; ``raw`` is the endpoint's own response.

    It also has the attributes of OpenAI's object: ``completion.choices[0].message.content``.

    >>> Completion(message={"role": "assistant", "content": "4"}).choices[0].message.content
    '4'
    """

    message: ChatMessage
    finish_reason: str | None = None
    tokens: Tokens | None = None
    usage: Usage | None = None
    model: str = ""
    raw: Any = None

    @property
    def text(self) -> str:
        content = self.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def choices(self) -> Any:
        if self.raw is not None:
            return View(self.raw).choices if isinstance(self.raw, dict) else self.raw.choices
        choice = {"index": 0, "message": {"tool_calls": None, **self.message}, "text": self.text}
        return [View({**choice, "finish_reason": self.finish_reason, "logprobs": None})]

    def model_dump(self, **given: Any) -> dict[str, Any]:
        """Plain data in the shape of a chat completion, like ``model_dump`` of OpenAI's objects."""
        if isinstance(self.raw, dict) and "choices" in self.raw:
            return dict(self.raw)
        if callable(dump := getattr(self.raw, "model_dump", None)) and isinstance(dumped := dump(**given), dict):
            return dumped
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, "logprobs": None}
        whole: dict[str, Any] = {"object": "chat.completion", "model": self.model, "choices": [choice]}
        if self.usage is not None:
            counts = ("prompt_tokens", "completion_tokens", "total_tokens")
            whole["usage"] = {name: getattr(self.usage, name) for name in counts}
        return whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.raw is None:
            raise AttributeError(name)
        return getattr(View(self.raw) if isinstance(self.raw, dict) else self.raw, name)


@runtime_checkable
class Client(Protocol):
    """Anything that completes requests. The errors it raises are `verifiers.errors.Error`s."""

    async def complete(self, request: Request) -> Completion: ...
