"""Rollouts with tools: the model calls functions and gets their results until it answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from verifiers import calls
from verifiers.clients.protocol import Completion
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.errors import HookError
from verifiers.messages import text_of
from verifiers.parsers import Parser, XMLParser
from verifiers.rollout import stop
from verifiers.rubrics import Rubric
from verifiers.rubrics.tool_rubric import count_calls
from verifiers.tools.calling import (
    MAX_RESULT_CHARS,
    TOOL_TIMEOUT_S,
    Content,
    ErrorFormatter,
    ToolBox,
    as_content,
    explain,
    record,
)
from verifiers.tools.faults import KINDS, BadJSONError, NoCallError, ToolFailedError, is_the_models, kind_of
from verifiers.tools.protocols import (
    EXAMPLE,
    TAG,
    Call,
    as_sent,
    describe_tools,
    native_calls,
    read_arguments,
    tagged_calls,
)
from verifiers.tools.tool import Tool
from verifiers.types import ChatMessage, Messages, SamplingArgs, State

MAX_CALLS = 64  # of one turn
PLACEHOLDER = "{tool_descriptions}"
TOOLS_TEXT = """You have these tools:

{tool_descriptions}

To call one, write its name and arguments as JSON:
{example}
The result comes back in <result> tags. When you know the answer, write it in <{answer}> tags and call nothing more."""

Answer = tuple[ChatMessage, dict[str, Any]]


class ToolEnv(MultiTurnEnv):
    """An environment in which the model may call functions, until a turn without a call.

    Tools are functions, sync or async; their schemas come from signatures and docstrings. With a parser that has a
    ``tool`` field, ``XMLParser(["reasoning", ("tool", "answer")])``, calls are written as JSON in ``<tool>`` tags, and
    the rollout continues until ``<answer>``. If a call is invalid, the model gets an error message and may try again.

    The calls of one turn run concurrently; with ``sequential`` (here for all tools, or for one tool:
    ``as_tool(function, sequential=True)``) they run one after another, in order.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool] | None = None,
        max_turns: int = 10,
        error_formatter: ErrorFormatter | None = None,
        stop_errors: Iterable[type[Exception]] | None = None,
        *,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        tool_timeout_s: float = TOOL_TIMEOUT_S,
        max_result_chars: int = MAX_RESULT_CHARS,
        sequential: bool = False,
        **kwargs: Any,
    ) -> None:
        if "oai_tools" in kwargs:
            raise TypeError("a ToolEnv creates oai_tools from its tools; a row may have others in info['oai_tools']")
        self.toolbox = ToolBox(tools or (), timeout_s=tool_timeout_s, max_result_chars=max_result_chars)
        self.error_formatter = error_formatter
        self.stop_errors = _exception_types(stop_errors)
        self.sequential = sequential
        super().__init__(max_turns=max_turns, parser=parser, rubric=rubric, **kwargs)
        self.uses_tags = isinstance(self.parser, XMLParser) and hasattr(self.parser.parse(""), TAG)
        if self.message_type == "completion" and not self.uses_tags:
            raise ValueError(
                "a completions endpoint does not support tools: remove message_type='completion', or pass "
                'parser=XMLParser(["reasoning", ("tool", "answer")])'
            )
        self._tell_endpoint()

    # --- tools ----------------------------------------------------------------------------------------------------

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The functions, in order."""
        return [tool.function for tool in self.toolbox]

    @property
    def tool_map(self) -> dict[str, Callable[..., Any]]:
        """The functions by their names for the model."""
        return {tool.name: tool.function for tool in self.toolbox}

    def add_tool(self, tool: Callable[..., Any] | Tool) -> None:
        """Add a tool, from the next rollout on."""
        self.toolbox.add(tool)
        self._tell_endpoint()

    def remove_tool(self, tool: Callable[..., Any] | Tool | str) -> None:
        """Remove a tool, given as a function or by its name."""
        self.toolbox.remove(tool)
        self._tell_endpoint()

    def _tell_endpoint(self) -> None:
        self.tool_defs = None if self.uses_tags else self.toolbox.schemas or None

    def new_state(self, row: Mapping[str, Any], client: Any, model: str, sampling_args: SamplingArgs | None) -> State:
        state = super().new_state(row, client, model, sampling_args)
        state["tool_log"] = []
        self.tell(state)
        return state

    def tell(self, state: State) -> None:
        """Describe the tools to the model: through the endpoint, or in the system message."""
        if not self.uses_tags:
            state["oai_tools"] = state["oai_tools"] or (self.oai_tools and list(self.oai_tools))
            return
        schemas = state["oai_tools"] or self.toolbox.schemas
        state["oai_tools"] = None
        state["prompt"] = tell_of_tools(state["prompt"], describe_tools(schemas), self._answer_tag)

    @property
    def _answer_tag(self) -> str:
        return self.parser.answer_field if isinstance(self.parser, XMLParser) else "answer"

    # --- stop conditions ------------------------------------------------------------------------------------------

    def is_tool_call(self, message: ChatMessage) -> bool:
        """Whether an assistant message calls a tool."""
        return bool(self.calls_in(message))

    def calls_in(self, message: ChatMessage) -> list[Call]:
        """The tool calls in an assistant message."""
        return tagged_calls(text_of(message)).calls if self.uses_tags else native_calls(message)

    @stop(priority=10)
    async def no_tools_called(self, state: State) -> bool:
        """With native tool calls: whether the last reply has none."""
        if self.uses_tags or not state["trajectory"]:
            return False
        return not self.is_tool_call(_last_reply(state))

    @stop(priority=10)
    async def answer_given(self, state: State) -> bool:
        """With tool calls in tags: whether the last reply has an answer outside of its calls."""
        if not self.uses_tags or not state["trajectory"]:
            return False
        outside = tagged_calls(text_of(_last_reply(state))).outside
        return getattr(self.parser.parse(outside), self._answer_tag, None) is not None

    # --- a turn of the environment --------------------------------------------------------------------------------

    async def _env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Run the tool calls of the last message. The results are in the order of the calls."""
        last: Any = messages if isinstance(messages, str) else messages[-1]
        if isinstance(last, str):
            last = {"role": "assistant", "content": _last_reply(state)["content"]}
        found = self.calls_in(last)
        if self.uses_tags and not found:
            nothing = f"there is neither a <{TAG}> call nor an <{self._answer_tag}> in your reply. Write {EXAMPLE}"
            found = [Call(id="call_0", name="", arguments={}, problem=NoCallError(nothing))]
        answers = await self.answer_all(_limited(found, merge=self.uses_tags), messages, state)
        state.setdefault("tool_log", []).extend(noted for _, noted in answers)
        results = [message for message, _ in answers]
        return [tagged_results(results)] if self.uses_tags else results

    env_response = calls.both(_env_response)  # type: ignore[arg-type]

    async def _get_model_response(self, state: State, prompt: Messages, *args: Any, **kwargs: Any) -> Completion:
        """Call the model. Earlier tool calls with invalid JSON are repaired in the request only."""
        return await super()._get_model_response(state, as_sent(prompt), *args, **kwargs)

    async def answer_all(self, found: Sequence[Call], messages: Messages, state: State) -> list[Answer]:
        """Run the calls of one turn concurrently, except sequential ones."""
        answers: dict[int, Answer] = {}

        async def answer(numbers: Sequence[int]) -> None:
            try:
                for number in numbers:
                    answers[number] = await self.answer_one(found[number], messages, state)
            except BaseException as error:  # foreign code: exit() in a task would end the loop
                raise calls.contained(error) from error

        in_order = [number for number, call in enumerate(found) if self._is_sequential(call)]
        at_once = [[number] for number in range(len(found)) if number not in in_order]
        await _together([answer(numbers) for numbers in [in_order, *at_once] if numbers])
        return [answers[number] for number in range(len(found))]

    def _is_sequential(self, call: Call) -> bool:
        return self.sequential or (call.name in self.toolbox and self.toolbox[call.name].sequential)

    async def answer_one(self, call: Call, messages: Messages, state: State) -> Answer:
        """Run one call. Returns the message for the model and the log entry of the call."""
        began = time.perf_counter()
        fault: Exception | None = None
        try:
            message = await self._carry_out(call, messages, state)
        except BaseException as raised:  # foreign code: the tool
            error = calls.contained(raised)
            self._raise_if_fatal(error, call)
            fault = error
            message = _tool_message(explain(error, self.error_formatter), call.id)
        content, is_cut = self.toolbox.shown(message.get("content"))
        noted = record(call, fault, is_cut=is_cut, seconds=time.perf_counter() - began)
        return {**message, "content": content}, noted

    async def _carry_out(self, call: Call, messages: Messages, state: State) -> ChatMessage:
        if call.problem is not None:
            raise call.problem
        arguments = read_arguments(call.arguments)
        hook = self._hook("call_tool")
        if hook is None or call.name in self.toolbox:  # an override may have other tools
            tool = self.toolbox[call.name]
            arguments = await self.fill_in(tool, arguments, messages, state)
        run = self._call_tool if hook is None else hook
        message = await run(call.name, arguments, call.id)
        result: ChatMessage = message if isinstance(message, dict) else {"content": message}  # an override's plain text
        return {**_tool_message("", call.id), **result}

    async def fill_in(self, tool: Tool, arguments: dict[str, Any], messages: Messages, state: State) -> dict[str, Any]:
        """The checked arguments for a tool, from those that the model passed."""
        return tool.check(arguments)

    async def _call_tool(
        self, tool_name: str, tool_args: Mapping[str, Any], tool_call_id: str, **kwargs: Any
    ) -> ChatMessage:
        """Run one tool and return its result as a message. Exceptions of the tool are raised."""
        result = await self.toolbox.run(self.toolbox[tool_name], tool_args)
        return _tool_message(as_content(result), tool_call_id)

    call_tool = calls.both(_call_tool)

    def _raise_if_fatal(self, error: Exception, call: Call) -> None:
        """Raise the error if it ends the rollout: if it is not the model's fault, or is one of ``stop_errors``."""
        if calls.has_escaped(error):  # a fault of the tool, not of the model
            raise HookError(f"the tool {call.name!r}: {error}") from error
        if not is_the_models(error):
            raise error
        if not isinstance(error, self.stop_errors) and not isinstance(error.__cause__, self.stop_errors):
            return
        if kind_of(error) in ("exception", "timeout"):
            raise ToolFailedError(f"the tool {call.name!r} raised {type(error).__name__}: {error}") from error
        raise error

    def own_metrics(self, state: State) -> dict[str, float]:
        counted = count_calls(state.get("completion"), tags=self.uses_tags)
        faults = Counter(noted["fault"] for noted in state.get("tool_log") or () if noted["fault"])
        return {
            **super().own_metrics(state),
            "total_tool_calls": float(counted.total()),
            **{f"{tool.name}_calls": float(counted[tool.name]) for tool in self.toolbox},
            "tool_faults": float(faults.total()),
            **{f"{kind}_faults": float(faults[kind]) for kind in KINDS},
        }


