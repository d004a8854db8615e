"""Turn conversations into token ids, in the same way for prompts to sample from and for replies to learn from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from verifiers.chat.codec import Codec
from verifiers.chat.known import KnownTexts, shared_length
from verifiers.chat.template import BOUNDARIES, ChatTemplate, today
from verifiers.errors import RequestRefusedError
from verifiers.messages import as_messages, role_of, text_of

Tools = Any
_OPENED = re.compile(r"<([^<>/\s]+)>\s*\Z")
_CHAT, _TEXT = "chat:", "text:"  # the same characters may have different ids as a conversation and as plain text


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The tokens of a prompt and of the reply to it, including the end of the turn."""

    prompt_ids: list[int]
    reply_ids: list[int]


class ChatWriter:
    """Writes conversations, with and without tools, as token ids of one tokenizer.

    The engine gets prompts from it and stores the sampled ids in it. Trainers use it for whole conversations that were
    not sampled. They learn from exactly the prompts that the engine would have used.
    """

    def __init__(self, tokenizer: Any, *, model: str = "this model") -> None:
        self.tokenizer = tokenizer
        self.codec = Codec(tokenizer)
        self.template = ChatTemplate(tokenizer, model=model)
        self._known = KnownTexts()

    @property
    def now(self) -> tuple[Any, ...]:
        """What else a prompt's text and ids depend on: the template, the date, and the replies remembered so far."""
        return self.template.source(), today(), self._known.count

    # --- prompts ----------------------------------------------------------------------------------------------------

    def prompt(self, messages: Any, tools: Tools = None, **settings: Any) -> tuple[str, list[int]]:
        """A prompt's text, to pass to `remember`, and its ids. ``settings`` are passed to the template."""
        text = _CHAT + self.template.render(messages, tools, **settings)
        return text, self._ids(text, self._known)

    def text_prompt(self, prompt: str) -> tuple[str, list[int]]:
        """Like `prompt`, for a plain text."""
        text = _TEXT + prompt
        return text, self._ids(text, self._known)

    def scored_ids(self, prompt: str) -> list[int]:
        """The tokenizer's ids of a plain text whose own logprobs are requested, without remembered ids."""
        return self._ids(_TEXT + prompt, KnownTexts())

    def remember(self, text: str, reply: str, prompt_ids: list[int], reply_ids: list[int]) -> None:
        """Store the sampled ids of a prompt and its reply. Later prompts that begin with this text reuse them.

        Without ``reply_ids`` if they have no text: the same prompt, sampled from again, would end with them.
        """
        self._known.remember(text, reply, prompt_ids + reply_ids if reply else prompt_ids)

    def _ids(self, text: str, known: KnownTexts) -> list[int]:
        def encode(rest: str) -> list[int]:
            if len(rest) < len(text):
                return self.codec.encode(rest, special=False)
            return self.codec.encode(rest[len(_CHAT) :], special=text.startswith(_TEXT))

        try:
            return known.ids_of(text, encode)
        except (UnicodeEncodeError, TypeError) as error:  # half a surrogate pair, which a tokenizer does not accept
            raise RequestRefusedError(f"the prompt cannot be tokenized: {error}") from error

    # --- whole conversations ------------------------------------------------------------------------------------------

    def turns(
        self, prompt: Any, completion: Any, tools: Tools = None, *, is_cut: bool = False, **settings: Any
    ) -> list[Turn]:
        """Each reply of a conversation, with the prompt that it would have been sampled from.

        A reply includes the token that ends a turn, except for the last reply if the conversation ``is_cut`` off. What
        the template writes after this token belongs to the next prompt.
        """
        if isinstance(prompt, str) and isinstance(completion, str):
            ids = self.codec.encode(prompt, special=True)
            return [Turn(prompt_ids=ids, reply_ids=self.codec.encode_after(prompt, completion))]
        known = KnownTexts()
        messages = as_messages(prompt)
        found: list[Turn] = []
        for message in as_messages(completion, role="assistant"):
            if role_of(message) == "assistant":
                text, said, end = self._written(messages, message, tools, settings)
                ids = self._ids(_CHAT + text, known)
                body = self.codec.encode_after(text, said)
                known.remember(_CHAT + text, said, ids + body)
                found.append(Turn(prompt_ids=ids, reply_ids=body + end))
            messages = [*messages, message]
        if is_cut and found:
            found[-1] = Turn(prompt_ids=ids, reply_ids=body)
        return found

    def _written(
        self, messages: list[Any], message: Any, tools: Tools, settings: dict[str, Any]
    ) -> tuple[str, str, list[int]]:
        """The prompt of a reply, the reply as the template writes it, and the token that ends it, if any."""
        text = self.template.render(messages, tools, **settings)
        whole = self.template.render(
            [*messages, message], tools, **{**settings, "add_generation_prompt": False, "continue_final_message": False}
        )
        if whole.startswith(text):
            return text, *self._cut(whole[len(text) :])
        # The template does not repeat the generation prompt before the reply. A reply without calls still continues it,
        # as in sampling, unless the generation prompt opens a thought that the reply does not close.
        opened = _OPENED.search(text)
        is_closed = opened is None or f"</{opened[1]}>" in text_of(message)
        if is_closed and not message.get("tool_calls"):
            return text, text_of(message), self._ends()[:1]
        shared = whole[: shared_length(text, whole)]
        start = max(shared.rfind(mark) + 1 for mark in BOUNDARIES)
        return whole[:start], *self._cut(whole[start:])

    def _cut(self, reply: str) -> tuple[str, list[int]]:
        for end in self._ends():
            mark = self.codec.decode([end], special=True)
            if mark and mark in reply:
                return reply.rpartition(mark)[0], [end]
        return reply, []

    def _ends(self) -> list[int]:
        ends = [self.template.end_of_turn(self.codec), getattr(self.tokenizer, "eos_token_id", None)]
        return [end for end in ends if end is not None]
