"""Sends the weights after each step to the servers that sample from them: by collectives, or as a folder."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import weakref
from typing import Any

from verifiers import calls
from verifiers.signatures import signature_of
from verifiers.trainers.checkpoints import save_model
from verifiers.trainers.distributed.processes import raise_everywhere
from verifiers.trainers.distributed.samplers import Samplers
from verifiers.trainers.sampler import Sampler


class RemoteWeights:
    """Transfers weights to a model that is served elsewhere: rank 0 sends them, the other processes wait.

    ``servers`` is a `Samplers`, or an object with its ``start``, ``send``, ``version`` and ``close``. ``version`` is
    the number of updates of the weights that arrived last.
    """

    def __init__(self, servers: Any, model: Any, tokenizer: Any) -> None:
        self._servers, self._model, self._tokenizer = servers, model, tokenizer
        self.close = servers.close

    @property
    def version(self) -> int:
        return int(self._servers.version)

    def begin(self, processes: Any, version: int) -> None:
        """Send the first weights, or those of a resumed training."""
        for is_sender in (True, False):
            with raise_everywhere(processes):
                if processes.is_main_process == is_sender:
                    self._servers.start(self._model, self._tokenizer, version, is_sender=is_sender)

    def send(self, processes: Any, version: int) -> None:
        with raise_everywhere(processes):
            if processes.is_main_process:
                self._servers.send(version)
        self._servers.version = version


class _Folder:
    """Like `Samplers`, for a server that reads the weights from a folder."""

    def __init__(self, server: Any) -> None:
        self._server, self.version = server, 0
        private = tempfile.mkdtemp(prefix="verifiers-weights-")
        self._folder = os.path.join(private, "model")
        weakref.finalize(self, shutil.rmtree, private, ignore_errors=True)

    def start(self, model: Any, tokenizer: Any, version: int, *, is_sender: bool) -> None:
        """Label the weights that the server started with, or send those of a resumed training."""
        self._model, self._tokenizer = model, tokenizer
        if is_sender and version:
            self.send(version)
        elif is_sender and hasattr(self._server, "name_weights"):
            _run(self._server.name_weights(version))
        self.version = version

    def send(self, version: int) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # it was read, and there may be no room for two models
        save_model(self._model, self._tokenizer, self._folder)
        load = self._server.reload_weights
        named = {"version": version} if "version" in signature_of(load).parameters else {}
        _run(load(self._folder, **named))

    def close(self) -> None:
        """There is nothing to close between two steps."""


def _run(sent: Any) -> None:
    """Await the result of a server's method, if it is async."""

    async def awaited() -> None:
        await sent

    if inspect.isawaitable(sent):
        calls.run(awaited)


def remote_weights(client: Any, server: Any, model: Any, tokenizer: Any) -> RemoteWeights | None:
    """The transfer of weights to the model behind a client; None if the client samples from this model itself."""
    if client is None or isinstance(client, Sampler) or getattr(client, "engine_model", None) is model:
        return None
    if isinstance(client, Samplers) and server is None:
        return RemoteWeights(client, model, tokenizer)
    server = server if server is not None else client if hasattr(client, "reload_weights") else None
    if server is None:
        raise ValueError(
            "the client samples from another model, which would keep the old weights; pass client=vf.Samplers(url) for "
            "servers that accept weights (`vf serve`, `vf-vllm`), or weight_server= (VLLMServer, or any object "
            "with reload_weights(folder)), or leave client out to sample in this process"
        )
    return RemoteWeights(_Folder(server), model, tokenizer)
