"""Broadcast tensors from one process to others: over NCCL if all members have it, otherwise over gloo.

The sender is rank 0. Each `broadcast` sends one tensor, which the others receive in place. A channel is independent of
`torch.distributed`'s default group. This file must not import anything from the package, because vLLM workers load it
in another environment.
"""

from __future__ import annotations

import base64
import ctypes
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

LOOPBACK = "127.0.0.1"
ID_BYTES = 128
# NCCL's data type codes. Tensors of other types are sent as bytes.
_NCCL_TYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9, torch.int64: 4, torch.int32: 2}
_NCCL_BYTES, _NCCL_SUM = 1, 0


def backend_here() -> str:
    """The backend of this process: "nccl" if CUDA and NCCL are available, otherwise "gloo"."""
    return "nccl" if torch.cuda.is_available() and _library() is not None else "gloo"


def card_here(device: torch.device | None = None) -> str | None:
    """The UUID of this process's GPU. NCCL cannot join two processes on one GPU."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    return str(torch.cuda.get_device_properties(device or torch.cuda.current_device()).uuid)


def address_towards(host: str) -> str:
    """The address at which a host reaches this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


class GlooChannel:
    """A gloo group, for CPU tensors. With ``port=0`` the sender chooses a free port, available as `port`."""

    def __init__(self, address: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.device = torch.device("cpu")
        limit = timedelta(seconds=timeout_s)
        self._store = distributed.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False
        )
        self.port: int = self._store.port
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._address = address
        self._group: Any = None

    def join(self) -> None:
        """Wait until all members have joined."""
        options = distributed.ProcessGroupGloo._Options()
        here = self._address if self._rank == 0 else address_towards(self._address)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=here)]
        options._timeout = timedelta(seconds=self._timeout_s)
        store = distributed.PrefixStore("weights", self._store)
        self._group = distributed.ProcessGroupGloo(store, self._rank, self._world_size, options)

    def broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast([tensor], distributed.BroadcastOptions()).wait()

    def close(self) -> None:
        self._group = None
        self._store = None


class NcclChannel:
    """An NCCL group, for CUDA tensors, using PyTorch's NCCL library. ``unique_id`` is the sender's, as base64.

    `join` blocks until all members have called it. It ends with an all-reduce of one number, as vLLM's workers expect.
    The group uses the device that was current when it was created, on whichever thread it is called.
    """

    def __init__(self, unique_id: str, *, rank: int, world_size: int) -> None:
        library = _nccl()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._nccl, self._rank, self._world_size = library, rank, world_size
        self._id = _UniqueId.from_buffer_copy(base64.b64decode(unique_id))
        self._comm = ctypes.c_void_p()

    def join(self) -> None:
        with torch.cuda.device(self.device):
            made = self._nccl.ncclCommInitRank(ctypes.byref(self._comm), self._world_size, self._id, self._rank)
            _check(self._nccl, made)
            one = torch.zeros(1, device=self.device)
            where, count, kind = ctypes.c_void_p(one.data_ptr()), ctypes.c_size_t(1), _NCCL_TYPES[torch.float32]
            summed = self._nccl.ncclAllReduce(where, where, count, kind, _NCCL_SUM, self._comm, self._stream)
            _check(self._nccl, summed)
            torch.cuda.synchronize(self.device)

    @property
    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def broadcast(self, tensor: Tensor) -> None:
        kind = _NCCL_TYPES.get(tensor.dtype, _NCCL_BYTES)
        count = tensor.numel() if tensor.dtype in _NCCL_TYPES else tensor.numel() * tensor.element_size()
        where = ctypes.c_void_p(tensor.data_ptr())
        with torch.cuda.device(self.device):
            sent = self._nccl.ncclBroadcast(where, where, ctypes.c_size_t(count), kind, 0, self._comm, self._stream)
            _check(self._nccl, sent)
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value:
            self._nccl.ncclCommAbort(comm)


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * ID_BYTES)]


def new_unique_id() -> str:
    """The unique id of a new NCCL group, as base64."""
    library, made = _nccl(), _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(made)))
    return base64.b64encode(bytes(made)).decode()


def _library() -> Any:
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    library.ncclGetErrorString.restype = ctypes.c_char_p
    pointer, count = ctypes.c_void_p, ctypes.c_size_t
    library.ncclCommInitRank.argtypes = [pointer, ctypes.c_int, _UniqueId, ctypes.c_int]
    library.ncclAllReduce.argtypes = [pointer, pointer, count, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, count, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def _nccl() -> Any:
    if (library := _library()) is None:
        raise ValueError("NCCL is not available: PyTorch was installed without CUDA. Use gloo")
    return library


def _check(library: Any, code: int) -> None:
    if code:
        raise RuntimeError(f"NCCL failed: {library.ncclGetErrorString(code).decode()}")


def opened(init: dict[str, Any], *, rank: int, timeout_s: float) -> GlooChannel | NcclChannel:
    """Join as a receiver. ``init`` is the request body of ``/init_weight_transfer_engine``."""
    made: GlooChannel | NcclChannel
    if init.get("nccl_unique_id_b64"):
        made = NcclChannel(init["nccl_unique_id_b64"], rank=rank, world_size=init["world_size"])
    else:
        made = GlooChannel(
            init["master_address"], init["master_port"], rank=rank, world_size=init["world_size"], timeout_s=timeout_s
        )
    made.join()
    return made
