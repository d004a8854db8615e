"""102 · Tools: the letter task again, with a function that the model can call.

The player's first call has a wrong argument. The environment replies with an error, and the rollout continues.

python examples/102_tools.py
"""

from __future__ import annotations

import json
import re
from typing import Any

import verifiers as vf

WORDS = {"r": "strawberry", "p": "pepper", "f": "coffee", "s": "mississippi"}


def spell(word: str) -> list[str]:
    """The letters of a word, one by one.

    Args:
        word: The word to take apart.
    """
    return list(word)


def correct(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"].split()[-1] == answer)


def environment() -> vf.Environment:
    return vf.ToolEnv(
        dataset=[
            {"question": f"How many times does the letter {letter} occur in {word}?", "answer": str(word.count(letter))}
            for letter, word in WORDS.items()
        ],
        tools=[spell],
        rubric=vf.Rubric([correct]),
        max_turns=5,
    )


def call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "spell", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def speller(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    """A player that spells before it counts; its first call has a wrong argument name."""
    letter, word = re.findall(r"letter (.) occur in (\w+)", messages[0]["content"])[0]
    said = messages[-1]
    if said["role"] == "user":
        return call(text=word)
    if said["content"].startswith("Error"):
        return call(word=word)
    return f"{' '.join(json.loads(said['content']))}: {json.loads(said['content']).count(letter)}"


def main() -> vf.Results:
    results = environment().evaluate(client=vf.FakeClient(speller), model="speller", use_tqdm=False)
    for message in results["completions"][0]:
        calls = [one["function"]["arguments"] for one in message.get("tool_calls") or []]
        print(f"{message['role']:<10}{message['content'] or 'spell(' + calls[0] + ')'}")
    metrics = results["metrics"]
    print(f"\nreward {results.mean_reward:.2f}, calls {sum(metrics['spell_calls']):.0f}", end=", ")
    print(f"calls with a wrong argument {sum(metrics['unknown_argument_faults']):.0f}")
    return results


if __name__ == "__main__":
    main()
