"""A model's sizes and the settings of a training → its memory by part, and the settings that make it fit.

Nothing is allocated: `vf plan` uses a model's configuration, a trainer the model it was given. The peak is the memory
at the worst moment, not the sum of all parts: there are no gradients and activations during sampling, and no
activations at the end of a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verifiers.engine.plan import LEFT_FREE, LOGIT_COPIES, on_meta
from verifiers.engine.plan import WillNotFitError as WillNotFitError
from verifiers.kernels.modules import base_model
from verifiers.kernels.prove import max_positions, text_config
from verifiers.trainers.memory.optimizers import OPTIMIZERS

MOST_TOKENS = {"cpu": 4096, "cuda": 131072}  # of a micro-batch
MOST_TOKENS_ELSEWHERE = 8192
GOOD_TOKENS = 2048  # of a micro-batch; fewer do not keep a GPU busy
# Activations of a layer for each token, in multiples of its widths. Hidden: its input, the output of attention and the
# norms of both. Inner: gate, up and their product. Attention: queries, keys, values and the output.
KEPT_OF_HIDDEN, KEPT_OF_INNER, KEPT_OF_ATTENTION = 4, 3, 2
WORKING = 3  # gradients of each width that the backward pass of one layer holds at once
IN_4_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes: an 8-bit scale for 64 weights, and a 32-bit one for 256 scales
LOGIT_CHUNKS = 2  # in memory at the same time
# The size of a chunk in `verifiers.trainers.learning.target_logprobs`.
CHUNK_BYTES = {"cuda": 2 << 30}
CHUNK_BYTES_ELSEWHERE = 1 << 30
SAMPLED_LOGITS = 4 * LOGIT_COPIES  # bytes that sampling needs for each logit of a slot


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The sizes of a model that determine its memory; tied parameters count once."""

    parameters: int
    linear: int  # parameters of the linear layers without the head, which are quantised or get adapters
    linear_sides: int  # sum of their in_features and out_features, which is the parameters of rank-1 adapters
    largest: int  # elements of the largest parameter
    layers: int
    hidden: int
    inner: int  # width of the feed-forward
    attended: int  # width of the queries
    kv: int  # width of the keys (and of the values)
    vocabulary: int
    longest: int | None  # positions that the model supports

    @classmethod
    def of(cls, model: Any) -> ModelSize:
        """The sizes of a module, or of a configuration's model, which is built on the meta device."""
        if not hasattr(model, "named_modules"):
            model = on_meta(model)
        text, base = text_config(model.config), base_model(model)
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
            longest=max_positions(text),
        )

    @property
    def kept(self) -> int:
        """Elements that one layer keeps for each token until its backward pass."""
        attention = KEPT_OF_ATTENTION * (self.attended + self.kv)
        return KEPT_OF_HIDDEN * self.hidden + KEPT_OF_INNER * self.inner + attention

    def adapters(self, r: int) -> int:
        """Parameters of LoRA adapters of rank ``r`` on every linear layer but the head."""
        return r * self.linear_sides


def _of_linear(name: str) -> str:
    """The name of the linear layer that a weight belongs to; with adapters, the weight is in its base_layer."""
    return name.removesuffix(".weight").removesuffix(".base_layer") if name.endswith(".weight") else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The settings of a training that determine its memory."""

    size: ModelSize
    trained: int  # parameters
    length: int  # tokens of the longest sequence
    is_shortened: bool = False  # the length is a guess that was reduced to fit
    weight_bytes: int = 2
    optim: str = "adamw"
    in_4_bit: bool = False
    slots: int = 0  # sequences to sample concurrently, if memory allows; 0: no sampling in this process
    has_reference: bool = False  # KL to a copy of the weights (with adapters there is no copy)
    samples_ahead: bool = False  # rollouts are sampled during updates
    gradient_checkpointing: bool | None = None  # None: only if the training does not fit without
    micro_batch_tokens: int | None = None
    step_tokens: int | None = None  # of one update, at most
    sharding: str = "none"  # or ddp, zero2, fsdp2 (also for ZeRO-3, which shards the same tensors)
    processes: int = 1

    @property
    def trains_all(self) -> bool:
        return self.trained >= self.size.parameters

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the KV cache for each token."""
        return 2 * self.size.layers * self.size.kv * self.weight_bytes

    @property
    def optimizer_shards(self) -> int:
        """The number of shards of gradients and optimizer state."""
        return self.processes if self.sharding in ("zero2", "fsdp2") else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Bytes that a training may use on its device, including its weights, and on the host."""

    kind: str
    capacity: float
    host: float

    @property
    def usable(self) -> float:
        return self.capacity * (1 - LEFT_FREE)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory of a training, in bytes by part, and the settings that were chosen to make it fit."""

    asked: Training
    device: Device
    gradient_checkpointing: bool
    releases_cache: bool  # the KV cache is freed during updates
    slots: int
    micro_batch_tokens: int
    cache_room: float  # bytes that the KV cache may take
    host: float
    parts: dict[str, float]
    peak: float

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.usable and self.host <= self.device.host * (1 - LEFT_FREE)

    @property
    def told(self) -> list[str]:
        """The settings that were chosen to make it fit, in words."""
        asked, found = self.asked, []
        if asked.is_shortened:
            found.append(f"sequences of at most {asked.length} tokens are assumed (set max_seq_length to change this)")
        if self.gradient_checkpointing and not asked.gradient_checkpointing:
            found.append("gradient checkpointing")
        if self.releases_cache:
            found.append("the KV cache is released during updates")
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
    """The fastest plan that fits, using only settings that do not change results; if none fits, the smallest."""
    plans: list[MemoryPlan] = []
    for slots in _slots(asked.slots):
        for checkpointing, releases in _settings(asked):
            plans.append(_planned(asked, device, slots, checkpointing, releases))
            if plans[-1].fits:
                return plans[-1]
    return min(plans, key=lambda plan: plan.peak)


