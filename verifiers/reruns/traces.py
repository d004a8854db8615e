"""Traces of agents that ran elsewhere → rollouts, to be saved, scored, compared and trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from verifiers.envs.agent_branches import Branches, last_conversation
from verifiers.envs.environment import Environment
from verifiers.envs.states import fresh_state
from verifiers.errors import ModelError
from verifiers.messages import as_messages, role_of, text_of
from verifiers.reruns.json_values import json_value
from verifiers.reruns.spans import Call, Span, calls_in, read_spans
from verifiers.store import Record, to_record
from verifiers.types import Row, State, Usage

_TOKENS = ("verifiers.prompt_ids", "verifiers.completion_ids", "verifiers.completion_logprobs")
"""Span attributes for the exact tokens of a call, if the application knows them; the conventions define none."""


@dataclass(kw_only=True)
class Imported:
    """The rollouts of traces, the most frequent model, and the number of traces without a model call."""

    records: list[Record] = field(default_factory=list)
    model: str = "unknown"
    left_out: int = 0
    matched: int = 0


def import_traces(paths: Iterable[str | Path], env: Environment | None = None) -> Imported:
    """One rollout for each trace; its calls are the turns, in order of their start times.

    With an environment, a trace with a user message equal to a row's question gets that row's example, answer and info.
    """
    spans = [span for path in paths for span in _read(Path(path))]
    by_trace: dict[str, list[Span]] = {}
    for span in spans:
        by_trace.setdefault(span.trace, []).append(span)
    rows = {} if env is None else {_question(row["prompt"]): row for row in env.get_eval_dataset()}
    made, models, repeats = Imported(), Counter[str](), Counter[Any]()
    seen: dict[Any, int] = {}
    for trace, members in by_trace.items():
        members.sort(key=lambda span: (str(type(span.start)), span.start))
        try:
            calls = calls_in(members)
            if not any(call.prompt for call in calls):
                made.left_out += 1
                continue
            state = _state(trace, members, calls, rows, seen)
        except (ValueError, AttributeError, KeyError, TypeError) as error:  # malformed messages
            raise ValueError(f"trace {trace} cannot be read: {type(error).__name__}: {error}") from error
        models.update(_model(call) for call in calls)
        made.matched += state["info"].get("is_matched", False)
        key = state["example_id"]
        made.records.append(to_record(state, rollout=repeats[key], state_columns=("trajectory",)))
        repeats[key] += 1
    if models:
        made.model = models.most_common(1)[0][0]
    return made


def _read(path: Path) -> list[Span]:
    try:
        return read_spans(path.read_text(encoding="utf-8"))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be read as spans: {reason}") from error


def _state(trace: str, members: list[Span], calls: list[Call], rows: Mapping[str, Row], seen: dict[Any, int]) -> State:
    steps = _steps(trace, calls)
    last = calls[-1]
    first_prompt = steps[0]["prompt"] if steps else calls[0].prompt
    asked = [text_of(message) for message in first_prompt if role_of(message) == "user"]
    row = next((rows[text] for text in asked if text in rows), None)
    prompt, completion = last_conversation(steps) if steps else (first_prompt, [])
    key = msgspec.json.encode(prompt, enc_hook=str)
    about: Row = {"prompt": prompt, "answer": "", "example_id": seen.setdefault(key, len(seen)), "info": {}}
    about |= {} if row is None else {name: row.get(name) for name in ("answer", "example_id", "info", "task")}
    root = next((span for span in members if not span.parent), members[0])
    kept = {name: value for name, value in root.attributes.items() if not name.startswith("gen_ai.")}
    about["info"] = {**(about["info"] or {}), "trace_id": trace, **({"span": kept} if kept else {})}
    if row is not None:
        about["info"]["is_matched"] = True
    state = fresh_state(
        about,
        client=None,
        model=_model(last),
        sampling_args=None,
        task="otel",
        oai_tools=last.tools,
        message_type="chat",
    )
    state.update(trajectory=steps, completion=completion, is_completed=True, usage=_usage(calls), turn=len(steps))
    state["is_truncated"] = any(step["is_truncated"] for step in steps)
    state["stop_condition"] = "agent_done"
    failure = root.error or (last.span.error if last.reply is None else None)
    if failure is not None or not steps:
        state["error"] = ModelError(failure or "the trace contains no reply: it was recorded without content")
        state["stop_condition"] = "has_error"
    return state


def _steps(trace: str, calls: list[Call]) -> list[dict[str, Any]]:
    branches, steps = Branches(trace), []
    for call in calls:
        if call.reply is None:
            continue
        number, branch = branches.place(call.prompt, call.reply)
        is_cut = call.finish_reason == "length"
        extras = {"branch": number, **({"tools": call.tools} if call.tools else {})}
        steps.append(
            {
                "prompt": call.prompt,
                "completion": [call.reply],
                "tokens": _tokens(call),
                "reward": None,
                "advantage": None,
                "is_truncated": is_cut,
                "trajectory_id": branch,
                "extras": extras,
            }
        )
    return steps


def _tokens(call: Call) -> dict[str, Any] | None:
    prompt, reply, logprobs = given = [json_value(call.span.attributes.get(name)) for name in _TOKENS]
    if not any(given):
        return None
    are_lists = all(isinstance(one, list) for one in given)
    if not are_lists or len(reply) != len(logprobs) or not (_are(int, prompt + reply) and _are((int, float), logprobs)):
        wanted = "two lists of ids, and one logprob for each id of the reply"
        raise ValueError(f"span {call.span.id}: {', '.join(_TOKENS)} must be {wanted}, not {given!r:.200}")
    return {
        "prompt_ids": list(prompt),
        "prompt_mask": [0] * len(prompt),
        "completion_ids": list(reply),
        "completion_mask": [1] * len(reply),
        "completion_logprobs": list(logprobs),
        "overlong_prompt": False,
        "is_truncated": call.finish_reason == "length",
    }


def _are(kind: Any, values: list[Any]) -> bool:
    return all(isinstance(one, kind) and not isinstance(one, bool) for one in values)


def _question(prompt: Any) -> str:
    users = [message for message in as_messages(prompt) if role_of(message) == "user"]
    return text_of(users[-1]) if users else ""


def _model(call: Call) -> str:
    about = call.span.attributes
    return str(about.get("gen_ai.response.model") or about.get("gen_ai.request.model") or "unknown")


def _usage(calls: list[Call]) -> Usage:
    def total(*names: str) -> int:
        return sum(next((int(c.span.attributes[n]) for n in names if n in c.span.attributes), 0) for c in calls)

    return Usage(
        prompt_tokens=total("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
        completion_tokens=total("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    )
