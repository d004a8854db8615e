"""A game of TextArena as a conversation: the model plays, alone or against others, and the game gives the reward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from verifiers import calls
from verifiers.clients import as_client
from verifiers.clients.protocol import Request
from verifiers.envs.multiturn_env import MultiTurnEnv, turn_limit
from verifiers.envs.states import from_rollout
from verifiers.envs.textarena_game import Game, check_game, make_template
from verifiers.errors import HookError
from verifiers.messages import text_of
from verifiers.parsers import Parser, XMLParser
from verifiers.parsers.parser import identity
from verifiers.rollout import cleanup
from verifiers.rubrics import Rubric
from verifiers.types import ChatMessage, Messages, Row, State

EVAL_SEEDS_FROM = 1_000_003
POLICY = 0


def game_reward(state: State) -> float:
    """The policy's reward in the game; 0 if the game was not over after ``max_moves``."""
    return float(from_rollout(state, "game_reward") or 0.0)


class TextArenaEnv(MultiTurnEnv):
    """Any game of TextArena, by its id. A row is a game with its own seed.

    The model's move is what ``parser`` finds in its reply (in ``<move>`` tags by default), or the whole reply. Games
    for several players need an ``opponent``: a function from messages to a move (sync or async), a client (with
    ``opponent_model``), or ``"self"``, the policy itself. A game ends after ``max_moves`` moves of the policy (default
    100; ``max_turns`` is another name for it).

    >>> env = TextArenaEnv("GuessTheNumber-v0", num_train_examples=2)
    >>> env.dataset[0]["question"].splitlines()[0]
    'You are Player 0. You are playing Guess The Number.'
    """

    def __init__(
        self,
        game: str,
        num_train_examples: int = 1000,
        num_eval_examples: int = 20,
        system_prompt: str | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        feedback_fn: Callable[[str], str] = identity,
        seed: int = 0,
        *,
        num_players: int = 1,
        opponent: Any = None,
        opponent_model: str | None = None,
        game_kwargs: Mapping[str, Any] | None = None,
        max_moves: int | None = None,
        max_turns: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_game(game)
        max_moves = turn_limit(max_moves, max_turns, name="max_moves", default=100)
        if num_players < 1 or max_moves < 1:
            raise ValueError(f"num_players={num_players} and max_moves={max_moves} must be at least 1")
        if (num_players > 1) != (opponent is not None):
            raise ValueError(f"a game for {num_players} takes {'no' if num_players == 1 else 'an'} opponent=")
        self.game = game
        self.game_kwargs = dict(game_kwargs or {})
        self.num_players = num_players
        self.opponent = opponent
        self.opponent_model = opponent_model
        self.feedback_fn = feedback_fn
        self.max_moves = max_moves
        parser = parser or XMLParser(["move"], answer_field="move")
        super().__init__(
            max_turns=-1,  # `max_moves` ends a game instead, after its last move
            dataset=functools.partial(self._make_rows, num_train_examples, seed),
            eval_dataset=functools.partial(self._make_rows, num_eval_examples, seed + EVAL_SEEDS_FROM),
            system_prompt=system_prompt,
            parser=parser,
            rubric=rubric or Rubric([game_reward], parser=parser),
            **kwargs,
        )

    @functools.cached_property
    def _template(self) -> Any:
        return make_template(self.game, self.game_kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_template"}

    def _new_game(self, seed: int | None) -> Game:
        template = self._template
        try:
            return Game(template, self.num_players, seed)
        except Exception as error:  # foreign code
            what = f"TextArena's {self.game!r} cannot be set up for num_players={self.num_players}"
            raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error

    def _make_rows(self, n: int, first_seed: int) -> list[Row]:
        rows = []
        for seed in range(first_seed, first_seed + n):
            game = self._new_game(seed)
            # If another player begins, the first prompt depends on that player's move, so the rollout sets it.
            question = game.news(POLICY) if game.player == POLICY else f"Game {seed}"
            rows.append({"question": question, "answer": game.secret, "info": {"seed": seed}})
        return rows

    async def setup_state(self, state: State) -> None:
        """Set up the game, and let players before the policy make their moves."""
        game = state["ta_game"] = self._new_game((state.get("info") or {}).get("seed"))
        state.update(ta_talks={player: [] for player in range(1, self.num_players)}, game_reward=None)
        await self._let_others_move(game, state)
        first = game.news(POLICY)
        prompt = state["prompt"]
        if isinstance(prompt, str):
            state["prompt"] = prompt.removesuffix(state.get("question", prompt)) + first
        else:
            state["prompt"] = [*prompt[:-1], {**prompt[-1], "content": first}]
        if game.is_over:
            raise HookError(f"{self.game!r} was over before the policy could move: {first}")

    async def _env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Make the move of the last reply, and those of the others, as a hook, because the game's code may block."""
        return await self._foreign("_make_moves")(state)

    env_response = calls.both(_env_response)  # type: ignore[arg-type]

    async def _make_moves(self, state: State) -> tuple[str, dict[str, Any]]:
        game: Game = state["ta_game"]
        reply = state["trajectory"][-1]["completion"]
        move = self.parser.parse_answer(reply)
        game.move(move if move is not None else reply if isinstance(reply, str) else text_of(reply[-1]))
        await self._let_others_move(game, state)
        news = self.feedback_fn(game.news(POLICY))
        is_last = len(state["trajectory"]) >= self.max_moves
        if game.is_over:
            state.update(game_reward=game.reward(POLICY), broke_rules=game.broke_rules(POLICY))
        return news, {"completed": game.is_over or is_last}

    async def _let_others_move(self, game: Game, state: State) -> None:
        while not game.is_over and game.player != POLICY:
            talk: list[ChatMessage] = state["ta_talks"][game.player]
            talk.append({"role": "user", "content": game.news(game.player)})
            move = await self._ask_opponent(talk, state)
            talk.append({"role": "assistant", "content": move})
            game.move(move)

    async def _ask_opponent(self, talk: list[ChatMessage], state: State) -> str:
        if callable(self.opponent):
            return str(await calls.maybe_await(self.opponent, list(talk)))
        is_self = self.opponent == "self"
        rules = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        request = Request(
            model=state["model"] if is_self else self.opponent_model or state["model"],
            prompt=[*rules, *talk],
            sampling=(state["sampling_args"] or {}) if is_self else {},
        )
        reply = await as_client(state["client"] if is_self else self.opponent).complete(request)
        move = self.parser.parse_answer([reply.message])
        return reply.text if move is None else move

    @cleanup
    def leave_game(self, state: State) -> None:
        """Drop the game object from the state."""
        state.pop("ta_game", None)

    def own_metrics(self, state: State) -> dict[str, float]:
        own = {
            "game_over": float(state.get("game_reward") is not None),
            "broke_rules": float(bool(state.get("broke_rules"))),
        }
        return {**super().own_metrics(state), **own}
