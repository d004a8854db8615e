"""A model and several processes → sharded weights that are trained, and the full model that they are gathered into.

The module that a trainer was given keeps all its parameters: on the device if it samples there, else on the host. What
is trained is a copy, sharded by PyTorch's `fully_shard` (FSDP2) or by DeepSpeed (`distributed.zero`). The copy is
created on the meta device and filled one parameter at a time. After each update, its parameters are all-gathered into
the full module, one at a time, for sampling, weight transfer and checkpoints.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verifiers.kernels import prove as probe
from verifiers.kernels.modules import base_model, is_quantised
from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.distributed.processes import all_gather, is_on, mixed_precision, same_weights
from verifiers.trainers.learning.logprobs import TokenScorer
from verifiers.trainers.learning.proof import Layouts
from verifiers.trainers.weights import Weights

logger = logging.getLogger("verifiers.trainers")

Whole = Literal["sampled", "sent", "saved"]


def make_weights(model: Any, config: TrainingConfig, processes: Any, kind: str, *, whole: Whole) -> Weights:
    """The trained parameters of a model, sharded as the launcher configured (``kind``, from `processes.sharding`).

    ``whole`` is who reads the full model: ``sampled`` (every process after every step, on its device), ``sent`` (rank 0
    after every step) or ``saved`` (rank 0 when the model is saved).
    """
    same_weights(processes, model)
    if kind == "none":
        return Weights(model, config, processes)
    _check_kind(kind, in_4_bit=is_quantised(model), is_fp16=next(model.parameters()).dtype == torch.float16)
    if kind == "fsdp2":
        return FSDPWeights(model, config, processes, whole=whole)
    from verifiers.trainers.distributed.zero import ZeroWeights

    return ZeroWeights(model, config, processes, whole=whole)


def check_sharding(config: TrainingConfig, processes: Any, kind: str) -> None:
    """Refuse settings that cannot be sharded, before anything is loaded."""
    if kind == "none":
        return
    if config.optim != "adamw":
        raise ValueError(
            f"optim={config.optim!r} does not work with {kind}, which shards the optimizer over the processes: leave "
            "optim out"
        )
    is_fp16 = config.fp16 or (not config.bf16 and mixed_precision() == "fp16")
    _check_kind(kind, in_4_bit=config.load_in_4bit, is_fp16=is_fp16)
    if kind == "zero":
        from verifiers.trainers.distributed.zero import check_settings

        check_settings(config, processes)


def _check_kind(kind: str, *, in_4_bit: bool, is_fp16: bool) -> None:
    if in_4_bit:
        raise ValueError(
            f"weights in 4 bits (load_in_4bit) cannot be sharded, so {kind} does not work: use ddp, where each process "
            "holds the whole model in 4 bits, or leave load_in_4bit out"
        )
    if is_fp16:
        raise ValueError("fp16=True does not work with a sharded model: use bf16=True")


class Root(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """The root module of a sharded model; its forward pass calls a given function.

    This is needed because submodules of a sharded model have their parameters only during a forward pass of the root.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class ShardedWeights(Weights):
    """Trained parameters of which each process holds a shard, and the full model that they are gathered into."""

    is_sharded = True
    root: Any
    _layouts: Layouts

    def __init__(self, model: Any, sharded: Any, config: TrainingConfig, processes: Any, *, whole: Whole) -> None:
        self.whole, self._is_sampled, self._publishes = model, whole == "sampled", whole != "saved"
        super().__init__(sharded, config, processes)
        parameters = dict(model.named_parameters())
        self._whole = [parameters[name] for name in self.names]
        self._versions = [one._version for one in self._whole]

    @property
    def device(self) -> torch.device:
        return self.processes.device  # parameters may be offloaded

    def scorer(self) -> TokenScorer:
        return TokenScorer(self.module, layouts=self._layouts, run=self.root)

    def gather(self) -> Iterator[tuple[int, Tensor]]:
        """All-gather the trained parameters one at a time: index and full tensor."""
        raise NotImplementedError

    def scatter(self, i: int, whole: Tensor) -> None:
        """Write this process's shard of a full parameter."""
        raise NotImplementedError

    def publish(self) -> None:
        """Gather the parameters into the full model, if it is read after every step."""
        if self._publishes:
            self.publish_now()

    def publish_now(self, *, everywhere: bool = False) -> None:
        """Gather the parameters into the full model of the processes that read it, or ``everywhere``."""
        with torch.no_grad():
            for i, tensor in self.gather():
                if everywhere or self._is_sampled or self.processes.is_main_process:
                    self._whole[i].copy_(tensor)
        self._versions = [one._version for one in self._whole]

    def finish(self) -> None:
        self.publish_now(everywhere=True)

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not trained, for exporting a checkpoint; empty for a model with adapters."""
        if hasattr(self.whole, "peft_config"):
            return {}
        found = self.whole.named_parameters()
        return {f"frozen.{name}": one.detach() for name, one in found if not one.requires_grad}

    def _shards(self) -> list[Tensor]:
        """This process's shard of each trained parameter."""
        return self.masters

    def _not_finite(self) -> list[str]:
        shards = zip(self.names, self._shards(), strict=True)
        own = [name for name, shard in shards if shard.numel() and not bool(shard.isfinite().all())]
        found = {name for names in all_gather(self.processes, own) for name in names}
        return [name for name in self.names if name in found]

    def refresh(self) -> None:
        """Scatter parameters of the full model that were changed from outside, if they changed in all processes."""
        if not self._is_sampled:
            return
        changed = [i for i, one in enumerate(self._whole) if one._version != self._versions[i]]
        everywhere = set(changed).intersection(*all_gather(self.processes, changed))
        if everywhere:
            with torch.no_grad():
                for i, tensor in self.gather():
                    if i in everywhere and not torch.equal(tensor.to(self._whole[i].dtype), self._whole[i]):
                        self.scatter(i, self._whole[i])
        self._versions = [one._version for one in self._whole]


