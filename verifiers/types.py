"""The data types that pass between layers: messages, rows, trajectory steps with tokens, the state of a rollout."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypedDict

from verifiers.errors import Error
from verifiers.message_types import (  # noqa: F401 - environments import them from here
    AssistantMessage,
    ImageUrlContentPart,
    ImageUrlSource,
    InputAudioContentPart,
    InputAudioSource,
    Response,
    ResponseMessage,
    ResponseTokens,
    SystemMessage,
    TextContentPart,
    TextMessage,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)

ChatMessage = dict[str, Any]
ChatMessages = list[ChatMessage]
Message = str | ChatMessage
Messages = str | list[ChatMessage]
MessageType = Literal["chat", "completion"]
ContentPart = dict[str, Any]
MessageContent = str | list[ContentPart]
FinishReason = Literal["stop", "length", "tool_calls"] | None
LARGEST_SCORE = 1e100  # of one function: the sum of squares of larger scores would overflow
LARGEST_REWARD = 1e15  # of a rollout: the sum of a million squares still fits into float32, in which trainers compute
Info = dict[str, Any]
SamplingArgs = dict[str, Any]
Row = dict[str, Any]
DatasetBuilder = Callable[[], Any]
GenerateInputs = dict[str, list[Any]]

IndividualRewardFunc = Callable[..., float | Awaitable[float]]
GroupRewardFunc = Callable[..., list[float] | Awaitable[list[float]]]
RewardFunc = IndividualRewardFunc | GroupRewardFunc
JsonPrimitive = Literal["string", "number", "integer", "boolean", "array", "object"]


class VersionSpan(NamedTuple):
    """The version of the weights that sampled tokens ``start`` to ``end`` of a reply."""

    version: str
    start: int
    end: int

    @property
    def updates(self) -> int | None:
        """The version as a trainer's number of updates; None if it is not a number.

        >>> VersionSpan("12", 0, 5).updates, VersionSpan("default", 0, 5).updates
        (12, None)
        """
        is_count = len(self.version) < 20 and self.version.isascii() and self.version.isdecimal()
        return int(self.version) if is_count else None


class TrajectoryStepTokens(TypedDict):
    """Ids, masks and sampling logprobs of one turn, exactly as the engine produced them."""

    prompt_ids: list[int]
    prompt_mask: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]
    overlong_prompt: bool
    is_truncated: bool
    sampling: NotRequired[dict[str, Any]]  # how the tokens were sampled, if known
    weight_versions: NotRequired[list[VersionSpan]]  # the weights that sampled the tokens, if known


class TrajectoryStep(TypedDict):
    """One model call: its prompt and its completion."""

    prompt: Messages
    completion: Messages
    response: Any
    tokens: TrajectoryStepTokens | None
    reward: float | None
    advantage: float | None
    is_truncated: bool
    trajectory_id: str
    extras: dict[str, Any]


class BaseRolloutInput(TypedDict):
    prompt: Messages
    example_id: int
    task: str


class RolloutInput(BaseRolloutInput, total=False):
    """One formatted row: the input of a rollout."""

    answer: Any
    info: Info


class RolloutOutput(dict[str, Any]):
    """A scored rollout as plain data; `Environment.run_group` returns it to hosts that pass ``state_columns``."""

    example_id: int
    task: str
    prompt: Messages | None
    completion: Messages | None
    reward: float
    timing: RolloutTiming
    is_completed: bool
    is_truncated: bool
    metrics: dict[str, float]


class RolloutTiming(TypedDict, total=False):
    start_time: float
    generation_ms: float
    scoring_ms: float
    total_ms: float


class RolloutScore(TypedDict):
    reward: float
    metrics: dict[str, float]


class RolloutScores(TypedDict):
    reward: list[float]
    metrics: dict[str, list[float]]


class ProcessedOutputs(dict[str, Any]):
    """One batch of training samples as lists of equal length, accessible by key or (for prime-rl) by attribute.

    >>> batch = ProcessedOutputs(rewards=[1.0])
    >>> batch["rewards"] == batch.rewards == [1.0]
    True
    """

    prompt_ids: list[list[int]]
    prompt_mask: list[list[int]]
    completion_ids: list[list[int]]
    completion_mask: list[list[int]]
    completion_logprobs: list[list[float]]
    rewards: list[float]
    is_truncated: list[bool]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a batch has no {name!r}; it has {', '.join(self)}") from None


class GenerateMetadata(TypedDict, total=False):
    """The metadata of a run: enough to repeat it, and its main figures."""

    env_id: str
    env_args: dict[str, Any]
    model: str
    base_url: str
    num_examples: int
    rollouts_per_example: int
    sampling_args: SamplingArgs
    date: str
    time_ms: float
    avg_reward: float | None
    avg_metrics: dict[str, float]
    state_columns: list[str]
    until: dict[str, Any] | None
    retried_usage: dict[str, Any] | None
    path_to_save: Path | None
    ended_early: str
    interrupted: str | None
    aggregates: dict[str, dict[str, Any]]
    finished: bool


class Endpoint(TypedDict):
    key: str
    url: str
    model: str


Endpoints = dict[str, Endpoint]


@dataclass(kw_only=True)
class ClientConfig:
    """How to reach an OpenAI-compatible endpoint."""

    api_key_var: str = "OPENAI_API_KEY"
    api_base_url: str = "https://api.openai.com/v1"
    timeout: float = 3600.0
    max_connections: int = 28000
    max_keepalive_connections: int = 28000
    max_retries: int = 10
    extra_headers: dict[str, str] | None = None


@dataclass(kw_only=True)
class EvalConfig:
    """One evaluation, for `verifiers.utils.eval_utils.run_evaluation`."""

    env_id: str
    model: str
    env_args: dict[str, Any] = field(default_factory=dict)
    env_dir_path: str = "environments"
    client_config: ClientConfig = field(default_factory=ClientConfig)
    sampling_args: SamplingArgs = field(default_factory=dict)
    num_examples: int = -1
    rollouts_per_example: int = 1
    max_concurrent: int = -1
    max_concurrent_generation: int | None = None
    max_concurrent_scoring: int | None = None
    independent_scoring: bool = False
    extra_env_kwargs: dict[str, Any] = field(default_factory=dict)
    print_results: bool = False
    verbose: bool = False
    state_columns: list[str] | None = None
    save_results: bool = False
    save_every: int = -1
    save_to_hf_hub: bool = False
    hf_hub_dataset_name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens used, and their price in dollars if that of all tokens is known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        costs = [used.cost_usd for used in (self, other) if used.cost_usd is not None or used.total_tokens]
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost_usd=sum(cost or 0.0 for cost in costs) if costs and None not in costs else None,
        )


class TurnCount(int):
    """The number of turns of a rollout. Addition returns a TurnCount too, so that an environment can count on it."""

    def __add__(self, more: int) -> TurnCount:
        total = super().__add__(more)
        return total if total is NotImplemented else TurnCount(total)  # a float adds itself


_FORWARDED = frozenset(("prompt", "answer", "task", "info", "example_id"))
_SAME = {"tool_defs": "oai_tools"}  # from 0.1.11 on, the tools have this name
_WRITTEN_ELSEWHERE = _FORWARDED | _SAME.keys()
_COMPUTED = frozenset(("turn", "responses", *_SAME))


class State(dict[str, Any]):
    """The state of one rollout: a dict that forwards its input fields to ``state["input"]``.

    >>> state = State(input={"prompt": "2+2?", "answer": "4", "example_id": 0, "task": "sum"})
    >>> state["answer"], state.get("info")
    ('4', None)
    >>> state["answer"] = "5"; state["input"]["answer"]
    '5'
    """

    INPUT_FIELDS = ["prompt", "answer", "task", "info", "example_id"]

    input: RolloutInput
    client: Any
    model: str
    sampling_args: SamplingArgs | None
    is_completed: bool
    is_truncated: bool
    stop_condition: str | None
    oai_tools: list[dict[str, Any]]
    trajectory: list[TrajectoryStep]
    completion: Messages | None
    reward: float | None
    advantage: float | None
    metrics: dict[str, float] | None
    timing: RolloutTiming | None
    error: Error | None
    # These are attributes, not keys, so that they are never saved.
    answerer: Any  # the client that answers, resolved once from ``client``
    is_adopted: bool  # whether the state belongs to a run
    not_sampled: str  # why the sampled tokens are not known
    began_at: float  # start time by a monotonic clock
    remote_score: Any  # the score from another process
    saved_score: Any  # of a rollout that is scored again: its saved score, before group rewards
    saved_metrics: Any  # the same: its saved metrics
    forgotten_reward: Any  # the same: its previous reward

    def __getitem__(self, key: str) -> Any:
        if key in _FORWARDED and (row := dict.get(self, "input")) is not None and key in row:
            return row[key]
        return dict.__getitem__(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _WRITTEN_ELSEWHERE:
            if key in _SAME:
                key = _SAME[key]
            elif (row := dict.get(self, "input")) is not None and key in row:
                row[key] = value
                return
        dict.__setitem__(self, key, value)

    def get(self, key: str, default: Any = None) -> Any:
        if key in _FORWARDED and (row := dict.get(self, "input")) is not None and key in row:
            return row[key]
        if key in _COMPUTED and not dict.__contains__(self, key):
            try:
                return self.__missing__(key)
            except KeyError:
                return default
        return dict.get(self, key, default)

    def __missing__(self, key: str) -> Any:
        """``responses``: the endpoint's raw replies, and ``turn``: how many turns; an environment may set its own."""
        if key in _SAME:
            return dict.__getitem__(self, _SAME[key])
        if key not in _COMPUTED or (steps := dict.get(self, "trajectory")) is None:
            raise KeyError(key)
        if key == "turn":
            return TurnCount(len(steps))
        return [reply for step in steps if (reply := dict.get(step, "response")) is not None]

    # A state that is still on disk is not loaded for these methods. Their results must not be changed.

    def peek_timing(self) -> Mapping[str, Any]:
        return self.get("timing") or {}

    def peek_usage(self) -> Usage | None:
        """The tokens used; None if an environment stores something else under ``usage``."""
        usage = self.get("usage")
        return usage if isinstance(usage, Usage) else None

    def peek_metric(self, name: str) -> Any:
        return (self.get("metrics") or {}).get(name)

    def peek_metric_names(self) -> tuple[str, ...]:
        return tuple(self.get("metrics") or ())

    def note_advantage(self, advantage: float) -> None:
        """Set the advantage of the rollout, and of each of its turns that has none yet."""
        self["advantage"] = advantage
        for step in self.get("trajectory") or ():
            if step.get("advantage") is None:
                step["advantage"] = advantage

    def __contains__(self, key: object) -> bool:
        if dict.__contains__(self, key):
            return True
        if key in _SAME:
            return dict.__contains__(self, _SAME[str(key)])
        return key in _FORWARDED and key in (dict.get(self, "input") or ())


