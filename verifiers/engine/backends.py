"""Choose the fastest backend that reproduces a model's own logprobs, and report why a faster one was rejected.

Prompts of several lengths run in one batch. They are long enough to exceed every attention window and chunk of the
model. Some are then continued, like the second turn of a chat. The logprob of each token is compared with the model's
own forward over the whole sequence. If they disagree, the next backend is tried. If none agrees, it is an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiers.engine.fair_lock import steady
from verifiers.engine.sequence import ActiveSequence, Generated, Sampling
from verifiers.kernels import prove
from verifiers.kernels.cpu.build import FAILED
from verifiers.kernels.modules import ModuleSnapshot, invocation_tokens, is_quantised

if TYPE_CHECKING:
    from verifiers.engine.engine import Engine

logger = logging.getLogger("verifiers.engine")

CPU, CUDA, TORCH, MODULES, SEQUENTIAL, UNCACHED = "cpu", "cuda", "torch", "modules", "sequential", "uncached"
DESCRIPTIONS = {
    CPU: "batched, in C",
    CUDA: "batched, by Triton kernels",
    TORCH: "batched, in PyTorch",
    MODULES: "batched, by the model's own modules",
    SEQUENTIAL: "one sequence at a time",
    UNCACHED: "one sequence at a time, without a cache",
}
BATCHED = (CPU, CUDA, TORCH, MODULES)  # continuous batching over the engine's KV cache

NEW_TOKENS = 12  # per request: more than LAY_OUT_AFTER, so that the weights in C's layout are tested too
TEMPERATURE = 16.0  # high, to sample unlikely tokens too: the logprob of a near-certain one hides errors in the others
SECOND_TURN = 5  # tokens that a second turn adds
# Tolerances for rounding: largest absolute error and root mean square error of the logprobs. In bfloat16, logits of 16
# to 32 are spaced 1/8 apart. Wrong attention causes errors of several units.
WITHIN, WITHIN_MEAN = 2e-3, 1e-3
WITHIN_HALF, WITHIN_HALF_MEAN = 2.0, 0.4


class UnsupportedModelError(ValueError):
    """No backend reproduces the logprobs of the model's own forward."""


@dataclass(frozen=True, slots=True)
class Backend:
    """How a model is run: ``name``, and ``why`` a faster backend was rejected (empty if there is no faster one).

    >>> str(Backend("torch", "not in C: capped scores"))
    'batched, in PyTorch (not in C: capped scores)'
    """

    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{DESCRIPTIONS[self.name]} ({self.why})" if self.why else DESCRIPTIONS[self.name]


def choose_backend(engine: Engine) -> Backend:
    """Set the engine up for the first backend that passes the comparison, and return it."""
    name = type(engine.model).__name__
    with (
        steady(engine.lock), engine.lock, torch.inference_mode(), engine.runner.evaluating(),
        prove.without_hooks(engine.model),
    ):  # fmt: skip
        seen = ModuleSnapshot(engine.model)
        _check_forward(engine.model, name)
        before = engine.runner.writes  # `realistic` scales the weights, then restores them
        try:
            with prove.realistic(engine.model) as is_conclusive:
                tried = [one for one in _candidates(engine) if is_conclusive or one in (SEQUENTIAL, UNCACHED)]
                found, faults = _first_proven(engine, tried)
                longest = max(prove.prompt_lengths(engine.model.config, engine.length, 1))
                is_deterministic = found is not None or prove.is_steady(engine.model, longest)
        finally:
            engine.lock.undone += engine.runner.writes - before  # so other engines of this model keep their caches
            engine.runner.varying = seen.changed_settings
            engine.reset()
    if not is_deterministic:
        raise UnsupportedModelError(f"{name} cannot be sampled from: {prove.UNSTEADY}")
    if found is None:
        bounds = prove.bounds(engine.model.config, engine.length)
        advice = f"try length={bounds[0]}" if bounds else "is it a causal language model?"
        raise UnsupportedModelError(f"{name} cannot be sampled from: {faults[-1]} ({advice})")
    why = (
        faults[0]
        if faults
        else _slower_because(engine, found)
        if is_conclusive
        else "its logits hardly depend on token order yet, so batching could not be verified"
    )
    backend = Backend(found, why)
    _log_choice(name, backend)
    return backend


def _candidates(engine: Engine) -> list[str]:
    """The backends that could run the model, fastest first."""
    if invocation_tokens(engine.model):  # the proof's prompts do not contain these tokens
        return [UNCACHED]
    if is_quantised(engine.model):
        return [MODULES, SEQUENTIAL, UNCACHED]
    if engine.device.type == "cuda":
        return [CUDA, MODULES, SEQUENTIAL, UNCACHED]
    in_c = [CPU] if engine.runner.cpu is not None else []
    return [*in_c, TORCH, MODULES, SEQUENTIAL, UNCACHED]


def _slower_because(engine: Engine, backend: str) -> str:
    """Why the first candidate, which passed, is slower than the fastest backend there is; empty if it is not."""
    decoder = engine.runner.decoder
    if invocation_tokens(engine.model):
        return "its adapter (aLoRA) applies from certain tokens of the whole sequence on"
    if is_quantised(engine.model):
        return "its weights are quantised"
    if backend == TORCH:
        return f"not in C: {engine.runner.not_in_c}"
    if backend == CUDA and not decoder.layers:
        return "between the kernels: its own modules"
    return ""


