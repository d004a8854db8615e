"""A row and its answer → replies to test an environment with: right ones in every usual form, and wrong ones."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verifiers.envs.environment import Environment
from verifiers.messages import text_of
from verifiers.parsers import Parser
from verifiers.reruns.judges import members_of
from verifiers.types import Row

Form = Callable[[str], str]
THOUGHT = "I have worked it out."
THINKING = ("think", "thinking", "reasoning", "scratchpad")
_TAG = re.compile(r"<([A-Za-z][\w-]*)>")
OVERSIZED_CHARS = 200_000
_WORDS = ("amber", "river", "forty", "lantern", "quiet", "seven", "marble", "window", "maybe", "orbit", "nine")


def gold_forms(env: Environment, rows: Sequence[Row]) -> dict[str, Form]:
    """The usual forms of an answer, those of the environment's parsers first."""
    forms: dict[str, Form] = {}
    for parser in {id(member.parser): member.parser for member in members_of(env)}.values():
        forms |= _own_forms(parser)
    return {
        **forms,
        **_prompted_forms(rows),
        "the answer alone": lambda answer: answer,
        "\\boxed{}": lambda answer: f"{THOUGHT} \\boxed{{{answer}}}",
        "<think> and \\boxed{}": lambda answer: f"<think>\n{THOUGHT}\n</think>\n\n\\boxed{{{answer}}}",
        "<think> and the answer": lambda answer: f"<think>\n{THOUGHT}\n</think>\n\n{answer}",
        "<answer>": lambda answer: f"<think>\n{THOUGHT}\n</think>\n<answer>\n{answer}\n</answer>",
        "####": lambda answer: f"{THOUGHT}\n#### {answer}",
    }


def _own_forms(parser: Parser) -> dict[str, Form]:
    fields, write = getattr(parser, "get_fields", None), getattr(parser, "format", None)
    if not callable(fields) or not callable(write):
        return {}
    names = list(fields())
    wanted = getattr(parser, "answer_field", "answer")
    targets = [wanted] if wanted in names else names[-1:]

    def form(answer: str) -> str:
        return str(write(**{name: answer if name in targets else THOUGHT for name in names}))

    return {f"its own fields ({', '.join(names)})": form}


def _prompted_forms(rows: Sequence[Row]) -> dict[str, Form]:
    """Forms with the tags that the prompt mentions."""
    tags = list(dict.fromkeys(_TAG.findall(echo(rows[0], 0)))) if rows else []
    return {
        f"<{tag}>, of the prompt": lambda answer, tag=tag: f"<think>\n{THOUGHT}\n</think>\n<{tag}>{answer}</{tag}>"  # type: ignore[misc]
        for tag in tags
        if tag.lower() not in THINKING
    }


# --- replies that must not get a reward -------------------------------------------------------------------------------


def empty(row: Row, number: int) -> str:
    return ("", " \n\t ")[number % 2]


def echo(row: Row, number: int) -> str:
    """The prompt itself: all its messages, or the last one."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    texts = [text_of(message) for message in prompt]
    return texts[-1] if texts and number % 2 else "\n\n".join(texts)


def stuffed(rows: Sequence[Row], form: Form) -> Callable[[Row, int], str]:
    """All answers in one reply, within one form or one form after the other; the first and the last one are wrong."""
    answers = list(dict.fromkeys(str(row.get("answer", "")) for row in rows))
    listed = ["none of these", *answers, "none of these"]
    several, inside = "\n".join(map(form, listed)), form(", ".join(listed))
    return lambda row, number: inside if number % 2 else several


def oversized(row: Row, number: int) -> str:
    """A far too long reply, on which a careless regular expression is slow."""
    pieces = (" ", "<answer>", "\\boxed{", "word ", "<think>\n")
    piece = pieces[number % len(pieces)]
    return piece * (OVERSIZED_CHARS // len(piece))


def noise(row: Row, number: int) -> str:
    """Random words, characters or markup, from a fixed seed."""
    draw = random.Random(f"{row.get('example_id')} {number}")
    makers: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: (f"{draw.choice(_WORDS)} " for _ in range(60)),
        lambda: (chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x100, 0xD7FF)))) for _ in range(200)),
        lambda: (
            draw.choice(("{", "}", "[", '"a":', "null", "NaN", "<b>", "</b>", "\\", "$", "-1")) for _ in range(80)
        ),
    )
    return "".join(makers[number % len(makers)]())


ATTACKS: dict[str, Callable[[Row, int], Any]] = {
    "empty replies": empty,
    "echoed prompts": echo,
    "oversized replies": oversized,
    "random replies": noise,
}
