"""The base class of environments: rows, how to run a rollout, how to score it, and the methods that run many."""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verifiers import calls
from verifiers.clients import as_client
from verifiers.clients.activity import note_reply
from verifiers.clients.openai_objects import with_ending
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.reading import read_response
from verifiers.clients.recording import recorded_calls
from verifiers.envs.arguments import check_scorers, either, misspelled, warn_of_time_limit
from verifiers.envs.calling import (
    Answerer,
    RolloutCall,
    adopt_result,
    find_answerer,
    merge_sampling,
    override_arguments,
    read_ask,
    read_call,
)
from verifiers.envs.env_scoring import EnvScoring
from verifiers.envs.hooks import ClassicHooks, Hooks, as_verdict
from verifiers.envs.host_calls import Group, get_results_path, read_host_call, run_for_host, single_rollout
from verifiers.envs.own_rollouts import SPEAKING_HOOKS, add_steps
from verifiers.envs.rows import RowFormat, Rows, as_rows, few_shot_messages
from verifiers.envs.states import fresh_state
from verifiers.envs.trainer_calls import TrainerCalls
from verifiers.errors import HookError, RequestRefusedError, wrap
from verifiers.escapes import hurry
from verifiers.message_types import as_tool
from verifiers.messages import concat_messages, make_readable, request_messages
from verifiers.parsers import Parser
from verifiers.rollout import abandon, note_error, note_timing, read_error
from verifiers.rubrics import Rubric
from verifiers.stats import as_aggregates
from verifiers.types import Messages, MessageType, Row, SamplingArgs, State, Usage
from verifiers.views import plain

if TYPE_CHECKING:
    from verifiers.envs.run_steps import Player
    from verifiers.results import Results


__all__ = ["Environment", "get_results_path"]

AT_EXIT_S = 60.0  # limit of each teardown hook at exit, because a hanging hook must not keep Python from exiting
HURRIED_S = 3.0  # the same, after a second Ctrl-C


