"""SFT examples (texts, chats, gold answers, saved rollouts) become samples whose loss mask covers the replies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifiers.chat import ChatWriter
from verifiers.envs.env_group import environment_of
from verifiers.envs.environment import Environment
from verifiers.messages import as_messages
from verifiers.samples import Sample, are_ids_of, samples_of, tokenized, written_samples
from verifiers.store.training_data import note_missing_tools
from verifiers.trainers.offline import read_rows
from verifiers.trainers.setup import tools_for

_KINDS = "prompt and completion, messages, or (with env=) question and answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTSamples:
    """Samples to train on, and how many rows were left out: failed, below ``min_reward``, or too long."""

    samples: list[Sample]
    failed: int = 0
    below: int = 0
    overlong: int = 0

    @property
    def dropped(self) -> int:
        return self.failed + self.below + self.overlong


def read_samples(
    given: Any,
    tokenizer: Any,
    *,
    env: Environment | None = None,
    min_reward: float | None = None,
    max_length: int | None = None,
) -> SFTSamples:
    """The samples of a dataset (rows, columns, `Results`, a run directory, a file); of the environment's, if None."""
    rows = _rows_of(given, env)
    if not rows:
        raise ValueError("the dataset has no rows to imitate")
    alive = [row for row in rows if not row.get("error")]
    wanted = alive if min_reward is None else [row for row in alive if _reward(row) >= min_reward]
    if not wanted:
        raise ValueError(_nothing_left(rows, alive, min_reward))
    samples: list[Sample] = []
    overlong = 0
    writer = ChatWriter(tokenizer)
    note_missing_tools(wanted if env is None else (), "pass env=, the environment that they come from")
    for i, row in enumerate(wanted):
        found = [_truncated(sample, max_length) for sample in _samples(row, i, writer, env)]
        fitting = [sample for sample in found if any(sample.completion_mask)]
        overlong += not fitting
        samples += fitting
    if not samples:
        raise ValueError(
            f"all {len(wanted)} rows are too long: no reply begins within max_seq_length={max_length} tokens"
        )
    return SFTSamples(samples=samples, failed=len(rows) - len(alive), below=len(alive) - len(wanted), overlong=overlong)


def _nothing_left(rows: Sequence[Any], alive: Sequence[Any], min_reward: float | None) -> str:
    if not alive:
        return f"all {len(rows)} rollouts failed: there is nothing to imitate"
    best = max((_reward(row) for row in alive), default=float("-inf"))
    if best == float("-inf"):
        return f"min_reward={min_reward} needs rows with a reward, but these have none; leave it out"
    return f"no row has a reward of at least min_reward={min_reward}: the best reward is {best:g}"


def _reward(row: Mapping[str, Any]) -> float:
    reward = row.get("reward")
    try:
        return float("-inf") if reward is None else float(reward)
    except (TypeError, ValueError):
        raise ValueError(f"min_reward needs rewards that are numbers, but a row has {reward!r:.80}") from None


def _rows_of(given: Any, env: Environment | None) -> Sequence[Mapping[str, Any]]:
    if given is None:
        if env is None:
            raise ValueError(f"there is nothing to imitate; pass dataset= (rows with {_KINDS}), or env=")
        given = env.get_dataset()
    found = read_rows(given)
    rows: Sequence[Any] = [given[i] for i in range(len(given))] if found is None else found
    if odd := [row for row in rows if not isinstance(row, Mapping)]:
        raise TypeError(f"a row must be a mapping with {_KINDS}, not a {type(odd[0]).__name__}")
    return rows


def _samples(row: Mapping[str, Any], position: int, writer: ChatWriter, env: Environment | None) -> list[Sample]:
    """The samples of a row, with the sampled tokens if the row has them, else with its text tokenized."""
    exact = samples_of(row.get("trajectory") or ())
    if exact and are_ids_of(row["trajectory"], writer):
        return exact
    prompt, completion = _parts(row, position, env)
    for name, given in (("prompt", prompt), ("completion", completion)):
        if not isinstance(given, Iterable) and not hasattr(given, "model_dump"):
            raise ValueError(f"row {position}: its {name} must be a text or messages, not {given!r:.80}")
    if isinstance(prompt, str) and isinstance(completion, str):
        end = None if row.get("is_truncated") else writer.tokenizer.eos_token_id
        return [_with_eos(sample, end) for sample in tokenized(prompt, completion, writer)]
    if not writer.template.is_there:
        raise ValueError("these rows are chats, but this tokenizer has no chat template; set tokenizer.chat_template")
    return written_samples(prompt, completion, writer, row, tools_for(env, row))


