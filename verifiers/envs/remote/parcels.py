"""States, errors, requests and completions ↔ plain data for another process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from verifiers.clients.protocol import Completion, Request
from verifiers.envs.calling import Answerer
from verifiers.errors import Error, InfraError, describe, ending_cause
from verifiers.messages import make_readable
from verifiers.rubrics.score import Score
from verifiers.rubrics.shipping import LIVE
from verifiers.store.plain import plain
from verifiers.store.record import read_usage
from verifiers.types import State

Plain = dict[str, Any]


# --- states -------------------------------------------------------------------------------------------------------


def detached(state: State, score: Score | None = None) -> tuple[Plain, Plain | None]:
    """A finished rollout and its score as plain data: without the client and raw responses, with errors as data."""
    fields = {key: value for key, value in state.items() if key not in LIVE}
    if isinstance(steps := fields.get("trajectory"), list):
        fields["trajectory"] = [{**step, "response": None} if isinstance(step, Mapping) else step for step in steps]
    fields["error"] = error_fields(fields.get("error"))
    if reason := getattr(state, "not_sampled", None):
        fields["_not_sampled"] = reason
    return fields, None if score is None else score_fields(score)


def attached(fields: Mapping[str, Any], score: Mapping[str, Any] | None, answerer: Answerer | None) -> State:
    """The state of a rollout that ran elsewhere, with this process's client."""
    state = State(fields)
    if reason := state.pop("_not_sampled", None):
        state.not_sampled = reason
    make_readable(state)
    state["error"] = read_error(state.get("error"))
    if isinstance(used := state.get("usage"), Mapping):
        state["usage"] = read_usage(used) or used
    if answerer is not None:
        state["client"] = answerer.given
        state.answerer = answerer
    if score is not None:
        state.remote_score = read_score(score)
    return state


def score_fields(score: Score) -> Plain:
    return {"reward": score.reward, "metrics": score.metrics, "error": error_fields(score.error)}


def read_score(fields: Mapping[str, Any]) -> Score:
    error = read_error(fields.get("error"))
    reward = fields["reward"]  # JSON has null for NaN and infinity, which must fail here as on the server
    return Score(math.nan if reward is None else reward, dict(fields["metrics"]), error)


# --- errors -------------------------------------------------------------------------------------------------------


def error_fields(error: Any) -> Plain | None:
    """An error as data: its record, and that of the cause that ends the whole run, if any."""
    if not isinstance(error, BaseException):
        return None if error is None else {"record": plain(error)}
    ending = ending_cause(error)
    return {"record": describe(error), "ending": None if ending is None else describe(ending)}


def read_error(fields: Any) -> Any:
    """The error from another process, with the same class and the traceback that it had there.

    >>> from verifiers.errors import JudgeError
    >>> read_error(error_fields(JudgeError("the judge is down")))
    JudgeError('the judge is down')
    """
    if not isinstance(fields, Mapping):
        return None
    record, ending = fields.get("record"), fields.get("ending")
    if not isinstance(record, Mapping) or "blame" not in record:
        return record
    error = _error_of(record)
    if isinstance(ending, Mapping) and ending != record:
        error.__cause__ = _error_of(ending)
    return error


def _error_of(record: Mapping[str, Any]) -> Error:
    kind = _classes().get(record["type"])
    if kind is None or kind.blame != record["blame"]:
        kind = type(str(record["type"]), (Error,), {"blame": record["blame"]})
    error = Exception.__new__(kind, str(record["message"]))  # without __init__, which may have other arguments
    error.args = (str(record["message"]),)
    error.described = dict(record)
    return error


def _classes() -> dict[str, type[Error]]:
    found: dict[str, type[Error]] = {}
    below: list[type[Error]] = [Error]
    while below:
        kind = below.pop()
        found.setdefault(kind.__name__, kind)
        below += kind.__subclasses__()
    return found


# --- requests and completions -------------------------------------------------------------------------------------


def sendable(completion: Completion) -> Completion:
    """A completion without objects of an SDK. Raw JSON of an endpoint is kept."""
    return completion if isinstance(completion.raw, dict) else replace(completion, raw=None)


def read_request(fields: Any) -> Request:
    try:
        return msgspec.convert(fields, Request)
    except msgspec.ValidationError as error:
        raise InfraError(f"a request for the model cannot be read: {error}") from error


def read_completion(fields: Any) -> Completion:
    try:
        return msgspec.convert(fields, Completion)
    except msgspec.ValidationError as error:
        raise InfraError(f"a completion cannot be read: {error}") from error
