"""Scored rollouts become a batch, the columns that ``train_step`` takes; its rewards become a column of advantages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from verifiers.envs.remote.parcels import attached, detached
from verifiers.errors import GraderError
from verifiers.messages import as_messages, content_text
from verifiers.store.plain import plain
from verifiers.trainers.advantages import Advantage, Estimator, Gather, as_ordered, checked, mean_advantage
from verifiers.trainers.distributed.processes import all_gather
from verifiers.types import State


class Reply(str):
    """The completion of a rollout as text; its messages and the state of the rollout are attached.

    >>> reply = Reply("4", messages=[{"role": "assistant", "content": "4"}])
    >>> reply.lower(), len(reply), reply.messages[0]["role"]
    ('4', 1, 'assistant')
    """

    messages: Any
    state: State | None

    def __new__(cls, text: str, *, messages: Any = None, state: State | None = None) -> Reply:
        reply = super().__new__(cls, text)
        reply.messages = text if messages is None else messages
        reply.state = state
        return reply

    @classmethod
    def of(cls, state: State) -> Reply:
        completion = state["completion"]
        return cls(completion_text(completion), messages=completion, state=state)


def completion_text(completion: Any) -> str:
    """The text of the assistant's messages in a completion.

    >>> completion_text([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])
    'a'
    >>> completion_text([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}])
    'a'
    """
    if isinstance(completion, str):
        return completion
    said = [one for one in as_messages(completion) if one.get("role") == "assistant"]
    return "\n".join(content_text(one.get("content")) for one in said)


class Batch(dict[str, list[Any]]):
    """Columns of scored rollouts, all of one length: prompts, completions, rewards, groups, answers, advantages.

    Failed rollouts are in ``failed`` instead. ``cursor`` is the row stream's cursor after the batch's rows were taken.
    ``row_positions`` has the stream positions of each group's rows if groups are not taken in order. ``replaced`` has
    the example and the reward of every scored rollout that dynamic sampling replaced. ``tokens`` is the number of
    tokens sampled for all of these rollouts and for the failed ones.
    """

    def __init__(
        self,
        columns: Mapping[str, list[Any]],
        *,
        failed: Sequence[State] = (),
        cursor: int = 0,
        replaced: Sequence[tuple[Any, float]] = (),
        tokens: int | None = None,
    ) -> None:
        super().__init__(columns)
        self.failed = list(failed)
        self.cursor = cursor
        self.row_positions: dict[int, list[int]] | None = None
        self.refused: list[str] = []  # for each rollout that cannot be trained on: why
        self.replaced = list(replaced)
        self.tokens = sum(map(_tokens_of, [*self.states, *self.failed])) if tokens is None else tokens
        self.seconds: dict[str, float] = {}
        self.reward_weights: dict[str, float] = {}  # of the reward functions, by name, when the batch was scored
        self.ratios: dict[int, list[float]] = {}  # ratios of the trained tokens of some rollouts, by index

    @classmethod
    def of_states(cls, states: Sequence[State], groups: Sequence[int], **kwargs: Any) -> Batch:
        """Scored states as a batch; states with an error become its ``failed`` rollouts."""
        alive = [(state, group) for state, group in zip(states, groups, strict=True) if state.get("error") is None]
        columns: dict[str, list[Any]] = {
            "prompts": [state["prompt"] for state, _ in alive],
            "completions": [Reply.of(state) for state, _ in alive],
            "rewards": [state.get("reward") for state, _ in alive],
            "groups": [group for _, group in alive],
            "answers": [state.get("answer") for state, _ in alive],
        }
        return cls(columns, failed=[state for state in states if state.get("error") is not None], **kwargs)

    @property
    def rows_taken(self) -> list[int]:
        """Stream positions of all rows that were taken for this batch."""
        return [position for positions in (self.row_positions or {}).values() for position in positions]

    @property
    def examples(self) -> list[Any]:
        """The example id of each rollout: groups of the same row share it."""
        ids = (None if state is None else state.get("example_id") for state in self.states)
        return [f"group {group}" if known is None else known for known, group in zip(ids, self["groups"], strict=True)]

    @property
    def sampled(self) -> list[tuple[Any, Any]]:
        """The example and the reward of every scored rollout, those that were replaced last."""
        return self._scored + self.replaced

    @property
    def _scored(self) -> list[tuple[Any, Any]]:
        return list(zip(self.examples, self["rewards"], strict=True))

    def __add__(self, other: Batch) -> Batch:
        columns = {name: self[name] + other[name] for name in self}
        failed, cursor = self.failed + other.failed, max(self.cursor, other.cursor)
        replaced, tokens = self.replaced + other.replaced, self.tokens + other.tokens
        both = Batch(columns, failed=failed, cursor=cursor, replaced=replaced, tokens=tokens)
        if self.row_positions is not None and other.row_positions is not None:
            both.row_positions = {**self.row_positions, **other.row_positions}
        return both

    def keep(self, indices: Sequence[int]) -> Batch:
        """A batch of these rollouts only; its figures still count all sampled and failed ones."""
        columns = {name: [values[i] for i in indices] for name, values in self.items()}
        kept = set(indices)
        replaced = self.replaced + [one for i, one in enumerate(self._scored) if i not in kept]
        return Batch(columns, failed=self.failed, cursor=self.cursor, replaced=replaced, tokens=self.tokens)

    def split(self, n: int, first_cursor: int) -> list[Batch]:
        """``n`` batches of about equally many whole groups, each with its rows and the cursor after them.

        With fewer groups than parts, some parts are empty. Failed rollouts go to the parts that are not: a step with
        failed rollouts only would end the training.
        """
        numbers = list(dict.fromkeys(self["groups"]))
        bounds = [-(-k * len(numbers) // n) for k in range(n + 1)]
        filled = [k for k in range(n) if bounds[k] < bounds[k + 1]] or [0]
        parts = []
        for k in range(n):
            of_part = set(numbers[bounds[k] : bounds[k + 1]])
            part = self.keep([i for i, group in enumerate(self["groups"]) if group in of_part])
            part.failed = self.failed[filled.index(k) :: len(filled)] if k in filled else []
            if self.row_positions is not None:
                empty = self.row_positions.keys() - set(numbers) if k == 0 else set()  # groups that failed entirely
                mine = of_part | empty
                part.row_positions = {group: taken for group, taken in self.row_positions.items() if group in mine}
            part.replaced = self.replaced[k * len(self.replaced) // n : (k + 1) * len(self.replaced) // n]
            part.tokens = self.tokens if k == 0 else 0  # the first part accounts for all of them, as for the seconds
            # Groups are numbered in the order of their rows: this part ends where the next one's first group begins.
            later = next(iter(numbers[bounds[k + 1] :]), self.cursor - first_cursor)
            part.cursor = min(self.cursor, first_cursor + (later if isinstance(later, int) else 0))
            part.seconds = dict(self.seconds) if k == 0 else {}
            part.reward_weights = self.reward_weights
            parts.append(part)
        return parts

    def saved(self) -> dict[str, Any]:
        """Plain data that `of_saved` restores the batch from."""
        columns = {name: values for name, values in self.items() if name != "completions"}
        if None in self.states:  # otherwise the states have the messages
            columns["messages"] = [getattr(reply, "messages", reply) for reply in self["completions"]]
        about = {name: getattr(self, name) for name in ("replaced", "tokens", "cursor", "reward_weights")}
        states, failed = ([one and detached(one)[0] for one in some] for some in (self.states, self.failed))
        # States hold any objects of environments, but this is sent to another process and written as JSON.
        found: dict[str, Any] = plain({"columns": columns, "states": states, "failed": failed, **about})
        return found

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Batch:
        states, failed = ([one and attached(one, None, None) for one in saved[name]] for name in ("states", "failed"))
        for step in (step for state in states if state for step in state.get("trajectory") or ()):
            if tokens := step["tokens"]:  # NaN was saved as null
                known = [math.nan if one is None else one for one in tokens["completion_logprobs"]]
                tokens["completion_logprobs"] = known
        columns = dict(saved["columns"])
        said = columns.pop("messages", None) or [state["completion"] for state in states]
        columns["completions"] = [
            Reply(completion_text(messages), messages=messages, state=state)
            for messages, state in zip(said, states, strict=True)
        ]
        replaced = [(example, reward) for example, reward in saved["replaced"]]
        batch = cls(columns, failed=failed, cursor=saved["cursor"], replaced=replaced, tokens=saved["tokens"])
        batch.reward_weights = saved["reward_weights"]
        return batch

    @property
    def states(self) -> list[State | None]:
        """The state of each rollout; None if only its text is known."""
        return [getattr(reply, "state", None) for reply in self["completions"]]

    def rewarded(self, given: Any) -> Batch:
        """The batch with rewards from an overridden `compute_rewards`; rollouts with None or NaN become ``failed``."""
        states = [reply.state for reply in self["completions"]]
        for state, reward in zip(states, _rewards_of(given, len(states)), strict=True):
            if state.get("error") is not None:
                continue
            if math.isfinite(reward):
                state["reward"] = reward  # so that the rollout is saved with the reward that it is trained on
            else:
                state["error"] = GraderError("compute_rewards returned a reward that is not finite")
        scored = Batch.of_states(states, self["groups"], cursor=self.cursor, tokens=self.tokens)
        scored.failed = self.failed + scored.failed
        return scored


def _tokens_of(state: Mapping[str, Any] | None) -> int:
    turns = () if state is None else state.get("trajectory") or ()
    return sum(len(step["tokens"]["completion_ids"]) for step in turns if step.get("tokens") is not None)


def _rewards_of(given: Any, n: int) -> list[float]:
    """What `compute_rewards` returned, as ``n`` floats; None becomes NaN."""
    try:
        rewards = [math.nan if one is None else float(one) for one in as_ordered(given)]
    except (TypeError, ValueError):
        raise ValueError(
            f"compute_rewards returned {given!r:.80}; it must return a list with a number for each of {n} completions "
            "(None if it could not be scored)"
        ) from None
    if len(rewards) != n:
        raise ValueError(f"compute_rewards returned {len(rewards)} rewards for {n} completions; return one for each")
    return rewards


def as_batch(given: Any) -> Batch:
    """A batch from what ``get_batch`` returned: a batch, a mapping, or (prompts, completions, rewards).

    A prompt may have several completions; those of the first prompt come first, and so on.
    """
    batch = given if isinstance(given, Batch) else _batch_of_columns(given)
    for i, reward in enumerate(batch["rewards"]):
        is_number = type(reward) is float or isinstance(reward, SupportsFloat)  # isinstance of a protocol is slow
        if reward is not None and not (is_number and math.isfinite(reward)):
            raise ValueError(
                f"the reward of rollout {i} of a batch is {reward!r}; it must be a finite number (None if the rollout "
                "could not be scored)"
            )
    return batch


def _batch_of_columns(given: Any) -> Batch:
    if isinstance(given, tuple) and len(given) == 3:
        given = dict(zip(("prompts", "completions", "rewards"), given, strict=True))
    if not isinstance(given, Mapping) or not {"prompts", "completions", "rewards"} <= set(given.keys()):
        raise TypeError("a batch must be a mapping with prompts, completions and rewards, or a tuple of these three")
    columns = {name: list(given[name]) for name in given}
    prompts = [row["prompt"] if isinstance(row, Mapping) and "prompt" in row else row for row in columns["prompts"]]
    n, m = len(columns["completions"]), len(prompts)
    if m == 0 or n % m or len(columns["rewards"]) != n:
        raise ValueError(
            f"{m} prompts, {n} completions and {len(columns['rewards'])} rewards do not match: every prompt needs the "
            "same number of completions, and every completion a reward"
        )
    columns["prompts"] = [prompt for prompt in prompts for _ in range(n // m)]
    if "groups" not in columns:
        columns["groups"] = [i // (n // m) for i in range(n)] if n > m else group_equal(columns["prompts"])
    if len(columns.get("advantages", columns["rewards"])) != n:
        raise ValueError(f"{len(columns['advantages'])} advantages for {n} completions: give one for each")
    return Batch({name: values for name, values in columns.items() if len(values) == n})


def group_equal(prompts: Sequence[Any]) -> list[int]:
    """The group number of each prompt: equal prompts are in the same group.

    >>> group_equal(["a", "b", "a"])
    [0, 1, 0]
    """
    seen: dict[str, int] = {}
    return [seen.setdefault(repr(prompt), len(seen)) for prompt in prompts]


def with_advantages(batch: Batch, estimator: Estimator, *, gather: Gather = list) -> Batch:
    """Add the column of advantages and write them to the states; a batch that already has the column keeps it."""
    rewards = batch["rewards"]
    if "advantages" in batch:
        what = f"{len(rewards)} rollouts"
        batch["advantages"] = checked(batch["advantages"], rewards, whose="advantages of the batch", what=what)
    else:
        weights = batch.reward_weights
        batch["advantages"] = estimator(rewards, batch["groups"], batch.states, weights=weights, gather=gather)
        for state, advantage in zip(batch.states, batch["advantages"], strict=True):
            if state is not None:
                _note_advantage(state, advantage)
    return batch


def _note_advantage(state: State, advantage: Advantage) -> None:
    """Write the advantage of a rollout and of its turns to its state, replacing the one from scoring."""
    steps = state.get("trajectory") or []
    state["advantage"] = mean = mean_advantage(advantage)
    is_per_turn = isinstance(advantage, Sequence) and len(advantage) == len(steps)
    for i, step in enumerate(steps):
        step["advantage"] = advantage[i] if is_per_turn else mean  # type: ignore[index]


def refusals(batch: Batch, trained: Sequence[Any], processes: Any) -> dict[str, Any]:
    """Counts of the rollouts of a step that cannot be trained on; ValueError, in all processes, if none can be."""
    found = all_gather(processes, (list(batch.refused), len(trained)))
    reasons = Counter(reason for refused, _ in found for reason in refused)
    if not reasons:
        return {}
    if not any(count for _, count in found):
        reason, count = reasons.most_common(1)[0]
        raise ValueError(f"none of {reasons.total()} rollouts can be trained on; {count} of them: {reason}")
    told = [f"{count} × {reason}" for reason, count in reasons.most_common()]
    return {"refused": reasons.total(), "refused_reasons": told}
