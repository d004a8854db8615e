"""A Gymnasium environment as a conversation: observations become text, replies become actions, rewards are summed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.envs.gym_spaces import BadActionError, describe_space, read_action, show
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.messages import text_of
from verifiers.parsers import Parser, XMLParser
from verifiers.rollout import cleanup
from verifiers.rubrics import Rubric
from verifiers.types import Messages, Row, State

EVAL_SEEDS_FROM = 1_000_003


def episode_return(state: State) -> float:
    """The sum of the rewards of an episode."""
    return float(sum(state.get("gym_rewards") or ()))


class GymEnv(MultiTurnEnv):
    """Any Gymnasium environment, by its id or its class; a row is an episode, begun by a seed of its own.

    The model gives its action in ``<action>`` tags, or as its whole reply. A reply that is no action is answered with
    what is wrong about it, and takes one of the ``max_episode_steps`` as well. Where the environment renders text
    (``env_kwargs={"render_mode": "ansi"}``) that is what the model sees, otherwise the observation.

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
        action_names: Sequence[str] | None = None,
        num_train_episodes: int = 1000,
        num_eval_episodes: int = 20,
        max_episode_steps: int = 100,
        seed: int = 0,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        **kwargs: Any,
    ) -> None:
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
        if isinstance(env_cls, str):
            _check_id(env_cls)
        elif not callable(env_cls):
            raise TypeError(f"env_cls is the id of a Gymnasium environment or a class, got {env_cls!r}")
        self.env_cls = env_cls
        self.env_kwargs = dict(env_kwargs or {})
        self.action_parser = action_parser
        self.obs_to_text = obs_to_text
        self.action_names = None if action_names is None else list(action_names)
        self.max_episode_steps = max_episode_steps
        parser = parser or XMLParser(["action"], answer_field="action")
        super().__init__(
            max_turns=-1,  # `max_episode_steps` ends an episode, after the action of its last turn was taken
            dataset=functools.partial(self._make_rows, num_train_episodes, seed),
            eval_dataset=functools.partial(self._make_rows, num_eval_episodes, seed + EVAL_SEEDS_FROM),
            parser=parser,
            rubric=rubric or Rubric([episode_return], parser=parser),
            **kwargs,
        )

    def make_env(self) -> Any:
        """A new environment, as every rollout has one of its own."""
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
                seen, _ = env.reset(seed=seed)
                rows.append({"question": how + self._show(env, seen), "answer": "", "info": {"seed": seed}})
            return rows
        finally:
            env.close()

    def _how_to_act(self, env: Any) -> str:
        if self.action_parser is not None:
            return ""
        actions = describe_space(env.action_space, self.action_names)
        return f"Choose one action a turn, and give it in <action> tags: {actions}.\n\n"

    def _show(self, env: Any, seen: Any) -> str:
        if self.obs_to_text is not None:
            return str(self.obs_to_text(seen))
        return str(env.render()) if getattr(env, "render_mode", None) == "ansi" else show(seen)

    def setup_state(self, state: State) -> None:
        """Begin the episode. What is seen first ends the prompt, even if it was something else when rows were made."""
        env = state["gym_env"] = self.make_env()
        state.update(gym_rewards=[], gym_info={}, invalid_actions=0, is_terminated=False)
        seen, state["gym_info"] = env.reset(seed=(state.get("info") or {}).get("seed"))
        first = self._how_to_act(env) + self._show(env, seen)
        prompt = state["prompt"]
        if isinstance(prompt, str):
            state["prompt"] = prompt.removesuffix(state.get("question", prompt)) + first
        else:
            state["prompt"] = [*prompt[:-1], {**prompt[-1], "content": first}]

    def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        env = state["gym_env"]
        step = state["trajectory"][-1]
        is_last = len(state["trajectory"]) >= self.max_episode_steps
        try:
            action = self._read_action(env, step["completion"])
        except BadActionError as error:
            state["invalid_actions"] += 1
            step["reward"] = 0.0
            return f"{error}", {"completed": is_last}
        seen, reward, terminated, truncated, state["gym_info"] = env.step(action)
        step["reward"] = float(reward)
        state["gym_rewards"].append(step["reward"])
        state["is_terminated"] = bool(terminated)
        return self._show(env, seen), {"completed": bool(terminated or truncated) or is_last}

    def _read_action(self, env: Any, reply: Messages) -> Any:
        text = self.parser.parse_answer(reply)
        if text is None:
            text = reply if isinstance(reply, str) else text_of(reply[-1])
        if self.action_parser is None:
            return read_action(env.action_space, text, self.action_names)
        try:
            action = self.action_parser(text)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadActionError(f"{text.strip()!r:.100} is not an action: {error}") from error
        space = getattr(env, "action_space", None)
        if space is not None and not space.contains(action):
            raise BadActionError(f"{text.strip()!r:.100} is not an action here")
        return action

    @cleanup
    def close_gym(self, state: State) -> None:
        """Close the rollout's environment, however the rollout ended."""
        env = state.pop("gym_env", None)
        if env is not None:
            env.close()

    def own_metrics(self, state: State) -> dict[str, float]:
        own = {
            "episode_steps": float(len(state.get("gym_rewards") or ())),
            "invalid_actions": float(state.get("invalid_actions") or 0),
        }
        return {**super().own_metrics(state), **own}


def _check_id(env_id: str) -> None:
    try:
        import gymnasium
    except ImportError:
        raise ImportError("GymEnv makes environments by id with Gymnasium: pip install 'verifiers[games]'") from None
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise ValueError(f"Gymnasium has no environment {env_id!r}: {error}") from error
