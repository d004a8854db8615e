"""The weights after each step → the server that samples from them."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import weakref
from typing import Any

from verifiers import calls
from verifiers.trainers.checkpoints import save_model
from verifiers.trainers.sampler import Sampler


class RemoteWeights:
    """The weights as a folder that a server reads after each step."""

    def __init__(self, server: Any, model: Any, tokenizer: Any) -> None:
        self._server, self._model, self._tokenizer = server, model, tokenizer
        self._folder = tempfile.mkdtemp(prefix="verifiers-weights-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def send(self, processes: Any) -> None:
        """Hand the weights over, by the first process; the others wait."""
        if processes.is_main_process:
            self._hand_over()
        processes.wait_for_everyone()

    def _hand_over(self) -> None:
        save_model(self._model, self._tokenizer, self._folder)
        sent = self._server.reload_weights(self._folder)
        if inspect.isawaitable(sent):
            calls.run(lambda: _awaited(sent))


async def _awaited(value: Any) -> Any:
    return await value


def remote_weights(client: Any, server: Any, model: Any, tokenizer: Any) -> RemoteWeights | None:
    """How a model that is served elsewhere gets its new weights; None where it is this very one."""
    if client is None or isinstance(client, Sampler) or getattr(client, "engine_model", None) is model:
        return None
    server = server if server is not None else client if hasattr(client, "reload_weights") else None
    if server is None:
        raise ValueError(
            "client answers from elsewhere, and would go on with the old weights; pass weight_server= (VLLMServer, or "
            "any object with reload_weights(folder)), or leave client out to sample in this process"
        )
    return RemoteWeights(server, model, tokenizer)
