"""What an environment is: rows, a way to play them, a way to score them, and the calls that run it."""

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
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.reading import read_response
from verifiers.clients.recording import recorded_calls
from verifiers.envs.arguments import check_scorers, slips
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
from verifiers.envs.hooks import ClassicHooks, Hooks
from verifiers.envs.host_calls import Group, get_results_path, read_host_call, run_for_host, the_one
from verifiers.envs.own_rollouts import SPEAKING_HOOKS, add_steps
from verifiers.envs.rows import RowFormat, Rows, as_rows, few_shot_messages
from verifiers.envs.states import fresh_state
from verifiers.envs.trainer_calls import TrainerCalls
from verifiers.errors import HookError, RequestRefusedError, wrap
from verifiers.escapes import hurry
from verifiers.messages import concat_messages, strip_nones_from_content
from verifiers.parsers import Parser
from verifiers.rollout import abandon, note_error, note_timing, read_error
from verifiers.rubrics import Rubric
from verifiers.stats import as_aggregates
from verifiers.types import Messages, MessageType, Row, SamplingArgs, State, Usage

if TYPE_CHECKING:
    from verifiers.envs.run_steps import Player
    from verifiers.results import Results


__all__ = ["Environment", "get_results_path"]

AT_EXIT_S = 60.0  # for each teardown hook when Python ends: one that hangs must not keep it from ending
HURRIED_S = 3.0  # the same, after a second Ctrl-C


