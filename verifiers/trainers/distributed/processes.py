"""The processes of one training: how they were launched, and their collectives (gather, reduce, broadcast)."""

from __future__ import annotations

import atexit
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from verifiers.files import read_regular

T = TypeVar("T")

_RANK_VARIABLES = {  # by launcher: torchrun and accelerate, Open MPI, MPICH, MVAPICH2
    "RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
}
_UNSUPPORTED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism configuration",
}
_IGNORED = {  # variable: name of the setting, values without an effect, what to do instead
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", ("no",), "models are not compiled in training"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        ("1", "auto"),
        "set gradient_accumulation_steps in the configuration",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        "fsdp_activation_checkpointing",
        ("false",),
        "set gradient_checkpointing=True in the configuration",
    ),
}
COLLECTIVE_TIMEOUT_S = 24 * 3600.0
FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"


def accelerator() -> Any:
    """The `Accelerator` of all processes that ``torchrun`` or ``accelerate launch`` started."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise ImportError("training needs: pip install 'verifiers[train]'") from None
    _check_settings()
    world_size = _world_size()
    is_cpu = not torch.accelerator.is_available()
    if world_size > 1 and not torch.distributed.is_initialized():
        atexit.register(_leave_group)
    with _rendezvous():
        if is_on(DEEPSPEED):
            made = _with_deepspeed(is_cpu, world_size)
        else:
            # On a CPU, Accelerate joins processes of other launchers only with cpu=True. We shard the model ourselves:
            # with FSDP on a CPU, Accelerate would silently train a separate model in each process.
            if is_on(FSDP):  # otherwise transformers loads the weights in the first process only
                os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
            with _unset(FSDP):
                made = Accelerator(cpu=world_size > 1 and is_cpu, kwargs_handlers=_group_options(world_size))
    if made.num_processes != world_size:
        raise ValueError(
            f"{world_size} processes were started (WORLD_SIZE), but Accelerate sees {made.num_processes}: each would "
            "train its own model; start them with torchrun or accelerate launch, or start a single process"
        )
    return made


def _leave_group() -> None:
    """Join the threads of the process group before Python shuts down: one that ends during shutdown may abort it."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def _rendezvous() -> Iterator[None]:
    """Turn errors of the rendezvous (port in use, rank 0 missing) into a short ValueError."""
    try:
        yield
    except torch.distributed.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        said = " ".join(str(error).split("\n")[0].split())
        raise ValueError(
            f"the processes cannot connect at {where} ({said:.200}): if that port is in use, pass another one to the "
            "launcher (--master_port of torchrun, --main_process_port of accelerate launch)"
        ) from error


def sharding() -> str:
    """How the launcher's configuration shards the model: ``none`` (all of it in every process), ``fsdp2``, ``zero``."""
    if is_on(DEEPSPEED):
        return "zero"
    return "fsdp2" if is_on(FSDP) and _world_size() > 1 else "none"


def sharded_states(accelerator: Any, kind: str) -> str:
    """What is sharded, as the memory plan names it: ``fsdp2`` is everything, ``zero2`` all but the parameters."""
    if kind != "zero":
        return kind
    return "fsdp2" if accelerator.state.deepspeed_plugin.zero_stage == 3 else "zero2"


def devices() -> int:
    """The number of accelerators of this machine."""
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def mixed_precision() -> str | None:
    """The precision in the launcher's configuration: ``bf16``, ``fp16`` or None."""
    said = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if said not in ("no", "bf16", "fp16"):
        raise ValueError(f"mixed_precision={said} of Accelerate is not supported: use bf16, fp16 or no")
    return None if said == "no" else said


def _group_options(world_size: int, **more: Any) -> list[Any]:
    """Options of the process group. The timeout is long, because waiting for the rollouts of another process may take
    longer than PyTorch's default of ten minutes. The launcher notices a process that dies."""
    from accelerate.utils import InitProcessGroupKwargs

    if world_size == 1 and not more:
        return []
    return [InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), **more)]


def _with_deepspeed(is_cpu: bool, world_size: int) -> Any:
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError("this configuration needs DeepSpeed: pip install 'verifiers[deepspeed]'")
    from accelerate import Accelerator

    if is_cpu:
        import deepspeed

        # DeepSpeed would choose NCCL, and compile its shared-memory collectives in every process at once.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    handlers = _group_options(world_size, **({"backend": "gloo"} if is_cpu else {}))
    with _unset("ACCELERATE_MIXED_PRECISION"):  # the dtype of the model decides
        made = Accelerator(kwargs_handlers=handlers)
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # Otherwise transformers would shard every model that it loads from here on; `ZeroWeights` shards its own copy.
    made.state.deepspeed_plugin.zero3_init_flag = False
    unset_hf_deepspeed_config()
    return made


def is_on(variable: str) -> bool:
    """Whether a flag in the environment is set."""
    return os.environ.get(variable, "false").lower() in ("1", "true")


@contextmanager
def _unset(variable: str) -> Iterator[None]:
    """Remove a variable from the environment during the block."""
    before = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[variable] = before


