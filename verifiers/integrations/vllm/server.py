"""Control of a running vLLM server: new weights, new adapters, and no stale cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from verifiers.clients.control import ASK_AGAIN_S, ServerControl
from verifiers.errors import DeadlineError, Error, RequestRefusedError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


class VLLMServer(ServerControl):
    """A trainer's control of a vLLM server that `vf-vllm` started.

    ``base_url`` is the URL that clients use, with or without ``/v1``. ``timeout_s`` bounds each request to the server.

    >>> VLLMServer("http://localhost:8000/v1", "sk-secret")
    VLLMServer('http://localhost:8000', api_key='sk-…')
    """

    # --- weights and adapters -------------------------------------------------------------------------------------

    async def reload_weights(self, path: str | Path, *, check: bool = True, version: int | str | None = None) -> None:
        """Replace the weights by those in a folder (as written by `save_pretrained`).

        ``version`` is the name of the new weights in completions (`Tokens.weight_versions`).

        Requests in flight finish with the old weights; later ones wait for the new ones. The server reads the folder
        itself, and its engine dies if it cannot. So the folder is checked here first, unless ``check`` is False (for a
        folder that only exists on the server's machine).
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": _weights(path, check=check)}}
        async with self.paused():
            await self.ask("POST", "/collective_rpc", body)
            if version is not None:
                await self.name_weights(version)
            await self.reset_prefix_cache()

    async def name_weights(self, version: int | str) -> None:
        """Set the name of the current weights in completions; no effect on a vLLM older than 0.32."""
        path = "/update_weight_version"
        status, text = await self.send("POST", path, {"new_version": str(version)}, self.timeout_s)
        if status != 404:
            self.check("POST", path, status, text)

    async def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter (a folder of `peft`) as the model ``name``, replacing one with that name."""
        body = {"lora_name": name, "lora_path": _whole(path), "load_inplace": True}
        async with self.paused():
            try:
                await self.ask("POST", "/v1/load_lora_adapter", body)
            except RequestRefusedError as error:
                if "already been loaded" not in str(error):
                    raise
                await self.unload_lora(name)  # a vLLM without `load_inplace`
                await self.ask("POST", "/v1/load_lora_adapter", body)
            await self.reset_prefix_cache()

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter."""
        await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache; waits while running requests use it."""
        end = time.monotonic() + self.timeout_s
        while True:
            reply = await self.ask("POST", "/reset_prefix_cache")
            if not isinstance(reply, dict) or reply.get("success") is not False:  # older versions return nothing
                return
            if time.monotonic() + ASK_AGAIN_S >= end:
                raise DeadlineError(f"the prefix cache was still in use after {self.timeout_s:g} s")
            await asyncio.sleep(ASK_AGAIN_S)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No request runs inside the block: requests in flight finish first, later ones wait.

        A vLLM that is too old to pause continues them; its prefix cache is reset once they are done.
        """
        can_pause = True
        try:
            can_pause = await self._pause()
            yield
        except BaseException:
            if can_pause:
                with suppress(Error):  # the error from inside the block must reach the caller
                    await self.ask("POST", "/resume")
            raise
        if can_pause:
            await self.ask("POST", "/resume")

    async def _pause(self) -> bool:
        status, text = await self.send("POST", "/pause?mode=wait", None, self.timeout_s)
        if status == 404:
            return False
        self.check("POST", "/pause", status, text)
        return True


def _whole(path: str | Path) -> str:
    """The absolute path, because the server's working directory may differ."""
    return str(Path(path).absolute())


def _weights(path: str | Path, *, check: bool) -> str:
    """The absolute path of a folder; raises if it has no weights and ``check`` is set."""
    folder = _whole(path)
    if check and not any(next(Path(folder).glob(pattern), None) for pattern in WEIGHTS):
        raise RequestRefusedError(
            f"{folder} has no weights ({', '.join(WEIGHTS)}); pass check=False if only the server's machine has it"
        )
    return folder
