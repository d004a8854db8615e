"""Finished rollouts → columns, means with intervals, and a report."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from verifiers import stats
from verifiers.errors import describe
from verifiers.messages import as_messages, called_functions, content_text, last_reply
from verifiers.notebooks import figures_html, page_html, samples_html, text_html
from verifiers.stats.aggregates import failure
from verifiers.types import ChatMessage, GenerateMetadata, State, Usage

HTML_SAMPLES = 5  # rollouts shown in a notebook's report
_COLUMNS = {
    "prompt": "prompts",
    "completion": "completions",
    "answer": "answers",
    "state": "states",
    "task": "tasks",
    "info": "infos",
    "example_id": "example_ids",
    "reward": "rewards",
    "stop_condition": "stop_conditions",
    "is_truncated": "is_truncated",
}
_ABSENT = {"answer": str, "info": dict}  # the type of the empty value for a missing field, as on disk
_SINGULAR = {**{plural: singular for singular, plural in _COLUMNS.items()}, "outputs": "state"}  # as from 0.1.10 on
_TAKEN = frozenset((*_COLUMNS, *_SINGULAR, "metrics", "metadata"))


def listed_as(metric: str) -> str:
    """The name under which a metric is listed: one with the name of a column gets parentheses.

    >>> listed_as("exact"), listed_as("reward")
    ('exact', 'reward()')
    """
    return f"{metric}()" if metric in _TAKEN else metric


class Results:
    """The rollouts of one run.

    Columns contain the scored rollouts, aligned with one another. Failed rollouts are in ``results.failed``;
    ``results.rollouts`` has every state in the order of the rows. ``results.mean_reward`` gives every example the same
    weight, however many of its rollouts were scored.

    >>> state = State(input={"prompt": "2+2?", "answer": "4", "example_id": 0}, completion="4", reward=1.0, metrics={})
    >>> prompts, completions, rewards = Results([state])
    >>> rewards
    [1.0]
    """

    def __init__(
        self, rollouts: Sequence[State] = (), metadata: Mapping[str, Any] | None = None, **columns: Any
    ) -> None:
        self.rollouts: list[State] = [*rollouts, *_from_columns(columns)]
        self.metadata: GenerateMetadata = dict(metadata or {})  # type: ignore[assignment]
        self.aggregate_functions: dict[str, Any] = {}
        self.parsers: dict[str | None, Any] = {}  # by task; None: the parser of all other tasks
        self.scored = [state for state in self.rollouts if state.get("error") is None]
        self.failed = [state for state in self.rollouts if state.get("error") is not None]

    # --- acts as a finished coroutine, for scripts of 0.1.x that call ``asyncio.run(env.evaluate(...))`` --------------

    async def _itself(self) -> Results:
        return self

    def __await__(self) -> Generator[Any, Any, Results]:
        return self._itself().__await__()

    def send(self, value: Any) -> Any:
        raise StopIteration(self)

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None: ...

    # --- columns --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[Any]]:
        return iter((self["prompts"], self["completions"], self["rewards"]))

    def __len__(self) -> int:
        return len(self.scored)

    def keys(self) -> list[str]:
        return [*_COLUMNS, "metrics", *self.metric_names, "metadata"]

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self.keys()]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        return name in _COLUMNS or name in _SINGULAR or name in ("metrics", "metadata") or name in self.metric_names

    def __getitem__(self, name: str) -> Any:
        if not isinstance(name, str):
            raise TypeError(f"results are indexed by column name ({', '.join(self.keys())}), not {name!r}")
        if name == "metadata":
            return self.metadata
        if name == "metrics":
            return {metric: self[listed_as(metric)] for metric in self._metrics}
        field = _SINGULAR.get(name, name)
        if field == "state":
            return list(self.scored)
        if field in _ABSENT:
            return [_ABSENT[field]() if (value := state.get(field)) is None else value for state in self.scored]
        if field in _COLUMNS:
            return [state.get(field) for state in self.scored]
        metric = name.removesuffix("()") if name.removesuffix("()") in _TAKEN else name
        column = [state.peek_metric(metric) for state in self.scored]
        if any(value is not None for value in column) or name in self.metric_names:
            return column
        raise KeyError(f"there is no column {name!r}; there are {', '.join(self.keys())}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error)) from None

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics. That of a reward function named ``reward`` is ``reward()``."""
        return [*map(listed_as, self._metrics)]

    @property
    def _metrics(self) -> list[str]:
        names = dict.fromkeys(state.peek_metric_names() for state in self.scored)  # nearly all have the same names
        return list(dict.fromkeys(name for some in names for name in some))

    # --- figures --------------------------------------------------------------------------------------------------

    def interval(self, name: str = "reward", level: float = 0.95) -> stats.Interval:
        """The mean of a column over examples, with its confidence interval.

        If the run had an ``until`` rule, the reward's interval at the same level is the sequential one, which stays
        valid under early stopping.
        """
        found = stats.mean_interval(self[name], self["example_id"], level=level)
        early = self.metadata.get("until")
        if name != "reward" or not early or early["low"] is None or found.mean is None or level != early["level"]:
            return found
        return replace(found, low=min(early["low"], found.mean), high=max(early["high"], found.mean))

    @property
    def mean_with_failures(self) -> tuple[float, float] | None:
        """The lowest and the highest mean reward that are possible if the failed rollouts had been scored."""
        rewards = [None if state.get("error") is not None else state.get("reward") for state in self.rollouts]
        return stats.with_failures(rewards, [state.get("example_id") for state in self.rollouts])

    def by(self, name: str) -> dict[Any, Results]:
        """The rollouts split by a column of their rows: ``results.by("task")``, ``results.by("difficulty")``."""
        parts: dict[Any, list[State]] = {}
        for state in self.rollouts:
            parts.setdefault(state.get(name), []).append(state)
        metadata = {key: about for key, about in self.metadata.items() if key not in ("until", "retried_usage")}
        return {value: Results(states, metadata) for value, states in parts.items()}

    def judged_by(self, env: Any) -> Results:
        """These results with the aggregate metrics of an environment."""
        self.aggregate_functions, self.parsers = dict(getattr(env, "aggregates", {})), env.parsers
        return self

    @cached_property
    def aggregates(self) -> dict[str, stats.Aggregate]:
        """The environment's aggregate metrics (balanced accuracy, its own functions), with bootstrap intervals."""
        return {name: self.aggregate(function) for name, function in self.aggregate_functions.items()}

    def aggregate(self, function: Any, *, level: float = 0.95) -> stats.Aggregate:
        """One figure over all scored rows: a built-in name (``"balanced_accuracy"``) or any function of a list of rows.

        A row has ``example_id``, ``answer``, ``parsed`` (the parsed answer), ``reward``, ``metrics``, ``info``,
        ``task``, ``prompt`` and ``completion``. The bootstrap of the interval resamples whole examples.
        """
        (found,) = stats.as_aggregates([function]).values()
        try:
            rows = [row_of(state, self.parsers) for state in self.scored]
        except BaseException as error:  # foreign code: a parser
            return stats.Aggregate(value=None, error=failure(error), level=level)
        return stats.aggregate(rows, found, level=level)

    @property
    def mean_reward(self) -> float | None:
        return self.interval().mean

    @property
    def usage(self) -> Usage:
        """The tokens of all rollouts, including failed ones and those that were retried, since they all cost money."""
        retried = Usage(**(self.metadata.get("retried_usage") or {}))
        return sum((usage for state in self.rollouts if (usage := state.peek_usage())), retried)

    @property
    def causes(self) -> dict[str, int]:
        """Why rollouts failed, with counts, most frequent first."""
        counts: dict[str, int] = {}
        for state in self.failed:
            cause = (
                f"{type(state['error']).__name__}: {str(state['error']).splitlines()[0] if str(state['error']) else ''}"
            )
            counts[cause] = counts.get(cause, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def errors(self) -> list[dict[str, Any]]:
        """The full record of each failure, with its traceback."""
        return [{"example_id": state.get("example_id"), **describe(state["error"])} for state in self.failed]

    def __str__(self) -> str:
        return report(self)

    def _repr_html_(self) -> str:
        return html_report(self)

    def __repr__(self) -> str:
        return f"Results({len(self.scored)} scored, {len(self.failed)} failed)"


def row_of(state: Mapping[str, Any], parsers: Mapping[str | None, Any]) -> dict[str, Any]:
    """The row that aggregate functions get for a rollout or its record."""
    completion, parser = state.get("completion"), parsers.get(state.get("task"), parsers.get(None))
    keys = ("example_id", "answer", "reward", "info", "task", "prompt")
    parsed = parser.parse_answer(completion) if parser is not None else last_reply(completion)
    return {
        **{key: state.get(key) for key in keys},
        "parsed": parsed,
        "metrics": dict(state.get("metrics") or {}),
        "completion": completion,
    }


def _from_columns(columns: Mapping[str, Any]) -> list[State]:
    """Rollouts from columns by name, as for classic's ``GenerateOutputs(prompt=[…], completion=[…], …)``.

    >>> Results(prompt=["2+2?"], completion=["4"], example_id=[0], reward=[1.0], metrics={"exact": [1.0]})["exact"]
    [1.0]
    """
    lists = {_SINGULAR.get(name, name): values for name, values in columns.items() if name != "metrics"}
    if unknown := lists.keys() - _COLUMNS.keys():
        raise TypeError(f"there is no column {min(unknown)!r}; there are {', '.join(_COLUMNS)}")
    metrics: Mapping[str, Sequence[Any]] = columns.get("metrics") or {}
    rollouts = []
    for i in range(max(map(len, lists.values()), default=0)):
        cells = {name: values[i] for name, values in lists.items()}
        fields = {name: cells.pop(name) for name in State.INPUT_FIELDS if name in cells}
        own_metrics = {name: values[i] for name, values in metrics.items()}
        rollouts.append(State({**cells.pop("state", {}), **cells, "input": fields, "metrics": own_metrics}))
    return rollouts


def counts_and_causes(results: Results) -> list[str]:
    """The numbers of rollouts, examples and failures, and the causes of failure."""
    examples = len({state.get("example_id") for state in results.rollouts})
    rollouts = len(results.rollouts)
    counts = f"{rollouts} rollout{'s' * (rollouts != 1)} of {examples} example{'s' * (examples != 1)}"
    lines = [f"{counts}, {len(results.failed)} failed"]
    if ended := results.metadata.get("ended_early"):
        lines.append(f"ended early: {ended}")
    if cause := results.metadata.get("interrupted"):
        wanted = results.metadata.get("num_examples", 0) * results.metadata.get("rollouts_per_example", 0)
        lines.append(f"not finished: stopped by {cause} after {rollouts:,} of {wanted:,} rollouts")
    return [*lines, *(f"  {count} × {_shortened(cause)}" for cause, count in list(results.causes.items())[:5])]


def _shortened(cause: str, most: int = 240) -> str:
    """A cause, cut after a whole word."""
    return cause if len(cause) <= most else f"{cause[:most].rsplit(' ', 1)[0]} …"


def report(results: Results) -> str:
    """The report of a run: counts, rewards and metrics with intervals, tokens."""
    lines = counts_and_causes(results)
    if results.failed and (ends := results.mean_with_failures) is not None:
        lines.append(f"  had these been scored, the mean reward could be anything from {ends[0]:.3f} to {ends[1]:.3f}")
    if early := results.metadata.get("until"):
        lines.append(early["reason"])
    if results.scored:
        lines += figures(results)
        tasks = {str(task): part for task, part in results.by("task").items()}
        if len(tasks) > 1:
            width = max(map(len, tasks))
            lines += ["by task:", *(f"  {task:<{width}}  {_task_figure(part)}" for task, part in tasks.items())]
    if results.usage.total_tokens:
        lines.append(_tokens(results))
    if path := results.metadata.get("path_to_save"):
        lines.append(f"saved in {path}")
    return "\n".join(lines)


def _tokens(results: Results) -> str:
    usage, retried = results.usage, Usage(**(results.metadata.get("retried_usage") or {}))
    cost = "" if usage.cost_usd is None else f", ${usage.cost_usd:.4f}"
    again = f" ({retried.total_tokens:,} of them in rollouts that failed and were run again)"
    told = f"tokens: {usage.prompt_tokens:,} prompt + {usage.completion_tokens:,} completion{cost}"
    unknown = sum(state.peek_usage() is None for state in results.scored)
    uncounted = f", without {unknown:,} of the rollouts, whose tokens were not reported"
    return told + again * bool(retried.total_tokens) + uncounted * bool(unknown)


def figures(results: Results) -> list[str]:
    """The reward and the metrics with intervals, then counts without; counts that are always 0 share one line."""
    names = results.metric_names
    scores = ["reward", *(name for name in names if not stats.is_count(name))]
    counts = {name: results.interval(name).mean for name in names if stats.is_count(name)}
    seen = {name: mean for name, mean in counts.items() if mean}
    width = max(map(len, (*scores, *seen)))
    lines = [f"{name:<{width}}  {_figure(results, name)}" for name in scores]
    lines += [f"{name:<{width}}  {mean:.3f}" for name, mean in seen.items()]
    if results.aggregates:
        wide = max(map(len, results.aggregates))
        lines += [f"{name:<{max(width, wide)}}  {found}" for name, found in results.aggregates.items()]
    zero = [name for name in counts if name not in seen]
    if zero:
        shown = ", ".join(zero[:2])
        lines.append(f"always 0: {shown}" + (f" and {len(zero) - 2} other counts" if len(zero) > 2 else ""))
    return lines


def html_report(results: Results) -> str:
    """The report as HTML for a notebook: plotted intervals, and the first rollouts to expand."""
    examples = len({state.get("example_id") for state in results.rollouts})
    counts = f"{len(results.rollouts):,} rollouts of {examples:,} examples, {len(results.failed):,} failed"
    notes = [text_html(counts)]
    notes += [text_html(f"{n} × {cause[:200]}", "vf-bad") for cause, n in list(results.causes.items())[:5]]
    early = results.metadata.get("until")
    notes += [
        text_html(str(words)) for words in (results.metadata.get("ended_early"), early and early["reason"]) if words
    ]
    parts = ["".join(notes)]
    if results.scored:
        parts.append(figures_html([_html_row(results, name) for name in ("reward", *results.metric_names)]))
        tasks = results.by("task")
        if len(tasks) > 1:
            parts.append(text_html("by task", "vf-muted"))
            parts.append(figures_html([(str(task), *_html_row(part, "reward")[1:]) for task, part in tasks.items()]))
    path = results.metadata.get("path_to_save")
    parts += [text_html(_tokens(results), "vf-muted")] * bool(results.usage.total_tokens)
    parts += [text_html(f"saved in {path}", "vf-muted")] * bool(path)
    return page_html(*parts, samples_html(_sample(state) for state in results.rollouts[:HTML_SAMPLES]))


def _html_row(results: Results, name: str) -> tuple[str, float | None, float | None, float | None]:
    found = results.interval(name)
    return (name, found.mean, None, None) if stats.is_count(name) else (name, found.mean, found.low, found.high)


def _sample(state: State) -> tuple[str, list[tuple[str, str]]]:
    reward = "failed" if state.get("error") is not None else f"reward {state.get('reward')}"
    asked = as_messages(state.get("prompt") or [])
    said = [*asked, *as_messages(state.get("completion") or [], role="assistant")]
    messages = [(str(one.get("role", "message")), _words(one)) for one in said]
    return f"example {state.get('example_id')}, {reward}", messages


def _words(message: ChatMessage) -> str:
    """A message as text, followed by its tool calls."""
    calls = [f"→ {one.get('name')}({one.get('arguments')})" for one in called_functions(message)]
    return "\n".join(part for part in (content_text(message.get("content")), *calls) if part)


def _task_figure(part: Results) -> str:
    failed = f"  {len(part.failed)} failed" if part.failed else ""
    return f"{len(part.rollouts)} rollouts  reward {_figure(part, 'reward')}{failed}"


def _figure(results: Results, name: str) -> str:
    interval = results.interval(name)
    if interval.mean is None:
        return "none"
    if stats.is_count(name):
        return f"{interval.mean:.3f}"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.3f}  (no interval: {'one example' if interval.clusters < 2 else 'all alike'})"
    return f"{interval.mean:.3f}  [{interval.low:.3f}, {interval.high:.3f}]"