def _world_size() -> int:
    """The number of processes, from the variables of torchrun, Accelerate or MPI."""
    for rank, size in _RANK_VARIABLES.items():
        if rank in os.environ:
            return _integer(size, 1)
    if "MASTER_ADDR" in os.environ and is_on("ACCELERATE_USE_CPU"):
        raise ValueError(
            "accelerate launch --cpu started only one of several processes; start them with "
            "torchrun --nproc_per_node N, or start a single process with --num_processes 1"
        )
    return 1


def _integer(variable: str, default: int) -> int:
    """An environment variable that a launcher sets to an integer."""
    value = os.environ.get(variable) or str(default)
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"{variable}={value:.50} in the environment is not a whole number: let a launcher set it (torchrun, "
            "accelerate launch, vf train --launch), or unset it for a single process"
        ) from None


def _check_settings() -> None:
    for variable in (*_RANK_VARIABLES, *_RANK_VARIABLES.values(), "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        _integer(variable, 0)  # Accelerate and PyTorch read them, too
    if (world_size := _world_size()) > 1:
        _integer("MASTER_PORT", 0)  # only with several processes: Kubernetes sets it for a service named "master"
        if _rank() not in range(world_size):
            raise ValueError(f"rank {_rank()} of {world_size} (RANK, WORLD_SIZE) is not valid: ranks count from 0")
    mixed_precision()
    for variable, name in _UNSUPPORTED.items():
        if is_on(variable):
            raise ValueError(
                f"{name} ({variable}) is not supported, only DDP, FSDP2 and DeepSpeed ZeRO: use one of "
                "configs/ddp.yaml, fsdp2.yaml, zero2.yaml, zero3.yaml"
            )
    if is_on(FSDP) and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            "this configuration is for FSDP 1 (fsdp_version), but only FSDP 2 is supported: set fsdp_version: 2, "
            "as in configs/fsdp2.yaml"
        )
    for variable, (name, neutral, instead) in _IGNORED.items():
        value = os.environ.get(variable, "").lower()
        if value and value not in neutral:
            warnings.warn(f"{name}={value} of Accelerate has no effect here: {instead}", stacklevel=4)
    if not is_on(DEEPSPEED):
        _warn_of_ignored_sections()


def _warn_of_ignored_sections() -> None:
    """Warn about sections that Accelerate silently ignores, because they are for another ``distributed_type``."""
    path = _config_file()
    if path is None or _rank() != 0:
        return
    try:
        import yaml

        config = yaml.safe_load(read_regular(path, most=1 << 20))
    except (OSError, ValueError, yaml.YAMLError):
        return
    kind = str(config.get("distributed_type", "NO")).upper() if isinstance(config, dict) else ""
    for section, wanted in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if kind and kind != wanted and config.get(section):
            warnings.warn(
                f"{path} has a section {section}, but Accelerate ignores it because of distributed_type: {kind}; "
                f"set distributed_type: {wanted} to shard the model",
                stacklevel=5,
            )


def _config_file() -> Path | None:
    """The configuration file of ``accelerate launch``, from the command lines of this process's ancestors."""
    import psutil

    try:
        commands = [process.cmdline() for process in psutil.Process().parents()]
    except psutil.Error:
        return None
    for command in commands:
        if not any("accelerate" in word for word in command[:4]):
            continue
        for i, word in enumerate(command):
            name, _, value = word.partition("=")
            if name in ("--config-file", "--config_file"):
                return Path(value or (command[i + 1] if i + 1 < len(command) else ""))
    return None


def _rank() -> int:
    return next((_integer(rank, 0) for rank in _RANK_VARIABLES if rank in os.environ), 0)


def all_gather(processes: Any, value: T) -> list[T]:
    """All-gather: the values of all processes in the order of their ranks; values are pickled."""
    if processes is None or processes.num_processes == 1:
        return [value]
    from accelerate.utils import gather_object

    found: list[T] = gather_object([value])
    return found


def gather_lists(processes: Any, values: list[T]) -> list[T]:
    """The lists of all processes, concatenated."""
    return [one for part in all_gather(processes, values) for one in part]


@contextmanager
def raise_everywhere(processes: Any) -> Iterator[None]:
    """Raise an error of the block in all processes, so that none waits at a collective for a failed process."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    failed = [one for one in all_gather(processes, None if error is None else str(error)) if one]
    if error is not None:
        raise error
    if failed:
        raise OSError(failed[0])


def shortfall(processes: Any, count: int) -> int:
    """The difference between the largest count of all processes and this process's count."""
    return max(all_gather(processes, count)) - count


def sum_gradients(processes: Any, masters: Sequence[Tensor]) -> None:
    """All-reduce gradients by their sum; each process has divided its loss by the total counts."""
    if processes is None or processes.num_processes == 1:
        return
    for master in masters:
        if master.requires_grad:
            gradient = master.grad if master.grad is not None else torch.zeros_like(master)
            master.grad = processes.reduce(gradient, "sum")


def same_weights(processes: Any, model: Any) -> None:
    """Broadcast the weights of rank 0, because each process initialises adapters and new models at random."""
    if processes.num_processes == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            on_device = tensor.detach().to(processes.device).contiguous()  # the model may be on the host
            torch.distributed.broadcast(on_device, 0)
            tensor.copy_(on_device)
