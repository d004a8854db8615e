"""Stream a reply: pieces of text with their tokens, as the engine samples them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from verifiers.chat.tool_calls import opens_call, shown_length
from verifiers.clients.protocol import Completion
from verifiers.dialects.completions import wants_ids
from verifiers.dialects.replies import Piece
from verifiers.engine.ready_model import ReadyModel
from verifiers.engine.sequence import Answer, Generated, OnToken, PromptLogprob
from verifiers.engine.text.detokenizer import StopWatch, TextStream
from verifiers.engine.text.logprobs import TokenTexts, write_logprobs, write_prompt_logprobs
from verifiers.engine.text.replies import Choice, Prompt, completion_of, envelope
from verifiers.errors import DeadlineError, ModelError, wrap


@contextmanager
def reply_errors(timeout_s: float | None) -> Iterator[None]:
    """Convert errors while awaiting a reply: DeadlineError at its timeout, ModelError for a failure of the model."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TimeoutError) and timeout_s is not None:
            raise DeadlineError(f"the reply took longer than {timeout_s:g} s") from None
        failure = wrap(error, ModelError, "the model")
        raise failure from failure.__cause__


class _PartialChoice:
    """A choice that is being sampled: the text that is held back and the tokens that were not sent yet."""

    def __init__(self, loaded: ReadyModel, prompt: Prompt, answer: Answer) -> None:
        self._answer, self._codec = answer, loaded.codec
        self._is_empty = prompt.options.max_tokens == 0
        self._style = prompt.tool_style
        self._text = TextStream(loaded.codec, prompt.ids, prompt.options.stop)
        self._held = ""
        self._is_call = False  # whether a special token that begins a call arrived; the text does not show it
        self._shown = 0  # characters sent
        self._sent = 0  # tokens sent
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    def push(self, index: int, token: int, logprob: float) -> Piece | None:
        if self._is_empty:
            return None
        self._ids.append(token)
        self._logprobs.append(logprob)
        self._held += self._text.push(token)
        shown = len(self._held)
        if self._style is not None:
            if token in self._codec.special_ids:
                self._is_call |= opens_call(self._codec.decode([token], special=True), self._style)
            shown = 0 if self._is_call else shown_length(self._held, self._style)
        return self._piece(index, shown) if shown else None

    def _piece(self, index: int, shown: int, **rest: Any) -> Piece:
        text, self._held = self._held[:shown], self._held[shown:]
        self._shown += shown
        sent = self._sent + len(self._ids)
        tops = self._answer.top_logprobs[self._sent : sent]
        piece = Piece(index=index, text=text, ids=self._ids, logprobs=self._logprobs, top_logprobs=tops, **rest)
        self._sent = sent
        self._ids, self._logprobs = [], []
        return piece

    def finish(self, index: int, choice: Choice) -> Piece:
        """The last piece: the text that was held back and the token that ended the reply."""
        generated = choice.generated
        for token in generated.ids[self._sent + len(self._ids) : choice.body]:
            self._held += self._text.push(token)
        self._held += self._text.finish()
        if choice.calls:
            self._held = (choice.content or "")[self._shown :]  # the text outside the calls
        self._ids = generated.ids[self._sent :]
        self._logprobs = generated.logprobs[self._sent :]
        ended = {"calls": choice.calls, "finish_reason": choice.finish_reason, "stop": choice.stop}
        return self._piece(index, len(self._held), **ended, weight_versions=generated.weight_versions)


class ReplyStream:
    """The pieces of a reply. ``completion`` is set after the last piece. Leaving early cancels the request."""

    def __init__(self, loaded: ReadyModel, prompt: Prompt, read: Callable[[Generated], Choice]) -> None:
        self.prompt = prompt
        self.head = envelope(prompt, is_chunk=True)  # the first fields of every chunk
        self.completion: Completion | None = None
        self._loaded = loaded
        self._read = read
        self._futures: list[Answer] = []
        self._texts = [TokenTexts(prompt, loaded.codec) for _ in range(prompt.options.n)]
        self._queue: asyncio.Queue[tuple[int, Any, float]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Submit the request (EngineFullError if the queue is full). Optional: iterating submits it too."""
        n = self.prompt.options.n
        self._futures = self._loaded.engine.submit(
            self.prompt.ids, self.prompt.sampling, n=n, on_token=[self._callback(i) for i in range(n)]
        )
        for index, future in enumerate(self._futures):
            future.add_done_callback(lambda done, index=index: self._enqueue(index, done, 0.0))  # type: ignore[misc]

    def _callback(self, index: int) -> OnToken:
        stops = self.prompt.options.stop
        watch = StopWatch(self._loaded.codec, stops, self.prompt.ids) if stops else None

        def on_token(token: int, logprob: float) -> bool:
            is_read = self._enqueue(index, token, logprob)
            return not is_read or (watch is not None and watch(token, logprob))

        return on_token

    def _enqueue(self, index: int, what: Any, logprob: float) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, what, logprob))
        except RuntimeError:  # the loop is closed, so the reader is gone
            return False
        return True

    @property
    def choices(self) -> int:
        return self.prompt.options.n

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.ids)

    def extras(self, piece: Piece, *, is_first: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """The requested fields besides the text: of this choice, and of the prompt."""
        prompt, codec = self.prompt, self._loaded.codec
        of_choice: dict[str, Any] = {}
        of_prompt: dict[str, Any] = {}
        if is_first and prompt.message_type == "completion":
            of_choice["text"] = prompt.echoed + piece.text
        if prompt.options.logprobs:
            echoed = self.prompt_logprobs if is_first and prompt.options.echo else None
            tokens = piece.ids, piece.logprobs, piece.top_logprobs
            of_choice["logprobs"] = write_logprobs(prompt, *tokens, self._texts[piece.index], echoed=echoed)
        if is_first and prompt.options.prompt_logprobs is not None:
            of_choice["prompt_logprobs"] = write_prompt_logprobs(self.prompt_logprobs or (), prompt, codec)
        if wants_ids(lambda name: getattr(prompt.options, name)):
            of_choice["token_ids"] = piece.ids
            if is_first:
                of_prompt["prompt_token_ids"] = prompt.ids
        if piece.weight_versions:
            of_choice["weight_versions"] = [span._asdict() for span in piece.weight_versions]
        return of_choice, of_prompt

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob] | None:
        """The logprobs of the prompt's tokens, if requested. Complete by the first piece."""
        return next((future.prompt_logprobs for future in self._futures if future.prompt_logprobs), None)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        if not self._futures:
            self.start()
        partial = [_PartialChoice(self._loaded, self.prompt, future) for future in self._futures]
        choices: dict[int, Choice] = {}
        timeout_s = self.prompt.timeout_s
        deadline = None if timeout_s is None else self._loop.time() + timeout_s
        try:
            with reply_errors(timeout_s):
                while len(choices) < len(partial):
                    async with asyncio.timeout_at(deadline):
                        index, what, logprob = await self._queue.get()
                    if isinstance(what, Future):
                        choices[index] = self._read(what.result())
                        yield partial[index].finish(index, choices[index])
                    elif piece := partial[index].push(index, what, logprob):
                        yield piece
        finally:
            self.close()
        whole = [choices[index] for index in sorted(choices)]
        self.completion = completion_of(self.prompt, whole, self._loaded.codec, self.head)

    def close(self) -> None:
        """Cancel unfinished replies."""
        for future in self._futures:
            future.cancel()
