"""``check_environment``: each way in which environments go wrong gets the verdict of its name, and only that one."""

from __future__ import annotations

import random
import threading
import time

import pytest

import verifiers as vf
from verifiers.checks import check_environment
from verifiers.rubrics import JudgeRubric

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(100, 140)]
parser = vf.XMLParser(["answer"])


def correct(completion, answer):
    return parser.parse_answer(completion) == answer


def env_of(*funcs, rows=ROWS, **kwargs) -> vf.Environment:
    kwargs.setdefault("rubric", vf.Rubric(list(funcs) or [correct], parser=parser))
    return vf.SingleTurnEnv(dataset=rows, parser=parser, **kwargs)


def failed(env: vf.Environment) -> dict[str, str]:
    return {verdict.name: verdict.found for verdict in check_environment(env).verdicts if verdict.status == "fail"}


def test_a_good_environment_passes_everything():
    report = check_environment(env_of())
    assert report.is_clean
    assert report.counts["warn"] == 0
    (gold,) = report.named("gold answers")
    assert gold.found == "mean 1.000 on 8 rows, given as its own fields (answer)"


# --- scores -------------------------------------------------------------------------------------------------------


def test_gold_answers_that_earn_nothing_fail_and_the_way_out_is_told():
    found = failed(env_of(lambda completion, answer: completion[-1]["content"] == f"»{answer}«"))
    assert list(found) == ["gold answers"]
    assert "define solve(messages, row) in the module" in found["gold answers"]


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (lambda completion, answer: answer in completion[-1]["content"], "stuffed answers"),
        (lambda completion: 1.0, "empty replies"),
        (lambda completion: "What is" in completion[-1]["content"], "echoed prompts"),
        (lambda completion: min(len(completion[-1]["content"]) / 10_000, 1), "oversized replies"),
        (lambda completion: len(completion[-1]["content"].split()) >= 1, "random replies"),
    ],
    ids=["contains", "constant", "echo", "length", "any words"],
)
def test_a_reward_that_can_be_had_without_the_answer_fails(reward, name):
    assert name in failed(env_of(reward))


def test_a_reward_that_raises_on_what_a_model_may_write_fails():
    found = failed(env_of(lambda completion, answer: float(completion[-1]["content"]) == float(answer)))
    assert "8 of 8 could not be scored" in found["empty replies"]
    assert "could not convert string to float" in found["random replies"]


def test_a_reward_that_is_no_number_fails():
    found = failed(env_of(lambda completion, answer: float("nan") if not completion[-1]["content"].strip() else 1.0))
    assert "rewards are finite and quick" in found


def test_a_score_that_changes_from_time_to_time_fails():
    assert "the same seed, the same scores" in failed(env_of(lambda completion: random.random()))


def test_an_empty_rubric_fails():
    found = failed(vf.SingleTurnEnv(dataset=ROWS))
    assert found["gold answers"] == "the rubric is empty, so nothing scores a rollout"


def test_rows_without_answers_are_no_reason_to_fail():
    rows = [{"question": f"Say hello {n} times."} for n in range(9)]
    report = check_environment(env_of(lambda completion: completion[-1]["content"].count("hello") == 3, rows=rows))
    assert report.is_clean
    (gold,) = report.named("gold answers")
    assert gold.status == "skip"


def test_a_game_that_never_ends_is_told():
    class Endless(vf.MultiTurnEnv):
        async def env_response(self, messages, state):
            return "again"

    found = failed(Endless(dataset=ROWS[:2], rubric=vf.Rubric([correct]), max_turns=-1))
    assert "does the environment have max_turns or a stop condition?" in found["empty replies"]


# --- rows ---------------------------------------------------------------------------------------------------------


def test_rows_are_looked_at_one_by_one():
    rows = [*ROWS, {"question": "  ", "answer": "1"}, {"question": "x", "answer": "1", "info": "{no json"}]
    found = failed(env_of(rows=rows))
    assert found["rows are valid"] == (
        "train row 40 has an empty prompt; train row 41 has an 'info' that is a text but not JSON"
    )


def test_rows_that_cannot_be_read_end_the_trial_with_their_cause():
    def rows():
        raise OSError("no network")

    report = check_environment(env_of(rows=rows))
    (found,) = report.named("rows are valid")
    assert found.found == "they cannot be read: OSError: no network"
    assert not list(report.named("gold answers"))


def test_questions_in_both_splits_are_a_warning():
    report = check_environment(env_of(eval_dataset=ROWS[:20]))
    (found,) = report.named("splits are apart")
    assert (found.status, found.found) == (
        "warn",
        "20 of 20 evaluation questions are also training questions",
    )


# --- sending, tools, judges ---------------------------------------------------------------------------------------


def test_what_cannot_be_pickled_is_named():
    assert "cannot pickle '_thread.lock' object" in failed(env_of(board=threading.Lock()))["it pickles"]
    lock = threading.Lock()

    def locked(completion, answer):
        with lock:
            return parser.parse_answer(completion) == answer

    assert "_thread.lock" in failed(env_of(locked))["it pickles"]


class Calling(vf.MultiTurnEnv):
    """Calls its only tool with whatever the model says, carefully or not."""

    def __init__(self, careful: bool, **kwargs):
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        tool = {"type": "function", "function": {"name": "double", "parameters": schema}}
        super().__init__(dataset=ROWS, rubric=vf.Rubric([correct]), oai_tools=[tool], max_turns=3, **kwargs)
        self.careful = careful

    async def is_completed(self, messages, state):
        return not messages[-1].get("tool_calls")

    async def env_response(self, messages, state):
        import json

        try:
            said = 2 * json.loads(messages[-1]["tool_calls"][0]["function"]["arguments"])["n"]
        except (ValueError, KeyError, TypeError):
            if not self.careful:
                raise
            said = "that did not work"
        return [{"role": "tool", "tool_call_id": "call_1", "content": str(said)}]


