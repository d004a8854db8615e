"""Turn requests into checked prompts: token ids, sampling arguments, and the grammar that the reply must follow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.chat.lru import LRU
from verifiers.chat.tool_calls import Style
from verifiers.clients.protocol import Request
from verifiers.engine.constraints import Constraint, call_grammar, schema_grammar
from verifiers.engine.options import Options, read_options
from verifiers.engine.ready_model import ReadyModel
from verifiers.engine.structured import tool_name, wants_grammar
from verifiers.engine.text.replies import Prompt
from verifiers.errors import OverlongPromptError, RequestRefusedError
from verifiers.messages import chars_in

SHORT_CHARS = 16_384  # a tokenizer takes about a millisecond for this many


class PromptWriter:
    """Writes the prompts of one model, whose replies all end at ``stops``. Caches recent ones, for groups."""

    def __init__(self, model: str, stops: Sequence[str]) -> None:
        self._model, self._stops = model, stops
        self._recent_options: LRU[Options] = LRU()
        self._recent_prompts: LRU[Prompt] = LRU()

    async def prepare(self, loaded: ReadyModel, request: Request, *, in_thread: bool = False) -> Prompt:
        """A request's prompt. A long one is tokenized in a thread, so that it does not block the event loop."""
        given = (request.prompt, request.tools, request.sampling)
        if wants_grammar(request.sampling):
            return await asyncio.wrap_future(loaded.constraints.submit(self._checked_prompt, loaded, request))
        if not in_thread and chars_in(given, stop_after=SHORT_CHARS) <= SHORT_CHARS:
            key = (repr(given), request.message_type, request.timeout_s, *loaded.writer.now)
            prompt = self._recent_prompts.get(key)
            if prompt is None:
                prompt = self._prompt(loaded, request)
                if prompt.options.is_of_plain_values:
                    self._recent_prompts.put(key, prompt)
            return prompt
        return await asyncio.to_thread(self._checked_prompt, loaded, request)

    def ids(self, loaded: ReadyModel, request: Request) -> list[int]:
        """Only the token ids, even if they leave no room for a reply."""
        return self._tokens(loaded, request, self._options(loaded, request))[1]

    def _checked_prompt(self, loaded: ReadyModel, request: Request) -> Prompt:
        """Like `_prompt`, but refuse a prompt with too many characters before spending seconds on tokenizing it."""
        longest = loaded.codec.longest_token
        most = loaded.engine.length * longest
        further = request.sampling.get("extra_body")
        args = (request.sampling, further if isinstance(further, Mapping) else {})
        in_template = [one.get(name) for one in args for name in ("tools", "chat_template_kwargs")]
        if chars_in((request.prompt, request.tools, in_template), stop_after=most) > most:
            raise self._overlong(f"more than {most:,} characters", loaded, f" of at most {longest} characters")
        return self._prompt(loaded, request)

    def _overlong(self, found: str, loaded: ReadyModel, each: str = "") -> OverlongPromptError:
        return OverlongPromptError(
            f"the prompt has {found}, and the maximum context length of {self._model} is "
            f"{loaded.engine.length} tokens{each}, reply included"
        )

    def _prompt(self, loaded: ReadyModel, request: Request) -> Prompt:
        options = self._options(loaded, request)
        tools = _tools(request, options)
        text, ids = self._tokens(loaded, request, options)
        room = loaded.engine.length - len(ids)
        if room < 1:
            raise self._overlong(f"{len(ids)} tokens", loaded)
        if not ids:
            raise RequestRefusedError("the prompt is empty: pass at least one token")
        if max(ids) >= loaded.vocabulary:
            raise RequestRefusedError(
                f"the tokenizer encodes this prompt with token {max(ids)}, but the model has only {loaded.vocabulary}: "
                "resize its embeddings, or use the model's own tokenizer"
            )
        if options.echo and request.message_type == "chat":
            raise RequestRefusedError("'echo' is for plain completions: a chat reply does not begin with its prompt")
        schemas = {_checked_name(tool): tool.get("function", tool).get("parameters") for tool in tools or ()}
        style = loaded.template.style(tools) if tools else None
        constraint = _constraint(loaded, options, tools, style)
        seconds = [s for s in (request.timeout_s, options.timeout_s) if s is not None]
        echoed = ""
        if options.echo:
            echoed = request.prompt if isinstance(request.prompt, str) else loaded.codec.decode(ids)
        return Prompt(
            model=self._model,
            message_type=request.message_type,
            text=text,
            ids=ids,
            options=options,
            sampling_record=options.record(),
            sampling=options.sampling(room, loaded.stop_ids - loaded.engine.stop_ids, constraint),
            stop_ids=options.stop_ids if options.ignore_eos else loaded.stop_ids | options.stop_ids,
            tools=schemas,
            tool_style=style,
            echoed=echoed,
            timeout_s=min(seconds, default=None),
        )

    def _tokens(self, loaded: ReadyModel, request: Request, options: Options) -> tuple[str | None, list[int]]:
        """A prompt as text (None if it was given as ids) and as token ids."""
        if request.message_type == "chat":
            if isinstance(request.prompt, str):
                raise RequestRefusedError("the prompt of a chat must be a list of messages, not a string")
            return loaded.writer.prompt(request.prompt, _tools(request, options), **options.template)
        if isinstance(request.prompt, str):
            if options.scores_prompt:
                return None, loaded.writer.scored_ids(request.prompt)
            return loaded.writer.text_prompt(request.prompt)
        return None, _checked_ids(request.prompt, loaded.vocabulary)

    def _options(self, loaded: ReadyModel, request: Request) -> Options:
        given = dict(request.sampling)
        if request.tools and "tools" not in given:
            given["tools"] = request.tools
        stops = given.get("stop")
        if self._stops and isinstance(stops, str | list | tuple | None):
            given["stop"] = [*([stops] if isinstance(stops, str) else stops or []), *self._stops]
        key = repr(given)
        options = self._recent_options.get(key)
        if options is None:
            options = read_options(given, vocabulary=loaded.vocabulary)
            if options.is_of_plain_values:
                self._recent_options.put(key, options)
        return options


