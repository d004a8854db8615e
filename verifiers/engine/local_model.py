"""A request → a completion from a model in this process, with the exact tokens of prompt and reply."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from verifiers.chat.recent import Recent
from verifiers.chat.tool_calls import Style
from verifiers.clients.openai_looks import OpenAILooks
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.recording import is_recording, record
from verifiers.engine import ready_model as loading
from verifiers.engine.constraints import Constraint, call_grammar, schema_grammar
from verifiers.engine.options import Options, read_options
from verifiers.engine.ready_model import ReadyModel, name_of
from verifiers.engine.sequence import Generated, OnToken, arrivals
from verifiers.engine.structured import wants_grammar
from verifiers.engine.text.detokenizer import StopWatch
from verifiers.engine.text.replies import Choice, Prompt, completion_of, read_choice, reply_id
from verifiers.engine.text.streams import ReplyStream
from verifiers.errors import DeadlineError, InfraError, ModelError, OverlongPromptError, RequestRefusedError, wrap
from verifiers.messages import chars_in

if TYPE_CHECKING:
    from verifiers.engine.backends import Backend
    from verifiers.engine.engine import Engine

DEFAULT_MODEL = "smollm2"
SHORT_CHARS = 16_384  # that a tokenizer takes about a millisecond for


class LocalModel(OpenAILooks):
    """A model in this process as a client: ``env.evaluate(client=vf.LocalModel("smollm2"))``.

    ``model`` is the embedded one's name, a folder, a GGUF file, a name on the hub, or a live module with its
    ``tokenizer``, whose parameters are then read where they are: after an optimizer step the next token comes from the
    new weights. Nothing is loaded before the first request. ``rows`` requests run at once, each of at most ``length``
    tokens; they share a KV cache of ``cache_tokens``. ``stop`` are texts or token ids that end every reply.
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
            raise ValueError(f"stop holds {wrong[0]!r}; it takes texts and token ids")
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
            raise ValueError("device and dtype are those of the model you hand in: leave them out")
        self.model = name or name_of(model)
        self._source = model
        self._tokenizer = tokenizer
        self._sizes = {label: value for label, value in sizes.items() if value is not None}
        self._device, self._dtype = device, dtype
        self._stop_texts = tuple(one for one in stops if isinstance(one, str))
        self._stop_ids = frozenset(one for one in stops if isinstance(one, int))
        self._lock = threading.Lock()
        self._recent: Recent[Options] = Recent()
        self._loaded: ReadyModel | None = None
        self._failure: Exception | None = None
        self._is_closed = False
        self._ending: weakref.finalize[Any, Any] | None = None  # stops the engine if nobody closes it
        self._merges = 0

    def __repr__(self) -> str:
        return f"LocalModel({self.model!r})"

    # --- asking ---------------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Completion:
        """The reply to a request; with ``n`` above 1 the others are in ``completion.raw["choices"]``."""
        return await self._complete(request, in_thread=False)

    async def complete_in_thread(self, request: Request) -> Completion:
        """The same, tokenized in a thread however short it is: for one of many that come at once."""
        return await self._complete(request, in_thread=True)

    async def _complete(self, request: Request, *, in_thread: bool) -> Completion:
        ready = await self.ready()
        prompt = await self._prepared(ready, request, in_thread)
        watches: list[OnToken] | None = None
        if prompt.options.stop:
            watches = [StopWatch(ready.codec, prompt.options.stop) for _ in range(prompt.options.n)]
        futures = ready.engine.submit(prompt.ids, prompt.sampling, n=prompt.options.n, on_token=watches)
        generated = await _results(futures, prompt.timeout_s)
        choices = list(map(partial(self._choice, ready, prompt), generated))
        if is_recording():
            record(self, request, [choice.as_reply for choice in choices])
        return completion_of(prompt, choices, ready.codec)

    async def stream(self, request: Request) -> ReplyStream:
        """A reply piece by piece: ``async for piece in await model.stream(request)``."""
        ready = await self.ready()
        prompt = await self._prepared(ready, request, in_thread=False)
        return ReplyStream(ready, prompt, lambda generated: self._choice(ready, prompt, generated))

    def _choice(self, loaded: ReadyModel, prompt: Prompt, generated: Generated) -> Choice:
        choice = read_choice(prompt, generated, loaded.codec)
        if prompt.text is not None:
            loaded.writer.remember(prompt.text + choice.sampled_text, prompt.ids + generated.ids[: choice.body])
        return choice

    async def prompt_ids(self, request: Request) -> list[int]:
        """The tokens of a request's prompt, whether they leave room for a reply or not."""
        return await asyncio.to_thread(self._prompt_ids, await self.ready(), request)

    def _prompt_ids(self, loaded: ReadyModel, request: Request) -> list[int]:
        return self._tokens(loaded, request, self._options(loaded, request))[1]

    # --- a request's tokens ---------------------------------------------------------------------------------------

    async def _prepared(self, loaded: ReadyModel, request: Request, in_thread: bool) -> Prompt:
        """The request's tokens: made here if it is short, else in a thread, where they hold up nobody."""
        given = (request.prompt, request.tools, request.sampling)
        if wants_grammar(request.sampling):
            return await asyncio.wrap_future(loaded.constraints.submit(self._checked_prompt, loaded, request))
        if not in_thread and chars_in(given, stop_after=SHORT_CHARS) <= SHORT_CHARS:
            return self._prompt(loaded, request)
        return await asyncio.to_thread(self._checked_prompt, loaded, request)

    def _checked_prompt(self, loaded: ReadyModel, request: Request) -> Prompt:
        """Refuse by its length what cannot fit, whatever its tokens are: tokenizing it would take seconds."""
        most = loaded.engine.length * loaded.codec.longest_token
        further = request.sampling.get("extra_body")
        args = (request.sampling, further if isinstance(further, Mapping) else {})
        told = [one.get(name) for one in args for name in ("tools", "chat_template_kwargs")]  # by the template
        found = chars_in((request.prompt, request.tools, told), stop_after=most)
        if found > most:
            raise OverlongPromptError(
                f"the prompt has more than {most:,} characters, and the maximum context length of {self.model} is "
                f"{loaded.engine.length} tokens of at most {loaded.codec.longest_token} characters, reply included"
            )
        return self._prompt(loaded, request)

    def _prompt(self, loaded: ReadyModel, request: Request) -> Prompt:
        options = self._options(loaded, request)
        is_chat = request.message_type == "chat"
        tools = _tools(request, options)
        text, ids = self._tokens(loaded, request, options)
        room = loaded.engine.length - len(ids)
        if room < 1:
            raise OverlongPromptError(
                f"the prompt has {len(ids)} tokens, and the maximum context length of {self.model} is "
                f"{loaded.engine.length} tokens, reply included"
            )
        if not ids:
            raise RequestRefusedError("the prompt is empty: give at least one token")
        if options.echo and is_chat:
            raise RequestRefusedError("'echo' is for plain completions: a chat's reply does not begin with its prompt")
        names = tuple(map(_tool_name, tools or ()))
        style = loaded.template.style(tools) if tools else None
        constraint = _constraint(loaded, options, tools, style)
        seconds = [s for s in (request.timeout_s, options.timeout_s) if s is not None]
        return Prompt(
            model=self.model,
            message_type=request.message_type,
            text=text,
            ids=ids,
            options=options,
            sampling=options.sampling(room, loaded.stop_ids - loaded.engine.stop_ids, constraint),
            stop_ids=options.stop_ids if options.ignore_eos else loaded.stop_ids | options.stop_ids,
            tool_names=names,
            tool_style=style,
            echoed=_echoed(request.prompt, ids, loaded) if options.echo else "",
            timeout_s=min(seconds, default=None),
            id=reply_id(request.message_type),
            created=int(time.time()),
        )

    def _tokens(self, loaded: ReadyModel, request: Request, options: Options) -> tuple[str | None, list[int]]:
        """A prompt as a text, where it is one, and as token ids."""
        if request.message_type == "chat":
            if isinstance(request.prompt, str):
                raise RequestRefusedError("a chat's prompt is a list of messages; this is a string")
            return loaded.writer.prompt(request.prompt, _tools(request, options), **options.template)
        if isinstance(request.prompt, str):
            return loaded.writer.text_prompt(request.prompt)
        return None, _checked_ids(request.prompt, loaded.vocabulary)

    def _options(self, loaded: ReadyModel, request: Request) -> Options:
        given = dict(request.sampling)
        if request.tools and "tools" not in given:
            given["tools"] = request.tools
        stops = given.get("stop")
        if self._stop_texts and isinstance(stops, str | list | tuple | None):
            given["stop"] = [*([stops] if isinstance(stops, str) else stops or []), *self._stop_texts]
        key = repr(given)
        options = self._recent.find(key)
        if options is None:
            options = read_options(given, vocabulary=loaded.vocabulary)
            # Tools, variables of the template and schemas are the caller's objects, and may change.
            if options.tools is None and not options.template and options.response_format.is_text:
                self._recent.keep(key, options)
        return options

    # --- its life -------------------------------------------------------------------------------------------------

    async def ready(self) -> ReadyModel:
        """Load the model if that has not been done; a thread does it, once."""
        if self._loaded is not None:
            return self._loaded
        if self._failure is None:
            try:
                return await asyncio.to_thread(self.load)
            except (ValueError, OSError, ImportError) as error:
                self._failure = error  # the next thousand requests need not try in vain
        raise InfraError(f"the model {self.model} could not be loaded: {self._failure}") from self._failure

    def load(self) -> ReadyModel:
        """Load the model now: ValueError or OSError where there is none, or it does not fit into memory."""
        with self._lock:
            if self._is_closed:
                raise InfraError(f"{self!r} is closed")
            if self._loaded is None:
                self._loaded = loading.load(
                    self._source,
                    self._tokenizer,
                    name=self.model,
                    sizes=self._sizes,
                    device=self._device,
                    dtype=self._dtype,
                    stop_ids=self._stop_ids,
                )
                if self._loaded.engine is not self._source:
                    self._ending = weakref.finalize(self, self._loaded.engine.stop)
                    self._ending.atexit = False
            return self._loaded

    @property
    def engine(self) -> Engine:
        """The engine, loaded if need be."""
        return self.load().engine

    @property
    def backend(self) -> Backend:
        """How the model is run: the quickest way that was proven to give its own numbers, and why not a quicker one."""
        return self.engine.backend

    def close(self) -> None:
        """Fail what is under way and give the memory back: the KV cache, graphs, and weights that were loaded here.

        An engine that was handed in is left running, and a module that was handed in is its owner's.
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
        if self._ending is not None:
            self._ending.detach()  # it refers to the engine, and so to the weights
        device = loaded.engine.device
        del loaded
        from verifiers.kernels.devices import free_unused  # torch, which this module does without

        free_unused(device)

    def __enter__(self) -> LocalModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- its weights ----------------------------------------------------------------------------------------------

    def update_weights(self, path: str | Path) -> int:
        """Load a folder of safetensors into the live module, in place; the number of tensors.

        A folder that does not fit the model raises ValueError and changes nothing.
        """
        from verifiers.engine.files.weights import load_into

        engine = self.engine
        with engine.lock:
            count = load_into(engine.model, path)
            engine.forget()
            engine.runner.name_next()
        return count

    def forget(self) -> None:
        """Drop the keys and values kept for reuse."""
        self.engine.forget()

    @contextmanager
    def merge_adapters(self) -> Iterator[None]:
        """While this lasts, LoRA adapters (peft) are merged into the weights: sampling is as quick as without them."""
        from verifiers.kernels.modules import is_quantised

        engine = self.engine
        if not callable(getattr(engine.model, "merge_adapter", None)):
            raise TypeError(f"a {type(engine.model).__name__} has no adapters to merge; hand in a peft model")
        if is_quantised(engine.model):
            raise TypeError("adapters on quantised weights are not merged: their sum would be rounded to few bits")
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
        if timeout_s is None:
            return await arrivals(futures)
        async with asyncio.timeout(timeout_s):
            return await arrivals(futures)
    except TimeoutError:
        raise DeadlineError(f"the reply took longer than {timeout_s:g} s") from None
    except Exception as error:
        failure = wrap(error, ModelError, "the model")
        raise failure from failure.__cause__
    finally:
        for future in futures:
            future.cancel()


def _tools(request: Request, options: Options) -> Sequence[Mapping[str, Any]] | None:
    """The tools that the model is told of."""
    is_told = request.message_type == "chat" and options.tool_choice.mode != "none"
    return (options.tools or None) if is_told else None


def _constraint(
    loaded: ReadyModel, options: Options, tools: Sequence[Mapping[str, Any]] | None, style: Style | None
) -> Constraint | None:
    """What the reply has to follow, if anything: a forced call goes before a format, which is that of other replies."""
    if options.tool_choice.is_forced:
        offered = options.tool_choice.offered(tools)
        return loaded.constraints.compile(call_grammar(offered, style or "hermes", loaded.codec))
    wanted = options.response_format
    if wanted.is_text:
        return None
    if tools and style is not None:
        grammar = call_grammar(tools, style, loaded.codec, schema=wanted.schema, strict=wanted.strict)
    else:
        grammar = schema_grammar(wanted.schema, strict=wanted.strict)
    return loaded.constraints.compile(grammar)


def _echoed(prompt: Any, ids: Sequence[int], loaded: ReadyModel) -> str:
    return prompt if isinstance(prompt, str) else loaded.codec.decode(ids)


def _checked_ids(prompt: Any, vocabulary: int) -> list[int]:
    if not isinstance(prompt, (list, tuple)) or not all(type(token) is int for token in prompt):
        raise RequestRefusedError("a completion's prompt is a text or a list of token ids")
    if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
        raise RequestRefusedError(f"the prompt holds token {wrong[0]}, and the model has {vocabulary}")
    return list(prompt)


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestRefusedError(f"a tool has a function with a name, not {tool!r:.100}")
    return name
