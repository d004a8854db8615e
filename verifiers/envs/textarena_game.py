"""One game of TextArena: takes moves, returns new messages for each player, and has its own random state."""

from __future__ import annotations

import contextlib
import copy
import difflib
import random
from collections.abc import Iterator, Mapping
from threading import RLock
from typing import Any

# TextArena's games use the global `random` module. They run one at a time, each with its own random state, so that they
# do not affect each other or other users of the module, and a seed reproduces a game.
_one_at_a_time = RLock()

MANY_WORDS = 1000


class Game:
    """A running game. Player 0 is the policy."""

    def __init__(self, template: Any, num_players: int, seed: int | None) -> None:
        self._dice = random.Random(seed).getstate()
        self.num_players = num_players
        with self._own_dice():
            self._game = copy.deepcopy(template, _word_lists(template))
            self._rules = _innermost(self._game)
            self._rules.reset(num_players=num_players, seed=seed)
        self.is_over = False
        self._last_move: dict[int, str] = {}

    @contextlib.contextmanager
    def _own_dice(self) -> Iterator[None]:
        with _one_at_a_time:
            outside = random.getstate()
            random.setstate(self._dice)
            try:
                yield
            finally:
                self._dice = random.getstate()
                random.setstate(outside)

    @property
    def player(self) -> int:
        """The player whose turn it is."""
        return int(self._rules.state.current_player_id)

    @property
    def secret(self) -> str:
        """The secret word, in games that have one, else ""."""
        position = self._rules.state.game_state
        return str(position.get("secret_word") or "") if isinstance(position, Mapping) else ""

    def move(self, text: str) -> None:
        """Make the current player's move."""
        self._last_move[self.player] = text
        with self._own_dice():
            is_over, _ = self._game.step(action=text)
        self.is_over = bool(is_over)

    def news(self, player: int) -> str:
        """The messages that a player has not seen yet, without its own move."""
        with self._own_dice():
            if player == self.player and not self.is_over:
                _, pending = self._rules.get_observation()
            else:
                pending = self._rules.state.observations.get(player, [])
                self._rules.state.observations[player] = []
        messages = [_in_order(*message) for message in pending]
        lines = [self._told(sender, text) for sender, text, kind in messages if not self._is_own(player, text, kind)]
        if self.is_over:
            lines.append(str(self._result()[1].get(player, {}).get("reason") or "The game is over."))
        return "\n".join(lines)

    def _is_own(self, player: int, text: str, kind: Any) -> bool:
        is_move = getattr(kind, "name", "") == "PLAYER_ACTION"
        return is_move and text.strip("[]") == self._last_move.get(player, "").strip("[]")

    def _told(self, sender: int, text: str) -> str:
        names = self._rules.state.role_mapping or {}
        return str(text) if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}"

    def _result(self) -> tuple[Mapping[int, float], Mapping[int, Mapping[str, Any]]]:
        rewards, facts = self._rules.state.close()
        return rewards or {}, facts or {}

    def reward(self, player: int) -> float | None:
        """A player's reward; None if the game is not over."""
        reward: Any = self._result()[0].get(player, 0.0)
        # After a bad move, some games give the reason in place of the reward: there is none.
        return (float(reward) if isinstance(reward, int | float) else 0.0) if self.is_over else None

    def broke_rules(self, player: int) -> bool:
        """Whether the game ended by an invalid move of this player."""
        return bool(self._result()[1].get(player, {}).get("invalid_move"))


def _in_order(sender: Any, text: Any, kind: Any) -> tuple[int, str, Any]:
    """A message's sender, text and kind. Some games report a move with these in another order."""
    return (sender, text, kind) if isinstance(sender, int) else (text, kind, sender)


def _innermost(game: Any) -> Any:
    while "env" in vars(game):
        game = game.env
    return game


def _word_lists(template: Any) -> dict[int, Any]:
    """Large word lists, which all copies of a game share (for `copy.deepcopy`), because copying one takes a second."""
    return {
        id(value): value
        for value in vars(_innermost(template)).values()
        if type(value).__name__ == "EnglishDictionary" or (isinstance(value, list | set) and len(value) > MANY_WORDS)
    }


def check_game(name: str) -> None:
    """Raise if TextArena is not installed or has no such game."""
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError:
        raise ImportError("TextArenaEnv needs TextArena: pip install 'verifiers[games]'") from None
    if name not in ENV_REGISTRY:
        close = difflib.get_close_matches(name, ENV_REGISTRY, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise ValueError(f"TextArena has no game {name!r}{hint}")


def make_template(name: str, game_kwargs: Mapping[str, Any]) -> Any:
    """The game before its first reset, of which each rollout plays a copy. Raises if something is missing."""
    import textarena

    try:
        with _one_at_a_time, _downloads_only_what_is_missing():
            return textarena.make(name, **game_kwargs)
    except LookupError as error:
        raise RuntimeError(
            f"TextArena's {name!r} needs word lists of NLTK, which are not on this machine and cannot be downloaded: "
            "python -m nltk.downloader words averaged_perceptron_tagger_eng"
        ) from error
    except Exception as error:  # foreign code: missing files, unset keys, syntax of a later Python
        raise RuntimeError(f"TextArena's {name!r} cannot be set up: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _downloads_only_what_is_missing() -> Iterator[None]:
    """Make NLTK download only missing word lists; some games request them on every import."""
    import nltk

    fetch = nltk.download

    def fetch_if_missing(names: Any = None, *args: Any, **kwargs: Any) -> Any:
        wanted = [names] if isinstance(names, str) else list(names or [])
        if wanted and all(_has_nltk(name) for name in wanted):
            return True
        return fetch(names, *args, **{**kwargs, "quiet": True})

    nltk.download = fetch_if_missing
    try:
        yield
    finally:
        nltk.download = fetch


def _has_nltk(name: str) -> bool:
    import nltk

    for folder in ("corpora", "taggers", "tokenizers"):
        with contextlib.suppress(LookupError):
            nltk.data.find(f"{folder}/{name}")
            return True
    return False
