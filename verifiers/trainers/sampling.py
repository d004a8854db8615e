"""Merges the sampling arguments of configuration and environment; reads the distribution that a reply was sampled from.

Precedence: the configuration (a field that was set, or ``sampling_args``), then the environment's ``sampling_args``,
then the default of the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verifiers.chat.lru import LRU
from verifiers.samples import Sample

if TYPE_CHECKING:
    from verifiers.trainers.config import GRPOConfig

_ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
_FIELDS = ("temperature", "max_new_tokens", "top_p", "top_k", "min_p")  # of a configuration
_IN_BODY = ("top_k", "min_p")  # OpenAI clients accept these only in extra_body
_NEUTRAL: dict[str, tuple[Any, ...]] = {"top_p": (1, 1.0), "top_k": (0, -1), "min_p": (0, 0.0)}

# Arguments whose distribution an update cannot compute, each with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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
    """Arguments under their canonical names, including those in ``extra_body``; different values for one are an error.

    >>> flat({"max_completion_tokens": 8, "extra_body": {"top_k": 5}})
    {'max_tokens': 8, 'top_k': 5}
    """
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name, value, spelled in _items(args):
        if value is None:
            continue
        if name in found and found[name] != value:
            raise ValueError(
                f"{where} has {said[name]}={found[name]!r} and {spelled}={value!r}, which are the same thing; keep one"
            )
        found[name], said[name] = value, spelled
    return found


def names(args: Mapping[str, Any] | None) -> set[str]:
    """The canonical names of the given arguments."""
    return {name for name, value, _ in _items(args) if value is not None}


def _items(args: Mapping[str, Any] | None) -> Iterator[tuple[str, Any, str]]:
    """(Canonical name, value, spelling) of each argument."""
    for name, value in (args or {}).items():
        if name != "extra_body":
            yield _ALIASES.get(name, name), value, name
        for inner, one in (value or {}).items() if name == "extra_body" else ():
            yield _ALIASES.get(inner, inner), one, f"extra_body.{inner}"


def merged(
    config: GRPOConfig, own: Mapping[str, Any] | None = None, members: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Sampling arguments for an environment with its ``own`` arguments and, if it is a group, those of its ``members``.

    They are spelled as the environments spell them, so that they replace the environments' values.
    """
    given = flat(config.sampling_args, "sampling_args of the configuration")
    defaults: dict[str, Any] = {}
    for field in _FIELDS:
        name, value = _ALIASES.get(field, field), getattr(config, field)
        if not config.is_set(field):
            if value not in _NEUTRAL.get(name, ()):
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
    wanted = {name: value for name, value in wanted.items() if name in known or value not in _NEUTRAL.get(name, ())}
    return _spelled(wanted, config.sampling_args, own, *members)


def default_args(config: GRPOConfig, env: Any) -> dict[str, Any]:
    """Sampling arguments of a request that has none."""
    return merged(config, None if env is None else env.sampling_args)


def max_new_tokens(config: GRPOConfig, env: Any) -> int:
    """The most tokens of one reply."""
    return int(flat(default_args(config, env))["max_tokens"])


