"""An environment and some rows → whether right answers get rewards, wrong ones do not, and scores are reproducible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verifiers.checks.replies import ATTACKS, Form, gold_forms, noise, stuffed
from verifiers.checks.trial import FunctionTime, ReplyTo, Trial, try_replies
from verifiers.checks.verdicts import Report, Status
from verifiers.envs.environment import Environment
from verifiers.messages import text_of
from verifiers.reruns.judges import judges_of, members_of
from verifiers.types import Row, State

Solve = Callable[..., Any]  # solve(messages, row) of an environment's module: the next reply of a perfect model
GOLD_SHARE, GOLD_LEAST = 0.8, 0.5  # shares of the largest reward: below the first it warns, below the second it fails
WRONG_MOST, WRONG_SOME = 0.5, 0.25  # shares of the gold reward: above the first it fails, above the second it warns
SLOW_S, TOO_SLOW_S = 1.0, 20.0
TRIED_FIRST = 3


@dataclass(kw_only=True)
class Gold:
    """The form of right answers, and their mean reward."""

    reply_to: ReplyTo | None = None
    form: Form | None = None
    mean: float | None = None


def check_scores(report: Report, env: Environment, rows: Sequence[Row], solve: Solve | None) -> Gold:
    """Check gold answers, then replies that must not get a reward, then that scoring is finite and quick."""
    trials: list[Trial] = []
    gold = _check_gold(report, env, rows, solve, trials)
    best = Most(gold.mean, "gold answers") if gold.mean else Most(most_reward(env), "at most")
    form = gold.form or next(iter(gold_forms(env, rows).values()))
    attacks = dict(ATTACKS)
    if any(str(row.get("answer", "") or "") for row in rows):
        attacks["stuffed answers"] = stuffed(rows, form)
    for name, reply_to in attacks.items():
        trial = _try(report, name, env, rows, reply_to)
        if trial is not None:
            trials.append(trial)
            _judge_attack(report, name, trial, best)
    _check_quick(report, trials)
    return gold


def _try(
    report: Report, name: str, env: Environment, rows: Sequence[Row], reply_to: ReplyTo, *, judge_says: bool = False
) -> Trial | None:
    try:
        return try_replies(env, rows, reply_to, judge_says=judge_says, name=name)
    except TimeoutError:
        report.add(name, "fail", "the rollouts did not end; does the environment have max_turns or a stop condition?")
    return None


# --- right answers ------------------------------------------------------------------------------------------------


def most_reward(env: Environment) -> float:
    """The largest reward if every function returns at most 1: the sum of the positive weights."""
    weights = [weight for member in members_of(env)[:1] for weight in member.rubric._get_reward_weights()]
    return sum(weight for weight in weights if weight > 0) or 1.0


def _check_gold(
    report: Report, env: Environment, rows: Sequence[Row], solve: Solve | None, trials: list[Trial]
) -> Gold:
    name = "gold answers"
    if env.scores_nothing:
        report.add(name, "fail", "the rubric is empty, so nothing scores a rollout")
        return Gold()
    if solve is not None:
        found, how = Gold(reply_to=_solver(solve)), "solve()"
    else:
        answered = [row for row in rows if str(row.get("answer", "") or "")]
        if not answered:
            report.add(name, "skip", "no row has an answer; define solve(messages, row) in the module to give replies")
            return Gold()
        how, found = _best_form(env, answered[:TRIED_FIRST])
    assert found.reply_to is not None
    trial = _try(report, name, env, rows, found.reply_to, judge_says=True)
    if trial is None:
        return Gold()
    trials.append(trial)
    found.mean = trial.mean
    _judge_gold(report, name, env, trial, how, has_solve=solve is not None)
    return found if found.mean is not None and found.mean > 0 else Gold()


def _solver(solve: Solve) -> ReplyTo:
    return lambda row, number: lambda messages: solve(messages, row)


def _best_form(env: Environment, rows: Sequence[Row]) -> tuple[str, Gold]:
    """The form of answers with the highest mean reward on a few rows."""
    best: tuple[float, str, Gold] | None = None
    for how, form in gold_forms(env, rows).items():
        reply_to = _answerer(form)
        try:
            mean = try_replies(env, rows, reply_to, judge_says=True).mean
        except TimeoutError:
            mean = None
        if best is None or (mean is not None and mean > best[0] + 1e-9):
            best = (float("-inf") if mean is None else mean, how, Gold(reply_to=reply_to, form=form))
    assert best is not None
    return best[1], best[2]


def _answerer(form: Form) -> ReplyTo:
    return lambda row, number: form(str(row.get("answer", "")))


def _judge_gold(report: Report, name: str, env: Environment, trial: Trial, how: str, *, has_solve: bool) -> None:
    judged = ", with judges that approve" if judges_of(env) else ""
    if trial.failed:
        report.add(name, "fail", f"{len(trial.failed)} of {len(trial.states)} failed: {trial.causes}")
        return
    mean, most = trial.mean or 0.0, most_reward(env)
    found = f"mean {mean:.3f} on {len(trial.states)} rows, given as {how}{judged}"
    if mean >= GOLD_SHARE * most:
        report.add(name, "ok", found)
        return
    hint = "" if has_solve else "; define solve(messages, row) in the module if answers need another form"
    status: Status = "warn" if mean >= GOLD_LEAST * most else "fail"
    report.add(name, status, f"{found}, but {most:g} is possible{hint}")


# --- wrong answers ------------------------------------------------------------------------------------------------


class Most(NamedTuple):
    """The reward that wrong replies are compared with: that of gold answers, or the largest one if none are known."""

    reward: float
    named: str


def _judge_attack(report: Report, name: str, trial: Trial, best: Most) -> None:
    if trial.failed:
        report.add(name, "fail", f"{len(trial.failed)} of {len(trial.states)} could not be scored: {trial.causes}")
        return
    mean = trial.mean or 0.0
    found = f"mean {mean:.3f}, {best.named} {best.reward:.3f}"
    share = mean / best.reward
    status: Status = "fail" if share > WRONG_MOST else "warn" if share > WRONG_SOME else "ok"
    report.add(name, status, found)


def _check_quick(report: Report, trials: Sequence[Trial]) -> None:
    """Check scoring times, and whether rollouts failed because a reward was not finite."""
    name = "rewards are finite and quick"
    not_finite = [trial for trial in trials for state in trial.failed if "finite" in str(state["error"])]
    if not_finite:
        report.add(name, "fail", not_finite[0].causes)
        return
    *_, slow, slowest = sorted([0.0, 0.0, *(took for trial in trials for took in trial.scoring_s)])
    status: Status = "fail" if slowest > TOO_SLOW_S else "warn" if slow > SLOW_S else "ok"
    found = f"the slowest took {slowest * 1000:.0f} ms to score"
    if slow <= SLOW_S < slowest:  # the first call imports what it needs, or starts a worker
        found = f"the slowest took {slow * 1000:.0f} ms to score, the first {slowest * 1000:.0f} ms with what it loads"
    elif status != "ok":
        found = _slow_ones(trials) or found
    report.add(name, status, found)


def _slow_ones(trials: Sequence[Trial]) -> str:
    """For each slow function, its slowest reply and how long it took."""
    slowest: dict[str, tuple[FunctionTime, str]] = {}
    for trial in trials:
        for one in trial.times:
            if one.seconds > SLOW_S and (one.function not in slowest or one.seconds > slowest[one.function][0].seconds):
                slowest[one.function] = one, trial.name
    return "; ".join(
        f"{function} took {one.seconds:.1f} s for {_reply_in_words(one.state)} ({name}, example "
        f"{one.state.get('example_id')})"
        for function, (one, name) in sorted(slowest.items(), key=lambda item: -item[1][0].seconds)[:3]
    )


def _reply_in_words(state: State) -> str:
    completion = state.get("completion")
    text = completion if isinstance(completion, str) else text_of(completion[-1]) if completion else ""
    return f"the reply {' '.join(text.split())[:40]!r} of {len(text):,} characters"


# --- reproducibility ----------------------------------------------------------------------------------------------


def check_repeats(report: Report, env: Environment, again: Environment | None, rows: Sequence[Row], gold: Gold) -> None:
    """Check that the environment, loaded a second time, has the same rows and gives the same scores."""
    name = "the same seed, the same scores"
    if again is not None:
        others = list(again.get_eval_dataset(len(rows)))
        differ = [i for i, (one, other) in enumerate(zip(rows, others, strict=False)) if _asked(one) != _asked(other)]
        if differ or len(others) != len(rows):
            report.add(
                name, "fail", f"loaded twice, {len(differ) or 'some'} of {len(rows)} rows differ: a seed is missing"
            )
            return
    second = env if again is None else again
    for reply_to in (noise, gold.reply_to):
        if reply_to is None:
            continue
        is_gold = reply_to is not noise
        first, then = (_try(report, name, one, rows, reply_to, judge_says=is_gold) for one in (env, second))
        if first is None or then is None:
            return
        pairs = zip(first.states, then.states, strict=True)
        changed = [i for i, (one, two) in enumerate(pairs) if not _is_same(one.get("reward"), two.get("reward"))]
        if changed:
            report.add(name, "fail", f"the same reply got another reward on {len(changed)} of {len(rows)} rows")
            return
    report.add(name, "ok", f"{len(rows)} rows, twice")


def _asked(row: Row) -> tuple[Any, Any]:
    return row["prompt"], row.get("answer")


def _is_same(one: float | None, two: float | None) -> bool:
    return one == two or (one is not None and two is not None and abs(one - two) < 1e-9)
