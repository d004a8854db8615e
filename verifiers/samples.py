"""A rollout's turns become token samples with masks: what the model said is trained on, all else is not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.messages import as_messages
from verifiers.types import ProcessedOutputs, TrajectoryStepTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sequence: a prompt, and everything after it, with a 1 for each token that the model sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]
    is_truncated: bool = False
    # How many completion tokens each stretch has, and what its sampler recorded (None: nothing).
    sampling: tuple[tuple[int, Mapping[str, Any] | None], ...] = ()

    def __post_init__(self) -> None:
        n = len(self.completion_ids)
        if len(self.completion_mask) != n or len(self.completion_logprobs) != n:
            raise ValueError(
                f"{n} completion ids, {len(self.completion_mask)} mask entries, "
                f"{len(self.completion_logprobs)} logprobs; they must be as many"
            )


def samples_of(steps: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """The samples of one rollout, from the exact tokens of its turns.

    Turns join into one sample while each turn's prompt repeats the tokens before it. Where a chat template rewrote
    history, a new sample begins: nothing is re-tokenized and nothing is masked silently.

    >>> one = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}
    >>> two = {"prompt_ids": [1, 2, 3, 9], "completion_ids": [4], "completion_logprobs": [-0.1]}
    >>> [(s.prompt_ids, s.completion_ids, s.completion_mask) for s in samples_of([{"tokens": one}, {"tokens": two}])]
    [([1, 2], [3, 9, 4], [1, 0, 1])]
    """
    samples: list[Sample] = []
    for step in steps:
        tokens = step.get("tokens")
        if tokens is None or tokens.get("overlong_prompt"):
            continue
        joined = _join(samples[-1], tokens) if samples else None
        if joined is None:
            samples.append(_first(tokens))
        else:
            samples[-1] = joined
    return samples


def _first(tokens: TrajectoryStepTokens) -> Sample:
    return Sample(
        prompt_ids=list(tokens["prompt_ids"]),
        completion_ids=list(tokens["completion_ids"]),
        completion_mask=[1] * len(tokens["completion_ids"]),
        completion_logprobs=list(tokens["completion_logprobs"]),
        is_truncated=bool(tokens.get("is_truncated")),
        sampling=((len(tokens["completion_ids"]), tokens.get("sampling")),),
    )


def _join(before: Sample, tokens: TrajectoryStepTokens) -> Sample | None:
    seen = len(before.prompt_ids) + len(before.completion_ids)
    prompt = tokens["prompt_ids"]
    if prompt[:seen] != before.prompt_ids + before.completion_ids:
        return None
    between = list(prompt[seen:])
    reply = list(tokens["completion_ids"])
    return Sample(
        prompt_ids=before.prompt_ids,
        completion_ids=before.completion_ids + between + reply,
        completion_mask=before.completion_mask + [0] * len(between) + [1] * len(reply),
        completion_logprobs=before.completion_logprobs + [0.0] * len(between) + list(tokens["completion_logprobs"]),
        is_truncated=before.is_truncated or bool(tokens.get("is_truncated")),
        sampling=(*before.sampling, (len(between) + len(reply), tokens.get("sampling"))),
    )


def tokenized(prompt: Any, completion: Any, tokenizer: Any) -> Sample:
    """A sample made by tokenizing text, for rollouts whose engine gave no tokens; their logprobs are unknown (NaN)."""
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt_ids = list(tokenizer.encode(prompt))
        reply = list(tokenizer.encode(completion, add_special_tokens=False))
        return _unsampled(prompt_ids, reply, [1] * len(reply))
    messages = as_messages(prompt)
    prompt_ids = _template(tokenizer, messages, add_generation_prompt=True)
    ids: list[int] = list(prompt_ids)
    mask: list[int] = []
    for message in as_messages(completion, role="assistant"):
        messages = [*messages, message]
        is_reply = message.get("role") == "assistant"
        now = _template(tokenizer, messages, add_generation_prompt=not is_reply)
        if now[: len(ids)] != ids:
            raise ValueError(
                "this tokenizer's chat template rewrites earlier turns; give rollouts with exact tokens instead"
            )
        mask += [int(is_reply)] * (len(now) - len(ids))
        ids = now
    return _unsampled(prompt_ids, ids[len(prompt_ids) :], mask)


def _unsampled(prompt_ids: list[int], completion_ids: list[int], mask: list[int]) -> Sample:
    return Sample(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_mask=mask,
        completion_logprobs=[float("nan")] * len(completion_ids),
    )


def _template(tokenizer: Any, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=add_generation_prompt)
    return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)


def batches(
    rollouts: Iterable[tuple[Any, Any, Mapping[str, Any], float]],
    tokenizer: Any,
    *,
    batch_size: int,
    max_seq_len: int | None = None,
) -> Iterator[ProcessedOutputs]:
    """(prompt, completion, state, reward) of each rollout as batches of samples for a training loop of one's own."""
    pending: list[tuple[Sample, float]] = []
    for prompt, completion, state, reward in rollouts:
        found = samples_of(state.get("trajectory") or ())
        if not found:
            if tokenizer is None:
                raise ValueError("these rollouts carry no tokens; pass processing_class=tokenizer to tokenize the text")
            warnings.warn("rollouts without exact tokens are tokenized from text; logprobs are NaN", stacklevel=2)
            found = [tokenized(prompt, completion, tokenizer)]
        pending += [(_cut(sample, max_seq_len), reward) for sample in found]
        while len(pending) >= batch_size:
            yield _batch(pending[:batch_size])
            del pending[:batch_size]
    if pending:
        yield _batch(pending)


def _cut(sample: Sample, max_seq_len: int | None) -> Sample:
    if max_seq_len is None or len(sample.prompt_ids) + len(sample.completion_ids) <= max_seq_len:
        return sample
    room = max(max_seq_len - len(sample.prompt_ids), 0)
    return Sample(
        prompt_ids=sample.prompt_ids[:max_seq_len],
        completion_ids=sample.completion_ids[:room],
        completion_mask=sample.completion_mask[:room],
        completion_logprobs=sample.completion_logprobs[:room],
        is_truncated=True,
        sampling=sample.sampling,
    )


def _batch(pairs: Sequence[tuple[Sample, float]]) -> ProcessedOutputs:
    samples = [sample for sample, _ in pairs]
    return ProcessedOutputs(
        prompt_ids=[s.prompt_ids for s in samples],
        prompt_mask=[[0] * len(s.prompt_ids) for s in samples],
        completion_ids=[s.completion_ids for s in samples],
        completion_mask=[s.completion_mask for s in samples],
        completion_logprobs=[s.completion_logprobs for s in samples],
        rewards=[reward for _, reward in pairs],
        is_truncated=[s.is_truncated for s in samples],
    )
