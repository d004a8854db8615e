"""Sampling arguments of a configuration and an environment become one set, and the record of a reply its distribution.

Which argument is in force: the configuration's (a field that was set, or ``sampling_args``), else the environment's own
``sampling_args``, else the default of the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verifiers.chat.recent import Recent
from verifiers.samples import Sample

if TYPE_CHECKING:
    from verifiers.trainers.config import GRPOConfig

_ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
_FIELDS = ("temperature", "max_new_tokens", "top_p", "top_k", "min_p")  # of a configuration
_IN_BODY = ("top_k", "min_p")  # OpenAI's clients take them nowhere else
_OFF: dict[str, tuple[Any, ...]] = {"top_p": (1, 1.0), "top_k": (0, -1), "min_p": (0, 0.0)}

# Arguments that change what is drawn in a way that an update cannot compute, with the values that change nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "frequency_penalty": (0,),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "tool_choice": ("auto", "none"),
    "use_beam_search": (False,),
}


def flat(args: Mapping[str, Any] | None, where: str = "sampling_args") -> dict[str, Any]:
    """Arguments by one name each, those in ``extra_body`` too; two names with two values are an error.

    >>> flat({"max_completion_tokens": 8, "extra_body": {"top_k": 5}})
    {'max_tokens': 8, 'top_k': 5}
    """
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name, value, spelled in _items(args):
        key = _ALIASES.get(name, name)
        if value is None:
            continue
        if key in found and found[key] != value:
            raise ValueError(
                f"{where} has {said[key]}={found[key]!r} and {spelled}={value!r}, which are the same thing; keep one"
            )
        found[key], said[key] = value, spelled
    return found


def names(args: Mapping[str, Any] | None) -> set[str]:
    """Which arguments there are, by one name each."""
    return {_ALIASES.get(name, name) for name, value, _ in _items(args) if value is not None}


def _items(args: Mapping[str, Any] | None) -> Iterator[tuple[str, Any, str]]:
    for name, value in (args or {}).items():
        if name != "extra_body":
            yield name, value, name
        for inner, one in (value or {}).items() if name == "extra_body" else ():
            yield inner, one, f"extra_body.{inner}"


def merged(
    config: GRPOConfig, own: Mapping[str, Any] | None = None, members: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """What is asked of a model, for an environment with arguments of its ``own`` (a group: and of its ``members``).

    It is written as the environments wrote it, so that it replaces what they say by themselves.
    """
    given = flat(config.sampling_args, "sampling_args of the configuration")
    defaults: dict[str, Any] = {}
    for field in _FIELDS:
        name, value = _ALIASES.get(field, field), getattr(config, field)
        if not config.is_set(field):
            if value not in _OFF.get(name, ()):
                defaults[name] = value
        elif name in given and given[name] != value:
            raise ValueError(
                f"{field}={value!r} and sampling_args[{name!r}]={given[name]!r} of the configuration are the same "
                "thing; keep one"
            )
        else:
            given[name] = value
    environment = flat(own, "sampling_args of the environment")
    theirs = {name for one in members for name in flat(one, "sampling_args of an environment")}
    wanted = {name: value for name, value in defaults.items() if name not in theirs} | environment | given
    known = environment.keys() | theirs
    wanted = {name: value for name, value in wanted.items() if name in known or value not in _OFF.get(name, ())}
    return _written(wanted, config.sampling_args, own, *members)


def over(args: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with others in their place, whatever they are called.

    >>> over({"max_tokens": 8, "temperature": 1.0}, {"max_completion_tokens": 16})
    {'max_tokens': 16, 'temperature': 1.0}
    """
    return _written({**flat(args), **flat(further, "eval_sampling_args")}, further, args)


