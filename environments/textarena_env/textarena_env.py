"""Games of TextArena, for a single player or against opponents of your choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import verifiers as vf

MOVE_PROMPT = "You play a game. Give your move, in the form the game asks for, in <move> tags."
THINK_PROMPT = (
    "You play a game. Think inside <think>...</think>, then give your move, in the form the game asks for, "
    "in <move> tags."
)


def read_move(text: str) -> str:
    """The move in tags; without tags an empty text, which is not a move in any game.

    >>> read_move("So <move>[up]</move>"), read_move("[up]")
    ('[up]', '')
    """
    return vf.XMLParser(["move"], answer_field="move").parse_answer(text) or ""


def solve(messages: vf.Messages, row: vf.Row) -> str:
    """The next reply of a perfect player of Frozen Lake: the first step of the shortest path on the last board."""
    _, _, board = messages[-1]["content"].rpartition("Current Board:")
    lines = [line.strip("|").split("|") for line in board.splitlines() if line.startswith("|")]
    cells = {(r, c): cell.strip() for r, line in enumerate(lines) for c, cell in enumerate(line)}
    start = next((place for place, cell in cells.items() if cell == "P"), None)
    ways = deque([] if start is None else [(start, "")])
    seen = {start}
    while ways:
        (r, c), first = ways.popleft()
        if cells[r, c] == "G":
            return f"<move>[{first}]</move>"
        for name, place in {"down": (r + 1, c), "right": (r, c + 1), "up": (r - 1, c), "left": (r, c - 1)}.items():
            if cells.get(place, "H") != "H" and place not in seen:
                seen.add(place)
                ways.append((place, first or name))
    return ""


def load_environment(
    game: str = "FrozenLake-v0-hardcore",
    game_kwargs: Mapping[str, Any] | None = None,
    num_players: int = 1,
    opponent: str = "self",
    opponent_base_url: str | None = None,
    opponent_api_key_var: str = "OPENAI_API_KEY",
    use_think: bool = False,
    max_moves: int = 100,
    num_train_examples: int = 1000,
    num_eval_examples: int = 20,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.TextArenaEnv:
    """``game`` of TextArena. Other players are the model itself, or the model ``opponent`` at ``opponent_base_url``."""
    if (opponent_base_url is not None) != (opponent != "self"):
        raise ValueError(
            f"another opponent needs both a model and a URL: got opponent={opponent!r}, "
            f"opponent_base_url={opponent_base_url!r}"
        )
    others: dict[str, Any] = {}
    if num_players > 1 and opponent == "self":
        others = {"opponent": "self"}
    elif num_players > 1:
        config = vf.ClientConfig(api_base_url=str(opponent_base_url), api_key_var=opponent_api_key_var)
        others = {"opponent": config, "opponent_model": opponent}
    parser = vf.ThinkParser(extract_fn=read_move) if use_think else vf.MaybeThinkParser(extract_fn=read_move)
    return vf.TextArenaEnv(
        game,
        num_train_examples=num_train_examples,
        num_eval_examples=num_eval_examples,
        system_prompt=system_prompt or (THINK_PROMPT if use_think else MOVE_PROMPT),
        parser=parser,
        seed=seed,
        num_players=num_players,
        game_kwargs=game_kwargs,
        max_moves=max_moves,
        **others,
    )
