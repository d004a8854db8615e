"""Logprobs of sampled tokens, of their alternatives and of a prompt's tokens → the JSON of OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verifiers.chat import Codec
from verifiers.engine.sequence import Alternatives, PromptLogprob

if TYPE_CHECKING:
    from verifiers.engine.text.replies import Prompt


def write_logprobs(
    prompt: Prompt,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Alternatives],
    codec: Codec,
    *,
    echoed: Sequence[PromptLogprob] | None = None,
) -> dict[str, Any]:
    """The logprobs of tokens; with ``echoed``, those of the prompt's tokens before them."""
    if echoed is not None:
        before = [(None, []) if one is None else one for one in echoed]
        ids, logprobs = [*prompt.ids, *ids], [*(value for value, _ in before), *logprobs]
        tops = [*(top for _, top in before), *tops]
    pieces = _pieces(prompt, ids, codec)
    shown = prompt.options.top_logprobs
    tops = [top[:shown] for top in tops] if shown else []
    if prompt.message_type == "chat":
        return {"content": _chat_entries(prompt, pieces, logprobs, tops, codec), "refusal": None}
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(piece)
    written = [
        None if value is None else _by_piece(prompt, (token, value), top, codec)
        for token, value, top in zip(ids, logprobs, tops, strict=False)
    ]
    return {
        "tokens": pieces,
        "token_logprobs": list(logprobs),
        "top_logprobs": written if shown else None,
        "text_offset": offsets,
    }


def write_prompt_logprobs(scores: Sequence[PromptLogprob], prompt: Prompt, codec: Codec) -> list[Any]:
    """For each token of the prompt its logprob and those of the most likely tokens, by id, as vLLM writes them."""
    shown = prompt.options.prompt_logprobs or 0
    written: list[Any] = []
    for token, one in zip(prompt.ids, scores, strict=True):
        if one is None:
            written.append(None)
            continue
        value, top = one
        found = {token: value, **dict(top[:shown])}
        pieces = codec.pieces(found)
        written.append(
            {
                str(key): {"logprob": logprob, "decoded_token": piece}
                for (key, logprob), piece in zip(found.items(), pieces, strict=True)
            }
        )
    return written


def _pieces(prompt: Prompt, ids: Sequence[int], codec: Codec) -> list[str]:
    if prompt.options.return_tokens_as_token_ids:
        return [f"token_id:{token}" for token in ids]
    return codec.pieces(ids)


def _chat_entries(
    prompt: Prompt, pieces: Sequence[str], logprobs: Sequence[float | None], tops: Sequence[Alternatives], codec: Codec
) -> list[dict[str, Any]]:
    entries = [{**_entry(piece, logprob), "top_logprobs": []} for piece, logprob in zip(pieces, logprobs, strict=True)]
    for entry, top in zip(entries, tops, strict=False):
        named = _pieces(prompt, [token for token, _ in top], codec)
        entry["top_logprobs"] = [_entry(piece, value) for piece, (_, value) in zip(named, top, strict=True)]
    return entries


def _entry(piece: str, logprob: float | None) -> dict[str, Any]:
    return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}


def _by_piece(prompt: Prompt, own: tuple[int, float], top: Alternatives, codec: Codec) -> dict[str, float]:
    """Alternatives by their texts, the token itself among them; of tokens with the same text the most likely."""
    found = [*top] if own[0] in (token for token, _ in top) else [*top, own]
    named = _pieces(prompt, [token for token, _ in found], codec)
    written: dict[str, float] = {}
    for piece, (_, value) in zip(named, found, strict=True):
        written[piece] = max(value, written.get(piece, value))
    return written