class Environment(ClassicHooks, EnvScoring, TrainerCalls):
    """A task: a data set, how to run a rollout, and a rubric. Any other keyword becomes an attribute."""

    def __init__(
        self,
        dataset: Any = None,
        eval_dataset: Any = None,
        system_prompt: str | None = None,
        few_shot: Sequence[Any] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: MessageType = "chat",
        oai_tools: list[dict[str, Any]] | None = None,
        max_workers: int = 512,
        env_id: str | None = None,
        env_args: dict[str, Any] | None = None,
        map_kwargs: dict[str, Any] | None = None,
        max_seq_len: int | None = None,
        interleaved_rollouts: bool = False,
        score_rollouts: bool = True,
        *,
        few_shot_examples: Sequence[Any] | None = None,
        tool_defs: Sequence[Any] | None = None,
        client: Any = None,
        model: Any = None,
        max_retries: int = 0,
        timeout: float | None = None,
        reward_timeout_s: float | None = None,
        hook_timeout_s: float | None = None,
        aggregates: Any = (),
        **kwargs: Any,
    ) -> None:
        if message_type not in ("chat", "completion"):
            raise ValueError(f"message_type must be 'chat' or 'completion', got {message_type!r}")
        check_scorers(parser, rubric)
        self.logger = logging.getLogger(f"verifiers.envs.{type(self).__name__}")
        self.message_type: MessageType = message_type
        self.system_prompt = system_prompt
        self.few_shot = either(few_shot=few_shot, few_shot_examples=few_shot_examples)
        self.parser = parser or (rubric.parser if rubric is not None else Parser())
        self.rubric = rubric if rubric is not None else Rubric(parser=self.parser)
        self.sampling_args = merge_sampling(sampling_args)
        self.tool_defs = either(oai_tools=oai_tools, tool_defs=tool_defs)
        self.max_workers = max_workers
        self.env_id = env_id or ""
        self.env_args = env_args or {}
        self.max_seq_len = max_seq_len
        self.score_rollouts = score_rollouts
        self.client, self.model = client, model
        self.max_retries = max_retries
        self.timeout, self.reward_timeout_s, self.hook_timeout_s = timeout, reward_timeout_s, hook_timeout_s
        self.aggregates = as_aggregates(aggregates)  # functions over all rows of a run, by name
        with self._time_limits():  # raises now if they are not valid
            pass
        self.set_interleaved_rollouts(interleaved_rollouts)
        if map_kwargs:
            warnings.warn("map_kwargs has no effect: rows are formatted as they are read", stacklevel=2)
        self._set_attributes(kwargs)
        self._set_rows(dataset, eval_dataset)
        self._hooks = Hooks(self)

    def _set_attributes(self, kwargs: Mapping[str, Any]) -> None:
        warn_of_time_limit(kwargs)
        for name, meant in misspelled(type(self), kwargs).items():
            self.logger.warning("the unknown keyword %r becomes an attribute; did you mean %r?", name, meant)
        for name, value in kwargs.items():
            if callable(getattr(type(self), name, None)):
                raise TypeError(f"{type(self).__name__}() got the keyword {name!r}, which is one of its methods")
            setattr(self, name, value)

    def _set_rows(self, dataset: Any, eval_dataset: Any) -> None:
        if dataset is None and eval_dataset is None:
            raise ValueError("an environment needs a dataset or an eval_dataset")
        self._format = RowFormat(
            message_type=self.message_type,
            system_prompt=self.system_prompt,
            few_shot=few_shot_messages(self.few_shot),
            task=self.env_id or "default",
        )
        self.dataset: Rows | None = None if dataset is None else as_rows(dataset, self._format)
        self.eval_dataset: Rows | None = None if eval_dataset is None else as_rows(eval_dataset, self._format)

    # --- rows -----------------------------------------------------------------------------------------------------

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """The training rows, shuffled if a seed is given (in a new object)."""
        if self.dataset is None:
            raise ValueError("this environment has no dataset, only an eval_dataset")
        return _take(self.dataset, n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """The evaluation rows, or the training rows if there are none."""
        if self.eval_dataset is None:
            return self.get_dataset(n, seed)
        return _take(self.eval_dataset, n, seed)

    def sample_prompts(self, n: int, seed: int | None = None) -> list[Row]:
        """``n`` random rows. A row is repeated only if there are fewer than ``n``."""
        rows = self.get_dataset()
        if not len(rows):
            raise ValueError("the dataset is empty: there is nothing to sample")
        draw = random.Random(seed)
        picks: list[int] = []
        while len(picks) < n:
            picks += draw.sample(range(len(rows)), min(n - len(picks), len(rows)))
        return [rows[i] for i in picks]

    # --- one rollout ----------------------------------------------------------------------------------------------

    def new_state(self, row: Mapping[str, Any], client: Any, model: str, sampling_args: SamplingArgs | None) -> State:
        """The initial state of a rollout of this row. The row itself is not changed."""
        return fresh_state(
            row,
            client=client,
            model=model,
            sampling_args=sampling_args,
            task=self.env_id or "default",
            oai_tools=self.oai_tools,
            message_type=self.message_type,
        )

    async def _init_state(
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: SamplingArgs | None = None
    ) -> State:
        return self.new_state(input, client, model, sampling_args)

    init_state = calls.both(_init_state)

    async def _get_model_response(
        self,
        state: State,
        prompt: Messages,
        client: Any = None,
        model: str | None = None,
        oai_tools: list[dict[str, Any]] | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: MessageType | None = None,
    ) -> Completion:
        """Call the model once. The reply counts towards the state's token usage."""
        given = client if client is not None else state["client"]
        known: Answerer | None = getattr(state, "answerer", None)
        answering = known.client if known is not None and known.given is given else as_client(given)
        tools = oai_tools if oai_tools is not None else state["oai_tools"]
        kind = message_type or self.message_type
        if tools and kind == "completion":
            raise RequestRefusedError("tools need message_type='chat'; a completions endpoint does not support them")
        request = Request(
            model=model or state["model"],
            prompt=request_messages(prompt),
            tools=[plain(as_tool(tool)) for tool in tools] if tools else None,
            sampling=sampling_args if sampling_args is not None else (state["sampling_args"] or {}),
            message_type=kind,
            timeout_s=self.timeout,
        )
        completion = await answering.complete(request)
        if completion.tokens is not None and completion.tokens.sampling is None:
            completion = replace(completion, tokens=replace(completion.tokens, sampling={"asked": request.sampling}))
        if completion.usage is not None:
            note_reply(completion.usage.completion_tokens)
            used = state.get("usage")
            if used is None or isinstance(used, Usage):
                state["usage"] = completion.usage if used is None else used + completion.usage
        return completion

    async def _get_model_response_by(self, *args: Any, **kwargs: Any) -> Completion:
        args, kwargs = read_ask(args, kwargs)
        completion = await self._get_model_response(*args, **kwargs)
        answered: Completion = with_ending(completion)
        return answered

    get_model_response = calls.both(_get_model_response_by)
    """``get_model_response(state, prompt, client=, model=, oai_tools=, sampling_args=, message_type=)`` calls the model
    once; so does the form of 0.1.8, ``(client, model, prompt, oai_tools, sampling_args, message_type)``."""

    def read_reply(self, response: Any) -> Completion:
        """Convert what ``get_model_response`` returned (any OpenAI object, from an override) into a completion."""
        return response if isinstance(response, Completion) else read_response(response, self.message_type)

    async def play(self, state: State) -> State:
        """Run one rollout from its initial state to its end. `MultiTurnEnv` runs turns."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout(input, client, model, sampling_args)")

    async def _rollout(self, *args: Any, **kwargs: Any) -> Any:
        call = read_call(args, kwargs)
        state = await self._play_call(call)
        return (state["completion"], state) if call.gives_pair else state

    rollout = calls.both(_rollout)
    """``rollout(input=row, client=, model=)`` returns the state; ``rollout(client, model, prompt, answer)`` returns
    ``(completion, state)``."""

    async def _play_call(self, call: RolloutCall) -> State:
        row = self.formatted(call.row)
        answerer = find_answerer(
            call.client if call.client is not None else self.client,
            call.model if call.model is not None else self.model,
        )
        with self._time_limits():
            return await self._play_row(row, answerer, merge_sampling(self.sampling_args, call.sampling_args))

    def formatted(self, row: Mapping[str, Any]) -> Row:
        """Format an external row for this environment. An already formatted row is not changed."""
        return self._format.apply(row, 0, keep_ids="example_id" in row)

    def failed_state(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs, error: Exception) -> State:
        """The state of a rollout that failed because its row cannot be read."""
        readable = {key: row.get(key) for key in ("prompt", "answer", "task", "example_id")}
        state = self.new_state(readable, answerer.given, answerer.model, sampling_args)
        note_error(state, wrap(error, HookError, f"reading row {row.get('example_id')}"))
        return state

    async def _play_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        return await self.play(await self._begin(row, answerer, sampling_args))

    async def _begin(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        hook = self._hook("init_state")
        given = (row, answerer.given, answerer.model, sampling_args)
        state: State = self.new_state(*given) if hook is None else await hook(*given)
        state.answerer = answerer
        return state

    async def run_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        """Run one rollout of a row, by a subclass's ``rollout`` if it has one. Raises only cancellation."""
        try:
            state = await self._begin(row, answerer, sampling_args)
        except BaseException as error:  # a bad row must not end the run
            return self.failed_state(row, answerer, sampling_args, calls.contained(error))
        hook = self._hook("rollout")
        if hook is None:
            return await self._play_recorded(state, answerer)
        with recorded_calls() as made:
            try:
                args, kwargs = override_arguments(self.rollout, row, answerer, sampling_args)
                state = adopt_result(await hook(*args, **kwargs), state)
            except BaseException as error:  # foreign code
                try:
                    note_error(state, wrap(calls.contained(error), HookError, f"{type(self).__name__}.rollout"))
                except asyncio.CancelledError:
                    await abandon(self, state)
                    raise
        state.answerer = answerer
        add_steps(state, made, self.max_seq_len)
        make_readable(state)
        try:
            await self.clean_up(state)
        except BaseException as error:  # foreign code
            note_error(state, calls.contained(error))
        state["is_completed"] = True
        read_error(state)
        note_timing(state)
        return state

    async def _play_recorded(self, state: State, answerer: Answerer) -> State:
        """Run a rollout, and add model calls made by the user's hooks to its trajectory."""
        if not any(map(self._hooks.__getitem__, SPEAKING_HOOKS)):
            return await self.play(state)
        with recorded_calls() as made:
            state = await self.play(state)
        state.answerer = answerer  # a hook may have replaced the state
        add_steps(state, made, self.max_seq_len, is_own=False)
        return state

    async def _run_rollout(self, *args: Any, **kwargs: Any) -> Any:
        row, call = read_host_call("run_rollout", args, kwargs)
        if call.score is None:
            call = replace(call, score=call.is_newer)
        return single_rollout(await run_for_host(self, [row], call), call)

    run_rollout = calls.both(_run_rollout)
    """``run_rollout(input, client, model, gen_sampling_args, gen_sem, score_sem, score=False, max_retries=0)``, and the
    forms of 0.1.8 (the semaphore first) and 0.1.10 (scored; ``sampling_args``, ``max_retries``, ``state_columns``)."""

    async def _run_group(self, *args: Any, **kwargs: Any) -> Group:
        rows, call = read_host_call("run_group", args, kwargs)
        return await run_for_host(self, list(rows), call)

    run_group = calls.both(_run_group)
    """``run_group(group_inputs, client, model, gen_sampling_args, gen_sem, score_sem, score=True, max_retries=0,
    state_columns=None)``: the rollouts of one group, scored together. Failed ones are in its ``failed``."""

    # --- hooks that users write -----------------------------------------------------------------------------------

    def _hook(self, name: str) -> calls.Hook | None:
        """A user's method of this name as a hook; None if it is the library's own or does not exist."""
        return self._hooks[name]

    def _time_limits(self) -> AbstractContextManager[None]:
        """Within the block, this environment's time limits apply to calls of reward functions and hooks."""
        return calls.time_limits(reward_s=self.reward_timeout_s, hook_s=self.hook_timeout_s)

    async def meets_a_stop(
        self,
        state: State,
        messages: Messages | None = None,
        *,
        is_after_answer: bool = False,
        replaced: Collection[str] = (),
    ) -> bool:
        """Whether a stop condition is met. The name of the first one is written into the state.

        Conditions of ``(messages, state)`` get the conversation, once there is one. After a response of the
        environment, the library's conditions on the model's turns are not checked again. Those in
        ``replaced`` are not checked at all.
        """
        for name, is_met, reads, takes_messages in self._hooks.stops:
            if name in replaced:
                continue
            if reads is not None:
                met = not is_after_answer and reads(self, state)
            elif not takes_messages:
                met = as_verdict(await is_met(state), name)
            else:
                shown = self.conversation(state) if messages is None and state.get("trajectory") else messages
                met = bool(shown) and as_verdict(await is_met(shown, state), name)
            if met:
                state["is_completed"] = True
                state["stop_condition"] = state.get("stop_condition") or name
                return True
        return False

    def conversation(self, state: State) -> Messages:
        """All messages so far."""
        steps = state.get("trajectory")
        if not steps:
            prompt: Messages = state["prompt"]
            return prompt
        return concat_messages([steps[-1]["prompt"], steps[-1]["completion"]])

    async def _is_completed(self, *messages_and_state: Any, state: State | None = None, **_: Any) -> bool:
        messages = messages_and_state[0] if len(messages_and_state) + (state is not None) > 1 else None
        state = messages_and_state[-1] if state is None else state
        if not await self.meets_a_stop(state, messages):
            return False
        note_timing(state)
        await self.clean_up(state)
        return True

    is_completed = calls.both(_is_completed)
    """``is_completed(state)`` or ``is_completed(messages, state)``, for an overridden ``rollout`` and for ``super()``:
    once a stop condition is met, it cleans up the rollout."""

    async def clean_up(self, state: State) -> None:
        """Run every clean-up hook once per rollout, even if one of them raises."""
        if state.get("is_cleaned_up"):
            return
        state["is_cleaned_up"] = True
        first_error: Exception | None = None
        for name, hook in self._hooks.marked("cleanup"):
            try:
                await hook(state)
            except BaseException as error:  # foreign code
                first_error = first_error or wrap(calls.contained(error), HookError, f"cleanup {name}")
        if first_error is not None:
            raise first_error

    async def _close(self) -> None:
        """Run the teardown hooks. Called at exit for environments that have hooks and were used."""
        for _, hook in self._hooks.marked("teardown"):
            await hook()

    close = calls.both(_close)

    def tear_down_at_exit(self) -> None:
        """Register the teardown at exit. Called on first use, because constructors have no side effects."""
        if not vars(self).get("_is_armed") and self._hooks.marked("teardown"):
            self._is_armed = True
            atexit.register(_close_if_alive, weakref.ref(self))

    # --- many rollouts --------------------------------------------------------------------------------------------

    def player(self, *, is_scored: bool) -> Player:
        """The object that runs and scores the rollouts of a run in this process."""
        return self

    async def _generate(
        self, inputs: Any = None, client: Any = None, model: Any = None, sampling_args: Any = None, **kwargs: Any
    ) -> Results:
        """Roll out (and score) rows: ``inputs``, or ``n_samples`` of the environment's rows."""
        from verifiers.envs import evaluation

        return await evaluation.generate(self, inputs, client, model, sampling_args, **kwargs)

    generate = calls.both(_generate)
    generate_sync = calls.blocking(generate)
    generate_async = calls.asynchronous(generate)
    a_generate = generate_async

    async def _evaluate(
        self,
        client: Any = None,
        model: Any = None,
        sampling_args: Any = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        **kwargs: Any,
    ) -> Results:
        """Roll out and score the evaluation rows: ``num_examples`` of them, ``rollouts_per_example`` times each."""
        from verifiers.envs import evaluation

        how = {"num_examples": num_examples, "rollouts_per_example": rollouts_per_example, **kwargs}
        return await evaluation.evaluate(self, client, model, sampling_args, **how)

    evaluate = calls.both(_evaluate)
    evaluate_sync = calls.blocking(evaluate)
    evaluate_async = calls.asynchronous(evaluate)

    async def _generate_completion(self, prompt: Any, answer: Any = "", **kwargs: Any) -> tuple[Any, State]:
        """One reply to a prompt: ``completion, state = env.generate_completion(prompt, temperature=0.3)``."""
        pair: tuple[Any, State] = await self._rollout(prompt=prompt, answer=answer, **kwargs)
        return pair

    generate_completion = calls.both(_generate_completion)

    def make_dataset(
        self, results: Results, push_to_hub: bool = False, hub_name: str | None = None, **kwargs: Any
    ) -> Any:
        """Scored rollouts as a Hugging Face ``Dataset``, pushed to the hub if requested."""
        from verifiers.envs.evaluation import make_dataset

        return make_dataset(results, push_to_hub=push_to_hub, hub_name=hub_name, **kwargs)

    # --- copies in other processes --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Hooks are not pickled; they are created again on unpickling."""
        return {key: value for key, value in vars(self).items() if key not in ("_hooks", "_is_armed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hooks = Hooks(self)


def _take(rows: Rows, n: int, seed: int | None) -> Rows:
    rows = rows if seed is None else rows.shuffle(seed)
    return rows if n < 0 else rows[:n]


def _close_if_alive(reference: weakref.ref[Environment]) -> None:
    env = reference()
    if env is not None:
        with calls.time_limits(hook_s=HURRIED_S if hurry.is_set() else AT_EXIT_S, for_all=True):
            env.close()
