"""A Gymnasium environment as a conversation: observations → text, replies → actions, rewards → their sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers import calls
from verifiers.envs.gym_spaces import (
    BadActionError,
    describe_observation,
    describe_space,
    read_action,
    show,
    without_escapes,
)
from verifiers.envs.multiturn_env import MultiTurnEnv, turn_limit
from verifiers.envs.states import from_rollout, not_saved
from verifiers.messages import text_of
from verifiers.parsers import Parser, XMLParser
from verifiers.rollout import cleanup
from verifiers.rubrics import Rubric
from verifiers.types import Messages, Row, State

EVAL_SEEDS_FROM = 1_000_003


def episode_return(state: State) -> float:
    """The sum of the rewards of an episode."""
    return float(sum(from_rollout(state, "gym_rewards")))


class EpisodicSumRubric(Rubric):
    """The sum of the rewards of an episode's steps: 0.1.9's name for the rubric of `GymEnv`."""

    def __init__(self, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(funcs=[sum_step_rewards], weights=[weight], **kwargs)


def sum_step_rewards(state: State) -> float:
    """The sum of the rewards of a rollout's steps."""
    steps = state.get("trajectory") or ()
    if not all("reward" in step for step in steps):
        raise not_saved("trajectory")
    return float(sum(step["reward"] or 0.0 for step in steps))


