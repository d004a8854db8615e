"""`make demo`: a bundled environment, a fake model behind a flaky server, and the report.

The model is a function that is often right, sometimes careless and now and then forgets the format. It is served over
HTTP by the package's fake server, which fails every fifth request on purpose: nothing of that reaches the scores.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import verifiers as vf

ROOT = Path(__file__).resolve().parents[1]


def careless_student(messages: list[dict[str, str]]) -> str:
    """Right more often the easier the question; the same question may be answered differently each time."""
    question = messages[-1]["content"]
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    value = numbers[0]
    for sign, number in zip(re.findall(r"[-+*](?= \d)", question), numbers[1:], strict=True):
        value = {"+": value + number, "-": value - number, "*": value * number}[sign]
    skill = {"+": 0.95, "-": 0.85, "*": 0.5}[min(re.findall(r"[-+*](?= \d)", question), key="*-+".index)]
    if random.random() > skill:
        value += random.choice([-10, -1, 1, 10])
    if random.random() < 0.05:
        return f"I think it is {value}."
    return f"<reasoning>\n{question} I work from left to right.\n</reasoning>\n<answer>\n{value}\n</answer>"


def main() -> None:
    random.seed(0)
    env = vf.load_environment("arithmetic", environments_dir=ROOT / "environments", difficulty="mixed")
    with vf.FakeServer(careless_student, chaos=vf.Chaos(rate=0.2)) as server:
        results = env.evaluate(
            client=vf.HTTPClient(server.url),
            model="careless-student",
            num_examples=100,
            rollouts_per_example=4,
            max_concurrent=64,
            save_results=True,
        )
    print("\nOne rollout:")
    vf.print_prompt_completions_sample(
        [results["prompts"][0][-1:]], [results["completions"][0]], [results["rewards"][0]], num_samples=1
    )
    print(f"The report (the server failed {server.faults} times on purpose; each was asked again):\n")
    print(results)
    for k in (1, 4):
        print(vf.stats.pass_at_k(results["correct"], results["example_ids"], k=k))
    for level, part in results.by("difficulty").items():
        print(f"{level:<6} correct {part.interval('correct')}")


if __name__ == "__main__":
    main()
