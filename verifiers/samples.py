"""The turns of a rollout → token samples with loss masks: only tokens that the model sampled are trained on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifiers.chat import ChatWriter
from verifiers.messages import as_messages, called_functions, template_settings, text_of, tools_of
from verifiers.types import ChatMessage, ProcessedOutputs, TrajectoryStepTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sequence: a prompt and everything after it. The mask is 1 for each token that the model sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]
    is_truncated: bool = False
    # For each segment of the completion: its number of tokens, and the recorded sampling details (None: none).
    sampling: tuple[tuple[int, Mapping[str, Any] | None], ...] = ()
    steps: tuple[int, ...] = ()  # the trajectory steps of the sampled tokens

    def __post_init__(self) -> None:
        n = len(self.completion_ids)
        if len(self.completion_mask) != n or len(self.completion_logprobs) != n:
            raise ValueError(
                f"{n} completion ids, {len(self.completion_mask)} mask entries, "
                f"{len(self.completion_logprobs)} logprobs; the numbers must be equal"
            )

    def first(self, n: int, **changes: Any) -> Sample:
        """The same sample with at most ``n`` completion tokens."""
        names = ("completion_ids", "completion_mask", "completion_logprobs")
        return replace(self, **{name: getattr(self, name)[:n] for name in names}, **changes)


def samples_of(steps: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """The samples of one rollout, from the exact tokens of its turns.

    Turns are joined into one sample if each prompt begins with the tokens of the turns before, even with other calls
    (of a sub-agent) in between. Where the history was rewritten, a new sample begins: nothing is tokenized again, and
    nothing is masked silently.

    >>> one = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}
    >>> two = {"prompt_ids": [1, 2, 3, 9], "completion_ids": [4], "completion_logprobs": [-0.1]}
    >>> [(s.prompt_ids, s.completion_ids, s.completion_mask) for s in samples_of([{"tokens": one}, {"tokens": two}])]
    [([1, 2], [3, 9, 4], [1, 0, 1])]
    """
    samples: list[Sample] = []
    for number, step in enumerate(steps):
        tokens = step.get("tokens")
        if tokens is None or tokens.get("overlong_prompt"):
            continue
        for place in range(len(samples) - 1, -1, -1):
            joined = _join(samples[place], tokens, number)
            if joined is not None:
                samples[place] = joined
                break
        else:
            samples.append(_first(tokens, number))
    return samples


def _first(tokens: TrajectoryStepTokens, number: int) -> Sample:
    return Sample(
        prompt_ids=list(tokens["prompt_ids"]),
        completion_ids=list(tokens["completion_ids"]),
        completion_mask=[1] * len(tokens["completion_ids"]),
        completion_logprobs=list(tokens["completion_logprobs"]),
        is_truncated=bool(tokens.get("is_truncated")),
        sampling=((len(tokens["completion_ids"]), tokens.get("sampling")),),
        steps=(number,),
    )


def _join(before: Sample, tokens: TrajectoryStepTokens, number: int) -> Sample | None:
    first, seen = len(before.prompt_ids), len(before.prompt_ids) + len(before.completion_ids)
    prompt = tokens["prompt_ids"]
    if len(prompt) < seen or prompt[first:seen] != before.completion_ids or prompt[:first] != before.prompt_ids:
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
        steps=(*before.steps, number),
    )


# --- rollouts -----------------------------------------------------------------------------------------------------


class NotSampledError(ValueError):
    """The sampled tokens of a rollout are not known, so it cannot be trained on. The message says why."""


NO_TOKENS = (
    "the client gave no token ids and logprobs: train in this process, or ask for them in sampling_args (vLLM: "
    "logprobs=True and extra_body={'return_token_ids': True})"
)


def exact_samples(state: Mapping[str, Any], completion: Any = None) -> list[Sample]:
    """The samples of a rollout with the exact sampled tokens; NotSampledError if they are not known."""
    steps = state.get("trajectory") or ()
    samples = samples_of(steps)
    if samples or any(step.get("tokens") is not None for step in steps):
        return samples
    if reason := getattr(state, "not_sampled", None):
        raise NotSampledError(reason)
    if steps:
        raise NotSampledError(NO_TOKENS)
    if state.get("completion") or completion:
        raise NotSampledError("it has text but no trajectory, so the sampled tokens are not known")
    return []  # it ended before the model was called


def are_ids_of(steps: Iterable[Mapping[str, Any]], writer: ChatWriter) -> bool:
    """Whether the ids of a saved rollout are of this tokenizer. Ids of another one would train on other text."""
    for step in steps:
        tokens, completion = step.get("tokens"), step.get("completion")
        if tokens is not None and completion is not None:
            text = writer.codec.continuation(tokens["prompt_ids"], tokens["completion_ids"])
            for message in as_messages(completion, role="assistant"):
                if any(words not in text for words in (text_of(message).strip(), *_called(message))):
                    return False
    return True


def _called(message: ChatMessage) -> Iterator[str]:
    return (str(function["name"]) for function in called_functions(message) if function.get("name"))


# --- text that was not sampled ------------------------------------------------------------------------------------


def written_samples(
    prompt: Any, completion: Any, writer: Any, row: Mapping[str, Any], tools: Any = None
) -> list[Sample]:
    """Samples from the text of a row, record or state, with its tools and template variables; truncated if it was."""
    is_cut = bool(row.get("is_truncated")) and row.get("stop_condition") != "prompt_too_long"
    offered = tools_of(row) if tools is None else tools
    return tokenized(prompt, completion, writer, offered, is_cut=is_cut, **template_settings(row))


def tokenized(prompt: Any, completion: Any, writer: Any, tools: Any = None, **settings: Any) -> list[Sample]:
    """Samples of a text, rendered as the engine would render it. Their logprobs are NaN.

    ``writer`` is a `ChatWriter` or a tokenizer, ``settings`` are variables of its template. A template that rewrites
    earlier turns yields several samples.
    """
    writer = writer if isinstance(writer, ChatWriter) else ChatWriter(writer)
    turns = writer.turns(prompt, completion, tools, **settings)
    samples = samples_of(
        {
            "tokens": {
                "prompt_ids": turn.prompt_ids,
                "completion_ids": turn.reply_ids,
                "completion_logprobs": [float("nan")] * len(turn.reply_ids),
            }
        }
        for turn in turns
    )
    return [sample if sample.prompt_ids else _without_first(sample) for sample in samples]


def _without_first(sample: Sample) -> Sample:
    """Mask the first token of a text without a prompt, because nothing predicts it."""
    return replace(sample, completion_mask=[0, *sample.completion_mask[1:]][: len(sample.completion_mask)])


def batches(
    rollouts: Iterable[tuple[Any, Any, Mapping[str, Any], float]],
    tokenizer: Any,
    *,
    batch_size: int,
    max_seq_len: int | None = None,
) -> Iterator[ProcessedOutputs]:
    """(prompt, completion, state, reward) of each rollout → batches of samples, for a user's training loop."""
    pending: list[tuple[Sample, float]] = []
    writer: ChatWriter | None = None
    for prompt, completion, state, reward in rollouts:
        try:
            found = exact_samples(state, completion)
        except NotSampledError as error:
            if tokenizer is None:
                raise ValueError(
                    f"the sampled tokens of a rollout are not known ({error}); pass processing_class=tokenizer to "
                    "tokenize the text"
                ) from None
            warnings.warn(
                f"rollouts without exact tokens are tokenized from text; logprobs are NaN ({error})", stacklevel=2
            )
            writer = writer or ChatWriter(tokenizer)
            found = written_samples(prompt, completion, writer, state)
        pending += [(_cut(sample, max_seq_len), reward) for sample in found]
        while len(pending) >= batch_size:
            yield _batch(pending[:batch_size])
            del pending[:batch_size]
    if pending:
        yield _batch(pending)


