"""A model and several processes → weights of which each holds a part, and a whole model that is sampled from.

The module that a trainer was given stays whole: on the device if it is sampled from there, else on the host. A twin of
it learns, sharded by PyTorch's `fully_shard` (FSDP2) or by DeepSpeed (`distributed.zero`). It is made without weights,
and takes its parts of them one parameter at a time. After each update its parameters are gathered into the whole
module, one after the other: the engine, a server elsewhere and whoever saves the model read them there.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verifiers.kernels import prove as probe
from verifiers.kernels.modules import base_model, is_quantised
from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.distributed.processes import gathered, mixed_precision, same_weights
from verifiers.trainers.learning.logprobs import Proven, TokenScorer
from verifiers.trainers.learning.proof import Layouts
from verifiers.trainers.memory.plan import MemoryPlan
from verifiers.trainers.weights import Weights

logger = logging.getLogger("verifiers.trainers")

Whole = Literal["sampled", "sent", "saved"]


def make_weights(
    model: Any, config: TrainingConfig, processes: Any, kind: str, *, whole: Whole, plan: MemoryPlan
) -> Weights:
    """The trained parameters of a model, held as the processes were started: ``kind`` is `processes.sharding()`'s.

    The whole model is ``sampled`` (read on its device after every step, by every process), ``sent`` (read after every
    step by the first) or ``saved`` (read by the first when it is saved).
    """
    same_weights(processes, model)
    if kind == "none":
        return Weights(model, config, processes, takes_each=plan.takes_each)
    _check_kind(kind, in_4_bit=is_quantised(model), is_fp16=next(model.parameters()).dtype == torch.float16)
    if kind == "fsdp2":
        return FSDPWeights(model, config, processes, whole=whole)
    from verifiers.trainers.distributed.zero import ZeroWeights

    return ZeroWeights(model, config, processes, whole=whole)


def check_sharding(config: TrainingConfig, processes: Any, kind: str) -> None:
    """Refuse what cannot be shared out among the processes as they were started, before anything is loaded."""
    if kind == "none":
        return
    if config.optim != "adamw":
        raise ValueError(
            f"optim={config.optim!r} is for weights that each process holds whole: leave it out, {kind} shares the "
            "optimizer out among the processes"
        )
    is_fp16 = config.fp16 or (not config.bf16 and mixed_precision() == "fp16")
    _check_kind(kind, in_4_bit=config.load_in_4bit, is_fp16=is_fp16)
    if kind == "zero":
        from verifiers.trainers.distributed.zero import check_settings

        check_settings(config, processes)


def _check_kind(kind: str, *, in_4_bit: bool, is_fp16: bool) -> None:
    if in_4_bit:
        raise ValueError(
            f"weights in 4 bits (load_in_4bit) are not shared out among processes, and {kind} is asked for: start them "
            "as ddp, where each holds all of a model in 4 bits, or leave load_in_4bit out"
        )
    if is_fp16:
        raise ValueError("fp16=True does not go with a sharded model: take bf16=True")


class Root(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """What is sharded: a model, and in one forward pass whatever a function computes with it.

    Parts of a sharded model have their parameters only within a forward pass of the whole.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class ShardedWeights(Weights):
    """Trained parameters of which each process holds a part, and the whole model that they are gathered into."""

    is_sharded = True
    root: Any
    _proven: Proven

    def __init__(self, model: Any, twin: Any, config: TrainingConfig, processes: Any, *, whole: Whole) -> None:
        self.whole, self._is_sampled, self._publishes = model, whole == "sampled", whole != "saved"
        super().__init__(twin, config, processes)
        parameters = dict(model.named_parameters())
        self._whole = [parameters[name] for name in self.names]
        self._versions = [one._version for one in self._whole]

    @property
    def device(self) -> torch.device:
        return self.processes.device  # parameters may be offloaded

    def scorer(self) -> TokenScorer:
        return TokenScorer(self.module, proven=self._proven, run=self.root)

    def gather(self) -> Iterator[tuple[int, Tensor]]:
        """The trained parameters, whole, one after the other; all processes go through them together."""
        raise NotImplementedError

    def scatter(self, i: int, whole: Tensor) -> None:
        """Take this process's part of a whole parameter."""
        raise NotImplementedError

    def publish(self) -> None:
        """Gather the parameters into the whole model, where it is read after every step."""
        if self._publishes:
            self.publish_now()

    def publish_now(self, *, everywhere: bool = False) -> None:
        """Gather the parameters into the whole model, of the processes that read it or of all."""
        with torch.no_grad():
            for i, tensor in self.gather():
                if everywhere or self._is_sampled or self.processes.is_main_process:
                    self._whole[i].copy_(tensor)
        self._versions = [one._version for one in self._whole]

    def finish(self) -> None:
        self.publish_now(everywhere=True)

    def frozen(self) -> dict[str, Tensor]:
        """The parameters that are not trained, for whoever exports a checkpoint; none of a model with adapters."""
        if hasattr(self.whole, "peft_config"):
            return {}
        found = self.whole.named_parameters()
        return {f"frozen.{name}": one.detach() for name, one in found if not one.requires_grad}

    def _parts(self) -> list[Tensor]:
        """What this process holds of each trained parameter."""
        return self.masters

    def _not_finite(self) -> list[str]:
        parts = zip(self.names, self._parts(), strict=True)
        own = [name for name, one in parts if one.numel() and not bool(one.isfinite().all())]
        found = {name for part in gathered(self.processes, own) for name in part}
        return [name for name in self.names if name in found]

    def refresh(self) -> None:
        """Take over what others wrote to the whole model, which must be the same in all processes."""
        if not self._is_sampled:
            return
        changed = [i for i, one in enumerate(self._whole) if one._version != self._versions[i]]
        everywhere = set(changed).intersection(*gathered(self.processes, changed))
        if everywhere:
            with torch.no_grad():
                for i, tensor in self.gather():
                    if i in everywhere and not torch.equal(tensor.to(self._whole[i].dtype), self._whole[i]):
                        self.scatter(i, self._whole[i])
        self._versions = [one._version for one in self._whole]