def _exception_types(stop_errors: Iterable[type[Exception]] | None) -> tuple[type[Exception], ...]:
    kinds = tuple(stop_errors or ())
    if wrong := [kind for kind in kinds if not _is_exception_type(kind)]:
        raise TypeError(f"stop_errors must contain exception types, not {wrong[0]!r}")
    return kinds


def _is_exception_type(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


def _last_reply(state: State) -> ChatMessage:
    completion = state["trajectory"][-1]["completion"]
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}
    return completion[-1] if completion else {"role": "assistant", "content": ""}


def _limited(found: list[Call], *, merge: bool) -> list[Call]:
    """The first calls of a turn; calls beyond the limit are replaced by errors that say that they were not run."""
    if len(found) <= MAX_CALLS:
        return found
    problem = f"a turn may make {MAX_CALLS} calls, and this one makes {len(found)}; this was not run"
    rest = found[MAX_CALLS : MAX_CALLS + 1] if merge else found[MAX_CALLS:]
    refused = [Call(id=call.id, name=call.name, arguments={}, problem=BadJSONError(problem)) for call in rest]
    return found[:MAX_CALLS] + refused


async def _together(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of them concurrently. If one raises, the others are cancelled."""
    if len(parts) == 1:
        return await parts[0]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _tool_message(content: Content, tool_call_id: str) -> ChatMessage:
    return {"role": "tool", "content": content, "tool_call_id": tool_call_id}


def tagged_results(answers: Sequence[ChatMessage]) -> ChatMessage:
    """Tool messages as one message of the user, each result in ``<result>`` tags.

    >>> tagged_results([{"role": "tool", "content": "4", "tool_call_id": "call_0"}])
    {'role': 'user', 'content': '<result>\\n4\\n</result>'}
    """
    if all(isinstance(answer["content"], str) for answer in answers):
        blocks = [f"<result>\n{answer['content']}\n</result>" for answer in answers]
        return {"role": "user", "content": "\n".join(blocks)}
    parts: list[dict[str, Any]] = []
    for answer in answers:
        shown = answer["content"]
        inside = [{"type": "text", "text": shown}] if isinstance(shown, str) else shown
        parts += [{"type": "text", "text": "<result>\n"}, *inside, {"type": "text", "text": "\n</result>\n"}]
    return {"role": "user", "content": parts}


def tell_of_tools(prompt: Messages, described: str, answer_tag: str) -> Messages:
    """The prompt with the tools in its system message: in place of ``{tool_descriptions}``, or at the end.

    >>> tell_of_tools([{"role": "system", "content": "Tools: {tool_descriptions}"}], "now: The time.", "answer")
    [{'role': 'system', 'content': 'Tools: now: The time.'}]
    """
    tools_text = TOOLS_TEXT.format(tool_descriptions=described, example=EXAMPLE, answer=answer_tag)
    if isinstance(prompt, str):
        return prompt if prompt.startswith(tools_text) else f"{tools_text}\n\n{prompt}"
    first = prompt[0] if prompt else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": tools_text}, *(prompt or ())]
    content, text = first.get("content"), text_of(first)
    if isinstance(content, str) and PLACEHOLDER in content:
        content = content.replace(PLACEHOLDER, described)
    elif described not in text:  # the prompt of an earlier rollout has the tools already
        part = {"type": "text", "text": tools_text}
        content = [*content, part] if isinstance(content, list) else f"{text}\n\n{tools_text}"
    return [{**first, "content": content}, *prompt[1:]]
