"""101 · A first environment: rows, a parser, two rewards. A function acts as the model.

The task is to count letters. The player fails because it reads a doubled letter as one.

python examples/101_first_environment.py
"""

from __future__ import annotations

import re
from typing import Any

import verifiers as vf

WORDS = ["strawberry", "banana", "letter", "parrot", "orange", "mississippi", "radar", "coffee", "tomato", "pepper"]

parser = vf.XMLParser(["reasoning", "answer"])


def rows() -> list[dict[str, Any]]:
    """A question for each distinct letter of each word."""
    return [
        {
            "question": f"How many times does the letter {letter} occur in {word}?",
            "answer": str(word.count(letter)),
            "kind": "doubled" if 2 * letter in word else "single",
        }
        for word in WORDS
        for letter in sorted(set(word))
    ]


def correct(completion: vf.Messages, answer: str) -> float:
    return float(parser.parse_answer(completion) == answer)


def environment() -> vf.Environment:
    return vf.SingleTurnEnv(
        dataset=rows(),
        system_prompt=f"Answer in this form:\n{parser.get_format_str()}",
        parser=parser,
        rubric=vf.Rubric([correct, parser.get_format_reward_func()], weights=[1.0, 0.1]),
    )


def hasty(messages: list[dict[str, str]]) -> str:
    """A player that sees a doubled letter as one."""
    letter, word = re.findall(r"letter (.) occur in (\w+)", messages[-1]["content"])[0]
    seen = re.sub(r"(.)\1", r"\1", word)
    return parser.format(reasoning=f"I read {seen}.", answer=str(seen.count(letter)))


def main() -> vf.Results:
    results = environment().evaluate(client=vf.FakeClient(hasty), model="hasty", use_tqdm=False)
    print(results)
    for kind, part in results.by("kind").items():
        print(f"{kind:<8} correct {part.interval('correct')}")
    return results


if __name__ == "__main__":
    main()
