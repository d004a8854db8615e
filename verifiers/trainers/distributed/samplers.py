"""Servers elsewhere → the policy as one client: requests go to those with the newest weights, and on if one dies."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verifiers import calls
from verifiers.chat import ChatWriter
from verifiers.clients.control import ServerControl
from verifiers.clients.exact import exact_tokens
from verifiers.clients.http import HTTPClient
from verifiers.clients.protocol import Completion, Request, Tokens
from verifiers.engine.fair_lock import FairLock
from verifiers.errors import (
    BadReplyError,
    ConnectionFailedError,
    EndpointDownError,
    Error,
    RateLimitError,
    RequestRefusedError,
    ServerError,
)
from verifiers.trainers.distributed.weight_sender import QUICK_S, WeightChannel, parameters_of, send
from verifiers.trainers.staleness import OtherWeightsError, with_versions

logger = logging.getLogger("verifiers.trainers")

LOOK_S = 1.0  # between two looks at whether servers are there
LOOK_FOR_LOST_S = 0.5  # between two looks at whether the server of a request has been given up
MISSES = 3  # looks at which a server did not answer, one after the other, before it is given up
MOST_FAILURES = 3  # of one request
WORDS = "Count from one to ten."
MOST_OFF, MOST_OFF_HALF = 0.05, 0.5  # nats by which a token's logprob may differ; in half precision


@dataclass(slots=True, eq=False)
class _Sampler:
    client: HTTPClient
    channel: WeightChannel
    in_flight: int = 0
    is_up: bool = False
    misses: int = 0
    reason: str = ""


class Samplers:
    """One or more servers (`vf serve`, `vf-vllm`) that sample for a trainer and get its weights after each update.

    ``servers`` are URLs, or a file with one on each line, which is read again and again: a server that is added to it
    joins. One that dies is passed over, and what it was asked is asked of another; when it is back it gets the newest
    weights, then requests. While none is there, requests wait, ``patience_s`` at most.
    """

    needs_no_model = True

    def __init__(
        self,
        *servers: str | Path,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        patience_s: float = 600.0,
    ) -> None:
        if not servers:
            raise ValueError("name at least one server: Samplers('http://127.0.0.1:8000/v1')")
        if not patience_s > 0:
            raise ValueError(f"patience_s must be above 0, not {patience_s!r}")
        self._api_key, self._timeout_s, self.patience_s = api_key, timeout_s, patience_s
        self._files = [Path(one) for one in servers if "://" not in str(one)]
        self._samplers: dict[str, _Sampler] = {}
        for url in (str(one) for one in servers if "://" in str(one)):
            self._add(url)
        self.lock = FairLock()  # held while the weights are changed, and while they are read to be sent
        self.version = 0
        self._newest = 0  # of the versions that servers may have: the one that is being sent, or was last
        self._guard = threading.Lock()  # held while a server joins, or all get weights
        self._model: Any = None
        self._tokenizer: Any = None
        self._is_sender = True
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    @property
    def base_url(self) -> str:
        return ",".join(one.channel.where for one in self._samplers.values())

    @property
    def api_key(self) -> str:
        return self._api_key or ""

    def __repr__(self) -> str:
        return f"Samplers({self.base_url!r})"

    # --- asking ---------------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Completion:
        """The completion of the least busy server; of another one if that is lost before it has answered."""
        end = time.monotonic() + (self.patience_s if request.timeout_s is None else request.timeout_s)
        failed: list[_Sampler] = []
        while True:
            sampler = await self._least_busy(end, failed)
            version = self.version
            if not sampler.is_up:  # it failed to get this version
                continue
            sampler.in_flight += 1
            try:
                completion = await self._ask(sampler, replace(request, model=sampler.channel.model), version)
            except (ConnectionFailedError, EndpointDownError) as error:
                self._lose(sampler, str(error))
                continue
            except (ServerError, BadReplyError) as error:
                if isinstance(error, OtherWeightsError):
                    self._lose(sampler, str(error))
                # Else it may be this request: a server that has failed as a whole is not healthy, which is seen.
                failed.append(sampler)
                if len(failed) > MOST_FAILURES:
                    raise
                continue
            except RateLimitError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(LOOK_FOR_LOST_S)
                continue
            finally:
                sampler.in_flight -= 1
            if completion is not None:
                return completion

    async def _least_busy(self, end: float, failed: Sequence[_Sampler]) -> _Sampler:
        while True:
            up = [one for one in self._samplers.values() if one.is_up]
            up = [one for one in up if one not in failed] or up
            if up:
                return min(up, key=lambda one: one.in_flight)
            if time.monotonic() > end:
                reasons = "; ".join(f"{one.channel.where}: {one.reason}" for one in self._samplers.values())
                raise EndpointDownError(f"no sampler is there ({reasons})")
            await asyncio.sleep(LOOK_FOR_LOST_S / 5)

    async def _ask(self, sampler: _Sampler, request: Request, version: int) -> Completion | None:
        """The reply, or None once the server has been given up: one that hangs does not answer.

        ``version`` is the oldest that it can be from: that of the weights when it is asked for.
        """
        asked = asyncio.ensure_future(sampler.client.complete(request))
        try:
            while not asked.done() and sampler.is_up:
                await asyncio.wait((asked,), timeout=LOOK_FOR_LOST_S)
            newest = self._newest if self._is_sender else None  # another process may have sent more than is known here
            return with_versions(asked.result(), version, newest) if asked.done() else None
        finally:
            asked.cancel()

    def _lose(self, sampler: _Sampler, reason: str) -> None:
        if sampler.is_up:
            logger.warning("the sampler %s is passed over: %s", sampler.channel.where, reason)
        sampler.is_up, sampler.reason = False, reason

    # --- weights --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a server that is not there or takes no weights, before there is a model to send; else see `start`."""
        for sampler in self._listed():
            try:
                calls.run(sampler.channel.check)
            except Error as error:
                raise _unfit(sampler, error) from error

    def _listed(self) -> list[_Sampler]:
        self._read_files()
        if not self._samplers:
            raise ValueError(f"{self._files[0]} names no server; write one URL on each line")
        return list(self._samplers.values())

    def start(self, model: Any, tokenizer: Any, version: int, *, is_sender: bool = True) -> None:
        """Give every server the weights, and check that it is this model; then watch over them until `close`."""
        self._model, self._tokenizer = model, tokenizer
        self.version = self._newest = version
        self._is_sender = is_sender
        for sampler in self._listed():
            error = self._join(sampler)
            if error is not None:
                self.close()
                raise _unfit(sampler, error) from error
        self._ends.clear()
        self._thread = threading.Thread(target=self._watch, name="verifiers-samplers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and leave the groups."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for sampler in self._samplers.values():
            sampler.channel.close()

    def send(self, version: int) -> None:
        """Hand the weights to every server that is there. One that fails is passed over until it is back."""
        with self._guard:
            there = [one for one in self._samplers.values() if one.is_up]
            channels = [one.channel for one in there]
            parameters = parameters_of(self._model)
            self._newest = version
            with self.lock:
                errors = calls.run(lambda: send(parameters, channels, version))
            for sampler, error in zip(there, errors, strict=True):
                if error is not None:
                    self._lose(sampler, str(error))
            self.version = version  # from here on: what is asked before may be answered by the weights before

    def _join(self, sampler: _Sampler) -> Error | None:
        """Give a server that is new, or back, the newest weights; only then is it asked anything."""
        with self._guard:
            error: Error | None = None
            try:
                if not self._is_sender:
                    calls.run(lambda: self._find(sampler))
                    return None
                calls.run(sampler.channel.open)
                with self.lock:
                    parameters = parameters_of(self._model)
                    (error,) = calls.run(lambda: send(parameters, [sampler.channel], self.version))
                    if error is None:
                        calls.run(lambda: self._check(sampler))
            except Error as found:
                error = found
            if error is None:
                sampler.is_up, sampler.reason = True, ""
            return error

    async def _check(self, sampler: _Sampler) -> None:
        """Refuse a server with another tokenizer, or one whose tokens are not from the weights it was sent."""
        writer = ChatWriter(self._tokenizer)
        is_chat = bool(getattr(self._tokenizer, "chat_template", None))
        words = _words(self._tokenizer)
        prompt: Any = [{"role": "user", "content": words}] if is_chat else words
        kind: Any = "chat" if is_chat else "completion"
        asked = exact_tokens({"temperature": 1.0, "max_tokens": 8}, message_type=kind)
        request = Request(
            model=sampler.channel.model, prompt=prompt, sampling=asked, message_type=kind, timeout_s=QUICK_S
        )
        completion = await sampler.client.complete(request)
        if (tokens := completion.tokens) is None:
            raise RequestRefusedError("it gives no token ids and logprobs; nothing can be learned from its replies")
        ours = (writer.prompt(prompt) if is_chat else writer.text_prompt(prompt))[1]
        if tokens.prompt_ids != ours:
            raise RequestRefusedError(
                f"it has another tokenizer or chat template: {words!r} is {len(tokens.prompt_ids)} tokens there "
                f"({tokens.prompt_ids[:8]}…) and {len(ours)} here ({ours[:8]}…)"
            )
        off, most = self._distance(tokens), self._most_off()
        if off > most:
            raise RequestRefusedError(
                f"it samples from other weights than it was sent: the logprobs of its tokens are {off:.2g} away from "
                f"this model's, and {most:g} is the most that rounding explains"
            )
        with_versions(completion, self.version, self.version)
        if not tokens.weight_versions:
            said = (
                "%s does not say which weights made a token: a reply counts as being of the oldest that it can be from"
            )
            logger.warning(said, sampler.channel.where)

    def _distance(self, tokens: Tokens) -> float:
        device, start = next(self._model.parameters()).device, len(tokens.prompt_ids) - 1
        with torch.no_grad():
            ids = torch.tensor([tokens.prompt_ids + tokens.completion_ids], device=device)
            logprob_TV = torch.log_softmax(self._model(input_ids=ids).logits[0, start:-1].float(), -1)
        found = logprob_TV.gather(1, torch.tensor(tokens.completion_ids, device=device)[:, None])[:, 0]
        return float((found.cpu() - torch.tensor(tokens.logprobs)).abs().mean())

    def _most_off(self) -> float:
        return MOST_OFF if next(self._model.parameters()).dtype == torch.float32 else MOST_OFF_HALF

    # --- who is there ---------------------------------------------------------------------------------------------

    def _add(self, url: str) -> None:
        client = HTTPClient(
            url if url.rstrip("/").endswith("/v1") else f"{url.rstrip('/')}/v1",
            self._api_key,
            timeout_s=self._timeout_s,
            max_retries=0,
            down_after_s=float("inf"),
        )
        control = ServerControl(url, self._api_key, timeout_s=self._timeout_s)
        self._samplers.setdefault(control.base_url, _Sampler(client, WeightChannel(control)))

    def _read_files(self) -> None:
        for path in self._files:
            try:
                lines: Iterable[str] = path.read_text().splitlines()
            except OSError as error:
                raise ValueError(f"the list of samplers cannot be read: {error}") from error
            for line in (one.split("#")[0].strip() for one in lines):
                if line and ServerControl(line).base_url not in self._samplers:
                    self._add(line)

    async def _find(self, sampler: _Sampler) -> None:
        """For a process that sends nothing: a server is there once another one has sent it the newest weights."""
        await sampler.channel.find_model()
        said = str(await sampler.channel.told("/weight_info", "weight_version"))
        if not said.isdecimal() or int(said) < self.version:
            raise RequestRefusedError(f"it has the weights of version {said} still")
        sampler.is_up, sampler.reason = True, ""

    def _watch(self) -> None:
        while not self._ends.wait(LOOK_S):
            try:
                self._read_files()
            except ValueError as unread:
                logger.warning("%s", unread)
            for sampler in list(self._samplers.values()):
                is_there = calls.run(sampler.channel.control.health)
                sampler.misses = 0 if is_there else sampler.misses + 1
                if sampler.is_up and sampler.misses >= MISSES:
                    self._lose(sampler, "it is not healthy")
                elif is_there and not sampler.is_up and not self._ends.is_set():
                    error = self._join(sampler)
                    if error is None:
                        logger.warning("the sampler %s has joined", sampler.channel.where)
                    elif sampler.reason != str(error):
                        sampler.reason = str(error)
                        logger.warning("the sampler %s cannot join: %s", sampler.channel.where, error)


def _unfit(sampler: _Sampler, error: Error) -> ValueError:
    return ValueError(f"the sampler {sampler.channel.where} cannot be trained with: {error}")


def _words(tokenizer: Any) -> str:
    """Something to say that a tokenizer knows, be it one of a few letters."""
    if tokenizer.decode(tokenizer.encode(WORDS, add_special_tokens=False)) == WORDS:
        return WORDS
    return str(tokenizer.decode(range(min(len(tokenizer), 64)), skip_special_tokens=True))[:16] or "a"
