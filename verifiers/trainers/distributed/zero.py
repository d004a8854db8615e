"""Weights sharded by DeepSpeed ZeRO: optimizer state and gradients (stage 2), and also parameters (stage 3)."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.distributed.sharding import Root, ShardedWeights, Whole, copy_with, layouts_on

REPLACED_SECTIONS = ("optimizer", "scheduler")  # of DeepSpeed's configuration; the trainer uses its own
MOMENTS = ("exp_avg", "exp_avg_sq")  # states that AdamW has for each parameter


class ZeroWeights(ShardedWeights):
    """Trained parameters that DeepSpeed shards; DeepSpeed keeps their float32 copies and updates them.

    Up to stage 2, every process has the full parameters and also samples from them.
    """

    def __init__(self, model: Any, config: TrainingConfig, processes: Any, *, whole: Whole) -> None:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        settings = settings_of(model, config, processes)
        self.stage = int(settings["zero_optimization"]["stage"])
        self._layouts = layouts_on(model, processes.device, is_here=whole == "sampled" or self.stage < 3)
        sharded = model
        if self.stage == 3:  # on the same storage, because DeepSpeed copies its shard and drops the reference
            sharded = copy_with(model, lambda one: nn.Parameter(one.detach(), one.requires_grad))
        super().__init__(model, sharded, config, processes, whole=whole)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # `initialize` makes a step to allocate the optimizer's state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DeepSpeed warns about versions of torch
            if self.stage == 3:
                deepspeed.zero.Init(module=sharded, config_dict_or_path=settings)
            self.root, *_ = deepspeed.initialize(
                model=Root(sharded), optimizer=self.optimizer, model_parameters=self.live, config=settings
            )
        self.optimizer = self.root.optimizer
        for state in self._inner.state.values():
            if "step" in state:
                state["step"] = state["step"] * 0
        self._has_gradients = False

    @property
    def _inner(self) -> Any:
        """The optimizer that DeepSpeed's optimizer wraps."""
        return self.root.optimizer.optimizer

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        self.root.set_gradient_accumulation_boundary(is_last)
        self.root.backward(loss * self.processes.num_processes)  # DeepSpeed averages gradients; undo it
        self._has_gradients = True

    def collect(self) -> None:
        """Do nothing, because the backward pass has already reduced the gradients."""

    def step(self, learning_rate: float) -> float:
        if not self._has_gradients:
            return 0.0
        for group in self.root.optimizer.param_groups:
            group["lr"] = learning_rate
        self.root.step()
        self._has_gradients = False
        norm = self.root.get_global_grad_norm()
        norm = 0.0 if norm is None else float(norm)
        self.publish()
        self.check_finite("after a step")
        return norm if norm >= 0 else math.inf  # -1 means an overflow: the step was skipped

    def clear(self) -> None:
        self.root.optimizer.zero_grad()

    def gather(self) -> Iterator[tuple[int, Tensor]]:
        import deepspeed

        for i, live in enumerate(self.live):
            with deepspeed.zero.GatheredParameters([live], enabled=self.stage == 3):
                yield i, live.detach()

    def scatter(self, i: int, whole: Tensor) -> None:
        """Write a full parameter to its float32 copy and to the parameter itself."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        live = self.live[i]
        if self.stage == 3:
            shard = self._shard_of(live, whole)
            safe_set_local_fp32_param(live, shard)
            live.ds_tensor.data.copy_(shard)
        else:
            safe_set_full_fp32_param(live, whole.float())
        if live.numel() == whole.numel():  # small parameters are not sharded even at stage 3
            live.data.copy_(whole)

    def _shard_of(self, live: Any, whole: Tensor) -> Tensor:
        """This process's shard of a full tensor that is shaped like a parameter; the last rank's shard is padded."""
        size, flat = live.ds_tensor.numel(), whole.float().flatten()
        padded = torch.nn.functional.pad(flat, (0, size * self.processes.num_processes - flat.numel()))
        return padded.narrow(0, size * self.processes.process_index, size)

    def _scatter_state(self, i: int, key: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        live = self.live[i]
        if self.stage == 3:
            safe_set_local_optimizer_state(live, self._shard_of(live, whole), key)
        else:
            safe_set_full_optimizer_state(live, whole, key)

    def publish(self) -> None:
        if self.stage == 3:
            super().publish()
        else:
            self.publish_now()

    def publish_now(self, *, everywhere: bool = False) -> None:
        if self.stage == 3:
            super().publish_now(everywhere=everywhere)
            return
        increment_version(self.live)  # DeepSpeed writes without incrementing version counters
        self._versions = [one._version for one in self._whole]

    def refresh(self) -> None:
        if self.stage == 3:
            super().refresh()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(one.shape) for name, one in zip(self.names, self._whole, strict=True)}

    def tensors(self) -> dict[str, Tensor]:
        """Gather one parameter at a time; of n processes, each keeps every n-th parameter to write it."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found = {}
        for i, (name, live) in enumerate(zip(self.names, self.live, strict=True)):
            whole = {f"weights.{name}": safe_get_full_fp32_param(live)}
            for key in MOMENTS:
                whole[f"optimizer.{name}.{key}"] = safe_get_full_optimizer_state(live, key)
            if i % self.processes.num_processes == self.processes.process_index:
                found.update({entry: one.detach().cpu().clone() for entry, one in whole.items()})
                found[f"optimizer.{name}.step"] = torch.tensor(float(self._steps))
        return found

    @property
    def _steps(self) -> float:
        return max((float(state["step"]) for state in self._inner.state.values() if "step" in state), default=0.0)

    def make_room(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._was_stepped = bool(shapes)
        zero = self.root.optimizer
        for flat in zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups:
            state = self._inner.state[flat]
            for key in MOMENTS:
                state.setdefault(key, torch.zeros_like(flat))
            state.setdefault("step", torch.zeros((), device=flat.device))
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()

    def take(self, read: Callable[[dict[str, Tensor]], Any]) -> None:
        """Read one full parameter at a time; each process keeps its shard."""
        step = torch.zeros(())
        for i, (name, whole) in enumerate(zip(self.names, self._whole, strict=True)):
            weight, states = torch.empty(whole.shape), {key: torch.empty(whole.shape) for key in MOMENTS}
            wanted = {f"weights.{name}": weight}
            if self._was_stepped:
                wanted |= {f"optimizer.{name}.{key}": one for key, one in {**states, "step": step}.items()}
            read(wanted)
            self.scatter(i, weight)
            for key, one in states.items() if self._was_stepped else ():
                self._scatter_state(i, key, one)
        for state in self._inner.state.values():
            state["step"] = torch.full_like(state["step"], float(step))
        self.publish()

    def _master(self, parameter: Any) -> Tensor:
        return parameter

    def _shards(self) -> list[Tensor]:
        return [getattr(one, "ds_tensor", one) for one in self.live]


def settings_of(model: Any, config: TrainingConfig, processes: Any) -> dict[str, Any]:
    """The launcher's DeepSpeed configuration, with the values that the trainer determines."""
    settings: dict[str, Any] = copy.deepcopy(processes.state.deepspeed_plugin.deepspeed_config)
    for name in REPLACED_SECTIONS:
        if settings.pop(name, None) is not None:
            warnings.warn(
                f"{name} of DeepSpeed's configuration has no effect here: set it in the trainer's", stacklevel=6
            )
    zero = settings["zero_optimization"]
    hidden = model.config.get_text_config().hidden_size
    auto = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    zero.update({name: value for name, value in auto.items() if zero.get(name) == "auto"})
    is_half = next(model.parameters()).dtype == torch.bfloat16
    for name in ("fp16", "amp", "train_batch_size"):
        settings.pop(name, None)
    return {
        **settings,
        "train_micro_batch_size_per_gpu": 1,  # the trainer sizes micro-batches by tokens
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm or 0.0,
        "bf16": {"enabled": is_half},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if is_half else {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # the trainer's optimizer also works with offloading
    }


def check_settings(config: TrainingConfig, processes: Any) -> None:
    """Refuse a DeepSpeed configuration that shards nothing, or whose batch sizes differ from the trainer's."""
    settings, count = processes.state.deepspeed_plugin.deepspeed_config, processes.num_processes
    stage = int(settings["zero_optimization"].get("stage", 0))
    if stage not in (1, 2, 3):
        raise ValueError(
            f"zero_stage: {stage} shards nothing: use 2 or 3 (configs/zero2.yaml, zero3.yaml), or configs/ddp.yaml"
        )
    own = {
        "train_batch_size": config.batch_size * config.gradient_accumulation_steps * count,
        "train_micro_batch_size_per_gpu": config.batch_size,
    }
    for name, value in own.items():
        given = settings.get(name, "auto")
        if given not in ("auto", value):
            raise ValueError(
                f"{name} of DeepSpeed's configuration is {given}, but batch_size = {config.batch_size} in each of "
                f"{count} processes makes {value}: set it to auto"
            )