class FSDPWeights(ShardedWeights):
    """Parameters sharded by `fully_shard`, a decoder layer at a time, on any device.

    They are float32 and the very ones that the optimizer moves; what is gathered for a layer is in the model's dtype.
    """

    def __init__(self, model: Any, config: TrainingConfig, processes: Any, *, whole: Whole) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._proven = proven(model, processes.device, is_here=whole == "sampled")
        self._mesh = init_device_mesh(processes.device.type, (processes.num_processes,))
        twin = twin_of(model, _without_weights)
        self.root = _fully_sharded(twin, self._mesh, next(model.parameters()).dtype)
        self._fill(twin, model, torch.device("cpu") if _offloads(self._mesh) else processes.device)
        super().__init__(model, twin, config, processes, whole=whole)

    def _fill(self, twin: Any, model: Any, device: torch.device) -> None:
        """Give each process its parts: nothing but these is ever on its device."""
        self.root.to_empty(device=device)
        with torch.no_grad():
            for part, whole in zip(twin.parameters(), model.parameters(), strict=True):
                part.to_local().copy_(self._part(part, whole))
            for mine, its in zip(twin.buffers(), model.buffers(), strict=True):
                mine.copy_(its)

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        (loss * self.processes.num_processes).backward()  # gradients are averaged, and we want their sum

    def collect(self) -> None:
        """Sums are made as each layer's gradient is there: what is left is to hand them to the optimizer."""
        for live, master in zip(self.live, self.masters, strict=True):
            master.grad = None if live.grad is None else live.grad.to_local()
            live.grad = None

    def gather(self) -> Iterator[tuple[int, Tensor]]:
        for i, live in enumerate(self.live):
            yield i, live.detach().to(self.device, self._whole[i].dtype).full_tensor()

    def scatter(self, i: int, whole: Tensor) -> None:
        self.masters[i].copy_(self._part(self.live[i], whole))

    def _part(self, live: Any, whole: Tensor) -> Tensor:
        """This process's part of a tensor of the shape of a parameter, where that tensor is."""
        (placement,), rank = live.placements, self._mesh.get_local_rank()
        parts = whole.detach().chunk(self._mesh.size(), placement.dim)
        return parts[rank] if rank < len(parts) else whole.detach().narrow(placement.dim, 0, 0)

    def spread(self, i: int, part: Tensor) -> Tensor:
        """As PyTorch writes and reads it: each process its part."""
        from torch.distributed.tensor import DTensor

        return DTensor(part, self.live[i]._spec, requires_grad=False)  # where it is: `from_local` would move it

    def _master(self, parameter: Any) -> Tensor:
        return parameter.detach().to_local().requires_grad_()

    def _norm(self, gradients: list[Tensor]) -> float:
        squares = torch.tensor(super()._norm(gradients) ** 2, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(squares)
        return math.sqrt(float(squares)) if math.isfinite(float(squares)) else float(squares)


def twin_of(model: Any, parameter: Callable[[Any], Any]) -> Any:
    """A copy of a model, with parameters that are made from its own; those that it shares stay shared."""
    return copy.deepcopy(model, {id(one): parameter(one) for one in model.parameters()})


def _without_weights(parameter: Any) -> Any:
    """A parameter of which nothing is there yet but its shape: in float32 if it is to be moved."""
    dtype = torch.float32 if parameter.requires_grad else parameter.dtype
    made = torch.empty_like(parameter, dtype=dtype, device="meta")
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def proven(model: Any, device: torch.device, *, is_here: bool) -> Proven:
    """In which layouts a model's own forward learns exactly on a device: found out before it is sharded.

    Of one that is not whole there its first layers are tried, as many as show each kind once.
    """
    if is_here:
        return TokenScorer(model, may_fuse=False).proven
    try:
        return TokenScorer(first_layers(model).to(device), may_fuse=False).proven
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:  # foreign code, cut short
        logger.warning("%s learns one sequence at a time: its first layers alone do not run", type(model).__name__)
        logger.debug("%r", error)
        return Proven(is_split=False, layouts=Layouts(rope_bounds=tuple(probe.rope_bounds(model.config))))


def first_layers(model: Any) -> Any:
    """A copy of a model with no more layers than show each kind once; all of them where they are not one list."""
    base = base_model(model)
    text = probe.text_config(base.config)
    lists = [one for one in base.modules() if isinstance(one, nn.ModuleList) and len(one) == text.num_hidden_layers]
    if len(lists) != 1:
        return copy.deepcopy(model)
    (layers,), types = lists, getattr(text, "layer_types", None)
    kinds = [_kind(layer, types[i] if types else None) for i, layer in enumerate(layers)]
    count = 1 + max(kinds.index(kind) for kind in set(kinds))
    with _fewer(layers, count):
        cut = copy.deepcopy(model)
    config = probe.text_config(cut.config)
    config.num_hidden_layers = count
    if types:
        config.layer_types = list(types[:count])
    return cut


def _kind(layer: Any, name: str | None) -> tuple[Any, ...]:
    return type(layer), name, tuple((key, tuple(one.shape)) for key, one in layer.named_parameters())


@contextmanager
def _fewer(layers: Any, count: int) -> Iterator[None]:
    """While this lasts a list of layers has only its first."""
    all_of_them = layers._modules
    layers._modules = dict(list(all_of_them.items())[:count])
    try:
        yield
    finally:
        layers._modules = all_of_them


def _fully_sharded(twin: Any, mesh: Any, dtype: torch.dtype) -> Root:
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
    for layer in decoder_layers(twin):
        fully_shard(layer, reshard_after_forward=reshards, **settings)
    whole: Root = fully_shard(Root(twin), **settings)
    return whole


def _offloads(mesh: Any) -> bool:
    """Do parameters and the optimizer stay on the host, and come to the device for each pass?"""
    return mesh.device_type != "cpu" and os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() in ("1", "true")


def decoder_layers(model: Any) -> list[Any]:
    """The modules that transformers keeps whole on a device, or else the members of every module list."""
    base = base_model(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    found = [one for one in base.modules() if type(one).__name__ in names]
    return found or [layer for one in base.modules() if isinstance(one, nn.ModuleList) for layer in one]