def _written(wanted: Mapping[str, Any], given: Mapping[str, Any], *theirs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments as clients take them: in every place that ``theirs`` have them in, else where ``given`` has them."""
    places: dict[str, set[str]] = {}
    for args in theirs:
        for name, _, where in _items(args):
            places.setdefault(_ALIASES.get(name, name), set()).add(where)
    for name, _, where in _items(given):
        key = _ALIASES.get(name, name)
        places.setdefault(key, {f"extra_body.{key}" if key in _IN_BODY else where})
    plain: dict[str, Any] = {}
    body: dict[str, Any] = {}
    for key, value in wanted.items():
        for place in sorted(places.get(key) or [f"extra_body.{key}" if key in _IN_BODY else key]):
            (body if place.startswith("extra_body.") else plain)[place.removeprefix("extra_body.")] = value
    return {**plain, "extra_body": body} if body else plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """What tokens were drawn from: the model's logits, biased, over the temperature, and truncated.

    ``is_asked``: so it was asked for, of an engine that does not say how it drew; its logprobs may be of another.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    is_asked: bool = False

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def is_tempered(self) -> bool:
        """Is it the model's own but for the temperature?"""
        return not self.truncates and not self.logit_bias

    @property
    def is_ambiguous(self) -> bool:
        """Do engines understand it differently? Some truncate by one rule what the other left, some by both at once."""
        return self.is_asked and (self.top_p < 1.0) + (self.top_k > 0) + (self.min_p > 0.0) > 1


PLAIN = Distribution()


def read_distribution(record: Mapping[str, Any], where: str = "a reply") -> Distribution:
    """What a reply was drawn from, by the record of the engine, or by what was asked of one (``{"asked": {…}}``).

    >>> read_distribution({"asked": {"temperature": 0.7, "extra_body": {"top_k": 5}}}).top_k
    5
    """
    is_asked = "asked" in record
    args = flat(record["asked"] if is_asked else record, f"the record of {where}")
    for name in sorted(args.keys() & _NOT_FOLLOWED.keys()):
        if args[name] not in _NOT_FOLLOWED[name]:
            raise ValueError(
                f"{where} was sampled with {name}={args[name]!r}: the update cannot compute what that draws from; "
                "leave it out of what is trained on"
            )
    found = Distribution(
        temperature=float(args.get("temperature", 1.0)),
        top_p=float(args.get("top_p", 1.0)),
        top_k=max(int(args.get("top_k", 0)), 0),
        min_p=float(args.get("min_p", 0.0)),
        logit_bias=_bias(args.get("logit_bias") or {}),
        is_asked=is_asked,
    )
    if not (math.isfinite(found.temperature) and found.temperature > 0):
        raise ValueError(
            f"{where} was sampled at temperature {found.temperature:g}: training samples, at a temperature above 0"
        )
    if found.is_ambiguous:
        raise ValueError(
            f"{where} was sampled with more than one of top_p, top_k and min_p by an engine that does not say how it "
            "combines them: train with one of them, or sample in this process"
        )
    return found


def _bias(bias: Mapping[Any, Any]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(token), float(value)) for token, value in bias.items() if value))


def check(args: Mapping[str, Any], where: str) -> None:
    """Refuse arguments that a training cannot sample with."""
    try:
        found = read_distribution(args, "a rollout")
    except ValueError as error:
        raise ValueError(f"{where} cannot be trained with: {error}") from None
    if not 0 < found.top_p <= 1 or not 0 <= found.min_p <= 1:
        raise ValueError(f"{where} has top_p={found.top_p:g} and min_p={found.min_p:g}; both are shares, top_p above 0")
    if (seed := flat(args).get("seed")) is not None:
        raise ValueError(
            f"{where} samples with seed={seed!r}: all rollouts of a prompt would be the same, and nothing could be "
            "learned from them; leave it out (seed= of the configuration makes a training repeatable)"
        )


def distributions(sample: Sample, usual: Distribution) -> tuple[tuple[int, Distribution], ...]:
    """(Tokens, distribution) of each part of a sample's completion; ``usual`` where none was recorded."""
    if not sample.sampling:
        return ((len(sample.completion_ids), usual),)
    return tuple([(n, usual if record is None else _distribution(record)) for n, record in sample.sampling])


_read: Recent[Distribution] = Recent()


def _distribution(record: Mapping[str, Any]) -> Distribution:
    """`read_distribution`, once for all replies that were drawn alike."""
    found = _read.find(key := repr(record))
    if found is None:
        found = read_distribution(record)
        _read.keep(key, found)
    return found


def saved(sample: Sample) -> Sample:
    """A sample that was saved: one of which a reply was taken greedily is a text, whose logprobs are not known."""
    records = [record.get("asked", record) for _, record in sample.sampling if record is not None]
    if all(float(flat(one).get("temperature", 1.0)) > 0 for one in records):
        return sample
    return replace(sample, completion_logprobs=[math.nan] * len(sample.completion_ids), sampling=())


def without_doubtful_logprobs(
    sample: Sample, drawn: Sequence[tuple[int, Distribution]], *, is_off_policy: bool = False
) -> Sample:
    """The sample, its logprobs unknown (NaN) if they may be of another distribution than the tokens were drawn from.

    Such are measured in the update, which is no way out for a batch that an earlier policy sampled.
    """
    if all(not one.is_asked or one.is_tempered for _, one in drawn):
        return sample
    if is_off_policy:
        raise ValueError(
            "with num_batches_ahead or steps_per_generation, an engine that does not say how it drew cannot be trained "
            "with top_p, top_k, min_p or logit_bias: its logprobs may be of another distribution; leave these out, or "
            "sample in this process"
        )
    return replace(sample, completion_logprobs=[math.nan] * len(sample.completion_ids))