_OPENAI = {
    "AsyncOpenAI": "openai",
    "ChatCompletion": "openai.types.chat",
    "ChatCompletionMessageParam": "openai.types.chat",
    "ChatCompletionMessageToolCall": "openai.types.chat",
    "ChatCompletionRole": "openai.types.chat",
    "ChatCompletionToolParam": "openai.types.chat",
    "Completion": "openai.types",
    "FunctionDefinition": "openai.types.shared_params",
    "FunctionParameters": "openai.types.shared_params",
}

if TYPE_CHECKING:
    ModelResponse = Any
else:

    def __getattr__(name: str) -> Any:
        if name == "ModelResponse":
            return Any
        import importlib

        if name == "GenerateOutputs":  # classic has this name here
            return importlib.import_module("verifiers.results").Results
        if name not in _OPENAI:
            raise AttributeError(f"module 'verifiers.types' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(_OPENAI[name]), name)
        except ImportError:
            return Any


_draw = random.Random()  # seeded from the system, independent of the user's seed and of the parent process
os.register_at_fork(after_in_child=_draw.seed)


def unique_id() -> str:
    """A random id of 32 hex digits. Called often, so it does not ask the system for each.

    >>> len(unique_id()), unique_id() == unique_id()
    (32, False)
    """
    return f"{_draw.getrandbits(128):032x}"