class Environment(ClassicHooks, EnvScoring, TrainerCalls):
    """A task: a data set, how a rollout goes, and a rubric. Any further keyword becomes an attribute."""

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
            raise ValueError(f"message_type is 'chat' or 'completion', got {message_type!r}")
        if few_shot is not None and few_shot_examples is not None:
            raise TypeError("few_shot and few_shot_examples are the same thing; pass one of them")
        check_scorers(parser, rubric)
        self.logger = logging.getLogger(f"verifiers.envs.{type(self).__name__}")
        self.message_type: MessageType = message_type
        self.system_prompt = system_prompt
        self.few_shot = few_shot if few_shot is not None else few_shot_examples
        self.parser = parser or (rubric.parser if rubric is not None else Parser())
        self.rubric = rubric if rubric is not None else Rubric(parser=self.parser)
        self.sampling_args = merge_sampling(sampling_args)
        self.oai_tools = oai_tools
        self.max_workers = max_workers
        self.env_id = env_id or ""
        self.env_args = env_args or {}
        self.max_seq_len = max_seq_len
        self.score_rollouts = score_rollouts
        self.client, self.model = client, model
        self.max_retries = max_retries
        self.timeout, self.reward_timeout_s, self.hook_timeout_s = timeout, reward_timeout_s, hook_timeout_s
        self.aggregates = as_aggregates(aggregates)  # functions of all rows of a run, by name
        with self._time_limits():  # refused now, if they are no limits
            pass
        self.set_interleaved_rollouts(interleaved_rollouts)
        if map_kwargs:
            warnings.warn("map_kwargs has no effect: rows are formatted as they are read", stacklevel=2)
        self._set_attributes(kwargs)
        self._set_rows(dataset, eval_dataset)
        self._hooks = Hooks(self)

    def _set_attributes(self, kwargs: Mapping[str, Any]) -> None:
        for name, meant in slips(type(self), kwargs).items():
            self.logger.warning("the keyword %r is kept as an attribute; did you mean %r?", name, meant)
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
        """The rows to train on, shuffled by a seed if one is given (a new object: nothing is shuffled in place)."""
        if self.dataset is None:
            raise ValueError("this environment has no dataset, only an eval_dataset")
        return _take(self.dataset, n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """The rows to evaluate on; the training rows where there are none."""
        if self.eval_dataset is None:
            return self.get_dataset(n, seed)
        return _take(self.eval_dataset, n, seed)

    def sample_prompts(self, n: int, seed: int | None = None) -> list[Row]:
        """``n`` random rows; a row comes twice only when there are fewer rows than that."""
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
        """The state a rollout of this row starts from; the row itself stays as it is."""
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
        """Ask the model once; the reply counts towards the state's token usage."""
        given = client if client is not None else state["client"]
        known: Answerer | None = getattr(state, "answerer", None)
        answering = known.client if known is not None and known.given is given else as_client(given)
        tools = oai_tools if oai_tools is not None else state["oai_tools"]
        kind = message_type or self.message_type
        if tools and kind == "completion":
            raise RequestRefusedError("tools need message_type='chat'; a completions endpoint takes none")
        request = Request(
            model=model or state["model"],
            prompt=prompt if isinstance(prompt, str) else strip_nones_from_content(prompt),
            tools=tools or None,
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
        return await self._get_model_response(*args, **kwargs)

    get_model_response = calls.both(_get_model_response_by)
    """``get_model_response(state, prompt, client=, model=, oai_tools=, sampling_args=, message_type=)`` asks the model
    once; so does the form of 0.1.8, ``(client, model, prompt, oai_tools, sampling_args, message_type)``."""

    def read_reply(self, response: Any) -> Completion:
        """What ``get_model_response`` gave (an override may give any OpenAI-shaped object) as a completion."""
        return response if isinstance(response, Completion) else read_response(response, self.message_type)

    async def play(self, state: State) -> State:
        """Play one rollout from its first state to its end. `MultiTurnEnv` plays turns."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout(input, client, model, sampling_args)")

    async def _rollout(self, *args: Any, **kwargs: Any) -> Any:
        call = read_call(args, kwargs)
        state = await self._play_call(call)
        return (state["completion"], state) if call.gives_pair else state

    rollout = calls.both(_rollout)
    """``rollout(input=row, client=, model=)`` gives the state; ``rollout(client, model, prompt, answer)`` gives
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
        """A row from outside as this environment plays it; one that is formatted already stays the same."""
        return self._format.apply(row, 0, keep_ids="example_id" in row)

    def failed_state(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs, error: Exception) -> State:
        """The state of a rollout whose row cannot be read."""
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
        """One rollout of a row, by a subclass's own ``rollout`` if it has one. Raises nothing but cancellation."""
        try:
            state = await self._begin(row, answerer, sampling_args)
        except BaseException as error:  # one poison row never ends the run
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
        try:
            await self.clean_up(state)
        except BaseException as error:  # foreign code
            note_error(state, calls.contained(error))
        state["is_completed"] = True
        read_error(state)
        note_timing(state)
        return state

    async def _play_recorded(self, state: State, answerer: Answerer) -> State:
        """Play a rollout; what hooks of the user's own let the model say in between belongs to its trajectory too."""
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
        return the_one(await run_for_host(self, [row], call), call)

    run_rollout = calls.both(_run_rollout)
    """``run_rollout(input, client, model, gen_sampling_args, gen_sem, score_sem, score=False, max_retries=0)``, and the
    shapes of 0.1.8 (the semaphore first) and 0.1.10 (scored; ``sampling_args``, ``max_retries``, ``state_columns``)."""

    async def _run_group(self, *args: Any, **kwargs: Any) -> Group:
        rows, call = read_host_call("run_group", args, kwargs)
        return await run_for_host(self, list(rows), call)

    run_group = calls.both(_run_group)
    """``run_group(group_inputs, client, model, gen_sampling_args, gen_sem, score_sem, score=True, max_retries=0,
    state_columns=None)``: the rollouts of one group, scored together; those that failed are in its ``failed``."""

    # --- hooks that users write -----------------------------------------------------------------------------------

    def _hook(self, name: str) -> calls.Hook | None:
        """A user's method by this name, ready to be called; None where the library's own (or none) is in force."""
        return self._hooks[name]

    def _time_limits(self) -> AbstractContextManager[None]:
        """While this lasts, one call of a reward function or hook may take as long as this environment says."""
        return calls.time_limits(reward_s=self.reward_timeout_s, hook_s=self.hook_timeout_s)

    async def meets_a_stop(
        self,
        state: State,
        messages: Messages | None = None,
        *,
        is_after_answer: bool = False,
        replaced: Collection[str] = (),
    ) -> bool:
        """Has a stop condition been met? The first that has is written into the state.

        Conditions of ``(messages, state)`` are shown the conversation, once there is one. After an answer of the
        environment, conditions that only read what the model did are not asked again. Those ``replaced`` are not asked.
        """
        for name, is_met, reads, takes_messages in self._hooks.stops:
            if name in replaced:
                continue
            if reads is not None:
                met = not is_after_answer and reads(self, state)
            elif not takes_messages:
                met = await is_met(state)
            else:
                shown = self.conversation(state) if messages is None and state.get("trajectory") else messages
                met = bool(shown) and await is_met(shown, state)
            if met:
                state["is_completed"] = True
                state["stop_condition"] = state.get("stop_condition") or name
                return True
        return False

    def conversation(self, state: State) -> Messages:
        """All that was said so far."""
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
    """``is_completed(state)`` or ``is_completed(messages, state)``, for a ``rollout`` of one's own and for ``super()``:
    once a stop condition has been met, the rollout is cleaned up."""

    async def clean_up(self, state: State) -> None:
        """Run every clean-up hook, once for a rollout, even when one of them raises."""
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
        """Run the teardown hooks; called at exit for environments that have any and were used."""
        for _, hook in self._hooks.marked("teardown"):
            await hook()

    close = calls.both(_close)

    def tear_down_at_exit(self) -> None:
        """Called when the environment is first used: constructors have no side effects."""
        if not vars(self).get("_is_armed") and self._hooks.marked("teardown"):
            self._is_armed = True
            atexit.register(_close_if_alive, weakref.ref(self))

    # --- many rollouts --------------------------------------------------------------------------------------------

    def player(self, *, is_scored: bool) -> Player:
        """Who plays and scores the rollouts of a run in this process."""
        return self

    async def _generate(
        self, inputs: Any = None, client: Any = None, model: Any = None, sampling_args: Any = None, **kwargs: Any
    ) -> Results:
        """Roll out (and score) rows: ``inputs``, or ``n_samples`` of the environment's own."""
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
        """Scored rollouts as a Hugging Face ``Dataset``, pushed to the hub if asked for."""
        from verifiers.envs.evaluation import make_dataset

        return make_dataset(results, push_to_hub=push_to_hub, hub_name=hub_name, **kwargs)

    # --- copies in other processes --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Hooks are made anew where the environment is unpickled."""
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