def overridden(args: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments replaced by ``further`` ones, even if they are spelled differently.

    >>> overridden({"max_tokens": 8, "temperature": 1.0}, {"max_completion_tokens": 16})
    {'max_tokens': 16, 'temperature': 1.0}
    """
    return _spelled({**flat(args), **flat(further, "eval_sampling_args")}, further, args)


def _spelled(wanted: Mapping[str, Any], given: Mapping[str, Any], *theirs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments as clients take them: under every spelling in ``theirs``, else under the one in ``given``."""
    spellings: dict[str, set[str]] = {}
    for args in theirs:
        for name, _, spelled in _items(args):
            spellings.setdefault(name, set()).add(spelled)
    for name, _, spelled in _items(given):
        spellings.setdefault(name, {f"extra_body.{name}" if name in _IN_BODY else spelled})
    plain: dict[str, Any] = {}
    body: dict[str, Any] = {}
    for name, value in wanted.items():
        for spelled in sorted(spellings.get(name) or [f"extra_body.{name}" if name in _IN_BODY else name]):
            (body if spelled.startswith("extra_body.") else plain)[spelled.removeprefix("extra_body.")] = value
    return {**plain, "extra_body": body} if body else plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """The distribution that tokens were sampled from: (logits + bias) / temperature, truncated.

    ``is_requested``: the engine did not report how it sampled, so that these are the arguments of the request. The
    logprobs that it returned may be of another distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    is_requested: bool = False

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def is_tempered(self) -> bool:
        """Whether this is the model's own distribution at some temperature, without truncation and bias."""
        return not self.truncates and not self.logit_bias


PLAIN = Distribution()


def read_distribution(record: Mapping[str, Any], where: str = "a reply") -> Distribution:
    """The distribution of a reply: as the engine recorded it, or as it was requested (``{"asked": {…}}``).

    >>> read_distribution({"asked": {"temperature": 0.7, "extra_body": {"top_k": 5}}}).top_k
    5
    """
    is_requested = "asked" in record
    args = flat(record["asked"] if is_requested else record, f"the record of {where}")
    for name in sorted(args.keys() & _UNSUPPORTED.keys()):
        if args[name] not in _UNSUPPORTED[name]:
            raise ValueError(
                f"{where} was sampled with {name}={args[name]!r}: the update cannot compute the distribution that this "
                "argument samples from; leave it out for training"
            )
    bias: Mapping[Any, Any] = args.get("logit_bias") or {}
    found = Distribution(
        temperature=float(args.get("temperature", 1.0)),
        top_p=float(args.get("top_p", 1.0)),
        top_k=max(int(args.get("top_k", 0)), 0),
        min_p=float(args.get("min_p", 0.0)),
        logit_bias=tuple(sorted((int(token), float(value)) for token, value in bias.items() if value)),
        is_requested=is_requested,
    )
    if not (math.isfinite(found.temperature) and found.temperature > 0):
        raise ValueError(
            f"{where} was sampled at temperature {found.temperature:g}: training needs a temperature above 0"
        )
    # Some engines apply one rule to the tokens that the other left, others apply both at once.
    if is_requested and (found.top_p < 1.0) + (found.top_k > 0) + (found.min_p > 0.0) > 1:
        raise ValueError(
            f"{where} was sampled with more than one of top_p, top_k and min_p by an engine that does not report how "
            "it combines them: use only one of them, or sample in this process"
        )
    return found


def check(args: Mapping[str, Any], where: str) -> None:
    """Refuse sampling arguments that cannot be trained with."""
    try:
        found = read_distribution(args, "a rollout")
    except ValueError as error:
        raise ValueError(f"{where} cannot be trained with: {error}") from None
    if not 0 < found.top_p <= 1 or not 0 <= found.min_p <= 1:
        raise ValueError(f"{where} has top_p={found.top_p:g}, min_p={found.min_p:g}: need 0 < top_p ≤ 1, 0 ≤ min_p ≤ 1")
    if (seed := flat(args).get("seed")) is not None:
        raise ValueError(
            f"{where} samples with seed={seed!r}: all rollouts of a prompt would be the same, and nothing could be "
            "learned from them; leave it out (to make a training repeatable, set seed= of the configuration)"
        )


def distributions(sample: Sample, default: Distribution) -> tuple[tuple[int, Distribution], ...]:
    """(Number of tokens, distribution) of each part of a completion; ``default`` where none was recorded."""
    if not sample.sampling:
        return ((len(sample.completion_ids), default),)
    return tuple([(n, default if record is None else _distribution(record)) for n, record in sample.sampling])


_read: LRU[Distribution] = LRU()


def _distribution(record: Mapping[str, Any]) -> Distribution:
    """`read_distribution`, cached: most replies were sampled with the same arguments."""
    found = _read.get(key := repr(record))
    if found is None:
        found = read_distribution(record)
        _read.put(key, found)
    return found


def without_greedy_logprobs(sample: Sample) -> Sample:
    """The sample; if any of its replies was decoded greedily, its logprobs are set to NaN (unknown)."""
    records = [record.get("asked", record) for _, record in sample.sampling if record is not None]
    if all(float(flat(one).get("temperature", 1.0)) > 0 for one in records):
        return sample
    return replace(sample, completion_logprobs=[math.nan] * len(sample.completion_ids), sampling=())


def without_doubtful_logprobs(
    sample: Sample, drawn: Sequence[tuple[int, Distribution]], *, is_off_policy: bool = False
) -> Sample:
    """The sample; its logprobs are set to NaN (unknown) if they may not be of the distribution that was sampled from.

    The update then computes them, which is correct only for a batch that the current policy sampled.
    """
    if all(not one.is_requested or one.is_tempered for _, one in drawn):
        return sample
    if is_off_policy:
        raise ValueError(
            "top_p, top_k, min_p and logit_bias cannot be combined with num_batches_ahead or steps_per_generation if "
            "the engine does not report how it sampled: its logprobs may be of another distribution; leave these out, "
            "or sample in this process"
        )
    return replace(sample, completion_logprobs=[math.nan] * len(sample.completion_ids))
