"""Processes that were started together become one trainer: the same weights, summed gradients, everybody's rollouts."""

from __future__ import annotations

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

_RANKS = {
    "RANK": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
}
_REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism configuration",
}
_WITHOUT_EFFECT = {
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", ("no",), "models are not compiled in training"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        ("1", "auto"),
        "say gradient_accumulation_steps in the configuration",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        "fsdp_activation_checkpointing",
        ("false",),
        "say gradient_checkpointing=True in the configuration",
    ),
}
MOST_WAIT_S = 24 * 3600.0
FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"


def accelerator() -> Any:
    """Accelerate's view of the processes: all that ``torchrun`` or ``accelerate launch`` started, or one sentence."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise ImportError("training needs: pip install 'verifiers[train]'") from None
    _check_settings()
    started = _started()
    is_cpu = not torch.accelerator.is_available()
    with _found_each_other():
        if _is_on(DEEPSPEED):
            made = _with_deepspeed(is_cpu, started)
        else:
            # On a CPU no launcher but its own tells Accelerate that processes belong together. The model is sharded by
            # us: Accelerate's FSDP on a CPU trains one model in each process and says nothing.
            if _is_on(FSDP):  # else transformers gives weights to the first process alone
                os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
            with _hidden(FSDP):
                made = Accelerator(cpu=started > 1 and is_cpu, kwargs_handlers=_waiting(started))
    if made.num_processes != started:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE), and Accelerate sees {made.num_processes}: each would "
            "train a model of its own; start them with torchrun or accelerate launch, or one process alone"
        )
    return made


@contextmanager
def _found_each_other() -> Iterator[None]:
    """What PyTorch says of a port in use, or of a first process that is not there, as one sentence."""
    try:
        yield
    except torch.distributed.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        said = " ".join(str(error).split("\n")[0].split())
        raise ValueError(
            f"the processes do not meet at {where} ({said:.200}): if that port is in use, give another to the launcher "
            "(--master_port of torchrun, --main_process_port of accelerate launch)"
        ) from error


def sharding() -> str:
    """How the processes were asked to hold a model: ``none`` (each all of it), ``fsdp2`` or ``zero``."""
    if _is_on(DEEPSPEED):
        return "zero"
    return "fsdp2" if _is_on(FSDP) and _started() > 1 else "none"


def held_apart(accelerator: Any, kind: str) -> str:
    """What each process holds a part of, as the memory plan says it: ``fsdp2`` is all, ``zero2`` all but weights."""
    if kind != "zero":
        return kind
    return "fsdp2" if accelerator.state.deepspeed_plugin.zero_stage == 3 else "zero2"


def devices() -> int:
    """How many GPUs this machine has."""
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def mixed_precision() -> str | None:
    """The precision that a launcher's configuration asks for: ``bf16``, ``fp16`` or None."""
    said = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if said not in ("no", "bf16", "fp16"):
        raise ValueError(f"mixed_precision={said} of Accelerate is not known here: take bf16, fp16 or no")
    return None if said == "no" else said


def _waiting(started: int, **more: Any) -> list[Any]:
    """A process may wait for rollouts of another for longer than PyTorch's ten minutes; a launcher sees who dies."""
    from accelerate.utils import InitProcessGroupKwargs

    return [InitProcessGroupKwargs(timeout=timedelta(seconds=MOST_WAIT_S), **more)] if started > 1 or more else []


def _with_deepspeed(is_cpu: bool, started: int) -> Any:
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError("DeepSpeed is asked for, and it is not installed: pip install 'verifiers[deepspeed]'")
    from accelerate import Accelerator

    if is_cpu:
        import deepspeed

        # It would take NCCL, and compile shared memory for several processes when they are already started.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    handlers = _waiting(started, **({"backend": "gloo"} if is_cpu else {}))
    with _hidden("ACCELERATE_MIXED_PRECISION"):  # the dtype of the model decides
        made = Accelerator(kwargs_handlers=handlers)
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # transformers would shard every model that it makes from here on; ours are whole until their twins are sharded.
    made.state.deepspeed_plugin.zero3_init_flag = False
    unset_hf_deepspeed_config()
    return made


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true")


@contextmanager
def _hidden(variable: str) -> Iterator[None]:
    """While this lasts a variable of the environment is not there."""
    before = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[variable] = before


def _started() -> int:
    """How many processes were started together, by the variables of torchrun, Accelerate or MPI."""
    for rank, size in _RANKS.items():
        if rank in os.environ:
            return _whole(size, 1)
    if "MASTER_ADDR" in os.environ and os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true"):
        raise ValueError(
            "accelerate launch --cpu was asked for several processes and started one; start them with "
            "torchrun --nproc_per_node N, or one process alone with --num_processes 1"
        )
    return 1


