"""A client over a model in this process, whose completions have the exact tokens of prompt and reply."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.chat import ChatWriter
from verifiers.clients.activity import note_under_way
from verifiers.clients.openai_looks import OpenAILooks
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.recording import is_recording, record
from verifiers.engine.constraints import Constraints
from verifiers.engine.ready_model import ReadyModel, name_of, stop_ids_of
from verifiers.engine.sequence import Generated, OnToken, results_of
from verifiers.engine.text.detokenizer import StopWatch
from verifiers.engine.text.prompts import PromptWriter
from verifiers.engine.text.replies import Choice, Prompt, completion_of, read_choice
from verifiers.engine.text.streams import ReplyStream, reply_errors
from verifiers.errors import InfraError

if TYPE_CHECKING:
    from verifiers.engine.backends import Backend
    from verifiers.engine.engine import Engine
    from verifiers.engine.plan import Plan

DEFAULT_MODEL = "smollm2"


class LocalModel(OpenAILooks):
    """A model in this process as a client: ``env.evaluate(client=vf.LocalModel("smollm2"))``.

    ``model`` is ``"smollm2"``, a folder, a GGUF file, a name on the hub, or a live module with its
    ``tokenizer``. A live module's parameters are read in place: the next token after an optimizer step uses the new
    weights. Nothing is loaded before the first request. ``rows`` requests run at once, each of at most ``length``
    tokens. They share a KV cache of ``cache_tokens``. ``stop`` lists texts or token ids that end every reply.
    """

    needs_no_model = True
    base_url = "local://"
    api_key = ""

    def __init__(
        self,
        model: Any = DEFAULT_MODEL,
        tokenizer: Any = None,
        *,
        rows: int | None = None,
        length: int | None = None,
        cache_tokens: int | None = None,
        device: Any = None,
        dtype: Any = None,
        stop: Iterable[str | int] = (),
        max_waiting: int | None = None,
        name: str | None = None,
    ) -> None:
        stops: list[Any] = [stop] if isinstance(stop, (str, int)) else list(stop)
        if wrong := [one for one in stops if one == "" or type(one) not in (str, int)]:
            raise ValueError(f"stop must contain non-empty texts and token ids, not {wrong[0]!r}")
        sizes: dict[str, Any] = {
            "rows": rows,
            "length": length,
            "cache_tokens": cache_tokens,
            "max_waiting": max_waiting,
        }
        for label, value in sizes.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{label} must be at least 1, got {value!r}")
        if not isinstance(model, (str, Path)) and (device is not None or dtype is not None):
            raise ValueError("device and dtype are taken from the model that you pass in; leave them out")
        self.model = name or name_of(model)
        self._source = model
        self._tokenizer = tokenizer
        self._sizes = {label: value for label, value in sizes.items() if value is not None}
        self._device, self._dtype = device, dtype
        self._prompts = PromptWriter(self.model, [one for one in stops if isinstance(one, str)])
        self._stop_ids = frozenset(one for one in stops if isinstance(one, int))
        self._lock = threading.Lock()
        self._loaded: ReadyModel | None = None
        self._failure: Exception | None = None
        self._is_closed = False
        self._finalizer: weakref.finalize[Any, Any] | None = None  # stops the engine if `close` is never called
        self._merges = 0  # depth of nested `merge_adapters`

    def __repr__(self) -> str:
        return f"LocalModel({self.model!r})"

    # --- requests -------------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Completion:
        """The reply to a request. With ``n`` above 1, the other replies are in ``completion.raw["choices"]``."""
        return await self._complete(request, in_thread=False)

    async def complete_in_thread(self, request: Request) -> Completion:
        """Like `complete`, but even a short prompt is tokenized in a thread."""
        return await self._complete(request, in_thread=True)

    async def _complete(self, request: Request, *, in_thread: bool) -> Completion:
        ready = await self.ready()
        prompt = await self._prompts.prepare(ready, request, in_thread=in_thread)
        watches: list[OnToken] | None = None
        if prompt.options.stop:
            watches = [StopWatch(ready.codec, prompt.options.stop, prompt.ids) for _ in range(prompt.options.n)]
        futures = ready.engine.submit(prompt.ids, prompt.sampling, n=prompt.options.n, on_token=watches)
        note_under_way(ready.engine.tokens_under_way)
        generated = await _results(futures, prompt.timeout_s)
        choices = list(map(partial(self._choice, ready, prompt), generated))
        if is_recording():
            record(self, request, [choice.as_reply for choice in choices])
        return completion_of(prompt, choices, ready.codec)

    async def stream(self, request: Request) -> ReplyStream:
        """Stream a reply piece by piece: ``async for piece in await model.stream(request)``."""
        ready = await self.ready()
        prompt = await self._prompts.prepare(ready, request)
        return ReplyStream(ready, prompt, lambda generated: self._choice(ready, prompt, generated))

    def _choice(self, loaded: ReadyModel, prompt: Prompt, generated: Generated) -> Choice:
        choice = read_choice(prompt, generated, loaded.codec)
        reply = choice.sampled_text
        if prompt.text is not None and (reply or prompt.message_type == "chat"):  # else it is not a turn
            loaded.writer.remember(prompt.text, reply, prompt.ids, generated.ids[: choice.body])
        return choice

    async def prompt_ids(self, request: Request) -> list[int]:
        """The tokens of a request's prompt, even if they leave no room for a reply."""
        return await asyncio.to_thread(self._prompts.ids, await self.ready(), request)

    # --- loading and closing --------------------------------------------------------------------------------------

    async def ready(self) -> ReadyModel:
        """The loaded model. The first call loads it, in a thread."""
        if self._loaded is not None:
            return self._loaded
        if self._failure is None:
            try:
                return await asyncio.to_thread(self.load)
            except (ValueError, OSError, ImportError) as error:
                self._failure = error  # later requests fail with it immediately
        raise InfraError(f"the model {self.model} could not be loaded: {self._failure}") from self._failure

    def load(self) -> ReadyModel:
        """Load the model now. Raises ValueError or OSError if it is not found or does not fit into memory."""
        with self._lock:
            if self._is_closed:
                raise InfraError(f"{self!r} is closed")
            if self._loaded is None:
                self._loaded = self._load()
                if self._loaded.engine is not self._source:
                    self._finalizer = weakref.finalize(self, self._loaded.engine.stop)
                    self._finalizer.atexit = False
            return self._loaded

    def _load(self) -> ReadyModel:
        """Load the model by its name, or use the module or engine that was passed in."""
        from verifiers.engine.engine import Engine
        from verifiers.engine.files import models

        source, tokenizer = self._source, self._tokenizer
        given = source.model if isinstance(source, Engine) else source
        tokenizer = getattr(given, "tokenizer", None) if tokenizer is None else tokenizer
        model, tokenizer = models.load(
            given, tokenizer, device=self._device, dtype=self._dtype, before_weights=self._plan
        )
        writer = ChatWriter(tokenizer, model=self.model)
        stop_ids = self._stop_ids | stop_ids_of(model, tokenizer, writer.template, writer.codec)
        engine = source if isinstance(source, Engine) else self._start_engine(model, stop_ids)
        vocabulary, ends = engine.vocabulary, stop_ids | engine.stop_ids
        constraints = Constraints(writer.codec, vocabulary=vocabulary, stop_ids=ends)
        return ReadyModel(engine=engine, writer=writer, stop_ids=ends, vocabulary=vocabulary, constraints=constraints)

    def _start_engine(self, model: Any, stop_ids: frozenset[int]) -> Engine:
        from verifiers.engine.engine import Engine
        from verifiers.kernels.devices import current

        parameter = next(model.parameters())
        planned = self._plan(model.config, parameter.dtype, parameter.device, weights_loaded=True)
        with current(parameter.device):  # for this thread
            return Engine(model, **{**self._sizes, **asdict(planned)}, stop_ids=sorted(stop_ids))

    def _plan(self, config: Any, dtype: Any, device: Any, *, weights_loaded: bool = False) -> Plan:
        """The sizes of the engine. Raises ``WillNotFitError`` if the requested sizes do not fit into memory."""
        from verifiers.engine.plan import plan

        asked = {name: self._sizes.get(name) for name in ("rows", "length", "cache_tokens")}
        return plan(config, **asked, dtype=dtype, device=device, weights_loaded=weights_loaded)

    @property
    def engine(self) -> Engine:
        """The engine; loads the model if needed."""
        return self.load().engine

    @property
    def backend(self) -> Backend:
        """How the model is run: the fastest backend that reproduces its logprobs, and why a faster one was rejected."""
        return self.engine.backend

    def close(self) -> None:
        """Fail the requests in flight and free the KV cache, the graphs, and weights that were loaded here.

        An engine that was passed in keeps running, and a module that was passed in is kept.
        """
        with self._lock:
            self._is_closed = True
            loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        loaded.constraints.close()
        if loaded.engine is self._source:
            return
        loaded.engine.close()
        if self._finalizer is not None:
            self._finalizer.detach()  # it keeps the engine alive, and so the weights
        device = loaded.engine.device
        del loaded
        from verifiers.kernels.devices import free_unused  # needs torch, which this module does not import

        free_unused(device)

    def __enter__(self) -> LocalModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- weights --------------------------------------------------------------------------------------------------

    def update_weights(self, path: str | Path) -> int:
        """Load a folder of safetensors into the live module, in place. Returns the number of tensors.

        If the folder does not match the model, raises ValueError and changes nothing.
        """
        from verifiers.engine.files.weights import load_into

        engine = self.engine
        with engine.lock:
            count = load_into(engine.model, path)
            engine.forget()
            engine.runner.name_next()
        return count

    def forget(self) -> None:
        """Drop the prefix cache."""
        self.engine.forget()

    @contextmanager
    def merge_adapters(self) -> Iterator[None]:
        """Merge LoRA adapters (peft) into the weights within this block, to sample as fast as without adapters."""
        from verifiers.kernels.modules import is_quantised

        engine = self.engine
        if not callable(getattr(engine.model, "merge_adapter", None)):
            raise TypeError(f"a {type(engine.model).__name__} has no adapters to merge; pass a peft model")
        if is_quantised(engine.model):
            raise TypeError("adapters on quantised weights are not merged: the sum would be rounded to few bits")
        self._merge(engine, +1)
        try:
            yield
        finally:
            self._merge(engine, -1)

    def _merge(self, engine: Engine, change: int) -> None:
        with engine.lock:
            was, self._merges = self._merges, self._merges + change
            if was == 0:
                engine.model.merge_adapter()
            elif self._merges == 0:
                engine.model.unmerge_adapter()
            engine.forget()


async def _results(futures: Sequence[Future[Generated]], timeout_s: float | None) -> list[Generated]:
    try:
        with reply_errors(timeout_s):
            async with asyncio.timeout(timeout_s):
                return await results_of(futures)
    finally:
        for future in futures:
            future.cancel()