class GymEnv(MultiTurnEnv):
    """Any Gymnasium environment, by its id or its class. A row is an episode with its own seed.

    The model gives its action in ``<action>`` tags, or as its whole reply. An invalid action is answered with an error
    message and counts as one of the ``max_episode_steps`` too. If the environment renders text
    (``env_kwargs={"render_mode": "ansi"}``), the model sees that, otherwise the observation. The prompt begins with the
    ``description`` (the rules, and the meaning of the numbers) and a description of the action and observation spaces.
    Objects of the older protocol (``step`` returns four values, no spaces, no ``close``) work too.

    >>> env = GymEnv("FrozenLake-v1", {"render_mode": "ansi"}, action_names=["left", "down", "right", "up"])
    >>> print(env.dataset[0]["question"].splitlines()[0])
    Choose one action a turn, and give it in <action> tags: left, down, right, up.
    """

    def __init__(
        self,
        env_cls: str | Callable[..., Any],
        env_kwargs: Mapping[str, Any] | None = None,
        action_parser: Callable[[str], Any] | None = None,
        obs_to_text: Callable[[Any], str] | None = None,
        *,
        description: str | None = None,
        action_names: Sequence[str] | None = None,
        num_train_episodes: int = 1000,
        num_eval_episodes: int = 20,
        max_episode_steps: int | None = None,
        max_turns: int | None = None,
        seed: int = 0,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        **kwargs: Any,
    ) -> None:
        max_episode_steps = turn_limit(max_episode_steps, max_turns, name="max_episode_steps", default=100)
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
        if isinstance(env_cls, str):
            _check_id(env_cls)
        elif not callable(env_cls):
            raise TypeError(f"env_cls must be the id of a Gymnasium environment or a class, got {env_cls!r}")
        self.env_cls = env_cls
        self.env_kwargs = dict(env_kwargs or {})
        self.action_parser = action_parser
        self.description = description
        self.obs_to_text_fn = obs_to_text
        self.action_names = None if action_names is None else list(action_names)
        self.max_episode_steps = max_episode_steps
        parser = parser or XMLParser(["action"], answer_field="action")
        super().__init__(
            max_turns=-1,  # `max_episode_steps` ends an episode instead, after its last action was executed
            dataset=functools.partial(self._make_rows, num_train_episodes, seed),
            eval_dataset=functools.partial(self._make_rows, num_eval_episodes, seed + EVAL_SEEDS_FROM),
            parser=parser,
            rubric=rubric or Rubric([episode_return], parser=parser),
            **kwargs,
        )

    def make_env(self) -> Any:
        """A new environment. Every rollout has its own."""
        if not isinstance(self.env_cls, str):
            return self.env_cls(**self.env_kwargs)
        import gymnasium

        return gymnasium.make(self.env_cls, **self.env_kwargs)

    def _make_rows(self, n: int, first_seed: int) -> list[Row]:
        env = self.make_env()
        try:
            how = self._how_to_act(env)
            rows = []
            for seed in range(first_seed, first_seed + n):
                seen, _ = _reset(env, seed)
                rows.append({"question": how + self._show(env, seen), "answer": "", "info": {"seed": seed}})
            return rows
        finally:
            _close(env)

    def _how_to_act(self, env: Any) -> str:
        parts = [] if self.description is None else [self.description.strip()]
        if self.action_parser is None and (space := getattr(env, "action_space", None)) is not None:
            actions = describe_space(space, self.action_names)
            parts.append(f"Choose one action a turn, and give it in <action> tags: {actions}.")
            seen = describe_observation(getattr(env, "observation_space", None))
            if seen and not self._writes_own_text and not _renders_text(env):
                parts.append(f"What you see each turn is {seen}.")
        return "".join(f"{part}\n\n" for part in parts)

    def _show(self, env: Any, seen: Any) -> str:
        if self._writes_own_text:
            return str(self.obs_to_text(seen))
        return without_escapes(str(env.render())) if _renders_text(env) else show(seen)

    @property
    def _writes_own_text(self) -> bool:
        return self.obs_to_text_fn is not None or type(self).obs_to_text is not GymEnv.obs_to_text

    def obs_to_text(self, seen: Any) -> str:
        """An observation as text: by the ``obs_to_text`` function, or as a subclass overrides this."""
        return show(seen) if self.obs_to_text_fn is None else self.obs_to_text_fn(seen)

    def setup_state(self, state: State) -> None:
        """Start the episode. The prompt ends with its first observation, even if the row has a different one."""
        env = state["gym_env"] = self.make_env()
        state.update(gym_rewards=[], gym_info={}, invalid_actions=0, is_terminated=False, gym_done=False)
        seen, state["gym_info"] = _reset(env, (state.get("info") or {}).get("seed"))
        first = self._how_to_act(env) + self._show(env, seen)
        prompt = state["prompt"]
        if isinstance(prompt, str):
            state["prompt"] = prompt.removesuffix(state.get("question", prompt)) + first
        else:
            state["prompt"] = [*prompt[:-1], {**prompt[-1], "content": first}]

    async def _env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Execute the action of the last reply, as a hook, because the environment's code may block."""
        return await self._foreign("_take_action")(state)

    env_response = calls.both(_env_response)  # type: ignore[arg-type]

    def _take_action(self, state: State) -> Any:
        env = state["gym_env"]
        step = state["trajectory"][-1]
        is_last = len(state["trajectory"]) >= self.max_episode_steps
        try:
            action = self._read_action(env, step["completion"])
        except BadActionError as error:
            state["invalid_actions"] += 1
            step["reward"] = 0.0
            return f"{error}", {"completed": is_last}
        seen, reward, terminated, truncated, state["gym_info"] = _step_result(env.step(action))
        step["reward"] = float(reward)
        step["extras"]["gym_info"] = state["gym_info"]
        state["gym_done"] = bool(terminated or truncated)
        state["gym_rewards"].append(step["reward"])
        state["is_terminated"] = bool(terminated)
        return self._show(env, seen), {"completed": state["gym_done"] or is_last}

    def _read_action(self, env: Any, reply: Messages) -> Any:
        text = self.parser.parse_answer(reply)
        if text is None:
            text = reply if isinstance(reply, str) else text_of(reply[-1])
        space = getattr(env, "action_space", None)
        if self.action_parser is None:
            return text.strip() if space is None else read_action(space, text, self.action_names)
        try:
            action = self.action_parser(text)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadActionError(f"{text.strip()!r:.100} is not an action: {error}") from error
        if space is not None and not space.contains(action):
            raise BadActionError(f"{text.strip()!r:.100} is not an action here")
        return action

    @cleanup
    def close_gym(self, state: State) -> None:
        """Close the rollout's environment."""
        env = state.pop("gym_env", None)
        if env is not None:
            _close(env)

    def own_metrics(self, state: State) -> dict[str, float]:
        own = {
            "episode_steps": float(len(state.get("gym_rewards") or ())),
            "invalid_actions": float(state.get("invalid_actions") or 0),
        }
        return {**super().own_metrics(state), **own}


def _reset(env: Any, seed: int | None) -> tuple[Any, dict[str, Any]]:
    """The first observation and the info. Older environments return only the observation."""
    result = env.reset(seed=seed)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result[0], dict(result[1])
    return result, {}


def _step_result(result: Any) -> tuple[Any, float, bool, bool, Any]:
    """The result of a step in Gymnasium's form. Older environments have no truncation."""
    if isinstance(result, tuple | list) and len(result) == 4:
        seen, reward, done, info = result
        return seen, reward, done, False, info
    if not (isinstance(result, tuple | list) and len(result) == 5):
        raise TypeError(f"step() returned {result!r:.100}; it must return (seen, reward, terminated, truncated, info)")
    seen, reward, terminated, truncated, info = result
    return seen, reward, terminated, truncated, info


def _close(env: Any) -> None:
    close = getattr(env, "close", None)
    if callable(close):
        close()


def _renders_text(env: Any) -> bool:
    return getattr(env, "render_mode", None) == "ansi"


def _check_id(env_id: str) -> None:
    try:
        import gymnasium
    except ImportError:
        raise ImportError("GymEnv needs Gymnasium to create environments: pip install 'verifiers[games]'") from None
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise ValueError(f"Gymnasium has no environment {env_id!r}: {error}") from error
