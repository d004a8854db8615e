"""104 · A judge: another model scores free text. If the judge is down, the rollout fails; it does not count as zero.

python examples/104_judge.py
"""

from __future__ import annotations

import verifiers as vf

ANSWERS = {
    "Why is the sky blue?": "Air scatters short wavelengths more than long ones, so blue reaches us from everywhere.",
    "Why do leaves turn red?": "Because it is autumn.",
    "Why does ice float?": "Water expands when it freezes, so ice is less dense than the water it displaces.",
    "Why is the sea salty?": "Rivers carry dissolved minerals into it, water evaporates, and the salt stays.",
    "Why do cats purr?": "Nobody asked them.",
}

TEMPLATE = """Does the answer explain the cause?

Question: {prompt}
<answer>
{completion}
</answer>

Score from 0 to 10.
<score>
[number]
</score>"""


def judge(messages: list[dict[str, str]]) -> str:
    """Acts as the judge: a good explanation names a consequence. For one question the judge is down."""
    text = messages[-1]["content"]
    if "salty" in text:
        raise vf.ServerError("503: the judge is overloaded")
    answer = text.split("<answer>")[1].split("</answer>")[0].strip()
    return f"<score>{9 if ', so ' in answer else 2}</score>"


def brief(completion: vf.Messages) -> float:
    """A plain reward in addition to the judge's: at most 20 words."""
    return float(len(completion[-1]["content"].split()) <= 20)


def environment() -> vf.Environment:
    judged = vf.JudgeRubric(client=vf.FakeClient(judge), judge_models=["a-judge"], template=TEMPLATE, max_retries=0)
    return vf.SingleTurnEnv(
        dataset=[{"question": question} for question in ANSWERS],
        rubric=vf.RubricGroup([judged, vf.Rubric([brief], weights=[0.2])]),
    )


def main() -> vf.Results:
    results = environment().evaluate(client=vf.FakeClient(ANSWERS), model="explainer", use_tqdm=False)
    for state in results.rollouts:
        reward = "failed" if state["reward"] is None else f"{state['reward']:.2f}"
        print(f"{reward:<7} {state['prompt'][-1]['content']}")
    print(f"mean of the {len(results['rewards'])} that were scored: {results.mean_reward:.2f}")
    print(f"cause of the other: {results.failed[0]['error']}")
    return results


if __name__ == "__main__":
    main()
