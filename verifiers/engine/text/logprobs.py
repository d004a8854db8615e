"""Write logprobs of sampled tokens, their alternatives and prompt tokens as the JSON of OpenAI's endpoints."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verifiers.chat import Codec
from verifiers.chat.codec import CONTEXT
from verifiers.engine.sequence import Alternatives, PromptLogprob

if TYPE_CHECKING:
    from verifiers.engine.text.replies import Prompt


class TokenTexts:
    """For the tokens of one choice, in order: the text that each adds, its bytes, and its offset in the text.

    With ``echo`` the prompt's tokens come first. A leading token that the text does not show (a BOS) adds nothing.
    """

    def __init__(self, prompt: Prompt, codec: Codec) -> None:
        self._codec, self._labels = codec, prompt.options.return_tokens_as_token_ids
        self._seen = [] if prompt.options.echo else list(prompt.ids[-CONTEXT:])
        self._unseen = prompt.echoed if prompt.options.echo else None  # the prompt's text, until its first token
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self.at = 0

    def read(self, token: int) -> TokenText:
        """The text that a token would add here."""
        text = self._codec.continuation(self._seen, [token], special=True)
        label = f"token_id:{token}" if self._labels else text
        return TokenText(label, self._codec.bytes_of(token, text), text)

    def push(self, token: int) -> TokenText:
        """Append a token; returns the text that it adds."""
        found = self.read(token)
        if self._unseen is not None and token in self._codec.special_ids and not self._unseen.startswith(found.text):
            return found
        self._unseen = None
        self._seen = [*self._seen[1 - CONTEXT :], token]
        self.at += len(found.text if found.raw is None else self._decode(found.raw))
        return found


class TokenText(NamedTuple):
    """A token as it is shown, its bytes (None if unknown), and its text."""

    shown: str
    raw: bytes | None
    text: str

    def entry(self, logprob: float | None) -> dict[str, Any]:
        return {"token": self.shown, "logprob": logprob, "bytes": None if self.raw is None else list(self.raw)}


def write_logprobs(
    prompt: Prompt,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Alternatives],
    texts: TokenTexts,
    *,
    echoed: Sequence[PromptLogprob] | None = None,
) -> dict[str, Any]:
    """The logprobs of tokens. With ``echoed``, those of the prompt's tokens come first."""
    if echoed is not None:
        before = [(None, []) if one is None else one for one in echoed]
        ids, logprobs = [*prompt.ids, *ids], [*(value for value, _ in before), *logprobs]
        tops = [*(top for _, top in before), *tops]
    shown = prompt.options.top_logprobs
    tops = [top[:shown] for top in tops] + [[]] * (len(ids) - len(tops))
    entries, alternatives, offsets = [], [], []
    for token, value, top in zip(ids, logprobs, tops, strict=True):
        alternatives.append([(texts.read(one), logprob) for one, logprob in top])
        offsets.append(texts.at)
        entries.append(texts.push(token).entry(value))
    if prompt.message_type == "chat":
        written = [[text.entry(logprob) for text, logprob in some] for some in alternatives]
        content = [{**one, "top_logprobs": top} for one, top in zip(entries, written, strict=True)]
        return {"content": content, "refusal": None}
    by_text = [_by_text(own, some) for own, some in zip(entries, alternatives, strict=True)]
    return {
        "tokens": [one["token"] for one in entries],
        "token_logprobs": list(logprobs),
        "top_logprobs": by_text if shown else None,
        "text_offset": offsets,
    }


def write_prompt_logprobs(scores: Sequence[PromptLogprob], prompt: Prompt, codec: Codec) -> list[Any]:
    """For each prompt token, its logprob and those of the most likely tokens, by id, in vLLM's format."""
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


def _by_text(own: dict[str, Any], top: Sequence[tuple[TokenText, float]]) -> dict[str, float] | None:
    """Logprobs by text, of the alternatives and the token itself. If texts are equal, the likeliest token counts."""
    if own["logprob"] is None:
        return None
    written: dict[str, float] = {}
    for shown, value in [*((text.shown, value) for text, value in top), (own["token"], own["logprob"])]:
        written[shown] = max(value, written.get(shown, value))
    return written
