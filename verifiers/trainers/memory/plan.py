"""A model's sizes and what is asked of a training → what each part takes, what fits, and which knob makes the rest fit.

Nothing is allocated: `vf plan` asks with a configuration alone, a trainer with the model it was given. A peak is that
of the worst moment, not the sum of all parts: while the model is sampled from there are no gradients and activations,
and at the end of a backward pass there are no activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verifiers.trainers.memory.optimizers import OPTIMIZERS

LEFT_FREE = 0.1  # of the memory: the allocator's leftovers, libraries, other programs
MOST_TOKENS = {"cpu": 4096, "cuda": 131072}
MOST_TOKENS_ELSEWHERE = 8192
GOOD_TOKENS = 2048  # of a micro-batch: with fewer, a card has too little to do at once
# Elements that a layer keeps of each token for its backward pass: its input, what is added to it, the norms of both;
# gate, up and their product; queries, keys, values and what attention makes of them.
KEPT_OF_HIDDEN, KEPT_OF_INNER, KEPT_OF_ATTENTION = 4, 3, 2
WORKING = 3  # gradients of each kind that the layer has alive which is going back
IN_4_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes: a scale of 8 bits for 64 weights, and one of 32 for 256 scales
LOGIT_CHUNKS = 2  # that are alive at once
# Logits that are alive at once, as `verifiers.trainers.learning.target_logprobs` cuts them.
CHUNK_BYTES = {"cuda": 2 << 30}
CHUNK_BYTES_ELSEWHERE = 1 << 30
SAMPLED_LOGITS = 16  # bytes for each of a slot's logits that sampling has alive at once


class WillNotFitError(ValueError):
    """A training needs more memory than there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What of a model counts for memory; parameters that are tied count once."""

    parameters: int
    linear: int  # parameters of the linear layers but the head: what 4 bits and adapters are for
    linear_sides: int  # their inputs and outputs: the parameters of adapters of rank 1
    largest: int  # the largest parameter
    layers: int
    hidden: int
    inner: int
    attended: int  # width of queries and of what attention gives
    kv: int  # width of keys, and of values
    vocabulary: int
    longest: int | None  # positions that the model knows

    @classmethod
    def of(cls, model: Any) -> ModelSize:
        """Read off a module, loaded or laid out on the meta device; or off a configuration, which is laid out."""
        if not hasattr(model, "named_modules"):
            model = laid_out(model)
        config = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = base.get_output_embeddings()
        linears = {
            name: (one.in_features, one.out_features)
            for name, one in base.named_modules()
            if hasattr(one, "in_features") and one is not head and ".lora_" not in name and "base_layer" not in name
        }
        linear = sum(a * b for a, b in linears.values())
        counts = {name: one.numel() for name, one in base.named_parameters() if ".lora_" not in name}
        packed = sum(n for name, n in counts.items() if _of_linear(name) in linears)
        heads = getattr(text, "num_attention_heads", None) or 1
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return cls(
            parameters=sum(counts.values()) - packed + linear,
            linear=linear,
            linear_sides=sum(a + b for a, b in linears.values()),
            largest=max([*counts.values(), *(a * b for a, b in linears.values())]),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            attended=heads * head_dim,
            kv=kv_heads * head_dim,
            vocabulary=text.vocab_size,
            longest=getattr(text, "max_position_embeddings", None),
        )

    @property
    def kept(self) -> int:
        """Elements of a token that one layer keeps for its backward pass."""
        attention = KEPT_OF_ATTENTION * (self.attended + self.kv)
        return KEPT_OF_HIDDEN * self.hidden + KEPT_OF_INNER * self.inner + attention

    def adapters(self, r: int) -> int:
        """Parameters of adapters on every linear layer but the head."""
        return r * self.linear_sides


def _of_linear(name: str) -> str:
    """The linear layer that a weight is of: adapters hold it as their base layer."""
    return name.removesuffix(".weight").removesuffix(".base_layer") if name.endswith(".weight") else ""


def laid_out(config: Any) -> Any:
    """The model of a configuration without its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is asked of a training, as far as it counts for memory."""

    size: ModelSize
    trained: int  # parameters
    length: int  # tokens of the longest sequence
    is_shortened: bool = False  # it is a guess, and a longer one does not fit
    weight_bytes: int = 2
    optim: str = "adamw"
    in_4_bit: bool = False
    slots: int = 0  # sequences that are sampled at once, if there is memory; 0: nothing is sampled here
    has_reference: bool = False  # a copy of the weights (with adapters there is none)
    samples_ahead: bool = False  # while it learns
    gradient_checkpointing: bool | None = None  # None: if memory asks for it
    micro_batch_tokens: int | None = None
    step_tokens: int | None = None  # that one update learns from, at most
    sharding: str = "none"  # or ddp, zero2, fsdp2 (ZeRO-3 shards what that does)
    processes: int = 1

    @property
    def trains_all(self) -> bool:
        return self.trained >= self.size.parameters

    @property
    def bytes_per_token(self) -> int:
        """Of the KV cache."""
        return 2 * self.size.layers * self.size.kv * self.weight_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Memory that a training may have, its weights included, and what the host has beside it."""

    kind: str
    capacity: float
    host: float

    @property
    def usable(self) -> float:
        return self.capacity * (1 - LEFT_FREE)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What a training takes, in bytes by part, and the knobs that were taken to make it fit."""

    asked: Training
    device: Device
    gradient_checkpointing: bool
    releases_cache: bool  # while it learns
    takes_each: bool  # gradients are moved to their float32 copies one by one
    slots: int
    micro_batch_tokens: int
    cache_room: float  # bytes that the KV cache may have
    host: float
    parts: dict[str, float]
    peak: float

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.usable and self.host <= self.device.host * (1 - LEFT_FREE)

    @property
    def told(self) -> list[str]:
        """What is done so that it fits, for whoever watches."""
        asked, found = self.asked, []
        if asked.is_shortened:
            found.append(f"sequences of at most {asked.length} tokens are planned for (max_seq_length says otherwise)")
        if self.gradient_checkpointing and not asked.gradient_checkpointing:
            found.append("gradient checkpointing")
        if self.releases_cache:
            found.append("the KV cache is given back while it learns")
        if self.takes_each:
            found.append("gradients are moved one by one")
        if self.slots < asked.slots:
            found.append(f"{self.slots} of {asked.slots} rollouts are sampled at once")
        if asked.micro_batch_tokens is None and self.micro_batch_tokens < min(
            GOOD_TOKENS, asked.step_tokens or GOOD_TOKENS
        ):
            found.append(f"micro-batches of {self.micro_batch_tokens} tokens")
        return found

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gb(size)}" for name, size in self.parts.items() if size)
        how = f"; to fit: {', '.join(self.told)}" if self.told else ""
        host = f", and {gb(self.host)} on the host" if self.host else ""
        return f"{gb(self.peak)} at the peak{host} ({parts}) of {gb(self.device.capacity)}{how}"


def plan_memory(asked: Training, device: Device) -> MemoryPlan:
    """The quickest way that fits, by knobs that change no number; where none does, the one that takes least."""
    best: MemoryPlan | None = None
    for slots in _slots(asked.slots):
        for checkpointing, releases, takes_each in _ways(asked):
            found = _planned(asked, device, slots, checkpointing, releases, takes_each)
            if found.fits:
                return found
            best = found if best is None or found.peak < best.peak else best
    assert best is not None
    return best


def _slots(wanted: int) -> list[int]:
    """As many as wanted, or half as many, and so on.

    >>> _slots(6), _slots(0)
    ([6, 3, 1], [0])
    """
    found = [wanted]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def _ways(asked: Training) -> Iterator[tuple[bool, bool, bool]]:
    """Gradient checkpointing, the cache given back, gradients one by one: from the quickest to the smallest."""
    set_to = asked.gradient_checkpointing
    can_release = asked.slots > 0 and not asked.samples_ahead
    for checkpointing in (False, True) if set_to is None else (set_to,):
        for releases in (False, True) if can_release else (False,):
            for takes_each in (False, True):
                yield checkpointing, releases, takes_each


def _planned(
    asked: Training, device: Device, slots: int, checkpointing: bool, releases: bool, takes_each: bool
) -> MemoryPlan:
    resident, resident_host = _resident(asked)
    kept, most, on_host = _gradients(asked, takes_each)
    host = resident_host + on_host
    if device.kind == "cpu":  # it is one memory
        resident["optimizer"] += resident_host
        kept, most, host = kept + on_host, most + on_host, 0.0
    always = sum(resident.values())
    cache = slots * asked.length * asked.bytes_per_token
    sampled = slots * asked.size.vocabulary * SAMPLED_LOGITS
    held = 0 if releases else cache
    gathered = _gathered(asked)

    def learning(tokens: int) -> float:
        acts = activations(asked, tokens, checkpointing) + logits(asked, tokens, device.kind)
        is_first = asked.step_tokens is not None and tokens >= asked.step_tokens  # and the last: nothing to add up
        return always + held + max((0 if is_first else kept) + gathered + acts, most)

    tokens = asked.micro_batch_tokens or _tokens(asked, device, checkpointing, learning)
    most_tokens = min(max(asked.length, tokens), asked.step_tokens or tokens)
    whole = asked.size.parameters * asked.weight_bytes if asked.sharding == "fsdp2" and slots else 0
    peak = max(learning(most_tokens), always + whole + cache + sampled)
    copies = _copies(asked) if device.kind == "cpu" and slots else 0
    if peak + copies > device.usable:  # then they are not made
        copies = 0
    peak += copies
    spare = max(device.usable - peak, 0) / 2
    parts = {
        "weights": resident["weights"],
        "gradients": most,
        "optimizer": resident["optimizer"],
        "reference": resident["reference"],
        "KV cache": cache,
        "copies": copies,
        "activations": activations(asked, most_tokens, checkpointing),
        "logits": logits(asked, most_tokens, device.kind),
    }
    return MemoryPlan(
        asked=asked,
        device=device,
        gradient_checkpointing=checkpointing,
        releases_cache=releases,
        takes_each=takes_each,
        slots=slots,
        micro_batch_tokens=tokens,
        cache_room=cache + sampled + (device.usable - always - cache - sampled if releases else spare),
        host=host,
        parts=parts,
        peak=peak,
    )


def _tokens(asked: Training, device: Device, checkpointing: bool, learning: Any) -> int:
    """Of a micro-batch: what half of the memory that is left holds, and no less than one sequence."""
    left = (device.usable - learning(0)) / 2
    of_one = activations(asked, 1, checkpointing) - activations(asked, 0, checkpointing)
    most = MOST_TOKENS.get(device.kind, MOST_TOKENS_ELSEWHERE)
    return max(256, min(asked.length, most), min(most, int(left / of_one)))


def _resident(asked: Training) -> tuple[dict[str, float], float]:
    """What is there all the time, on the device and on the host."""
    size, kind, trained = asked.size, OPTIMIZERS[asked.optim], asked.trained
    adapters = 0 if asked.trains_all else trained
    in_4_bit = size.linear if asked.in_4_bit else 0
    weights = (size.parameters - in_4_bit + adapters) * asked.weight_bytes + in_4_bit * IN_4_BIT
    states, copies = trained * kind.state_bytes, trained * 4 * (asked.weight_bytes < 4 or kind.on_host)
    apart = asked.processes if asked.sharding in ("zero2", "fsdp2") else 1
    on_host = (states if kind.is_paged or kind.on_host else 0) + (copies if kind.on_host else 0)
    found = {
        "weights": weights / (asked.processes if asked.sharding == "fsdp2" else 1),
        "optimizer": (states + copies - on_host) / apart,
        "reference": weights / apart if asked.has_reference and asked.trains_all else 0.0,
    }
    return found, on_host / apart


def _gradients(asked: Training, takes_each: bool) -> tuple[float, float, float]:
    """While micro-batches are added up; at the end of a backward pass; on the host."""
    trained = asked.trained / (asked.processes if asked.sharding in ("zero2", "fsdp2") else 1)
    one = min(asked.size.largest, trained) * asked.weight_bytes
    if OPTIMIZERS[asked.optim].on_host:
        return one, one, trained * 4
    if asked.weight_bytes == 4:
        return trained * 4, trained * 4, 0
    return trained * 4, trained * 4 + (one if takes_each else trained * asked.weight_bytes), 0


def _gathered(asked: Training) -> float:
    """Layers that are whole for the moment in which they are computed, and the next one."""
    if asked.sharding != "fsdp2":
        return 0.0
    return 2 * asked.size.linear / asked.size.layers * asked.weight_bytes


def _copies(asked: Training) -> float:
    """Weights in the layout that sampling in C likes, where there is memory for it."""
    return (asked.size.linear + asked.size.vocabulary * asked.size.hidden) * 4 if asked.weight_bytes == 4 else 0


def activations(asked: Training, tokens: int, checkpointing: bool) -> float:
    """What a micro-batch keeps for its backward pass, and what one layer of it has alive besides."""
    size, each = asked.size, asked.weight_bytes
    working = tokens * WORKING * (size.inner + size.hidden) * each
    layers = size.layers * size.hidden + size.kept if checkpointing else size.layers * size.kept
    unpacked = size.largest * each if asked.in_4_bit else 0
    return tokens * layers * each + working + unpacked


def logits(asked: Training, tokens: int, device_kind: str) -> float:
    """Chunks of logits, and the head's gradient, which is summed up over them."""
    size = asked.size
    most = CHUNK_BYTES.get(device_kind, CHUNK_BYTES_ELSEWHERE)
    head = size.vocabulary * size.hidden * 4 if asked.trains_all and tokens else 0
    return LOGIT_CHUNKS * min(most, tokens * size.vocabulary * asked.weight_bytes) + head


def gb(size: float) -> str:
    """
    >>> gb(15.23e9), gb(12_300_000)
    ('15.2 GB', '12.3 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e8 or size == 0 else f"{math.ceil(size / 1e5) / 10:.1f} MB"
