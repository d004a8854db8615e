"""Metrics of each step → a notice when a training goes wrong, with the symptom and the settings to change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from verifiers.trainers.watch.wording import number, variance

SILENCE = 50  # steps before a notice of the same kind is repeated
PATIENCE = 3  # consecutive steps before a notice is given
WINDOW = 10  # steps over which reward functions are judged
BLOCK, MAX_BLOCKS = 20, 50  # steps in a block whose mean reward is compared, and the number of such blocks

TRUNCATED_SHARE = 0.9  # of completions
FAILED_SHARE = 0.2  # of rollouts that failed
CLIPPED_SHARE = 0.3  # of tokens whose ratio was clipped
RATIO_MEAN = (0.8, 1.25)
RATIO_MAX = 20.0
KL_MAX = 1.0  # nats per token
ENTROPY_SHARE, ENTROPY_MAX = 0.2, 0.1  # share of its initial value; nats per token
SOLVED_SHARE = 0.9  # of the range of rewards seen so far; rows with a mean above it are solved
SOLVED_LEAST = 0.5  # of the sum of the weights; solved rows need a best reward of at least this
GAIN_SHARE = 0.03  # of the range of rewards; a larger gain over half a window means that rewards still rise
DOMINANT_SHARE = 0.98  # of the weighted variance
DOMINANT_SCALE = 20.0  # ratio of the standard deviations of two reward functions
SATURATED_SPREAD = 0.1  # standard deviation, as a share of a function's own range, below which it is saturated
FALL_ERRORS, FALL_SHARE = 5.0, 0.1  # standard errors (many blocks are compared); of the range of rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A warning about a training: its kind, its step and its text."""

    kind: str
    step: int
    text: str

    def __str__(self) -> str:
        return self.text


