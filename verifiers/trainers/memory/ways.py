"""The ways to train a model on some GPUs; and for a training that does not fit, the settings that would help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.memory.optimizers import OPTIMIZERS
from verifiers.trainers.memory.plan import Device, MemoryPlan, ModelSize, Training, WillNotFitError, gb, plan_memory

MOST_CARDS = 100_000
UNITS = {"MB": 1e6, "MIB": 2**20, "GB": 1e9, "GIB": 2**30, "TB": 1e12, "TIB": 2**40}
_CARDS = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\d+(?:\.\d+)?)\s*([MGT]I?B)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train a model."""

    name: str  # what is trained
    plan: MemoryPlan
    flags: tuple[str, ...]  # of ``vf train``

    @property
    def sharding(self) -> str:
        return self.plan.asked.sharding

    @property
    def rollouts(self) -> int:
        """Rollouts of one step, on all GPUs."""
        return self.plan.asked.slots * self.plan.asked.processes


def read_cards(text: str) -> tuple[int, float]:
    """The number of GPUs, and the bytes of each.

    >>> read_cards("4x24GB"), read_cards("80GiB")
    ((4, 24000000000.0), (1, 85899345920.0))
    """
    found = _CARDS.fullmatch(text.strip())
    if found is None or not 1 <= int(found[1] or 1) <= MOST_CARDS or float(found[2]) <= 0:
        raise ValueError(f"{text!r} is not a number of GPUs with their memory: write 4x24GB, 80GB or 8x141GiB")
    return int(found[1] or 1), float(found[2]) * UNITS[found[3].upper()]


def ways_to_train(
    size: ModelSize,
    *,
    length: int,
    cards: int,
    card_bytes: float,
    kind: str = "cuda",
    host_bytes: float = float("inf"),
    rollouts: int = 32,
    lora_r: int = 8,
    weight_bytes: int = 2,
) -> list[Way]:
    """The ways, from training all weights to the one with the least memory; ``rollouts`` are those of one step.

    Each GPU gets whole groups, as `GRPOConfig` requires, so that a step may have a few more rollouts.
    """
    each = -(-rollouts // (cards * GRPOConfig.group_size)) * GRPOConfig.group_size
    device = Device(kind=kind, capacity=card_bytes, host=host_bytes / cards)
    found = []
    for name, trained, optim, sharding, flags in _ways(size, cards, lora_r, kind):
        asked = Training(
            size=size,
            trained=trained,
            length=length,
            weight_bytes=weight_bytes,
            optim=optim,
            in_4_bit="--load-in-4bit" in flags,
            slots=each,
            step_tokens=each * length,
            sharding=sharding,
            processes=cards,
        )
        launch = () if cards == 1 else ("--launch", sharding, "--processes", str(cards))
        sizes = ("--max-seq-length", str(length), "--batch-size", str(each * cards))
        found.append(Way(name=name, plan=plan_memory(asked, device), flags=(*flags, *sizes, *launch)))
    return found


def _ways(size: ModelSize, cards: int, lora_r: int, kind: str) -> Iterator[tuple[str, int, str, str, tuple[str, ...]]]:
    """What is trained, its number of parameters, the optimizer, the sharding, and the flags of ``vf train`` for it."""
    whole, adapters = size.parameters, size.adapters(lora_r)
    r = ("--lora",) if lora_r == 8 else ("--lora-r", str(lora_r))
    shardings = ["none"] if cards == 1 else ["ddp", "zero2", "fsdp2"]
    for sharding in shardings:
        yield "all weights", whole, "adamw", sharding, ()
    yield "all weights", whole, "adamw_8bit", shardings[0], ("--optim", "adamw_8bit")
    if cards == 1 and kind == "cuda":
        yield "all weights", whole, "cpu_offload", "none", ("--optim", "cpu_offload")
    for sharding in shardings if cards == 1 else ["ddp", "fsdp2"]:
        yield "LoRA", adapters, "adamw", sharding, r
    yield "QLoRA (4 bit)", adapters, "adamw", shardings[0], (*r, "--load-in-4bit")


def best(ways: list[Way]) -> Way | None:
    """The first way that fits."""
    return next((way for way in ways if way.plan.fits), None)


def check_fits(plan: MemoryPlan, where: str) -> None:
    """Raise WillNotFitError for a plan that does not fit; the message has the settings that would make it fit."""
    if plan.fits:
        return
    asked, device = plan.asked, plan.device
    ways = [f"{knob} ({gb(found.peak)})" for knob, found in _remedies(plan) if found.fits]
    advice = f"it fits with {'; or '.join(ways)}" if ways else (
        "no setting of one process makes it fit: use a smaller model, or several GPUs (vf plan MODEL --gpus 4x80GB)"
    )  # fmt: skip
    what = "all weights" if asked.trains_all else "adapters"
    parts = ", ".join(f"{name} {gb(size)}" for name, size in plan.parts.items() if size)
    lacks = f"but {gb(device.capacity)} are free on {where}"
    if plan.peak <= device.usable:
        lacks = f"and {gb(plan.host)} on the host, which has {gb(device.host)} free"
    raise WillNotFitError(
        f"training {what} needs {gb(plan.peak)} at its peak ({parts}), {lacks}, of which a tenth stays unused: {advice}"
    )


def _remedies(plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
    """Settings that a user may change, and the plan with each of them."""
    asked, device = plan.asked, plan.device
    if asked.gradient_checkpointing is False:
        yield "gradient_checkpointing=True", plan_memory(replace(asked, gradient_checkpointing=True), device)
    if asked.samples_ahead:
        yield "num_batches_ahead=0", plan_memory(replace(asked, samples_ahead=False), device)
    is_sharded = asked.sharding in ("zero2", "fsdp2")  # sharding supports neither other optimizers nor 4 bits
    for name, kind in OPTIMIZERS.items() if asked.trains_all and not is_sharded else ():
        can_run = device.kind == "cuda" or not (kind.is_paged or kind.on_host)
        if name != asked.optim and can_run and not (kind.on_host and asked.processes > 1):
            yield f"optim={name!r}", plan_memory(replace(asked, optim=name), device)
    adapted = replace(asked, trained=min(asked.trained, asked.size.adapters(8)))
    if asked.trains_all:
        yield "LoRA: peft_config=vf.lora_defaults(), --lora", plan_memory(adapted, device)
    if not asked.in_4_bit and not is_sharded:
        named = "load_in_4bit=True with LoRA" if asked.trains_all else "load_in_4bit=True"
        yield named, plan_memory(replace(adapted, in_4_bit=True), device)
    length = 1 << max(asked.length - 1, 1).bit_length() - 1
    while length >= 128:
        shorter = plan_memory(replace(asked, length=length), device)
        if shorter.fits:
            yield f"max_seq_length={length}", shorter
            return
        length //= 2
