"""Sampling requests → requests to the engine; replies → bodies. Protobuf, or JSON for older clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verifiers.engine.ready_model import ReadyModel
from verifiers.engine.sequence import Answer, Generated, OnToken, PromptLogprob, Sampling
from verifiers.engine.text.detokenizer import StopWatch
from verifiers.errors import RequestRefusedError
from verifiers.integrations.tinker import wire
from verifiers.integrations.tinker.data import Datum, Written, json_tensor, json_tokens
from verifiers.trainers.sampling import PLAIN, Distribution

MOST_SAMPLES = 1024
MOST_TOPK = 1024
EMPTY = -99999.0  # the logprob that fills unused entries
_PARAMS = frozenset(("max_tokens", "seed", "stop", "temperature", "top_k", "top_p"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """A request for ``n`` replies to a prompt, and for logprobs of the prompt's tokens."""

    prompt: list[int]
    n: int
    sampling: Sampling
    stop_texts: tuple[str, ...] = ()
    topk_prompt: int = 0
    last_n: int | None = None
    targets: Any = None  # K token ids for each prompt position but the last; -1: none
    records: bool = False  # keep the logprobs, to be looked up by sequence id

    @classmethod
    def read(cls, body: Mapping[str, Any], ready: ReadyModel) -> SampleRequest:
        prompt = json_tokens(body.get("prompt"))
        if not prompt or not all(0 <= token < ready.vocabulary for token in prompt):
            raise RequestRefusedError(f"the prompt is empty, or not of the {ready.vocabulary} tokens of this model")
        room = ready.engine.length - len(prompt)
        if room < 1:
            raise RequestRefusedError(
                f"the prompt has {len(prompt)} tokens, but the model's context is {ready.engine.length}, including the "
                "reply"
            )
        if body.get("prompt_alt_tokens_k"):
            raise RequestRefusedError("prompt_alt_tokens_k is not supported by this server; leave it out")
        last_n = body.get("prompt_logprobs_last_n")
        if last_n is not None and not 1 <= _whole(body, "prompt_logprobs_last_n", 1) < len(prompt):
            raise RequestRefusedError(f"prompt_logprobs_last_n must be from 1 to {len(prompt) - 1}, not {last_n!r:.80}")
        topk_prompt = _whole(body, "topk_prompt_logprobs", 0, most=MOST_TOPK)
        scores = bool(body.get("prompt_logprobs")) or topk_prompt > 0
        sampling, texts = _sampling(
            body.get("sampling_params") or {},
            ready,
            room,
            top_logprobs=_whole(body, "topk_sample_logprobs", 0, most=MOST_TOPK),
            prompt_logprobs=topk_prompt if scores else None,
        )
        return cls(
            prompt=prompt,
            n=_whole(body, "num_samples", 1, least=1, most=MOST_SAMPLES),
            sampling=sampling,
            stop_texts=texts,
            topk_prompt=topk_prompt,
            last_n=last_n,
            targets=_targets(body.get("target_prompt_logprobs"), prompt, ready.vocabulary),
            records=bool(body.get("record_stability_info")),
        )

    @property
    def scores_prompt(self) -> bool:
        return self.sampling.prompt_logprobs is not None

    def submit(self, ready: ReadyModel, *, scores_prompt: bool) -> list[Answer]:
        sampling = self.sampling if scores_prompt else replace(self.sampling, prompt_logprobs=None)
        watches: list[OnToken] | None = None
        if self.stop_texts:
            watches = [StopWatch(ready.codec, self.stop_texts, self.prompt) for _ in range(self.n)]
        return ready.engine.submit(self.prompt, sampling, n=self.n, on_token=watches)

    @property
    def drawn_from(self) -> Distribution:
        """The distribution that tokens are sampled from; for greedy decoding, the model's own."""
        one = self.sampling
        if one.temperature == 0:
            return PLAIN
        return Distribution(temperature=one.temperature, top_p=one.top_p, top_k=one.top_k)

    @property
    def target_datum(self) -> Datum:
        return Datum(ids_T=np.array(self.prompt[:-1], np.int64), inputs={"target_tokens": self.targets.clip(min=0)})


def gathered(answers: Sequence[Answer]) -> Future[list[Generated]]:
    """One future for several, done when all are."""
    whole: Future[list[Generated]] = Future()
    left = [len(answers)]

    def note(_: Any) -> None:
        left[0] -= 1
        if left[0] or whole.done():
            return
        try:
            whole.set_result([answer.result() for answer in answers])
        except BaseException as error:  # passed on to the waiting caller
            whole.set_exception(error)

    for answer in answers:
        answer.add_done_callback(note)
    return whole


def _sampling(
    given: Any, ready: ReadyModel, room: int, *, top_logprobs: int, prompt_logprobs: int | None
) -> tuple[Sampling, tuple[str, ...]]:
    if not isinstance(given, Mapping):
        raise RequestRefusedError("sampling_params must be an object")
    if unknown := given.keys() - _PARAMS:
        raise RequestRefusedError(
            f"unknown sampling parameter {min(unknown)!r}; there are {', '.join(sorted(_PARAMS))}"
        )
    ids, texts = _stops(given.get("stop"), ready)
    top_k, seed = given.get("top_k", -1), given.get("seed")
    wanted = room if given.get("max_tokens") is None else _whole(given, "max_tokens", room, least=1)
    try:
        return Sampling(
            max_tokens=min(wanted, room),
            temperature=float(given.get("temperature", 1.0)),
            top_p=float(given.get("top_p", 1.0)),
            top_k=0 if top_k == -1 else min(int(top_k), ready.vocabulary),
            seed=None if seed is None else int(seed) % (1 << 62),
            stop_ids=ready.stop_ids - ready.engine.stop_ids if ids is None else ids,
            ignore_eos=ids is not None,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        ), texts  # fmt: skip
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestRefusedError(f"a sampling parameter is out of range: {error}") from error


