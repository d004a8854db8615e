"""A completion → a judge model's verdict, as text or as a score from 0 to 1."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any

from verifiers import calls, messages
from verifiers.clients import as_client
from verifiers.clients.protocol import Completion, Request, check_sampling
from verifiers.clients.resolve import OPENAI_URL, server_of
from verifiers.errors import JudgeError, OverlongPromptError
from verifiers.parsers import Parser
from verifiers.rubrics.judge_template import (
    DEFAULT_JUDGE_PROMPT,
    DEFAULT_TEMPLATE,
    Template,
    last_question,
    read_scale,
    read_score,
    shortened,
    transcript,
)
from verifiers.rubrics.rubric import Rubric
from verifiers.types import ChatMessage, Messages, RewardFunc

MAX_SHOWN_CHARS = 400_000
"""The longest text of the policy in a judge's prompt; reduced if the prompt does not fit into the judge's context."""
MIN_SHOWN_CHARS = 1_000
AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "vote": lambda scores: float(2 * sum(score >= 0.5 for score in scores) > len(scores)),
}


class JudgeRubric(Rubric):
    """Reward functions that can call a judge; with ``judge_models`` or a ``template``, the score that judges give.

    >>> from verifiers.clients import FakeClient
    >>> rubric = JudgeRubric(judge_models=["a", "b"], client=FakeClient(["<score>10</score>", "<score>5</score>"]))
    >>> rubric.score_rollout_sync("Why?", "Because.", "", {})
    {'judge_score': 0.75, 'judge_score_a': 1.0, 'judge_score_b': 0.5, 'reward': 0.75}
    """

    def __init__(
        self,
        parser: Parser | None = None,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: Mapping[str, Any] | None = None,
        judge_prompt: str = DEFAULT_JUDGE_PROMPT,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        *,
        judge_models: Sequence[str] | None = None,
        aggregation: str | None = None,
        client: Any = None,
        template: str | None = None,
        scale: tuple[float, float] | None = None,
        max_retries: int = 2,
        parallelize_scoring: bool | None = None,
        class_objects: Mapping[str, Any] | None = None,
    ) -> None:
        if judge_client is not None and client is not None and judge_client is not client:
            raise TypeError("client= and judge_client= are two names for the same argument; pass one")
        given = judge_client if judge_client is not None else client
        self.judge_client = _DefaultClient() if given is None else given
        self.judge_model = judge_model
        self.judge_sampling_args = dict(judge_sampling_args or {})
        check_sampling(self.judge_sampling_args)
        self.judge_prompt = judge_prompt
        self.max_retries = max_retries
        self._asked: dict[tuple[Any, ...], _Ask] = {}
        known = {
            "judge": self.judge,
            "judge_client": self.judge_client,
            "judge_model": judge_model,
            "judge_prompt": judge_prompt,
            "judge_sampling_args": self.judge_sampling_args,
        }
        super().__init__(
            funcs=funcs,
            weights=weights,
            parser=parser,
            class_objects={**known, **(class_objects or {})},
            parallelize_scoring=parallelize_scoring,
        )
        if judge_models is not None or template is not None:
            self._judge_alone(judge_models, aggregation, template, scale)
        elif aggregation is not None or scale is not None:
            raise TypeError("aggregation= and scale= need judge_models= or template=")

    # --- a judge for reward functions -----------------------------------------------------------------------------

    @calls.both
    async def judge(self, prompt: Messages, completion: Messages, answer: Any = "", state: Any = None, **_: Any) -> str:
        """The judge's reply to ``judge_prompt``, requested once per rollout and cached in its state.

        Reward functions may pass on all their arguments (``task``, ``info``, …); those not needed are ignored.
        """
        template = Template(self.judge_prompt)

        def render(most: int) -> str:
            return self._render(template, prompt, completion, answer, most)

        async def ask(asked: str) -> str:
            return await self._ask(self.judge_model, _from_user(asked))

        return await self._once(state, render(MAX_SHOWN_CHARS), self.judge_model, lambda: _ask_fitting(ask, render))

    def _render(self, template: Template, prompt: Any, completion: Any, answer: Any, most: int) -> str:
        """The judge's prompt. Text of the policy that is longer than ``most`` characters is cut in the middle."""
        make: dict[str, Callable[[], Any]] = {
            "question": lambda: last_question(prompt),
            "prompt": lambda: transcript(prompt),
            "completion": lambda: transcript(completion),
            "response": lambda: self.parser.parse_answer(completion),
            "answer": lambda: answer,
        }
        values = {name: make[name]() for name in template.fields}
        texts = {name: "" if value is None else str(value) for name, value in values.items()}
        cut = {name: shortened(text, most) for name, text in texts.items() if name in ("completion", "response")}
        return template.render(texts | cut)

    def _sampling(self) -> dict[str, Any]:
        return {name: value for name, value in self.judge_sampling_args.items() if value is not None}

    async def _ask(self, model: str, conversation: list[ChatMessage]) -> str:
        sampling = self._sampling()
        timeout_s = sampling.pop("timeout", None)
        try:
            request = Request(model=model, prompt=conversation, sampling=sampling, timeout_s=timeout_s)
            completion = await as_client(self.judge_client).complete(request)
        except BaseException as raised:  # a client may be foreign code
            error = calls.contained(raised)
            raise JudgeError(f"judge {model!r} did not reply: {error}") from error
        reply = messages.text_of(completion.message)
        if not reply:
            raise JudgeError(f"judge {model!r} gave an empty reply (finish reason: {completion.finish_reason})")
        return reply

    async def _once(self, state: Any, key: str, model: str, ask: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """The reply cached in the rollout's state, or else a new one; concurrent callers share one request.

        The key is the prompt; if another judge has replied to the same prompt, also the model's name; if that is the
        same too, also the server's address; and if only the sampling arguments differ, also those.
        """
        if state is None:
            return await ask()
        sampling = {name: value for name, value in self._sampling().items() if name != "timeout"}
        judge = model, server_of(self.judge_client), json.dumps(sampling, sort_keys=True, default=repr)
        if state.get("judge_response") and (known := _replies_in(state).find(key, judge)) is not None:
            return known
        loop = asyncio.get_running_loop()
        place = (id(loop), id(state), key, judge)
        asked = self._asked.get(place)
        if asked is None:
            asked = self._asked[place] = _Ask(loop.create_task(ask()))
            asked.task.add_done_callback(lambda _: self._asked.pop(place, None))
        reply = await asked
        _replies_in(state).keep(key, judge, reply)
        return reply

    # --- judges that give scores ----------------------------------------------------------------------------------

    def _judge_alone(
        self,
        judge_models: Sequence[str] | None,
        aggregation: str | None,
        template: str | None,
        scale: tuple[float, float] | None,
    ) -> None:
        given = self.judge_model if judge_models is None else judge_models
        models = [given] if isinstance(given, str) else list(given)
        if aggregation is not None and aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={aggregation!r} must be one of {', '.join(AGGREGATIONS)}")
        self.judge_models = _numbered(models)
        self.aggregation = aggregation or "mean"
        self.template = Template(DEFAULT_TEMPLATE if template is None else template)
        if not self.template.fields & {"completion", "response"}:
            raise ValueError("the judge's template does not contain the reply; add {completion} or {response}")
        self.scale = _checked(scale or read_scale(self.template.text))
        self.add_reward_func(self.judge_score)
        if len(models) > 1:
            for label in self.judge_models:
                self.add_metric(self._score_of(label))

    async def judge_score(self, prompt: Messages, completion: Messages, answer: Any, state: Any) -> float:
        """The aggregate of all judges' scores; fails if one of them gives no score."""
        score_of = [self._score_of(label) for label in self.judge_models]
        asked = (score(prompt=prompt, completion=completion, answer=answer, state=state) for score in score_of)
        scores = await asyncio.gather(*asked, return_exceptions=True)
        for score in scores:
            if isinstance(score, BaseException):
                raise score
        return AGGREGATIONS[self.aggregation]([score for score in scores if not isinstance(score, BaseException)])

    def _score_of(self, label: str) -> Callable[..., Awaitable[float]]:
        async def score(prompt: Messages, completion: Messages, answer: Any, state: Any) -> float:
            def render(most: int) -> str:
                return self._render(self.template, prompt, completion, answer, most) + self._reminder_if_untold()

            async def ask(asked: str) -> str:
                return await self._ask_for_score(self.judge_models[label], asked)

            asked = render(MAX_SHOWN_CHARS)
            key = asked if len(self.judge_models) == 1 else f"[{label}] {asked}"
            reply = await self._once(state, key, self.judge_models[label], lambda: _ask_fitting(ask, render))
            found = read_score(reply, self.scale)
            if found is None:
                raise JudgeError(f"the cached reply of judge {label!r} has no score: {reply!r:.200}")
            return found

        score.__name__ = f"judge_score_{label}"
        return score

    async def _ask_for_score(self, model: str, asked: str) -> str:
        conversation = _from_user(asked)
        for _ in range(self.max_retries + 1):
            reply = await self._ask(model, conversation)
            if read_score(reply, self.scale) is not None:
                return reply
            conversation = [*conversation, {"role": "assistant", "content": reply}, *_from_user(self._reminder())]
        low, high = self.scale
        raise JudgeError(
            f"judge {model!r} gave no score from {low:g} to {high:g} in {self.max_retries + 1} replies; "
            f"the last reply was {reply!r:.200}"
        )

    def _reminder(self) -> str:
        low, high = self.scale
        return f"Give your score as one number from {low:g} to {high:g}, in this form: <score>NUMBER</score>"

    def _reminder_if_untold(self) -> str:
        return "" if "<score>" in self.template.text.lower() else f"\n\n{self._reminder()}"


async def _ask_fitting(ask: Callable[[str], Awaitable[str]], render: Callable[[int], str]) -> str:
    """Ask; if the prompt does not fit into the judge's context, shorten the text of the policy in it.

    Otherwise a policy could avoid its judge by writing too much.
    """
    most, asked = MAX_SHOWN_CHARS, render(MAX_SHOWN_CHARS)
    while True:
        try:
            return await ask(asked)
        except JudgeError as error:
            if not isinstance(error.__cause__, OverlongPromptError):
                raise
            longer = len(asked)
            while len(asked) == longer and most > MIN_SHOWN_CHARS:
                most //= 4
                asked = render(most)
            if len(asked) == longer:  # the rest of the prompt is too long
                raise


class _Ask:
    """One request with several waiters; it is cancelled with the last of them."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task = task
        self.n_waiting = 0

    def __await__(self) -> Generator[Any, Any, str]:
        return self._wait().__await__()

    async def _wait(self) -> str:
        self.n_waiting += 1
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self.n_waiting == 1:
                self.task.cancel()
            raise
        finally:
            self.n_waiting -= 1


_Judge = tuple[str, str | int, str]  # the model, its server (an address, or an id without one), its sampling arguments


class _Replies(dict[str, str]):
    """The judges' replies about a rollout, by prompt. ``judges`` maps the same keys to the judge, if it is known."""

    def __init__(self, saved: Any) -> None:
        super().__init__(saved if isinstance(saved, Mapping) else {})
        self.judges: dict[str, _Judge] = {}

    def find(self, key: str, judge: _Judge) -> str | None:
        """This judge's reply. A saved reply of an unknown judge counts as that of the first judge that looks for it."""
        model, server, _ = judge
        names = [f"[{model}] {key}", key]
        own = self._own(key, judge)
        names = [*reversed(own), *names] if isinstance(server, str) else [*names, *own]
        saved = (name for name in names if name in self and self.judges.setdefault(name, judge) == judge)
        return next((str(self[name]) for name in saved), None)

    def keep(self, key: str, judge: _Judge, reply: str) -> None:
        model, server, _ = self.judges.get(key, judge)  # that of the shortest key
        names = [key, *([] if model == judge[0] else [f"[{judge[0]}] {key}"])]
        own = self._own(key, judge)
        names += own[-1:] if (model, server) == judge[:2] and isinstance(server, str) else own
        name = next(name for name in names if self.judges.setdefault(name, judge) == judge)
        self[name] = reply

    def _own(self, key: str, judge: _Judge) -> list[str]:
        """Keys for judges with the same model name: by the server's address, then by their sampling arguments too; or
        numbered, if the server has no address."""
        model, server, sampling = judge
        if isinstance(server, str):
            return [f"[{model} at {server}] {key}", f"[{model} at {server} with {sampling}] {key}"]
        return [f"[{model} {n}] {key}" for n in range(2, len(self) + 3)]


def _replies_in(state: Any) -> _Replies:
    replies = state.get("judge_response")
    if not isinstance(replies, _Replies):
        replies = state["judge_response"] = _Replies(replies)
    return replies


class _DefaultClient:
    """The default judge client. Rubrics call it like our clients, and reward functions like an ``AsyncOpenAI()``."""

    @property
    def base_url(self) -> str:
        return os.environ.get("OPENAI_BASE_URL") or OPENAI_URL

    async def complete(self, request: Request) -> Completion:
        return await as_client().complete(request)

    @cached_property
    def _openai(self) -> Any:
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise ImportError("there is no judge_client: pass one, or pip install 'verifiers[openai]'") from error
        return AsyncOpenAI()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._openai, name)


def _from_user(text: str) -> list[ChatMessage]:
    return [{"role": "user", "content": text}]


def _numbered(models: Sequence[str]) -> dict[str, str]:
    """The model of each judge by its label. A repeated model gets a number."""
    if not models:
        raise ValueError("judge_models is empty; name at least one model")
    labels: dict[str, str] = {}
    for model in models:
        same = sum(other == model for other in labels.values())
        labels[model if not same else f"{model}_{same + 1}"] = model
    return labels


def _checked(scale: tuple[float, float] | None) -> tuple[float, float]:
    if scale is None:
        raise ValueError(
            "the template does not contain its scale; write <score>[0-10]</score> in it, or pass scale=(0, 10)"
        )
    low, high = (float(bound) for bound in scale)
    if not low < high:
        raise ValueError(f"scale={scale!r} must be (low, high) with low < high")
    return low, high