class FSDPWeights(ShardedWeights):
    """Parameters sharded by `fully_shard`, one decoder layer at a time, on any device.

    The optimizer updates the shards, which are float32; a layer is all-gathered in the model's dtype.
    """

    def __init__(self, model: Any, config: TrainingConfig, processes: Any, *, whole: Whole) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._layouts = layouts_on(model, processes.device, is_here=whole == "sampled")
        self._mesh = init_device_mesh(processes.device.type, (processes.num_processes,))
        sharded = copy_with(model, _meta_parameter)
        self.root = _fully_sharded(sharded, self._mesh, next(model.parameters()).dtype)
        self.root.to_empty(device=torch.device("cpu") if _offloads(self._mesh) else processes.device)
        with torch.no_grad():
            for shard, full in zip(sharded.parameters(), model.parameters(), strict=True):
                shard.to_local().copy_(self._shard_of(shard, full))
            for mine, its in zip(sharded.buffers(), model.buffers(), strict=True):
                mine.copy_(its)
        super().__init__(model, sharded, config, processes, whole=whole)

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        (loss * self.processes.num_processes).backward()  # FSDP averages gradients, but we need their sum

    def collect(self) -> None:
        """Pass the gradients to the optimizer; the backward pass has already reduced them."""
        for live, master in zip(self.live, self.masters, strict=True):
            master.grad = None if live.grad is None else live.grad.to_local()
            live.grad = None

    def gather(self) -> Iterator[tuple[int, Tensor]]:
        for i, live in enumerate(self.live):
            yield i, live.detach().to(self.device, self._whole[i].dtype).full_tensor()

    def scatter(self, i: int, whole: Tensor) -> None:
        self.masters[i].copy_(self._shard_of(self.live[i], whole))

    def _shard_of(self, live: Any, whole: Tensor) -> Tensor:
        """This process's shard of a full tensor that is shaped like a parameter, on the tensor's device."""
        (placement,), rank = live.placements, self._mesh.get_local_rank()
        shards = whole.detach().chunk(self._mesh.size(), placement.dim)
        return shards[rank] if rank < len(shards) else whole.detach().narrow(placement.dim, 0, 0)

    def spread(self, i: int, part: Tensor) -> Tensor:
        """A shard as a DTensor, as needed for distributed checkpoints."""
        from torch.distributed.tensor import DTensor

        return DTensor(part, self.live[i]._spec, requires_grad=False)  # `from_local` would move it to another device

    def _master(self, parameter: Any) -> Tensor:
        return parameter.detach().to_local().requires_grad_()

    def _norm(self, gradients: list[Tensor]) -> float:
        squares = torch.tensor(super()._norm(gradients) ** 2, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(squares)
        return math.sqrt(float(squares)) if math.isfinite(float(squares)) else float(squares)


def copy_with(model: Any, make_parameter: Callable[[Any], Any]) -> Any:
    """A copy of a model with parameters that are made from its own; tied parameters stay tied."""
    return copy.deepcopy(model, {id(one): make_parameter(one) for one in model.parameters()})


def _meta_parameter(parameter: Any) -> Any:
    """A copy of a parameter on the meta device; in float32 if the parameter is trained."""
    dtype = torch.float32 if parameter.requires_grad else parameter.dtype
    empty = torch.empty_like(parameter, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def layouts_on(model: Any, device: torch.device, *, is_here: bool) -> Layouts:
    """The batch layouts in which a model's own forward is exact on a device, proven before the model is sharded.

    Unless the full model is on the device (``is_here``), only its `first_layers` are tested there.
    """
    if is_here:
        return TokenScorer(model, may_fuse=False).layouts
    try:
        return TokenScorer(first_layers(model).to(device), may_fuse=False).layouts
    except ValueError:  # the model cannot be trained at all
        raise
    except Exception as error:  # the model's own code may not run with fewer layers
        logger.warning("%s is trained one sequence at a time: its first layers do not run alone", type(model).__name__)
        logger.debug("%r", error)
        return Layouts(rope_bounds=tuple(probe.rope_bounds(model.config)))


def first_layers(model: Any) -> Any:
    """A copy of a model with the fewest first layers that have every kind; all, if they are not in one ModuleList."""
    base = base_model(model)
    text = probe.text_config(base.config)
    lists = [one for one in base.modules() if isinstance(one, nn.ModuleList) and len(one) == text.num_hidden_layers]
    if len(lists) != 1:
        return copy.deepcopy(model)
    (layers,), types = lists, getattr(text, "layer_types", None)
    shapes = [tuple((key, one.shape) for key, one in layer.named_parameters()) for layer in layers]
    kinds = [(type(layer), types[i] if types else None, shapes[i]) for i, layer in enumerate(layers)]
    count = 1 + max(kinds.index(kind) for kind in set(kinds))
    all_layers = layers._modules
    layers._modules = dict(list(all_layers.items())[:count])  # only during the copy
    try:
        first = copy.deepcopy(model)
    finally:
        layers._modules = all_layers
    config = probe.text_config(first.config)
    config.num_hidden_layers = count
    if types:
        config.layer_types = list(types[:count])
    return first


def _fully_sharded(model: Any, mesh: Any, dtype: torch.dtype) -> Root:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    is_half = dtype != torch.float32
    policy = (
        MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if is_half else MixedPrecisionPolicy()
    )
    reshards = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() not in ("0", "false")
    settings = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if _offloads(mesh) else OffloadPolicy(),
    }
    for layer in _decoder_layers(model):
        fully_shard(layer, reshard_after_forward=reshards, **settings)
    root: Root = fully_shard(Root(model), **settings)
    return root


def _offloads(mesh: Any) -> bool:
    """Whether parameters and optimizer states are kept on the host, and copied to the device for each pass."""
    return mesh.device_type != "cpu" and is_on("FSDP_OFFLOAD_PARAMS")


def _decoder_layers(model: Any) -> list[Any]:
    """The modules that transformers does not split between devices; without any, the members of every ModuleList."""
    base = base_model(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    found = [one for one in base.modules() if type(one).__name__ in names]
    return found or [layer for one in base.modules() if isinstance(one, nn.ModuleList) for layer in one]
