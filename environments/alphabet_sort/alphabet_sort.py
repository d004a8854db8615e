"""Sort names alphabetically while each turn adds new ones; three levels of difficulty."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import verifiers as vf

FIRST_NAMES = """
Ada Anna Ben Bruno Celia Clara Dario David Elena Emil Felix Flora Gina Greta Hannah Hugo Ida Ivan Jonas Julia Kai Karin
Lena Leo Mara Milo Nils Nora Olga Oscar Paul Petra Quentin Rosa Ruben Sara Simon Tara Theo Ulrich Uma Vera Victor Walter
Wanda Xenia Yara Yusuf Zeno Zoe
"""
LAST_NAMES = """
Abbot Adler Baker Becker Berg Carter Castle Dahl Dorn Eaton Ebert Falk Fisher Garner Glover Haas Hale Ingram Irwin
Jansen Jordan Keller Kemp Lang Lowe Marsh Moser Nash Norton Oakes Olsen Parker Pohl Quinn Ramsey Reed Sander Stone
Tanner Thorn Ulmer Unger Vance Vogel Walsh Weber York Young Zander Ziegler
"""
FIRST, LAST = FIRST_NAMES.split(), LAST_NAMES.split()

SYSTEM_PROMPT = "Answer every message with the whole sorted list, one name a line, between <sorted> and </sorted>."
SIMILARITY_POWER = 4
"""Makes a nearly sorted list worth little: with half of the names in place, 1/16."""


@dataclass(frozen=True, slots=True)
class Level:
    """The number of names in the first turn and in each later turn, and whether they are sorted by last name."""

    first: tuple[int, int]
    more: tuple[int, int]
    by_last: bool


LEVELS = {
    "easy": Level((3, 4), (1, 2), by_last=False),
    "medium": Level((5, 7), (2, 3), by_last=False),
    "hard": Level((8, 10), (3, 5), by_last=True),
}


def sort_key(name: str, by_last: bool) -> tuple[str, str]:
    first, last = name.split(" ")
    return (last, first) if by_last else (first, last)


def make_row(draw: random.Random, difficulty: str, min_turns: int, max_turns: int) -> vf.Row:
    """One game: the names of each turn in ``info``, the final sorted list in ``answer``."""
    level = LEVELS[difficulty]
    sizes = [draw.randint(*(level.more if i else level.first)) for i in range(draw.randint(min_turns, max_turns))]
    # No first name and no last name occurs twice in a game, so there are no ties and only one right order.
    firsts, lasts = draw.sample(FIRST, sum(sizes)), draw.sample(LAST, sum(sizes))
    names = [f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)]
    lists = [names[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    part = "last" if level.by_last else "first"
    return {
        "question": f"Sort these names in alphabetical order by {part} name:\n" + "\n".join(lists[0]),
        "answer": "\n".join(sorted(names, key=lambda name: sort_key(name, level.by_last))),
        "difficulty": difficulty,
        "info": {"lists": lists, "by_last": level.by_last},
    }


def make_rows(n: int, difficulty: str, min_turns: int, max_turns: int, seed: int) -> list[vf.Row]:
    draw = random.Random(seed)
    levels = list(LEVELS) if difficulty == "mixed" else [difficulty]
    return [make_row(draw, levels[i % len(levels)], min_turns, max_turns) for i in range(n)]


def common_length(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence; the items of ``a`` must be distinct.

    >>> common_length(["Ada", "Ben", "Ida"], ["Ben", "Ada", "Ida"])
    2
    """
    places = {item: 1 << i for i, item in enumerate(a)}
    everywhere = (1 << len(a)) - 1
    unmatched = everywhere
    for item in b:
        hits = unmatched & places.get(item, 0)
        unmatched = ((unmatched + hits) | (unmatched - hits)) & everywhere
    return len(a) - unmatched.bit_count()


def score_turn(said: str | None, right: Sequence[str]) -> float:
    """1 for the right list, else the share that is in order, to the fourth power."""
    lines = [line.strip() for line in (said or "").splitlines() if line.strip()]
    if not lines:
        return 0.0
    return (2 * common_length(right, lines) / (len(right) + len(lines))) ** SIMILARITY_POWER


def right_lists(info: vf.Info) -> list[list[str]]:
    """The right sorted list of each turn."""
    lists, by_last = info["lists"], info["by_last"]
    names_so_far = [[name for names in lists[: i + 1] for name in names] for i in range(len(lists))]
    return [sorted(names, key=lambda name: sort_key(name, by_last)) for names in names_so_far]


def turn_scores(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> list[float]:
    """A score for each turn of the game; 0 for turns that were not played."""
    replies = parser.get_assistant_messages(completion)
    right = right_lists(info)
    scores = [score_turn(parser.parse_answer([reply]), gold) for reply, gold in zip(replies, right, strict=False)]
    return scores + [0.0] * (len(right) - len(scores))


def in_order(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> float:
    """The mean score over all turns."""
    scores = turn_scores(parser, completion, info)
    return sum(scores) / len(scores)


def all_right(parser: vf.Parser, completion: vf.Messages, info: vf.Info) -> bool:
    """Is the list of every turn right?"""
    return min(turn_scores(parser, completion, info)) == 1.0


def solve(messages: vf.Messages, row: vf.Row) -> str:
    """The next reply of a perfect model."""
    turn = sum(message["role"] == "assistant" for message in messages)
    return "<sorted>\n" + "\n".join(right_lists(row["info"])[turn]) + "\n</sorted>"


class AlphabetSortEnv(vf.MultiTurnEnv):
    """Gives the next names after each reply, until the row has no more."""

    def env_response(self, messages: vf.Messages, state: vf.State) -> str:
        more = state["info"]["lists"][len(state["trajectory"])]
        return "More names. Put them in as well, and give the whole list, old and new:\n" + "\n".join(more)

    @vf.stop
    def all_names_given(self, state: vf.State) -> bool:
        return len(state["trajectory"]) >= len(state["info"]["lists"])


def load_environment(
    difficulty: str = "mixed",
    max_turns: int = 3,
    min_turns: int = 1,
    num_train_examples: int = 1000,
    num_eval_examples: int = 200,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.MultiTurnEnv:
    """Sorting over ``min_turns`` to ``max_turns`` turns at ``difficulty`` easy, medium, hard or mixed."""
    if difficulty not in (*LEVELS, "mixed"):
        raise ValueError(f"difficulty must be one of {', '.join(LEVELS)} or mixed, got {difficulty!r}")
    if not 1 <= min_turns <= max_turns:
        raise ValueError(f"min_turns must be from 1 to max_turns, got min_turns={min_turns}, max_turns={max_turns}")
    level = LEVELS["hard" if difficulty == "mixed" else difficulty]
    most = 1 + (min(len(FIRST), len(LAST)) - level.first[1]) // level.more[1]
    if max_turns > most:
        raise ValueError(f"there are names for {most} turns at difficulty {difficulty!r}, got max_turns={max_turns}")
    parser = vf.XMLParser(["sorted"], answer_field="sorted")
    return AlphabetSortEnv(
        dataset=make_rows(num_train_examples, difficulty, min_turns, max_turns, seed),
        eval_dataset=make_rows(num_eval_examples, difficulty, min_turns, max_turns, seed + 1_000_003),
        system_prompt=system_prompt or SYSTEM_PROMPT,
        parser=parser,
        rubric=vf.Rubric([in_order, all_right], [1.0, 0.0], parser=parser),
        max_turns=max_turns,
    )
