"""A conversation → token ids: of a prompt to sample from, and of replies to learn from, by the same steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from verifiers.chat.codec import Codec
from verifiers.chat.known import KnownTexts, shared_length
from verifiers.chat.template import ChatTemplate, today
from verifiers.errors import RequestRefusedError
from verifiers.messages import as_messages, role_of, text_of

Tools = Any
_OPENED = re.compile(r"<([^<>/\s]+)>\s*\Z")
_BOUNDARIES = ("\n", ">", "]")  # what the head of a turn ends with
_CHAT, _TEXT = "chat:", "text:"  # the same characters, as a conversation and as a plain text, may have other ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a model is shown, and what it is to say: the tokens of both, the end of the turn included."""

    prompt_ids: list[int]
    reply_ids: list[int]


class ChatWriter:
    """How one tokenizer writes conversations, with and without tools.

    The engine asks it for prompts, and tells it the ids that were sampled; trainers ask it for whole conversations that
    nobody sampled. What the engine would have been shown is what is learned from.
    """

    def __init__(self, tokenizer: Any, *, model: str = "this model") -> None:
        self.tokenizer = tokenizer
        self.codec = Codec(tokenizer)
        self.template = ChatTemplate(tokenizer, model=model)
        self._known = KnownTexts()

    @property
    def now(self) -> tuple[Any, ...]:
        """Whatever else the text and ids of a prompt depend on: the template, the day, and what was sampled so far."""
        return self.template.source(), today(), self._known.count

    # --- prompts ----------------------------------------------------------------------------------------------------

    def prompt(self, messages: Any, tools: Tools = None, **settings: Any) -> tuple[str, list[int]]:
        """A prompt of messages as a text to `remember` it by, and its ids; ``settings`` are the template's own."""
        text = _CHAT + self.template.render(messages, tools, **settings)
        return text, self._ids(text, self._known)

    def text_prompt(self, prompt: str) -> tuple[str, list[int]]:
        """A plain text in the same way."""
        text = _TEXT + prompt
        return text, self._ids(text, self._known)

    def scored_ids(self, prompt: str) -> list[int]:
        """The ids of a plain text whose own logprobs are asked for: the tokenizer's, whatever was sampled before."""
        return self._ids(_TEXT + prompt, KnownTexts())

    def remember(self, text: str, reply: str, ids: list[int]) -> None:
        """A prompt's text with the reply to it was sampled as these ids: what goes on from there begins with them."""
        self._known.remember(text, reply, ids)

    def _ids(self, text: str, known: KnownTexts) -> list[int]:
        def encode(rest: str) -> list[int]:
            if len(rest) < len(text):
                return self.codec.encode(rest, special=False)
            return self.codec.encode(rest[len(_CHAT) :], special=text.startswith(_TEXT))

        try:
            return known.ids_of(text, encode)
        except (UnicodeEncodeError, TypeError) as error:  # half a surrogate pair: no text that a tokenizer takes
            raise RequestRefusedError(f"the prompt is not text that can be tokenized: {error}") from error

    # --- whole conversations ------------------------------------------------------------------------------------------

    def turns(
        self, prompt: Any, completion: Any, tools: Tools = None, *, is_cut: bool = False, **settings: Any
    ) -> list[Turn]:
        """Each reply of a conversation with the prompt it would have been sampled from.

        A reply ends with the token that ends a turn, but for the last one where the conversation ``is_cut`` off; what
        the template writes after it belongs to the next prompt.
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
        """The prompt of a reply, the reply as the template writes it, and the token that ends it, if there is one."""
        text = self.template.render(messages, tools, **settings)
        whole = self.template.render(
            [*messages, message], tools, **{**settings, "add_generation_prompt": False, "continue_final_message": False}
        )
        if whole.startswith(text):
            return text, *self._cut(whole[len(text) :])
        # The generation prompt is not repeated in front of the reply. One without calls goes on from it all the same,
        # as when it is sampled; not one that would never close the thought that was opened there.
        opened = _OPENED.search(text)
        is_closed = opened is None or f"</{opened[1]}>" in text_of(message)
        if is_closed and not message.get("tool_calls"):
            return text, text_of(message), self._ends()[:1]
        shared = whole[: shared_length(text, whole)]
        start = max(shared.rfind(mark) + 1 for mark in _BOUNDARIES)
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