def _check_forward(model: Any, name: str) -> None:
    try:
        (prompt,) = prove.prompts(model.config, [2])
        logits = prove.plain_logits(model, prompt, 1)
    except Exception as error:  # the model is foreign code
        raise UnsupportedModelError(f"{name} cannot be sampled from: {_first_line(error)}") from error
    if bool(logits.isnan().any()):
        raise UnsupportedModelError(f"{name} returns logits that are not numbers (NaN): check its weights")


def _first_proven(engine: Engine, backends: Sequence[str]) -> tuple[str | None, list[str]]:
    faults: list[str] = []
    for backend in backends:
        fault = _fault(engine, backend)
        if fault is None:
            return backend, faults
        faults.append(f"{DESCRIPTIONS[backend]}, {fault}")
    return None, faults


def _log_choice(name: str, backend: Backend) -> None:
    if backend.name in (SEQUENTIAL, UNCACHED) or backend.why.endswith(("no C compiler", FAILED)):
        logger.warning("%s is sampled %s, which is exact and slower: %s", name, DESCRIPTIONS[backend.name], backend.why)
    else:
        logger.info("%s is sampled %s", name, backend)


def _fault(engine: Engine, backend: str) -> str | None:
    """Why a backend cannot be used; None if it can."""
    try:
        if backend in BATCHED and (count := _unbatchable_layers(engine)):
            return f"{count} of its layers keep state outside attention, or use a custom attention"
        engine.use_backend(backend)
        error_T = torch.cat([_errors(engine.model, reply) for reply in _replies(engine)])
    except Exception as fault:  # the model is foreign code, which may not support these arguments
        logger.debug("%s does not run %s", type(engine.model).__name__, backend, exc_info=True)
        return _first_line(fault)
    if backend == CPU and engine.runner.cpu is not None and not engine.runner.cpu.runs:
        return "its weights were not copied: too little memory, or too short a length"  # PyTorch ran instead of C
    is_half = engine.dtype.itemsize < 4
    most, mean = (WITHIN_HALF, WITHIN_HALF_MEAN) if is_half else (WITHIN, WITHIN_MEAN)
    largest, typical = float(error_T.max()), float(error_T.square().mean().sqrt())
    logger.debug("%s, %s: errors up to %.2g, typically %.2g", type(engine.model).__name__, backend, largest, typical)
    return None if largest <= most and typical <= mean else f"its logprobs are off by up to {largest:.2g}"


def _unbatchable_layers(engine: Engine) -> int:
    """How many layers cannot run over the engine's KV cache."""
    layers = int(engine.runner.text_config.num_hidden_layers)
    row = max(engine.length, engine.prefill_tokens)
    engine.runner.attending = row, engine.runner.attending_layers(row)
    return len(set(range(layers)) - engine.runner.attending[1])


def _replies(engine: Engine) -> list[Generated]:
    """Run a batch of prompts, then second turns of some, and one that samples the pad token.

    One prompt runs twice, and its first token alone: a cache may be wrong while it is shorter than a convolution.
    """
    room = engine.length - 1
    new = min(NEW_TOKENS, max(1, room // 2))
    lengths = prove.prompt_lengths(engine.model.config, engine.length, new)
    asked = prove.prompts(engine.model.config, lengths)
    sampling = Sampling(max_tokens=new, temperature=TEMPERATURE)
    sequences = [ActiveSequence(prompt, sampling, seed) for seed, prompt in enumerate([*asked, asked[1], asked[1][:1]])]
    replies = _drive(engine, sequences)
    for first in replies[: 1 + len(asked) // 3]:
        turn = [*first.prompt_ids, *first.ids, *asked[0][:SECOND_TURN]]
        if len(turn) < room:
            replies += _drive(engine, [ActiveSequence(turn, replace(sampling, max_tokens=2), 0)])
    pad = prove.pad_id(engine.model.config)
    if pad is not None:  # with this bias, about every second token is the pad token
        bias = {pad: TEMPERATURE * math.log(engine.vocabulary)}
        replies += _drive(engine, [ActiveSequence(asked[-1], replace(sampling, logit_bias=bias), 1)])
    return replies


def _drive(engine: Engine, sequences: Sequence[ActiveSequence]) -> list[Generated]:
    """Run requests to completion on this thread."""
    engine.waiting.extend(sequences)
    try:
        while not all(sequence.future.done() for sequence in sequences):
            engine.step()
    except Exception as error:
        engine.scheduler.fail(error, waiting=True)
    return [sequence.future.result() for sequence in sequences]


def _errors(model: Any, reply: Generated) -> Tensor:
    """The absolute difference of each token's logprob from that of the model's own forward."""
    logits_TV = prove.plain_logits(model, [*reply.prompt_ids, *reply.ids], len(reply.ids) + 1)[:-1]
    ids_T = torch.tensor(reply.ids, device=logits_TV.device)
    expected_T = torch.log_softmax(logits_TV, -1).gather(1, ids_T[:, None])[:, 0]
    return (expected_T.cpu() - torch.tensor(reply.raw_logprobs)).abs().nan_to_num(math.inf)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