def _whole(variable: str, otherwise: int) -> int:
    """A variable that a launcher sets to a whole number."""
    said = os.environ.get(variable) or str(otherwise)
    try:
        return int(said)
    except ValueError:
        raise ValueError(
            f"{variable}={said:.50} in the environment is not a whole number: let a launcher set it (torchrun, "
            "accelerate launch, vf train --launch), or unset it for one process alone"
        ) from None


def _check_settings() -> None:
    for variable in (*_RANKS, *_RANKS.values(), "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        _whole(variable, 0)  # Accelerate and PyTorch read them, too
    if (started := _started()) > 1:
        _whole("MASTER_PORT", 0)  # of one process Kubernetes may have set it, for a service of the name "master"
        if _rank() not in range(started):
            raise ValueError(f"this is process {_rank()} of {started} (RANK, WORLD_SIZE): they count from 0")
    mixed_precision()
    for variable, name in _REFUSED.items():
        if _is_on(variable):
            raise ValueError(
                f"{name} is asked for ({variable}), and this trainer has DDP, FSDP2 and DeepSpeed ZeRO: take one of "
                "configs/ddp.yaml, fsdp2.yaml, zero2.yaml, zero3.yaml"
            )
    if _is_on(FSDP) and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            "this configuration is for FSDP 1 (fsdp_version), and models are sharded by FSDP 2 here: say "
            "fsdp_version: 2, as configs/fsdp2.yaml does"
        )
    for variable, (name, neutral, instead) in _WITHOUT_EFFECT.items():
        value = os.environ.get(variable, "").lower()
        if value and value not in neutral:
            warnings.warn(f"{name}={value} of Accelerate has no effect here: {instead}", stacklevel=4)
    if not _is_on(DEEPSPEED):
        _warn_of_ignored_sections()


def _warn_of_ignored_sections() -> None:
    """Accelerate ignores a section of its configuration that is for another ``distributed_type``, without a word."""
    path = _config_file()
    if path is None or _rank() != 0:
        return
    try:
        import yaml

        said = yaml.safe_load(read_regular(path, most=1 << 20))
    except (OSError, ValueError, yaml.YAMLError):
        return
    kind = str(said.get("distributed_type", "NO")).upper() if isinstance(said, dict) else ""
    for section, wanted in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if kind and kind != wanted and said.get(section):
            warnings.warn(
                f"{path} has a section {section}, and Accelerate ignores it because it says distributed_type: {kind}; "
                f"say distributed_type: {wanted} to shard the model",
                stacklevel=5,
            )


def _config_file() -> Path | None:
    """The configuration that ``accelerate launch`` was given, which is among the processes above this one."""
    import psutil

    try:
        lines = [one.cmdline() for one in psutil.Process().parents()]
    except psutil.Error:
        return None
    for line in lines:
        if not any("accelerate" in word for word in line[:4]):
            continue
        for i, word in enumerate(line):
            name, _, value = word.partition("=")
            if name in ("--config-file", "--config_file"):
                return Path(value or (line[i + 1] if i + 1 < len(line) else ""))
    return None


def _rank() -> int:
    return next((_whole(rank, 0) for rank in _RANKS if rank in os.environ), 0)


def gathered(processes: Any, value: T) -> list[T]:
    """What each process has, in their order; it must be plain data."""
    if processes is None or processes.num_processes == 1:
        return [value]
    from accelerate.utils import gather_object

    found: list[T] = gather_object([value])
    return found


@contextmanager
def together(processes: Any) -> Iterator[None]:
    """What fails in one process fails in all of them: none waits for another that is gone."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    failed = [one for one in gathered(processes, None if error is None else str(error)) if one]
    if error is not None:
        raise error
    if failed:
        raise OSError(failed[0])


def lacking(processes: Any, count: int) -> int:
    """How many fewer a process has than the one that has most."""
    return max(gathered(processes, count)) - count


def sum_gradients(processes: Any, masters: Sequence[Tensor]) -> None:
    """Give every process the sum of all gradients; each has divided by the counts of all."""
    if processes is None or processes.num_processes == 1:
        return
    for master in masters:
        if master.requires_grad:
            gradient = master.grad if master.grad is not None else torch.zeros_like(master)
            master.grad = processes.reduce(gradient, "sum")


def same_weights(processes: Any, model: Any) -> None:
    """Give every process the weights of the first: adapters and new models are drawn at random in each."""
    if processes.num_processes == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().to(processes.device).contiguous()  # of a model on the host one tensor at a time
            torch.distributed.broadcast(whole, 0)
            tensor.copy_(whole)
