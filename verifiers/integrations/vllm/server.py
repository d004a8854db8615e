"""A vLLM server that runs already → the same one with other weights, or another adapter, and no stale cache."""

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
    """What a trainer asks of a vLLM server; `vf-vllm` starts one that answers.

    ``base_url`` is the one that clients use, with or without ``/v1``. ``timeout_s`` bounds each request to the server.

    >>> VLLMServer("http://localhost:8000/v1", "sk-secret")
    VLLMServer('http://localhost:8000', api_key='sk-…')
    """

    # --- weights and adapters -------------------------------------------------------------------------------------

    async def reload_weights(self, path: str | Path, *, check: bool = True, version: int | str | None = None) -> None:
        """Load the weights in a folder (as `save_pretrained` writes it) in place of the present ones.

        ``version`` is what completions will call them (`Tokens.weight_versions`).

        Requests in flight end with the old weights, later ones wait for the new. The server reads the folder itself;
        one that it cannot read ends its engine for good, so it is looked at from here first, unless ``check`` is False
        (a folder that only the server's machine has).
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": _weights(path, check=check)}}
        async with self.paused():
            await self.ask("POST", "/collective_rpc", body)
            if version is not None:
                await self.name_weights(version)
            await self.reset_prefix_cache()

    async def name_weights(self, version: int | str) -> None:
        """Say what completions call the present weights; a vLLM older than 0.32 calls them nothing."""
        path = "/update_weight_version"
        status, text = await self.send("POST", path, {"new_version": str(version)}, self.timeout_s)
        if status != 404:
            self.check("POST", path, status, text)

    async def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter (a folder of `peft`), to be asked for as the model ``name``; one of that name is replaced."""
        body = {"lora_name": name, "lora_path": _whole(path), "load_inplace": True}
        async with self.paused():
            try:
                await self.ask("POST", "/v1/load_lora_adapter", body)
            except RequestRefusedError as error:
                if "already been loaded" not in str(error):
                    raise
                await self.unload_lora(name)  # a vLLM that knows no `load_inplace`
                await self.ask("POST", "/v1/load_lora_adapter", body)
            await self.reset_prefix_cache()

    async def unload_lora(self, name: str) -> None:
        """Drop an adapter."""
        await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def reset_prefix_cache(self) -> None:
        """Forget the keys and values of old prompts; waits while running requests hold some of them."""
        end = time.monotonic() + self.timeout_s
        while True:
            reply = await self.ask("POST", "/reset_prefix_cache")
            if not isinstance(reply, dict) or reply.get("success") is not False:  # older ones answer with nothing
                return
            if time.monotonic() + ASK_AGAIN_S >= end:
                raise DeadlineError(f"the prefix cache was still in use after {self.timeout_s:g} s")
            await asyncio.sleep(ASK_AGAIN_S)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No request runs inside the block: those in flight end first, later ones wait.

        A vLLM too old to know how to pause goes on with them, and the prefix cache is reset once they are done.
        """
        can_pause = True
        try:
            can_pause = await self._pause()
            yield
        except BaseException:
            if can_pause:
                with suppress(Error):  # what went wrong inside the block is what the caller must hear
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
    """The server's working directory is not ours."""
    return str(Path(path).absolute())


def _weights(path: str | Path, *, check: bool) -> str:
    """The whole path of a folder, in which there are weights."""
    folder = _whole(path)
    if check and not any(next(Path(folder).glob(pattern), None) for pattern in WEIGHTS):
        raise RequestRefusedError(
            f"{folder} holds no weights ({', '.join(WEIGHTS)}); check=False if only the server's machine has it"
        )
    return folder