def _parts(row: Mapping[str, Any], position: int, env: Environment | None) -> tuple[Any, Any]:
    """Prompt and completion of a row, as texts or as messages."""
    if row.get("messages") is not None:
        return _split(as_messages(row["messages"]), position)
    if row.get("completion") is not None:
        return _prompt(row, position, env), row["completion"]
    if row.get("answer") is not None and env is not None:
        reply = gold_reply(env, row)
        prompt = _prompt(row, position, env)
        return prompt, reply if isinstance(prompt, str) else [{"role": "assistant", "content": reply}]
    columns = ", ".join(map(str, row)) or "none"
    hint = "; to use its answer, pass env=, whose parser defines its format" if row.get("answer") is not None else ""
    raise ValueError(f"row {position} has nothing to imitate: it needs {_KINDS} (its columns: {columns}{hint})")


def _prompt(row: Mapping[str, Any], position: int, env: Environment | None) -> Any:
    if env is not None:
        return env.formatted(row)["prompt"]
    prompt = row.get("prompt")
    if prompt is None and row.get("question") is not None:
        prompt = as_messages(row["question"])
    if prompt is None:
        raise ValueError(f"row {position} has a completion but neither a 'prompt' nor a 'question'")
    return prompt


def _split(messages: list[dict[str, Any]], position: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), None)
    if first is None:
        raise ValueError(f"row {position}: none of its {len(messages)} messages is the assistant's; there is no reply")
    if first == 0:
        raise ValueError(
            f"row {position} begins with an assistant message, but a reply needs a prompt; put a system or user "
            "message before it, or leave out the row"
        )
    return messages[:first], messages[first:]


def gold_reply(env: Environment, row: Mapping[str, Any]) -> str:
    """A reply from which the environment's parser reads the row's answer; its other fields are columns of the row.

    >>> from verifiers.envs import SingleTurnEnv
    >>> from verifiers.parsers import XMLParser
    >>> from verifiers.rubrics import Rubric
    >>> env = SingleTurnEnv(dataset=[], parser=XMLParser(["think", "answer"]), rubric=Rubric([]))
    >>> gold_reply(env, {"think": "2 and 2", "answer": "4"})
    '<think>\\n2 and 2\\n</think>\\n<answer>\\n4\\n</answer>'
    """
    player = environment_of(env, row.get("task")) or env
    parser, answer = player.parser, str(row["answer"])
    for reply in _formats(parser, row, answer):
        if str(parser.parse_answer([{"role": "assistant", "content": reply}])).strip() == answer.strip():
            return reply
    raise ValueError(
        f"the environment's {type(parser).__name__} does not find the answer {answer[:60]!r} in any common form of "
        "reply; pass rows with a completion that is written as the parser expects"
    )


def _formats(parser: Any, row: Mapping[str, Any], answer: str) -> Iterator[str]:
    """The answer in the parser's own format, then in common ones."""
    fields, write = getattr(parser, "get_fields", None), getattr(parser, "format", None)
    if callable(fields) and callable(write):
        target = getattr(parser, "answer_field", "answer")
        yield str(write(**{name: answer if name == target else row.get(name) or "" for name in fields()}))
    yield answer
    yield f"\\boxed{{{answer}}}"
    yield f"<think>\n\n</think>\n\n{answer}"
    yield f"<think>\n\n</think>\n\n\\boxed{{{answer}}}"
    yield f"#### {answer}"


def _with_eos(sample: Sample, end: int | None) -> Sample:
    """The sample with an end token, which is trained on too."""
    if end is None or sample.completion_ids[-1:] == [end]:
        return sample
    return replace(
        sample,
        completion_ids=[*sample.completion_ids, end],
        completion_mask=[*sample.completion_mask, int(bool(sample.prompt_ids or sample.completion_ids))],
        completion_logprobs=[*sample.completion_logprobs, float("nan")],
    )


def _truncated(sample: Sample, most: int | None) -> Sample:
    room = None if most is None else max(most - len(sample.prompt_ids), 0)
    if room is None or len(sample.completion_ids) <= room:
        return sample
    return sample.first(room, is_truncated=True)