def _tools(request: Request, options: Options) -> Sequence[Mapping[str, Any]] | None:
    """The tools that the model sees."""
    is_shown = request.message_type == "chat" and options.tool_choice.mode != "none"
    return (options.tools or None) if is_shown else None


def _checked_name(tool: Mapping[str, Any]) -> str:
    if not isinstance(name := tool_name(tool), str):
        raise RequestRefusedError(f"a tool must have a function with a name, not {tool!r:.100}")
    return name


def _constraint(
    loaded: ReadyModel, options: Options, tools: Sequence[Mapping[str, Any]] | None, style: Style | None
) -> Constraint | None:
    """The reply's grammar, if any: for a forced call, or for a response format (tools may be called instead)."""
    wanted = options.response_format
    if options.tool_choice.is_forced:
        grammar = call_grammar(options.tool_choice.offered(tools), style or "hermes", loaded.codec)
    elif wanted.is_text:
        return None
    elif tools and style is not None:
        grammar = call_grammar(tools, style, loaded.codec, schema=wanted.schema, strict=wanted.strict)
    else:
        grammar = schema_grammar(wanted.schema, strict=wanted.strict)
    return loaded.constraints.compile(grammar)


def _checked_ids(prompt: Any, vocabulary: int) -> list[int]:
    if not isinstance(prompt, (list, tuple)) or not all(type(token) is int for token in prompt):
        raise RequestRefusedError("the prompt of a completion must be a text or a list of token ids")
    if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
        raise RequestRefusedError(f"the prompt has token {wrong[0]}, but the vocabulary has {vocabulary} tokens")
    return list(prompt)