def _slots(wanted: int) -> list[int]:
    """As many slots as wanted, half as many, and so on.

    >>> _slots(6), _slots(0)
    ([6, 3, 1], [0])
    """
    found = [wanted]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def _settings(asked: Training) -> Iterator[tuple[bool, bool]]:
    """(Gradient checkpointing, cache released), from the fastest to the smallest."""
    set_to = asked.gradient_checkpointing
    can_release = asked.slots > 0 and not asked.samples_ahead
    for checkpointing in (False, True) if set_to is None else (set_to,):
        for releases in (False, True) if can_release else (False,):
            yield checkpointing, releases


def _planned(asked: Training, device: Device, slots: int, checkpointing: bool, releases: bool) -> MemoryPlan:
    resident, resident_host = _resident(asked)
    kept, most, on_host = _gradients(asked)
    host = resident_host + on_host
    if device.kind == "cpu":  # device and host share one memory
        resident["optimizer"] += resident_host
        kept, most, host = kept + on_host, most + on_host, 0.0
    always = sum(resident.values())
    cache = slots * asked.length * asked.bytes_per_token
    sampled = slots * asked.size.vocabulary * SAMPLED_LOGITS
    held = 0 if releases else cache
    gathered = _gathered(asked)

    def learning(tokens: int) -> float:
        acts = activations(asked, tokens, checkpointing) + logits(asked, tokens, device.kind)
        is_only = asked.step_tokens is not None and tokens >= asked.step_tokens  # no gradients are accumulated yet
        return always + held + max((0 if is_only else kept) + gathered + acts, most)

    tokens = asked.micro_batch_tokens or _tokens(asked, device, checkpointing, learning)
    most_tokens = min(max(asked.length, tokens), asked.step_tokens or tokens)
    whole = asked.size.parameters * asked.weight_bytes if asked.sharding == "fsdp2" and slots else 0
    peak = max(learning(most_tokens), always + whole + cache + sampled)
    copies = _copies(asked) if device.kind == "cpu" and slots else 0
    if peak + copies > device.usable:  # the engine then runs without copies
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
        slots=slots,
        micro_batch_tokens=tokens,
        cache_room=cache + sampled + (device.usable - always - cache - sampled if releases else spare),
        host=host,
        parts=parts,
        peak=peak,
    )


def _tokens(asked: Training, device: Device, checkpointing: bool, learning: Any) -> int:
    """Tokens of a micro-batch: as many as fit into half of the free memory, but at least those of one sequence."""
    left = (device.usable - learning(0)) / 2
    bytes_per_token = activations(asked, 1, checkpointing) - activations(asked, 0, checkpointing)
    most = MOST_TOKENS.get(device.kind, MOST_TOKENS_ELSEWHERE)
    return max(256, min(asked.length, most), min(most, int(left / bytes_per_token)))


def _resident(asked: Training) -> tuple[dict[str, float], float]:
    """Memory that is in use all the time: on the device, by part, and on the host."""
    size, kind, trained = asked.size, OPTIMIZERS[asked.optim], asked.trained
    adapters = 0 if asked.trains_all else trained
    in_4_bit = size.linear if asked.in_4_bit else 0
    weights = (size.parameters - in_4_bit + adapters) * asked.weight_bytes + in_4_bit * IN_4_BIT
    states, masters = trained * kind.state_bytes, trained * 4 * (asked.weight_bytes < 4 or kind.on_host)
    shards = asked.optimizer_shards
    on_host = (states if kind.is_paged or kind.on_host else 0) + (masters if kind.on_host else 0)
    found = {
        "weights": weights / (asked.processes if asked.sharding == "fsdp2" else 1),
        "optimizer": (states + masters - on_host) / shards,
        "reference": weights / shards if asked.has_reference and asked.trains_all else 0.0,
    }
    return found, on_host / shards


def _gradients(asked: Training) -> tuple[float, float, float]:
    """Bytes of gradients: between micro-batches, at the end of a backward pass, and on the host."""
    trained = asked.trained / asked.optimizer_shards
    one = min(asked.size.largest, trained) * asked.weight_bytes
    if OPTIMIZERS[asked.optim].on_host:
        return one, one, trained * 4
    if asked.weight_bytes == 4:
        return trained * 4, trained * 4, 0
    # FSDP2 and DeepSpeed move all gradients of a process at once.
    return trained * 4, trained * 4 + (one if asked.optimizer_shards == 1 else trained * asked.weight_bytes), 0


def _gathered(asked: Training) -> float:
    """Bytes of the layers that FSDP2 holds gathered: the current layer and the next."""
    if asked.sharding != "fsdp2":
        return 0.0
    return 2 * asked.size.linear / asked.size.layers * asked.weight_bytes


def _copies(asked: Training) -> float:
    """Bytes of weights packed for sampling in C, which is done if there is memory for it."""
    return (asked.size.linear + asked.size.vocabulary * asked.size.hidden) * 4 if asked.weight_bytes == 4 else 0


def activations(asked: Training, tokens: int, checkpointing: bool) -> float:
    """Bytes of activations that a micro-batch keeps for its backward pass, plus the working memory of one layer."""
    size, each = asked.size, asked.weight_bytes
    working = tokens * WORKING * (size.inner + size.hidden) * each
    layers = size.layers * size.hidden + size.kept if checkpointing else size.layers * size.kept
    unpacked = size.largest * each if asked.in_4_bit else 0
    return tokens * layers * each + working + unpacked


def logits(asked: Training, tokens: int, device_kind: str) -> float:
    """Bytes of the chunks of logits, and of the gradient of the head, which is summed over the chunks."""
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