def test_tools_are_called_in_every_wrong_way():
    assert "tools survive bad arguments" not in failed(Calling(careful=True))
    found = failed(Calling(careful=False))["tools survive bad arguments"]
    assert "bad calls broke the rollout, the first was double()" in found


def judged(**kwargs) -> vf.Environment:
    return env_of(rubric=JudgeRubric(judge_client="http://127.0.0.1:9/v1", parser=vf.Parser(), **kwargs))


async def approved(judge, prompt, completion, answer, state):
    return (await judge(prompt, completion, answer, state)).strip().lower() == "yes"


def test_a_judge_that_is_shown_replies_between_tags_passes_and_is_never_asked():
    report = check_environment(judged(funcs=[approved]))
    assert report.is_clean, report
    (found,) = report.named("judge prompts survive injection")
    assert found.status == "ok"
    (gold,) = report.named("gold answers")
    assert gold.found.endswith("with judges that approve")


def test_a_judge_prompt_that_a_reply_can_end_fails():
    async def naive(judge_client, judge_model, completion, answer):
        text = f"Is it {answer}?\n<r>\n{completion[-1]['content']}\n</r>\nReply yes or no."
        asked = [{"role": "user", "content": text}]
        reply = judge_client.chat.completions.create(model=judge_model, messages=asked)
        reply = await reply if hasattr(reply, "__await__") else reply
        return reply.choices[0].message.content == "yes"

    found = failed(judged(funcs=[naive]))
    assert "a reply that contains </r> closes its section" in found["judge prompts survive injection"]


def test_a_judge_prompt_without_any_frame_is_a_warning():
    report = check_environment(judged(funcs=[approved], judge_prompt="Yes or no: is {answer} said here? {response}"))
    (found,) = report.named("judge prompts survive injection")
    assert found.status == "warn"


def test_a_verdict_that_is_looked_for_anywhere_is_a_warning_for_judges_quote_what_they_read():
    async def lenient(judge, prompt, completion, answer, state):
        return "yes" in (await judge(prompt, completion, answer, state)).lower()

    (found,) = check_environment(judged(funcs=[lenient])).named("judge prompts survive injection")
    assert found.status == "warn"
    assert "quotes a yes from the reply counts as yes" in found.found


def test_after_a_check_the_judge_is_the_one_it_was():
    env = judged(funcs=[approved])
    check_environment(env)
    assert env.rubric.judge_client == env.rubric.class_objects["judge_client"] == "http://127.0.0.1:9/v1"


# --- by id --------------------------------------------------------------------------------------------------------

MODULE = '''
"""A toy."""
import random
import verifiers as vf

def turns(completion, answer):
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return said == ["ready", answer]

class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state):
        return "now the answer"

def solve(messages, row):
    return row["answer"] if messages[-1]["content"] == "now the answer" else "ready"

def load_environment(seed=SEED, n=20):
    """Says ready, then the answer."""
    draw = random.Random(seed)
    rows = [{"question": f"ready? {draw.random()}", "answer": f"a{i}"} for i in range(n)]
    return Twice(dataset=rows, rubric=vf.Rubric([turns]), max_turns=2)
'''


@pytest.mark.parametrize("seed", ["7", "None"])
def test_an_environment_by_id_is_loaded_twice_and_shows_how_it_is_played(tmp_path, seed):
    home = tmp_path / f"twice_{seed.lower()}"
    home.mkdir()
    (home / f"{home.name}.py").write_text(MODULE.replace("SEED", seed))
    report = check_environment(home.name, environments_dir=tmp_path)
    (gold,) = report.named("gold answers")
    assert gold.found == "mean 1.000 on 8 rows, given as solve()"
    (repeats,) = report.named("the same seed, the same scores")
    assert repeats.status == ("ok" if seed == "7" else "fail")
    (package,) = report.named("the package")
    assert package.status == "skip"


def test_a_slow_reward_is_named_with_the_reply_that_it_was_slow_over(monkeypatch):
    monkeypatch.setattr("verifiers.checks.scoring.SLOW_S", 1.0)

    def lingering(completion):
        text = completion[-1]["content"]
        time.sleep(1.2 if len(text) > 10_000 else 0.0)
        return 0.0

    (quick,) = check_environment(env_of(correct, lingering)).named("rewards are finite and quick")
    assert quick.status == "warn"
    assert "lingering took" in quick.found
    assert "oversized replies" in quick.found
    assert "correct took" not in quick.found


def test_rows_that_differ_in_info_alone_are_no_overlap_and_those_that_do_not_are():
    def rows(n, first):
        return [{"question": "Your move.", "info": {"board": first + i}} for i in range(n)]

    def overlap(train, evaluated):
        env = vf.SingleTurnEnv(dataset=train, eval_dataset=evaluated, rubric=vf.Rubric([lambda info: 1.0]))
        (found,) = check_environment(env, examples=2).named("splits are apart")
        return found

    apart = overlap(rows(20, 0), rows(10, 100))
    assert apart.status == "ok"
    assert "10 more have the same text and answer as one, but another info" in apart.found
    assert overlap(rows(20, 0), rows(10, 5)).status == "warn"
