"""Inference servers → the policy as one client: requests go to those with the newest weights, with failover."""

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

HEALTH_CHECK_S = 1.0  # between two health checks of the servers
POLL_S = 0.5  # between two looks at whether the server of a request is down
MAX_MISSES = 3  # failed health checks in a row before a server is down
MAX_FAILURES = 3  # of one request
TEST_PROMPT = "Count from one to ten."
MAX_DIFFERENCE, MAX_DIFFERENCE_HALF = 0.05, 0.5  # of a token's logprob, in nats, in float32 and in half precision


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
    joins. The requests of one that goes down are sent to another; when it is back it gets the newest weights, then
    requests. While none is up, requests wait, ``patience_s`` at most.
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
        self.lock = FairLock()  # held while the weights are updated, and while they are read to be sent
        self.version = 0
        self._newest = 0  # version that is being sent or was sent last: servers may have it already
        self._sending = threading.Lock()  # held while a server joins or weights are sent to all
        self._model: Any = None
        self._tokenizer: Any = None
        self._is_sender = True
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def base_url(self) -> str:
        return ",".join(one.channel.where for one in self._samplers.values())

    @property
    def api_key(self) -> str:
        return self._api_key or ""

    def __repr__(self) -> str:
        return f"Samplers({self.base_url!r})"

    # --- requests -------------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Completion:
        """The completion of the least busy server; of another one if that goes down before it has answered."""
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
                self._mark_down(sampler, str(error))
                continue
            except (ServerError, BadReplyError) as error:
                if isinstance(error, OtherWeightsError):
                    self._mark_down(sampler, str(error))
                # Else this request may be the cause: a server that does not work at all fails its health checks.
                failed.append(sampler)
                if len(failed) > MAX_FAILURES:
                    raise
                continue
            except RateLimitError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(POLL_S)
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
            await asyncio.sleep(POLL_S / 5)

    async def _ask(self, sampler: _Sampler, request: Request, version: int) -> Completion | None:
        """The reply, or None once the server is down: one that hangs never answers.

        ``version`` is that of the weights now: the oldest that the reply can be from.
        """
        asked = asyncio.ensure_future(sampler.client.complete(request))
        try:
            while not asked.done() and sampler.is_up:
                await asyncio.wait((asked,), timeout=POLL_S)
            newest = self._newest if self._is_sender else None  # unknown in a process that sends nothing
            return with_versions(asked.result(), version, newest) if asked.done() else None
        finally:
            asked.cancel()

    def _mark_down(self, sampler: _Sampler, reason: str) -> None:
        if sampler.is_up:
            logger.warning("the sampler %s is passed over: %s", sampler.channel.where, reason)
        sampler.is_up, sampler.reason = False, reason

    # --- weights --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse servers that are down or take no weights, before a model is loaded; `start` checks the rest."""
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
        """Send the weights to every server and check that it has this model; then monitor them until `close`."""
        self._model, self._tokenizer = model, tokenizer
        self.version = self._newest = version
        self._is_sender = is_sender
        for sampler in self._listed():
            error = self._join(sampler)
            if error is not None:
                self.close()
                raise _unfit(sampler, error) from error
        self._stop.clear()
        self._thread = threading.Thread(target=self._monitor, name="verifiers-samplers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop monitoring, and leave the process groups."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for sampler in self._samplers.values():
            sampler.channel.close()

    def send(self, version: int) -> None:
        """Send the weights to every server that is up. One that fails is down until it joins again."""
        with self._sending:
            up = [one for one in self._samplers.values() if one.is_up]
            channels = [one.channel for one in up]
            parameters = parameters_of(self._model)
            self._newest = version
            with self.lock:
                errors = calls.run(lambda: send(parameters, channels, version))
            for sampler, error in zip(up, errors, strict=True):
                if error is not None:
                    self._mark_down(sampler, str(error))
            self.version = version  # last: a request made before this may be answered by the old weights

    def _join(self, sampler: _Sampler) -> Error | None:
        """Send a new or returning server the newest weights; requests go to it only after that."""
        with self._sending:
            try:
                if self._is_sender:
                    calls.run(sampler.channel.open)
                    with self.lock:
                        parameters = parameters_of(self._model)
                        (failure,) = calls.run(lambda: send(parameters, [sampler.channel], self.version))
                        if failure is not None:
                            return failure
                        calls.run(lambda: self._check(sampler))
                else:
                    calls.run(lambda: self._check_version(sampler))
            except Error as error:
                return error
            sampler.is_up, sampler.reason = True, ""
            return None

    async def _check(self, sampler: _Sampler) -> None:
        """Refuse a server with another tokenizer, or whose logprobs are not those of the weights it was sent."""
        writer = ChatWriter(self._tokenizer)
        is_chat = bool(getattr(self._tokenizer, "chat_template", None))
        text = _test_prompt(self._tokenizer)
        prompt: Any = [{"role": "user", "content": text}] if is_chat else text
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
                f"it has another tokenizer or chat template: {text!r} is {len(tokens.prompt_ids)} tokens there "
                f"({tokens.prompt_ids[:8]}…) and {len(ours)} here ({ours[:8]}…)"
            )
        difference = self._mean_difference(tokens)
        is_half = next(self._model.parameters()).dtype != torch.float32
        allowed = MAX_DIFFERENCE_HALF if is_half else MAX_DIFFERENCE
        if difference > allowed:
            raise RequestRefusedError(
                f"it samples from other weights than it was sent: the logprobs of its tokens are {difference:.2g} away "
                f"from this model's, and {allowed:g} is the most that rounding explains"
            )
        with_versions(completion, self.version, self.version)
        if not tokens.weight_versions:
            logger.warning(
                "%s does not say which weights made a token: a reply counts as being of the oldest that it can be from",
                sampler.channel.where,
            )

    def _mean_difference(self, tokens: Tokens) -> float:
        """Mean absolute difference of the logprobs of a reply to this model's own."""
        device, start = next(self._model.parameters()).device, len(tokens.prompt_ids) - 1
        with torch.no_grad():
            ids = torch.tensor([tokens.prompt_ids + tokens.completion_ids], device=device)
            logprob_TV = torch.log_softmax(self._model(input_ids=ids).logits[0, start:-1].float(), -1)
        found = logprob_TV.gather(1, torch.tensor(tokens.completion_ids, device=device)[:, None])[:, 0]
        return float((found.cpu() - torch.tensor(tokens.logprobs)).abs().mean())

    # --- membership -----------------------------------------------------------------------------------------------

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

    async def _check_version(self, sampler: _Sampler) -> None:
        """In a process that sends nothing: refuse a server until the sender has given it the newest weights."""
        await sampler.channel.find_model()
        version = str(await sampler.channel.get("/weight_info", "weight_version"))
        if not version.isdecimal() or int(version) < self.version:
            raise RequestRefusedError(f"it has the weights of version {version} still")

    def _monitor(self) -> None:
        while not self._stop.wait(HEALTH_CHECK_S):
            try:
                self._read_files()
            except ValueError as error:
                logger.warning("%s", error)
            for sampler in list(self._samplers.values()):
                is_healthy = calls.run(sampler.channel.control.health)
                sampler.misses = 0 if is_healthy else sampler.misses + 1
                if sampler.is_up and sampler.misses >= MAX_MISSES:
                    self._mark_down(sampler, "it is not healthy")
                elif is_healthy and not sampler.is_up and not self._stop.is_set():
                    failure = self._join(sampler)
                    if failure is None:
                        logger.warning("the sampler %s has joined", sampler.channel.where)
                    elif sampler.reason != str(failure):
                        sampler.reason = str(failure)
                        logger.warning("the sampler %s cannot join: %s", sampler.channel.where, failure)


def _unfit(sampler: _Sampler, error: Error) -> ValueError:
    return ValueError(f"the sampler {sampler.channel.where} cannot be trained with: {error}")


def _test_prompt(tokenizer: Any) -> str:
    """A prompt that survives the tokenizer, whose vocabulary may be a few letters."""
    if tokenizer.decode(tokenizer.encode(TEST_PROMPT, add_special_tokens=False)) == TEST_PROMPT:
        return TEST_PROMPT
    return str(tokenizer.decode(range(min(len(tokenizer), 64)), skip_special_tokens=True))[:16] or "a"
