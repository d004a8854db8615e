"""103 · Code that a model wrote: it runs in the sandbox, and the expected values never enter it.

Five replies to one task: one that is right, one that is half right, one that never ends, one that exits, and one that
returns an object equal to everything.

python examples/103_sandboxed_code.py
"""

from __future__ import annotations

import verifiers as vf

TASK = "Write a Python function `gcd(a, b)` that returns the greatest common divisor of two integers."
CASES = [([12, 18], 6), ([7, 13], 1), ([0, 5], 5), ([-4, 6], 2)]

REPLIES = {
    "right": "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return abs(a)",
    "by counting down": "def gcd(a, b):\n    return next(n for n in range(min(a, b), 0, -1) if a % n == b % n == 0)",
    "never ends": "def gcd(a, b):\n    while True:\n        pass",
    "leaves": "import os\nos._exit(0)",
    "equal to everything": (
        "class Yes:\n    def __eq__(self, other):\n        return True\n\ndef gcd(a, b):\n    return Yes()"
    ),
}


async def passed(completion: vf.Messages) -> float:
    """The share of cases with the right value; the returned values are compared outside the sandbox."""
    right = 0
    async with vf.Sandbox(timeout_s=3) as sandbox, sandbox.session() as session:
        await session.run(completion[-1]["content"])
        for arguments, wanted in CASES:
            result = await session.call("gcd", arguments)
            if result.status == "timeout":
                break
            right += result.is_ok and result.value == wanted
    return right / len(CASES)


def environment() -> vf.Environment:
    rows = [{"question": f"{TASK} ({name})", "kind": name} for name in REPLIES]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([passed]))


def main() -> vf.Results:
    replies = {f"{TASK} ({name})": code for name, code in REPLIES.items()}
    results = environment().evaluate(client=vf.FakeClient(replies), model="five programmers", use_tqdm=False)
    for state in results.rollouts:
        print(f"{state['kind']:<20} {state['reward']:.2f} of the cases passed")
    print(f"{len(results.failed)} failed")
    return results


if __name__ == "__main__":
    main()