def _stops(given: Any, ready: ReadyModel) -> tuple[frozenset[int] | None, tuple[str, ...]]:
    """Token ids and texts that end a reply. Ids None: the model's own stop tokens. A text that is one token is both."""
    if given is None:
        return None, ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or any(type(one) not in (int, str) or one == "" for one in stops):
        raise RequestRefusedError(f"stop must be texts or token ids, not {given!r:.80}")
    ids = {one for one in stops if isinstance(one, int) and 0 <= one < ready.vocabulary}  # other ids are never sampled
    texts = tuple(one for one in stops if isinstance(one, str))
    for text in texts:
        found = ready.codec.encode(text, special=False)
        ids |= set(found) if len(found) == 1 else set()
    return frozenset(ids), texts


def _targets(given: Any, prompt: Sequence[int], vocabulary: int) -> Any:
    if given is None:
        return None
    if isinstance(given, Mapping) and given.get("sparse_crow_indices") is not None:
        raise RequestRefusedError("target_prompt_logprobs must not be sparse; send a dense array with -1 for no target")
    targets = json_tensor("target_prompt_logprobs", given)
    is_sound = targets.dtype.kind == "i" and targets.ndim == 2 and len(targets) == len(prompt) - 1 and targets.size
    if not is_sound or targets.min() < -1 or targets.max() >= vocabulary:
        raise RequestRefusedError(f"target_prompt_logprobs must be token ids or -1, with shape [{len(prompt) - 1}, K]")
    return targets


def _whole(body: Mapping[str, Any], name: str, usual: int, *, least: int = 0, most: int = 1 << 30) -> int:
    value = body.get(name)
    value = usual if value is None else value
    if type(value) is not int or not least <= value <= most:
        raise RequestRefusedError(f"{name} must be an integer from {least} to {most}, not {value!r:.80}")
    return value


# --- writing ----------------------------------------------------------------------------------------------------------


def sample_response(asked: SampleRequest, drawn: Sequence[Generated], target_logprobs: Any = None) -> Written:
    """The response to a sampling request: replies, and prompt logprobs if requested."""
    return Written(
        protobuf=lambda: _protobuf(asked, drawn, target_logprobs),
        json=lambda: _json(asked, drawn, target_logprobs),
    )


def reply_logprobs(asked: SampleRequest, one: Generated) -> list[float]:
    """The logprob of each token under its sampling distribution; for greedy decoding, under the model's own."""
    return one.raw_logprobs if asked.sampling.temperature == 0 else one.logprobs


def _protobuf(asked: SampleRequest, drawn: Sequence[Generated], target_logprobs: Any) -> bytes:
    out = wire.message("SampleResponse")
    for one in drawn:
        sequence = out.sequences.add(stop_reason=wire.STOP if one.finish_reason == "stop" else wire.LENGTH)
        sequence.tokens = np.array(one.ids, np.int32).tobytes()
        sequence.logprobs = np.array(reply_logprobs(asked, one), np.float32).tobytes()
        if asked.sampling.top_logprobs:
            _write_topk(sequence.topk_sampled_logprobs, one.top_logprobs, asked.sampling.top_logprobs)
    scores = _prompt_scores(asked, drawn[0])
    if scores is not None:
        own = [np.nan if score is None else score[0] for score in scores]
        out.prompt_logprobs = np.array(own, np.float32).tobytes()
        if asked.topk_prompt:
            _write_topk(out.topk_prompt_logprobs, [[] if one is None else one[1] for one in scores], asked.topk_prompt)
    if target_logprobs is not None:
        tensor = out.target_prompt_logprobs
        tensor.dense, tensor.dtype = target_logprobs.astype(np.float32).tobytes(), wire.FLOAT32
        tensor.shape.extend(target_logprobs.shape)
    out.prompt_cache_hit_tokens = drawn[0].reused
    written: bytes = out.SerializeToString()
    return written


def _prompt_scores(asked: SampleRequest, one: Generated) -> list[PromptLogprob] | None:
    if one.prompt_logprobs is None:
        return None
    scores = list(one.prompt_logprobs)
    skipped = 0 if asked.last_n is None else len(scores) - asked.last_n
    return [None] * skipped + scores[skipped:]


def _write_topk(out: Any, rows: Sequence[Sequence[tuple[int, float]]], k: int) -> None:
    ids, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), EMPTY, np.float32)
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row[:k]):
            ids[i, j], logprobs[i, j] = token, logprob
    out.token_ids, out.logprobs, out.k, out.length = ids.tobytes(), logprobs.tobytes(), k, len(rows)


def _json(asked: SampleRequest, drawn: Sequence[Generated], target_logprobs: Any) -> dict[str, Any]:
    scores = _prompt_scores(asked, drawn[0])
    body: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop" if one.finish_reason == "stop" else "length",
                "tokens": one.ids,
                "logprobs": reply_logprobs(asked, one),
            }
            for one in drawn
        ],
    }
    if scores is not None:
        body["prompt_logprobs"] = [None if score is None else score[0] for score in scores]
        if asked.topk_prompt:
            body["topk_prompt_logprobs"] = [None if score is None else score[1] for score in scores]
    if target_logprobs is not None:
        body["target_prompt_logprobs"] = target_logprobs.tolist()
    return body
