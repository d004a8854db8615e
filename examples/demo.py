"""`make demo`: a bundled environment with a fake model behind a flaky server, then with a real model; then a training.

The fake model is a function that is often right, sometimes wrong, and occasionally forgets the format. The package's
fake server serves it over HTTP and fails every fifth request on purpose, which does not affect the scores. The real
model is SmolLM2-135M-Instruct, in this process, without a network. A tiny new transformer is trained (see
303_warm_up_and_grpo.py).
"""

from __future__ import annotations

import importlib
import random
import re
import sys

import verifiers as vf


def careless_student(messages: list[dict[str, str]]) -> str:
    """Right more often on easier questions; may answer the same question differently each time."""
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


def show(results: vf.Results, n: int) -> None:
    """Print a few questions with their replies."""
    questions = [prompt[-1:] for prompt in results["prompts"]]
    vf.print_prompt_completions_sample(questions, results["completions"], results["rewards"], num_samples=n)


def fake_model(env: vf.Environment) -> None:
    print("A fake model behind a server that fails on purpose:\n")
    with vf.FakeServer(careless_student, chaos=vf.Chaos(rate=0.2)) as server:
        results = env.evaluate(
            client=vf.HTTPClient(server.url),
            model="careless-student",
            num_examples=100,
            rollouts_per_example=4,
            max_concurrent=64,
            save_results=True,
        )
    show(results, 1)
    print(f"The server failed {server.faults} times; each request was repeated. The report:\n\n{results}")
    for k in (1, 4):
        print(vf.stats.pass_at_k(results["correct"], results["example_ids"], k=k))
    for level, part in results.by("difficulty").items():
        print(f"{level:<6} correct {part.interval('correct')}")


def real_model(env: vf.Environment) -> None:
    print("\nA real model in this process (135M parameters: it knows some capitals):\n")
    model = vf.LocalModel("smollm2", length=1024)
    results = env.evaluate(client=model, num_examples=20, temperature=0.7, max_tokens=24, seed=1, save_results=True)
    show(results, 4)
    print(results)


def training() -> None:
    print("\nA tiny transformer with random weights learns to write text backwards:\n")
    importlib.import_module("examples.303_warm_up_and_grpo").main(show_progress=True)


def main() -> None:
    random.seed(0)
    fake_model(vf.load_environment("arithmetic"))
    try:
        import torch  # noqa: F401
    except ImportError:
        print("\nFor a real model in this process: pip install 'verifiers[local]'")
        return
    real_model(vf.load_environment("capitals"))
    try:
        import accelerate  # noqa: F401
    except ImportError:
        print("\nTo see one learn: pip install 'verifiers[train]'")
        return
    training()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt as stop:  # saved results are kept, and a traceback would not help
        print(f"\n{str(stop) or 'stopped'}", file=sys.stderr)
        sys.exit(130)