class Watch:
    """Checks the metrics of every step and returns notices, each kind at most once in SILENCE steps.

    ``config`` is a GRPOConfig or a mapping; notices mention its current values. ``weights`` are the weights of the
    reward functions by name. Metrics without a weight are not checked, because they may stay constant.

    >>> watch = Watch({"max_new_tokens": 64})
    >>> for step in range(1, 4):
    ...     notices = watch.look({"step": step, "truncated": 1.0}, {})
    >>> print(notices[0])
    100% of completions were cut off at the token limit for 3 steps, so few end with an answer: raise max_new_tokens
    (now 64), ask for shorter replies, or leave them out of the loss with mask_truncated_completions
    """

    def __init__(self, config: Any = None, *, weights: Mapping[str, float] | None = None) -> None:
        self.config = config
        self.weights = {name: weight for name, weight in (weights or {}).items() if weight}
        self._noticed_at: dict[str, int] = {}
        self._in_a_row: dict[str, int] = {}
        self._rewards: list[float] = []
        self._entropies: list[float] = []
        self._best, self._worst = -math.inf, math.inf
        self._columns: deque[Mapping[str, list[float]]] = deque(maxlen=WINDOW)  # values of each reward function
        self._varied: set[str] = set()  # reward functions that have returned different values

    def look(self, step_metrics: Mapping[str, Any], batch_view: Mapping[str, Any]) -> list[Notice]:
        """The notices about a step; usually none."""
        step = step_metrics.get("step") or 0
        self._remember(step_metrics, batch_view)
        found = {
            "not_finite": self._not_finite(step_metrics),
            "failures": self._failures(step_metrics),
            "refused": self._refusals(step_metrics),
            "no_variance": self._no_variance(step_metrics, batch_view),
            "truncated": self._truncation(step_metrics),
            "entropy": self._entropy(),
            "ratio": self._ratio(step_metrics),
            "kl": self._divergence(step_metrics),
            "falling_reward": self._falling_reward(),
            **{f"dead:{name}": self._dead_function(name) for name in self.weights},
            "dominance": self._dominance(),
        }
        notices = []
        for kind, text in found.items():
            last = self._noticed_at.get(kind)
            if text is not None and (last is None or step - last >= SILENCE):
                self._noticed_at[kind] = step
                notices.append(Notice(kind=kind, step=step, text=text))
        return notices

    def recall(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Process the steps before a resume; their notices were already given."""
        for metrics in steps:
            self.look(metrics, {})

    # --- checks -------------------------------------------------------------------------------------------------

    def _not_finite(self, metrics: Mapping[str, Any]) -> str | None:
        for name in ("loss", "grad_norm"):
            value = metrics.get(name)
            if isinstance(value, float) and not math.isfinite(value):
                return (
                    f"{name} is {value}, so this step was skipped; if this continues, resume from an earlier "
                    f"checkpoint with a lower {self._knob('learning_rate')}, and with bf16 or float32 rather than fp16"
                )
        return None

    def _failures(self, metrics: Mapping[str, Any]) -> str | None:
        failed, samples, sampled = (int(number(metrics.get(name)) or 0) for name in ("failed", "samples", "sampled"))
        total = sampled or samples + failed
        share = failed / max(total, 1)
        if not self._lasts("failures", share >= FAILED_SHARE):
            return None
        return (
            f"{share:.0%} of rollouts failed ({failed} of {total}), for {PATIENCE} steps: they are not "
            "trained on; their errors are in results.jsonl (see `vf view`), and come from the environment, a judge or "
            "an endpoint, not from the policy"
        )

    def _refusals(self, metrics: Mapping[str, Any]) -> str | None:
        reasons = metrics.get("refused_reasons")
        if not isinstance(reasons, list) or not reasons:
            return None
        return f"{metrics.get('refused')} rollouts were not trained on: {reasons[0]}"

    def _no_variance(self, metrics: Mapping[str, Any], view: Mapping[str, Any]) -> str | None:
        # Some estimators compare turns, or rollouts of different groups.
        is_flat = (number(metrics.get("zero_variance")) or 0.0) >= 1.0 and not any(view.get("has_advantage") or ())
        if not self._lasts("no_variance", is_flat):
            return None
        mean = f" (mean {self._rewards[-1]:.3f})" if self._rewards else ""
        seen = f"no group had any variance in its rewards{mean} for {PATIENCE} steps: nothing is learned"
        if self._is_solved():
            return f"{seen}; these rows look solved: stop here, or continue with harder ones"
        return (
            f"{seen}; raise {self._knob('temperature')} or {self._knob('group_size')}, use easier rows or a reward "
            "for partial success, warm up with SFTTrainer, or sample until rewards vary with "
            f"{self._knob('dynamic_sampling')}"
        )

    def _truncation(self, metrics: Mapping[str, Any]) -> str | None:
        share = number(metrics.get("truncated")) or 0.0
        if not self._lasts("truncated", share >= TRUNCATED_SHARE) or self._is_solved():
            return None
        seen = f"{share:.0%} of completions were cut off at the token limit for {PATIENCE} steps"
        if self._value("mask_truncated_completions") is True:
            return (
                f"{seen}, and with mask_truncated_completions they are not trained on: raise "
                f"{self._knob('max_new_tokens')}, or ask for shorter replies"
            )
        return (
            f"{seen}, so few end with an answer: raise {self._knob('max_new_tokens')}, ask for shorter replies, or "
            "leave them out of the loss with mask_truncated_completions"
        )

    def _entropy(self) -> str | None:
        if len(self._entropies) < 2 * PATIENCE:
            return None
        start, now = fmean(self._entropies[:PATIENCE]), fmean(self._entropies[-PATIENCE:])
        if now >= ENTROPY_SHARE * start or now >= ENTROPY_MAX or self._is_solved() or self._is_gaining():
            return None
        return (
            f"entropy fell from {start:.2f} to {now:.3f} nats per token: the policy hardly varies its replies, so that "
            f"it finds nothing new; resume from an earlier checkpoint and raise {self._knob('temperature')} or "
            f"{self._knob('kl_coef')}, or lower {self._knob('learning_rate')}"
        )

    def _ratio(self, metrics: Mapping[str, Any]) -> str | None:
        mean, most = number(metrics.get("ratio_mean")), number(metrics.get("ratio_max"))
        clipped = number(metrics.get("clip_fraction"))
        seen = []
        if mean is not None and not RATIO_MEAN[0] <= mean <= RATIO_MEAN[1]:
            seen.append(f"the mean ratio of new to old probabilities is {mean:.2f}")
        if most is not None and most > RATIO_MAX:
            seen.append(f"the largest ratio of new to old probabilities is {most:.4g}")
        if clipped is not None and clipped > CLIPPED_SHARE:
            seen.append(f"{clipped:.0%} of tokens are clipped")
        if not self._lasts("ratio", bool(seen)):
            return None
        off_policy = "num_batches_ahead" if self._value("num_batches_ahead") else "num_iterations"
        return (
            f"{' and '.join(seen)}, for {PATIENCE} steps: updates move too far from the policy that sampled; lower "
            f"{self._knob('learning_rate')}, {self._knob(off_policy)} or {self._knob('epsilon')}, or cap the "
            f"weights of tokens with {self._knob('importance_cap')}"
        )

    def _divergence(self, metrics: Mapping[str, Any]) -> str | None:
        kl = number(metrics.get("kl"))
        if not self._lasts("kl", kl is not None and kl > KL_MAX):
            return None
        return (
            f"the KL divergence from the reference is {kl:.2f} nats per token (above {KL_MAX:g} for {PATIENCE} steps): "
            f"raise {self._knob('kl_coef')} or lower {self._knob('learning_rate')}, and read some replies to see "
            "whether they still make sense"
        )

    def _falling_reward(self) -> str | None:
        """Compare the last block of steps with the best block before it."""
        recent = self._rewards[-BLOCK * MAX_BLOCKS :]
        blocks = [recent[end - BLOCK : end] for end in range(len(recent), BLOCK - 1, -BLOCK)]
        if len(blocks) < 2:
            return None
        last, best = blocks[0], max(blocks[1:], key=fmean)
        drop = fmean(best) - fmean(last)
        error = math.sqrt(2 * fmean([variance(block) for block in blocks]) / BLOCK)
        span = self._best - self._worst if self._best > self._worst else max(recent) - min(recent)
        if drop <= FALL_ERRORS * error or drop <= FALL_SHARE * span:
            return None
        return (
            f"the reward fell from {fmean(best):.3f} to {fmean(last):.3f} (means of {BLOCK} steps): lower "
            f"{self._knob('learning_rate')}, raise {self._knob('kl_coef')}, or resume from an earlier checkpoint; "
            "harder rows are another possible cause"
        )

    def _dead_function(self, name: str) -> str | None:
        values = self._values(name)
        if len(self._columns) < WINDOW or not values or name in self._varied:
            return None
        return (
            f"the reward function {name!r} has returned {values[0]:.3g} for every rollout so far: it has a weight "
            f"({self.weights[name]:g}) but changes no advantage; check that it can return other values, and that the "
            "parser finds what it looks for"
        )

    def _dominance(self) -> str | None:
        """Notice if one reward function makes up nearly all variance because of its scale, not its weight."""
        if len(self._columns) < WINDOW:
            return None
        columns = {name: values for name in self.weights if (values := self._values(name))}
        spreads = {name: math.sqrt(variance(values)) for name, values in columns.items()}
        parts = {name: (self.weights[name] * spread) ** 2 for name, spread in spreads.items()}
        total = sum(parts.values())
        top = max(parts, key=lambda name: parts[name], default="")
        if total == 0 or parts[top] <= DOMINANT_SHARE * total:
            return None
        for name, spread in spreads.items():
            varies = spread > SATURATED_SPREAD * (max(columns[name]) - min(columns[name]))
            if varies and spreads[top] > DOMINANT_SCALE * spread:
                return (
                    f"the reward function {top!r} makes up {parts[top] / total:.1%} of the rewards' variance: its "
                    f"values have a standard deviation of {spreads[top]:.3g}, those of {name!r} of {spread:.3g}, which "
                    f"hardly counts; use one scale, or lower the weight of {top!r} (now {self.weights[top]:g})"
                )
        return None

    # --- state --------------------------------------------------------------------------------------------------

    def _remember(self, metrics: Mapping[str, Any], view: Mapping[str, Any]) -> None:
        # The reward of all sampled rollouts: filtering removes groups without variance, so the rest never looks solved.
        rewards = (number(metrics.get(name)) for name in ("reward_sampled", "reward"))
        if (reward := next((one for one in rewards if one is not None), None)) is not None:
            self._rewards.append(reward)
        if (entropy := number(metrics.get("entropy"))) is not None:
            self._entropies.append(entropy)
        for one in view.get("rewards") or ():
            if (value := number(one)) is not None:
                self._best, self._worst = max(self._best, value), min(self._worst, value)
        columns = {
            name: [value for one in (view.get("metrics") or {}).get(name) or () if (value := number(one)) is not None]
            for name in self.weights
        }
        if any(columns.values()):
            for name, values in columns.items():
                earlier = next((found[name][0] for found in self._columns if found[name]), None)
                if values and (max(values) > min(values) or (earlier is not None and values[0] != earlier)):
                    self._varied.add(name)
            self._columns.append(columns)

    def _lasts(self, kind: str, is_so: bool) -> bool:
        """Whether a condition has been true for PATIENCE steps in a row."""
        self._in_a_row[kind] = self._in_a_row.get(kind, 0) + 1 if is_so else 0
        return self._in_a_row[kind] >= PATIENCE

    def _is_solved(self) -> bool:
        """Whether the mean reward is close to the maximum.

        The maximum is the best reward so far. If all rewards have been equal, it is the sum of the weights: equal
        rewards far below it are not a solution (for example a format reward without any right answer).
        """
        if not self._rewards:
            return False
        most = sum(weight for weight in self.weights.values() if weight > 0)
        mean = fmean(self._rewards[-PATIENCE:])
        if self._best <= self._worst:
            return most > 0 and mean >= SOLVED_SHARE * most
        if self._best < SOLVED_LEAST * most:
            return False
        return mean - self._worst >= SOLVED_SHARE * (self._best - self._worst)

    def _is_gaining(self) -> bool:
        """Whether rewards still rise between the two halves of the window; then a falling entropy is not a problem."""
        half = WINDOW // 2
        if len(self._rewards) < WINDOW:
            return False
        gain = fmean(self._rewards[-half:]) - fmean(self._rewards[-WINDOW:-half])
        return gain > GAIN_SHARE * max(self._best - self._worst, 0.0)

    def _values(self, name: str) -> list[float]:
        return [value for columns in self._columns for value in columns[name]]

    def _value(self, knob: str) -> Any:
        return self.config.get(knob) if isinstance(self.config, Mapping) else getattr(self.config, knob, None)

    def _knob(self, name: str) -> str:
        value = self._value(name)
        shown = value if number(value) is None else f"{value:g}"
        return name if value is None else f"{name} (now {shown})"
