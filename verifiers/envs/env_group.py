"""Several environments as one: the ``task`` of each row names the environment that runs and scores it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from verifiers import calls
from verifiers.envs.calling import Answerer, merge_sampling
from verifiers.envs.environment import Environment
from verifiers.envs.rows import Rows
from verifiers.errors import GraderError
from verifiers.parsers import Parser
from verifiers.rollout import note_error
from verifiers.rubrics import Rubric
from verifiers.rubrics.score import Score
from verifiers.types import Row, SamplingArgs, State


class EnvGroupRubric(Rubric):
    """Scores a rollout with the rubric of its environment, out of a group or a mapping by name."""

    def __init__(self, group: EnvGroup | Mapping[str, Environment]) -> None:
        self.group = group if isinstance(group, EnvGroup) else EnvGroup(list(group.values()), list(group))
        super().__init__(parser=self.group.envs[0].parser)

    @property
    def env_map(self) -> dict[str, Environment]:
        return self.group.env_map

    @property
    def all_reward_names(self) -> list[str]:
        """The names of all rewards, in alphabetical order."""
        return sorted(self._get_reward_func_names())

    @property
    def has_group_rewards(self) -> bool:
        return any(env.has_group_rewards for env in self.group.envs)

    @property
    def is_empty(self) -> bool:
        return all(env.scores_nothing for env in self.group.envs)

    def _get_reward_func_names(self) -> list[str]:
        return list(dict.fromkeys(name for env in self.group.envs for name in env.rubric._get_reward_func_names()))

    def reward_shares(self) -> dict[str, float]:
        return {}  # the weights depend on the environment of the row

    def weights_by_name(self) -> dict[str, Any]:
        return {name: env.rubric.weights_by_name() for name, env in self.env_map.items()}

    async def score_alone(self, state: State) -> Score:
        try:
            with self.group.as_member(state) as env, env._time_limits():
                return await env.score_alone(state)
        except ValueError as error:
            return Score(error=GraderError(str(error)))

    async def score_together(self, states: Sequence[State]) -> list[Score]:
        scores = [Score() for _ in states]
        for env in {id(env): env for env in self.group.envs}.values():  # each once, even if it has two names
            picks = [i for i, state in enumerate(states) if self.group.get_env_for_task(state["task"]) is env]
            if picks and env.has_group_rewards:
                with ExitStack() as stack:
                    stack.enter_context(env._time_limits())
                    for i in picks:
                        stack.enter_context(self.group.as_member(states[i]))
                    await env.add_group_scores([states[i] for i in picks], [scores[i] for i in picks])
        return scores


class EnvGroup(Environment):
    """A group of environments. The ``task`` of each row is the name of its environment.

    Groups may be nested: the names are then joined, ``"games/chess"``. Within its environment, a row has its original
    task.
    """

    def __init__(self, envs: Sequence[Environment], env_names: Sequence[str] | None = None, **kwargs: Any) -> None:
        if not envs:
            raise ValueError("EnvGroup needs at least one environment")
        self.envs = list(envs)
        self.env_names = list(env_names or [f"env_{i}" for i in range(len(self.envs))])
        if len(self.env_names) != len(self.envs):
            raise ValueError(f"{len(self.envs)} environments but {len(self.env_names)} names")
        if len(set(self.env_names)) != len(self.env_names):
            raise ValueError(f"environment names must be unique, got {self.env_names}")
        self.env_map = dict(zip(self.env_names, self.envs, strict=True))
        inner = [
            f"{name}/{task}" for name, env in self.env_map.items() if isinstance(env, EnvGroup) for task in env.env_map
        ]
        if twice := [name for name in self.env_names if name in inner]:
            raise ValueError(f"{twice[0]!r} is also the name of a member of a nested group; choose another name")
        kwargs.setdefault("message_type", self.envs[0].message_type)
        has_train = any(env.dataset is not None for env in self.envs)
        has_eval = any(env.eval_dataset is not None for env in self.envs)
        super().__init__(
            dataset=self._train_rows if has_train else None,
            eval_dataset=self._eval_rows if has_eval else None,
            rubric=EnvGroupRubric(self),
            **kwargs,
        )
        for name, env in self.env_map.items():
            for figure, function in env.aggregates.items():
                self.aggregates[f"{name}/{figure}"] = _of_member(name, function)

    def _train_rows(self) -> list[Row]:
        known = [(name, env, env.dataset) for name, env in self.env_map.items() if env.dataset is not None]
        return [row for name, env, rows in known for row in self._rows_of(name, env, rows)]

    def _eval_rows(self) -> list[Row]:
        return [row for name, env in self.env_map.items() for row in self._rows_of(name, env, env.get_eval_dataset())]

    def _rows_of(self, name: str, env: Environment, rows: Rows) -> Iterator[Row]:
        for row in rows:
            task = f"{name}/{row['task']}" if isinstance(env, EnvGroup) else name
            yield {**_without(row, "example_id"), "task": task, "member_task": row.get("member_task", row["task"])}

    @property
    def parsers(self) -> dict[str | None, Parser]:
        found: dict[str | None, Parser] = {None: self.parser}
        for name, env in self.env_map.items():
            found |= {name if task is None else f"{name}/{task}": one for task, one in env.parsers.items()}
        return found

    def get_env_for_task(self, task: str) -> Environment:
        """The environment of a task."""
        return self._route(task)[0]

    def _route(self, task: str) -> tuple[Environment, str]:
        """The member that a task belongs to, and the rest of the task's name within it."""
        if task in self.env_map:
            return self.env_map[task], ""
        for name, env in self.env_map.items():
            if isinstance(env, EnvGroup) and task.startswith(f"{name}/"):
                return env, task[len(name) + 1 :]
        raise ValueError(f"no environment has the task {task!r}; there are {', '.join(self.env_names)}")

    def _inner_task(self, env: Environment, rest: str, row: Mapping[str, Any]) -> str:
        return rest if isinstance(env, EnvGroup) else row.get("member_task") or env.env_id or "default"

    @contextmanager
    def as_member(self, state: State) -> Iterator[Environment]:
        """Within the block, a state has the task that it has in its environment."""
        task = state["task"]
        env, rest = self._route(task)
        state["task"] = self._inner_task(env, rest, state)
        try:
            yield env
        finally:
            state["task"] = task

    async def run_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        try:
            env, rest = self._route(row["task"])
        except ValueError as error:
            state = self.new_state(row, answerer.given, answerer.model, sampling_args)
            note_error(state, error)
            return state
        inner = {**row, "task": self._inner_task(env, rest, row)}
        with env._time_limits():
            state = await env.run_row(inner, answerer, merge_sampling(env.sampling_args, sampling_args))
        state["task"] = row["task"]
        return state

    def formatted(self, row: Mapping[str, Any]) -> Row:
        env, rest = self._route(row.get("task") or "")
        return {**env.formatted({**row, "task": self._inner_task(env, rest, row)}), "task": row["task"]}

    async def _play_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        return await self.run_row(row, answerer, sampling_args)

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        super().set_max_seq_len(max_seq_len)
        for env in self.envs:
            env.set_max_seq_len(max_seq_len)

    def set_score_rollouts(self, score_rollouts: bool) -> None:
        super().set_score_rollouts(score_rollouts)
        for env in self.envs:
            env.set_score_rollouts(score_rollouts)

    async def _close(self) -> None:
        for env in self.envs:
            await env._close()
        await super()._close()

    close = calls.both(_close)  # type: ignore[arg-type]


def _of_member(name: str, function: Any) -> Any:
    """A member's aggregate metric, over its rows only, with the tasks that they have in that member."""

    def aggregate(rows: Sequence[Mapping[str, Any]]) -> float | None:
        own = [row for row in rows if row["task"] == name or row["task"].startswith(f"{name}/")]
        own = [row if row["task"] == name else {**row, "task": row["task"][len(name) + 1 :]} for row in own]
        return function(own) if own else None

    return aggregate


def _without(row: Row, name: str) -> Row:
    return {key: value for key, value in row.items() if key != name}


def environment_of(env: Environment | None, task: str | None) -> Environment | None:
    """The environment of a task, resolved through nested groups."""
    while isinstance(env, EnvGroup) and task is not None:
        env, task = env._route(task)
    return env
