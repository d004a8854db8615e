"""Weights after each step → the servers that sample from them: by collectives, or as a folder that they read."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import weakref
from typing import Any, Protocol

from verifiers import calls
from verifiers.trainers.checkpoints import save_model
from verifiers.trainers.distributed.processes import raise_everywhere
from verifiers.trainers.distributed.samplers import Samplers
from verifiers.trainers.sampler import Sampler


class RemoteWeights(Protocol):
    """Transfers weights to a model that is served elsewhere.

    ``version`` counts the updates of the weights; the attribute is that of the weights which arrived last.
    """

    @property
    def version(self) -> int: ...

    def begin(self, processes: Any, version: int) -> None: ...

    def send(self, processes: Any, version: int) -> None: ...

    def close(self) -> None: ...


class FolderWeights:
    """The weights as a folder that a server reads after each step."""

    def __init__(self, server: Any, model: Any, tokenizer: Any) -> None:
        self._server, self._model, self._tokenizer = server, model, tokenizer
        self._folder, self.version = tempfile.mkdtemp(prefix="verifiers-weights-"), 0
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def begin(self, processes: Any, version: int) -> None:
        """Name the weights that the server was started with, or send those of a resumed training."""
        if version:
            self.send(processes, version)
            return
        with raise_everywhere(processes):
            if processes.is_main_process and hasattr(self._server, "name_weights"):
                _run(self._server.name_weights(version))

    def send(self, processes: Any, version: int) -> None:
        """Save the weights and have the server load them, in rank 0; the others wait."""
        with raise_everywhere(processes):
            if processes.is_main_process:
                save_model(self._model, self._tokenizer, self._folder)
                load = self._server.reload_weights
                named = {"version": version} if "version" in inspect.signature(load).parameters else {}
                _run(load(self._folder, **named))
        self.version = version

    def close(self) -> None:
        """Nothing is held between two steps."""


class TransferredWeights:
    """The weights sent by `Samplers`, from memory to memory."""

    def __init__(self, samplers: Samplers, model: Any, tokenizer: Any) -> None:
        self._samplers, self._model, self._tokenizer = samplers, model, tokenizer

    @property
    def version(self) -> int:
        return self._samplers.version

    def begin(self, processes: Any, version: int) -> None:
        with raise_everywhere(processes):
            if processes.is_main_process:
                self._samplers.start(self._model, self._tokenizer, version)
        with raise_everywhere(processes):
            if not processes.is_main_process:
                self._samplers.start(self._model, self._tokenizer, version, is_sender=False)

    def send(self, processes: Any, version: int) -> None:
        """Rank 0 sends the full model, which the step has gathered; the others wait."""
        with raise_everywhere(processes):
            if processes.is_main_process:
                self._samplers.send(version)
        self._samplers.version = version

    def close(self) -> None:
        self._samplers.close()


def _run(sent: Any) -> None:
    """Await the result of a server's method, if it is async."""

    async def awaited() -> None:
        await sent

    if inspect.isawaitable(sent):
        calls.run(awaited)


def remote_weights(client: Any, server: Any, model: Any, tokenizer: Any) -> RemoteWeights | None:
    """The transfer of weights to the model behind a client; None if the client samples from this very model."""
    if client is None or isinstance(client, Sampler) or getattr(client, "engine_model", None) is model:
        return None
    if isinstance(client, Samplers) and server is None:
        return TransferredWeights(client, model, tokenizer)
    server = server if server is not None else client if hasattr(client, "reload_weights") else None
    if server is None:
        raise ValueError(
            "client answers from elsewhere, and would go on with the old weights; pass client=vf.Samplers(url) for "
            "servers that can be sent weights (`vf serve`, `vf-vllm`), or weight_server= (VLLMServer, or any object "
            "with reload_weights(folder)), or leave client out to sample in this process"
        )
    return FolderWeights(server, model, tokenizer)
