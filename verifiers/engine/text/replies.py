"""Turn sampled ids into a completion: text, tool calls, tokens, and the JSON of OpenAI's endpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verifiers.chat import Codec
from verifiers.chat.tool_calls import Style, ToolCall, parse
from verifiers.clients.protocol import Completion, Tokens
from verifiers.clients.recording import CallReply
from verifiers.engine.options import Options
from verifiers.engine.sequence import Generated, Sampling
from verifiers.engine.text.detokenizer import first_stop
from verifiers.engine.text.logprobs import TokenTexts, write_logprobs, write_prompt_logprobs
from verifiers.types import ChatMessage, MessageType, Usage, unique_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A request, ready for the engine. ``text`` is None if the caller passed ids."""

    model: str
    message_type: MessageType
    text: str | None
    ids: list[int]
    options: Options
    sampling_record: Mapping[str, Any]  # the sampling arguments that a trainer needs
    sampling: Sampling
    stop_ids: frozenset[int]
    tools: Mapping[str, Any] = field(default_factory=dict)  # the schema of each tool's arguments, by its name
    tool_style: Style | None = None
    timeout_s: float | None = None
    echoed: str = ""  # with ``echo``: the prompt's text, with which replies begin


class Choice(NamedTuple):
    """One of the replies to a prompt, parsed."""

    content: str | None
    calls: list[ToolCall]
    finish_reason: str
    generated: Generated
    body: int  # number of tokens, without a stop token
    sampled_text: str  # text of these tokens, including special tokens and a stop string
    sampling_record: Mapping[str, Any]
    stop: str | None = None  # the stop string that ended the reply

    @property
    def message(self) -> ChatMessage:
        message: ChatMessage = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    @property
    def tokens(self) -> Tokens:
        sampled = self.generated
        return Tokens(
            prompt_ids=sampled.prompt_ids,
            completion_ids=sampled.ids,
            logprobs=sampled.logprobs,
            sampling=self.sampling_record,
            weight_versions=sampled.weight_versions,
        )

    @property
    def as_reply(self) -> CallReply:
        is_truncated = self.finish_reason == "length"
        return CallReply(message=self.message, tokens=self.tokens, is_truncated=is_truncated)


def read_choice(prompt: Prompt, generated: Generated, codec: Codec) -> Choice:
    """Parse a reply: its text without stop token or stop string, and its tool calls."""
    if prompt.options.max_tokens == 0:  # only the prompt's logprobs are wanted, so drop the one sampled token
        nothing: dict[str, Any] = {"ids": [], "logprobs": [], "raw_logprobs": [], "top_logprobs": []}
        generated = generated._replace(**nothing, weight_versions=(), finish_reason="length")
    ids = generated.ids
    ended_by_id = generated.finish_reason == "stop" and bool(ids) and ids[-1] in prompt.stop_ids
    body = len(ids) - 1 if ended_by_id else len(ids)
    text, sampled_text = codec.continuations(prompt.ids, ids[:body])
    stop = first_stop(text, prompt.options.stop) if prompt.options.stop else -1
    found = text[stop:] if stop >= 0 else ""
    if stop >= 0:
        text = text[:stop]
    content: str | None = text
    calls: list[ToolCall] = []
    reason = generated.finish_reason
    if prompt.tool_style is not None:
        whole = text if stop >= 0 else sampled_text
        reply = parse(whole, prompt.tool_style, tools=prompt.tools, salt=str(len(prompt.ids)))
        if reply.calls:
            content, calls = reply.content, reply.calls
            if content is not None and sampled_text != text:
                content = codec.without_special(content).rstrip() or None
            reason = "tool_calls" if reason == "stop" else reason
    return Choice(
        content=content,
        calls=calls,
        finish_reason=reason,
        generated=generated,
        body=body,
        sampled_text=sampled_text,
        sampling_record=prompt.sampling_record,
        stop=next((one for one in prompt.options.stop if found.startswith(one)), None) if found else None,
    )


def completion_of(
    prompt: Prompt, choices: Sequence[Choice], codec: Codec, head: Mapping[str, Any] | None = None
) -> Completion:
    """The result of `LocalModel.complete`. ``raw`` is the server's response. ``head``: a stream's first fields."""
    first = choices[0]
    asked, sampled = len(prompt.ids), sum([len(choice.generated.ids) for choice in choices])
    return Completion(
        message=first.message,
        finish_reason=first.finish_reason,
        tokens=first.tokens,
        usage=Usage(prompt_tokens=asked, completion_tokens=sampled),
        model=prompt.model,
        raw={
            **envelope(prompt, head),
            "choices": [_choice_json(prompt, choice, index, codec) for index, choice in enumerate(choices)],
            "usage": {
                "prompt_tokens": asked,
                "completion_tokens": sampled,
                "total_tokens": asked + sampled,
                "prompt_tokens_details": {"cached_tokens": first.generated.reused},
            },
            "prompt_token_ids": first.generated.prompt_ids,
            "sampling": dict(prompt.sampling_record),
        },
    )


def envelope(prompt: Prompt, of: Mapping[str, Any] | None = None, *, is_chunk: bool = False) -> dict[str, Any]:
    """The first fields of a reply or chunk: id, time and model, copied from ``of``, a chunk of the same reply."""
    kind, name = "text_completion", "cmpl"
    if prompt.message_type == "chat":
        kind, name = "chat.completion.chunk" if is_chunk else "chat.completion", "chatcmpl"
    if of is not None:
        return {**of, "object": kind}
    return {"id": f"{name}-{unique_id()}", "object": kind, "created": int(time.time()), "model": prompt.model}


def _choice_json(prompt: Prompt, choice: Choice, index: int, codec: Codec) -> dict[str, Any]:
    generated = choice.generated
    content: dict[str, Any] = {"message": choice.message}
    if prompt.message_type != "chat":
        content = {"text": prompt.echoed + (choice.content or "")}
    logprobs, echoed = None, generated.prompt_logprobs if prompt.options.echo else None
    if prompt.options.logprobs:
        tokens = generated.ids, generated.logprobs, generated.top_logprobs
        logprobs = write_logprobs(prompt, *tokens, TokenTexts(prompt, codec), echoed=echoed)
    written: dict[str, Any] = {
        "index": index,
        **content,
        "finish_reason": choice.finish_reason,
        "logprobs": logprobs,
        "stop_reason": choice.stop,
        "token_ids": generated.ids,
        "weights": list(generated.weights),
        "weight_versions": [span._asdict() for span in generated.weight_versions],
    }
    if prompt.options.raw_logprobs:
        written["raw_logprobs"] = generated.raw_logprobs
    if prompt.options.prompt_logprobs is not None and generated.prompt_logprobs is not None:
        written["prompt_logprobs"] = write_prompt_logprobs(generated.prompt_logprobs, prompt, codec)
    return written
