"""A few notes on where things are, and a question about one of them: reading that a very small model can do in part."""

from __future__ import annotations

import random
import re
import zlib

import verifiers as vf

THINGS = "ball kite book hat bag cup lamp drum clock coat ladder violin".split()
PLACES = "kitchen garden garage office hall attic cellar library bedroom barn".split()
EVERY_NTH_IS_EVAL = 5


def make_row(draw: random.Random, notes: int) -> vf.Row:
    """So many notes, no thing and no place in two of them, and a question about one."""
    things, places = draw.sample(THINGS, notes), draw.sample(PLACES, notes)
    asked = draw.randrange(notes)
    text = " ".join(f"The {thing} is in the {place}." for thing, place in zip(things, places, strict=True))
    return {"question": f"{text} Where is the {things[asked]}?", "answer": places[asked]}


def is_for_eval(row: vf.Row) -> bool:
    """Which of the two data sets a question may be in is decided by its text, so that none is in both."""
    return zlib.crc32(row["question"].encode()) % EVERY_NTH_IS_EVAL == 0


def make_rows(n: int, notes: int, seed: int, *, is_eval: bool) -> list[vf.Row]:
    draw = random.Random(f"reading {seed} {is_eval}")
    rows: list[vf.Row] = []
    while len(rows) < n:
        if is_for_eval(row := make_row(draw, notes)) == is_eval:
            rows.append(row)
    return rows


def first_sentence(text: str) -> str:
    return re.split(r"[.!?\n]", text.strip(), maxsplit=1)[0]


def places_in(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower())) & set(PLACES)


def load_environment(
    notes: int = 3, num_train_examples: int = 1000, num_eval_examples: int = 200, seed: int = 0
) -> vf.SingleTurnEnv:
    """Where is it? A few notes to read, one question; no question is both to train and to evaluate on."""
    if not 2 <= notes <= len(PLACES):
        raise ValueError(f"notes is a number from 2 to {len(PLACES)}, got {notes!r}")
    parser = vf.Parser(extract_fn=first_sentence)

    def correct(completion: vf.Messages, answer: str) -> float:
        """The first sentence names the right place, and no other."""
        return float(places_in(parser.parse_answer(completion) or "") == {answer})

    return vf.SingleTurnEnv(
        dataset=make_rows(num_train_examples, notes, seed, is_eval=False),
        eval_dataset=make_rows(num_eval_examples, notes, seed + 1_000_003, is_eval=True),
        parser=parser,
        rubric=vf.Rubric([correct], parser=parser),
    )
