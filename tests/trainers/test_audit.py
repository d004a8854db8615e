"""The page at the end of a training: what a person should look at, and nothing that the model can take over."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from verifiers.trainers.watch.audit import audit, block, is_repetitive, reply_of

PROSE = "the sum of both numbers is found by adding their digits from the right and carrying what is left over"
WORDS = PROSE.split()


def step(number: int, total: int = 40, **more: Any) -> dict[str, Any]:
    share = number / total
    jitter = 0.01 * (-1) ** number
    return {
        "step": number,
        "reward": 0.2 + 0.6 * share + jitter,
        "metrics": {"correct": 0.1 + 0.8 * share + jitter, "format": 0.9 - 0.4 * share + jitter, "turns": 1.0},
        **more,
    }


def record(
    reply: str, reward: float | None = 0.5, advantage: float | None = 0.0, at: int = 1, **more: Any
) -> dict[str, Any]:
    return {
        "example_id": more.pop("example_id", at),
        "rollout": 0,
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}],
        "completion": [{"role": "assistant", "content": reply}],
        "reward": reward,
        "advantage": advantage,
        "metrics": {"correct": reward, "format": 1.0},
        "is_truncated": False,
        "step": at,
        **more,
    }


def ordinary(total: int = 40) -> Iterator[dict[str, Any]]:
    for at in range(1, total + 1):
        order = WORDS[at % 7 :] + WORDS[: at % 7]
        yield record(" ".join(order) + f" {at}", reward=0.2 + 0.5 * at / total, advantage=at / 1000, at=at)


def part(page: str, title: str) -> str:
    """One part of the page, by its heading."""
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_reward_at_both_ends_with_its_interval_and_the_evaluations() -> None:
    lines = [step(n) for n in range(1, 41)]
    lines += [{"step": n, "eval": {"reward": n / 50, "low": n / 50 - 0.1, "high": n / 50 + 0.1}} for n in (0, 20, 40)]
    page = audit(lines, [])
    found = re.search(
        r"went from (\d\.\d+) \(steps 1 to 4, interval (.*?)\) to (\d\.\d+) \(steps 37 to 40, inter", page
    )
    assert found
    assert 0.2 < float(found[1]) < 0.3
    assert 0.7 < float(found[3]) < 0.81
    assert "Evaluated after step 0: 0.000 (interval -0.100 to 0.100)." in page
    assert "Evaluated after step 40: 0.800 (interval 0.700 to 0.900)." in page
    assert "after step 20" not in page


def test_a_single_step_has_the_interval_of_its_own_rollouts() -> None:
    page = audit([{"step": 1, "reward": 0.5, "reward_low": 0.4, "reward_high": 0.6}], [])
    assert "from 0.500 (step 1, interval 0.400 to 0.600) to 0.500" in page


def test_metrics_that_rose_while_others_fell() -> None:
    page = part(audit([step(n) for n in range(1, 41)], []), "Reward functions and metrics")
    assert "| turns | 1.000 | 1.000 | +0.000 |" in page
    assert "While correct rose, format fell: is this at the expense of the other?" in page


def test_noise_has_neither_risen_nor_fallen() -> None:
    lines = [{"step": n, "metrics": {"a": 0.5 + 0.1 * (-1) ** n, "b": 0.5 - 0.1 * (-1) ** n}} for n in range(1, 44)]
    assert "While" not in audit(lines, [])


def test_the_highest_advantages_one_of_each_example_with_rewards_by_function() -> None:
    rollouts = [*ordinary(), *(record(f"reply {n} of the best", 0.9, 2.0 + n, 5, example_id="x") for n in range(9))]
    page = part(audit([step(n) for n in range(1, 41)], rollouts), "What was reinforced most")
    heads = re.findall(r"\*\*(.*?)\*\*", page)
    assert heads[0] == "example x, step 5, reward 0.900, advantage +10.000"
    assert len(heads) == 5
    assert "example x" not in "".join(heads[1:])
    assert "correct 0.9, format 1" in page
    assert "    What is 2+2?" in page
    assert "    reply 8 of the best" in page
    assert "Be brief." not in page


def test_high_rewards_for_empty_short_or_repetitive_replies_are_suspicious() -> None:
    odd = [
        record("", 1.0, 0.9, 30),
        record("ok", 0.99, 0.8, 31),
        record("I am right. " * 80, 0.98, 0.7, 32),
        record("", 0.1, -0.5, 33),  # it did not pay
    ]
    page = part(audit([step(n) for n in range(1, 41)], [*ordinary(), *odd]), "Suspicious rollouts")
    assert re.findall(r"\*\*example (\d+).*?\*\*: (.*)", page) == [
        ("30", "the reply is empty"),
        ("31", "2 characters where 104 are usual"),
        ("32", "it repeats itself"),
    ]
    assert "    (nothing)" in page


def test_short_replies_are_not_suspicious_where_all_are_short() -> None:
    rollouts = [record(str(n % 10), float(n % 2), 0.1, n) for n in range(1, 41)]
    page = part(audit([step(n) for n in range(1, 41)], rollouts), "Suspicious rollouts")
    assert "No highly rewarded rollout is empty, very short or repetitive." in page


def test_drift_of_length_and_format() -> None:
    before = [record(f"<answer>{n}</answer>", 0.5, 0.0, at=n) for n in range(1, 11)]
    after = [
        record(f"Sure, here is\n```\n{'and more ' * 10}{n}\n```", 0.5, 0.0, at=n, is_truncated=n > 35)
        for n in range(31, 41)
    ]
    page = part(audit([step(n) for n in range(1, 41)], before + after), "Drift of replies")
    assert "(10 and 10 sampled rollouts)" in page
    assert "| has XML tags | 100% | 0% |" in page
    assert "| has a code block | 0% | 100% |" in page
    assert "| is cut off | 0% | 50% |" in page
    assert "| lines | 1.0 | 4.0 |" in page
    assert "| has the most common beginning | 10% | 100% |" in page
    assert "is empty" not in page  # never, so not a row
    assert page.rstrip().endswith("    Sure, here is")


def test_notices_are_listed() -> None:
    page = audit([step(1), {"step": 7, "notice": "the reward function 'a_b' <b>fell</b>\n# oops"}], [])
    assert r"- step 7: the reward function 'a\_b' \<b\>fell\</b\> \# oops" in page


def test_failed_rollouts_and_columns_of_any_kind_break_nothing() -> None:
    odd: list[dict[str, Any]] = [
        record("x", reward=None, advantage=None),
        {},
        {"reward": 1.0, "completion": None, "prompt": None, "metrics": None, "step": None, "advantage": "high"},
        {"reward": 0.5, "completion": "text", "prompt": "text", "metrics": {"a": None}, "advantage": 1.0},
        {"reward": float("nan"), "completion": [1, None], "prompt": [None]},
        {"reward": 0.2, "completion": [{"role": "assistant", "content": [{"type": "image_url"}]}], "advantage": 0.1},
    ]
    page = audit([{"step": 1}, {}, {"step": "x"}], odd)
    assert "No step has a reward." in page
    assert "example None, reward 0.500, advantage +1.000" in page


def test_nothing_at_all_is_a_short_page() -> None:
    assert audit([], []).count("\n") == 5


evil_texts = st.lists(
    st.sampled_from(
        [
            "```",
            "~~~",
            "\n",
            "\r",
            "\x0b",
            "\u2028",
            "\x85",
            "# h",
            "</pre>",
            "<script>",
            "    ",
            "- ",
            "\x1b[2J",
            "\x1b]0;x\x07",
            "a",
            "\t",
            "|",
            "\x9b",
        ]
    )
).map("".join)


@given(evil_texts, evil_texts)
def test_what_the_model_wrote_stays_in_its_block(reply: str, prompt: str) -> None:
    quiet = audit([step(1)], [record("q", 1.0, 0.5, example_id=1), record("", 0.0)])
    rollout = record(reply, 1.0, 0.5, example_id=1)
    rollout["prompt"] = [{"role": "user", "content": prompt}]
    page = audit([step(1)], [rollout, record("", 0.0)])
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]", page)
    ours = {line for line in quiet.split("\n") if not line.startswith("    ")}
    for line in page.split("\n"):
        assert (
            line.startswith("    ")
            or line in ours
            or re.fullmatch(r"\*\*example 1, step 1.*\*\*: .*|No highly .*|", line)
        )


@given(st.text())
def test_every_line_of_a_block_is_indented(text: str) -> None:
    lines = block(text)
    assert lines
    assert all(line.startswith("    ") and "\n" not in line for line in lines)


def test_the_reply_is_all_that_the_model_said_and_nothing_else() -> None:
    turns = [
        {"role": "assistant", "content": "one"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
    ]
    assert reply_of({"completion": turns}) == "one\ntwo"
    assert reply_of({}) == ""


def test_repetition_is_told_from_ordinary_prose() -> None:
    assert is_repetitive("again and again " * 30)
    assert not is_repetitive(PROSE * 2)
