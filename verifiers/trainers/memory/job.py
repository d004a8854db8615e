"""The memory plan of a trainer, from its model and configuration, before anything is allocated for training."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from verifiers.engine.plan import free_memory
from verifiers.envs.singleturn_env import SingleTurnEnv
from verifiers.kernels.modules import is_quantised
from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.memory.plan import Device, MemoryPlan, ModelSize, Training, plan_memory
from verifiers.trainers.memory.ways import check_fits
from verifiers.trainers.sampling import max_new_tokens

logger = logging.getLogger("verifiers.trainers")

MOST_SLOTS = {"cpu": 64, "cuda": 1024}  # rollouts that are sampled concurrently
MOST_SLOTS_ELSEWHERE = 64
# Tokens to plan for without max_seq_length: of a prompt, of a conversation, of an SFT example.
DEFAULT_PROMPT, DEFAULT_CONVERSATION, DEFAULT_EXAMPLE = 1024, 4096, 2048
LEAST_GUESSED = 128  # the least to which these are reduced to fit into memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The parts of a training that determine its memory."""

    config: TrainingConfig
    device: torch.device
    env: Any = None
    adapters: Any = None  # a LoRA configuration
    samples: bool = False  # rollouts are sampled from the model in this process
    processes: int = 1
    sharding: str = "none"  # see `processes.sharded_states`
    is_read: bool = True  # the whole model runs on the device between steps, to sample or as the reference

    @property
    def home(self) -> torch.device:
        """Where the whole model is kept: on the host if this process runs only a shard of it."""
        return torch.device("cpu") if self.sharding == "fsdp2" and not self.is_read else self.device

    def plan(
        self,
        size: ModelSize,
        *,
        weight_bytes: int,
        trained: int | None = None,
        loaded: float = 0,
        in_4_bit: bool = False,
    ) -> MemoryPlan:
        """The plan, or an error if it does not fit; ``loaded`` bytes of weights are already on the device."""
        config = self.config
        if trained is None:
            trained = size.parameters if self.adapters is None else size.adapters(getattr(self.adapters, "r", 8))
        length = longest_sequence(config, self.env, size.longest)
        asked = Training(
            size=size,
            trained=trained,
            length=length,
            weight_bytes=weight_bytes,
            optim=config.optim,
            in_4_bit=config.load_in_4bit or in_4_bit,
            slots=slots_wanted(config, self.device.type) if self.samples else 0,
            has_reference=bool(getattr(config, "kl_coef", 0.0)),
            samples_ahead=bool(getattr(config, "num_batches_ahead", 0)),
            gradient_checkpointing=config.gradient_checkpointing,
            micro_batch_tokens=config.micro_batch_tokens,
            step_tokens=length * config.batch_size * config.gradient_accumulation_steps,
            sharding=self.sharding,
            processes=self.processes,
        )
        capacity = free_memory(self.device) + loaded
        processes_here = min(self.processes, max(int(torch.cuda.device_count()), 1))  # at most, on this host
        host = capacity if self.device.type == "cpu" else free_memory("cpu") / processes_here
        device = Device(kind=self.device.type, capacity=capacity, host=host)
        found = plan_memory(asked, device)
        if not found.fits and length_asked(config, self.env, size.longest) is None:
            found = _for_shorter(found)
        check_fits(found, str(self.device))
        return found

    def plan_module(self, model: Any, *, dtype: torch.dtype, is_whole: bool) -> MemoryPlan:
        """The plan for a module; ``is_whole``: the module is on its device and already has its adapters, if any."""
        parameters = list(model.parameters())
        here = sum(one.numel() * one.element_size() for one in parameters if one.device.type == self.device.type)
        trained = sum(one.numel() for one in parameters if one.requires_grad) if is_whole else None
        return self.plan(
            ModelSize.of(model),
            weight_bytes=dtype.itemsize,
            trained=trained,
            loaded=here,
            in_4_bit=is_quantised(model),
        )


def _for_shorter(plan: MemoryPlan) -> MemoryPlan:
    """A plan for the longest sequences that fit, for a training whose length was a guess."""
    asked, length = plan.asked, plan.asked.length // 2
    while length >= LEAST_GUESSED:
        tokens = None if asked.step_tokens is None else asked.step_tokens * length // asked.length
        shorter = replace(asked, length=length, step_tokens=tokens, is_shortened=True)
        if (found := plan_memory(shorter, plan.device)).fits:
            return found
        length //= 2
    return plan


def this_machine() -> tuple[int, float, str]:
    """The number of devices of this machine, the free bytes of one, and their kind."""
    if torch.cuda.is_available():
        return int(torch.cuda.device_count()), float(free_memory("cuda")), "cuda"
    return 1, float(free_memory("cpu")), "cpu"


def slots_wanted(config: Any, device_type: str) -> int:
    """Rollouts in flight, limited to the number that is sampled concurrently on such a device."""
    under_way = config.rollouts_per_generation * (1 + config.num_batches_ahead)
    return int(min(under_way, MOST_SLOTS.get(device_type, MOST_SLOTS_ELSEWHERE)))


def shortest(*lengths: int | None) -> int | None:
    """The smallest limit; None if there is none.

    >>> shortest(512, None), shortest(None, None)
    (512, None)
    """
    return min((one for one in lengths if one is not None), default=None)


def length_asked(config: TrainingConfig, env: Any, longest: int | None) -> int | None:
    """The largest number of tokens of a sequence, if the configuration determines it."""
    length: int | None = getattr(config, "max_seq_length", None)
    if length is None and isinstance(config, GRPOConfig) and isinstance(env, SingleTurnEnv):
        length = None if config.max_prompt_length is None else config.max_prompt_length + max_new_tokens(config, env)
    return None if length is None else shortest(length, longest)


def longest_sequence(config: TrainingConfig, env: Any, longest: int | None) -> int:
    """The number of tokens of the longest sequence to plan for: as configured, or a default."""
    length = length_asked(config, env, longest)
    if length is None:
        length = DEFAULT_CONVERSATION if isinstance(config, GRPOConfig) else DEFAULT_EXAMPLE
        if isinstance(config, GRPOConfig) and isinstance(env, SingleTurnEnv):
            length = DEFAULT_PROMPT + max_new_tokens(config, env)
    return int(length if longest is None else min(length, longest))
