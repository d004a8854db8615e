"""Can a model call tools as instructed? Each row requests certain calls, and the reward checks them."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from typing import Any, Literal

import verifiers as vf

SYSTEM_PROMPT = "Make exactly the tool calls that you are asked for, all of them in one reply."
EVERY_NTH_IS_HELD_OUT = 5


def paint(colour: Literal["red", "green", "blue"]) -> str:
    """Paint the wall.

    Args:
        colour: The colour of the paint.
    """
    return f"The wall is {colour}."


def wait(minutes: int) -> str:
    """Wait for a while.

    Args:
        minutes: How long.
    """
    return f"{minutes} minutes have passed."


def pour(litres: float) -> str:
    """Pour water into the basin.

    Args:
        litres: How much.
    """
    return f"{litres} litres were poured."


def light(is_on: bool) -> str:
    """Switch the light.

    Args:
        is_on: True for on, False for off.
    """
    return f"The light is {'on' if is_on else 'off'}."


def say(words: str, times: int = 1) -> str:
    """Say something aloud.

    Args:
        words: What to say.
        times: How often.
    """
    return " ".join([words] * times)


TOOLS = [paint, wait, pour, light, say]


def make_call(draw: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    """An instruction in words, and the arguments of the right call."""
    if name == "paint":
        colour = draw.choice(["red", "green", "blue"])
        return f"paint the wall {colour}", {"colour": colour}
    if name == "wait":
        minutes = draw.randint(1, 90)
        return f"wait for {minutes} minutes", {"minutes": minutes}
    if name == "pour":
        litres = draw.randint(1, 99) / 4
        return f"pour {litres:g} litres of water", {"litres": litres}
    if name == "light":
        is_on = draw.random() < 0.5
        return f"switch the light {'on' if is_on else 'off'}", {"is_on": is_on}
    words, times = draw.choice(["good morning", "mind the gap", "hello"]), draw.randint(2, 5)
    return f'say "{words}" {times} times', {"words": words, "times": times}


def make_row(draw: random.Random, most: int) -> dict[str, Any]:
    names = [draw.choice(TOOLS).__name__ for _ in range(draw.randint(1, most))]
    made = [make_call(draw, name) for name in names]
    wanted = [{"name": name, "arguments": arguments} for name, (_, arguments) in zip(names, made, strict=True)]
    return {"question": f"Please {', then '.join(wish for wish, _ in made)}.", "info": {"wanted": wanted}}


def is_held_out(question: str) -> bool:
    """Is a row for evaluation or for training? Its text decides, so no row is in both data sets."""
    return zlib.crc32(question.encode()) % EVERY_NTH_IS_HELD_OUT == 0


def make_rows(n: int, most: int, seed: int, *, held_out: bool) -> list[dict[str, Any]]:
    draw = random.Random(f"tool-test {seed} {held_out}")
    rows: list[dict[str, Any]] = []
    while len(rows) < n:
        row = make_row(draw, most)
        if is_held_out(row["question"]) == held_out:
            rows.append(row)
    return rows


def key(name: str, arguments: Any) -> str:
    """One call as text; 2 and 2.0 give the same text, because JSON has one type of number."""
    numbers = (
        {k: float(v) if type(v) is int else v for k, v in arguments.items()} if isinstance(arguments, dict) else {}
    )
    return json.dumps([name, numbers], sort_keys=True)


def calls_made(completion: vf.Messages) -> Counter[str]:
    """The calls of the first reply; a call that cannot be parsed counts as ``unreadable``."""
    made: Counter[str] = Counter()
    for message in completion[:1]:
        for call in message.get("tool_calls") or () if isinstance(message, dict) else ():
            function = call.get("function") or {}
            try:
                made[key(function.get("name"), json.loads(function.get("arguments") or "{}"))] += 1
            except (ValueError, TypeError, RecursionError, OverflowError):  # deep nesting, numbers of a thousand digits
                made["unreadable"] += 1
    return made


def all_right(completion: vf.Messages, info: dict[str, Any]) -> bool:
    """Were exactly the requested calls made?"""
    return calls_made(completion) == Counter(key(call["name"], call["arguments"]) for call in info["wanted"])


def share_made(completion: vf.Messages, info: dict[str, Any]) -> float:
    """The share of the requested calls that were made."""
    wanted = Counter(key(call["name"], call["arguments"]) for call in info["wanted"])
    return (wanted & calls_made(completion)).total() / wanted.total()


def solve(messages: vf.Messages, row: dict[str, Any]) -> dict[str, Any]:
    """The next reply of a perfect model: the requested calls, then a word."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "Done."}
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
        for i, call in enumerate(row["info"]["wanted"])
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def load_environment(
    num_train_examples: int = 1000, num_eval_examples: int = 100, max_calls: int = 3, max_turns: int = 2, seed: int = 0
) -> vf.ToolEnv:
    """Instructions to make tool calls; the reward is 1 if the first reply makes exactly these, else 0."""
    if max_calls < 1:
        raise ValueError(f"max_calls must be at least 1, got {max_calls!r}")
    return vf.ToolEnv(
        tools=TOOLS,
        dataset=make_rows(num_train_examples, max_calls, seed, held_out=False),
        eval_dataset=make_rows(num_eval_examples, max_calls, seed, held_out=True),
        system_prompt=SYSTEM_PROMPT,
        rubric=vf.Rubric([all_right, share_made], [1.0, 0.0]),
        max_turns=max_turns,
    )