def one_batch(
    rollouts: Iterable[tuple[Any, Any, Mapping[str, Any], float]],
    tokenizer: Any,
    *,
    max_seq_len: int | None = None,
    mask_env_responses: bool = True,
    mask_truncated_completions: bool = False,
    zero_truncated_completions: bool = False,
) -> ProcessedOutputs:
    """All rollouts as one batch. Truncated ones are fully masked, or get a reward of 0, if requested."""
    if not mask_env_responses:
        warnings.warn(
            "mask_env_responses=False has no effect: only tokens that the model sampled are trained on", stacklevel=3
        )
    limit = None if max_seq_len is None or max_seq_len < 0 else max_seq_len
    for batch in batches(rollouts, tokenizer, batch_size=sys.maxsize, max_seq_len=limit):
        for i, is_cut in enumerate(batch["is_truncated"]):
            if is_cut and mask_truncated_completions:
                batch["completion_mask"][i] = [0] * len(batch["completion_ids"][i])
            if is_cut and zero_truncated_completions:
                batch["rewards"][i] = 0.0
        return batch
    raise ValueError("there are no rollouts to process")


def _cut(sample: Sample, max_seq_len: int | None) -> Sample:
    if max_seq_len is None or len(sample.prompt_ids) + len(sample.completion_ids) <= max_seq_len:
        return sample
    room = max(max_seq_len - len(sample.prompt_ids), 0)
    return sample.first(room, prompt_ids=sample.prompt_ids[:max_seq_len], is_truncated=True, steps=())


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
