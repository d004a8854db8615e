"""Inference servers as one client for the policy: requests go to servers with the newest weights, with failover."""

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

HEALTH_CHECK_S = 1.0  # between health checks of the servers
POLL_S = 0.5  # between checks whether the server of a request is down
MAX_MISSES = 3  # failed health checks in a row before a server is down
MAX_FAILURES = 3  # of a single request
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

    ``servers`` are URLs, or a file with one URL on each line. The file is reread regularly, so that servers can be
    added to it. If a server goes down, its requests are sent to another one; when it is back, it gets the newest
    weights before any requests. While no server is up, requests wait for at most ``patience_s``.
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
        self.lock = FairLock()  # held while the weights are updated, and while they are read to send them
        self.version = 0
        self._newest = 0  # the version that is being sent or was sent last; servers may already have it
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
        """The completion of the least busy server, or of another one if that server goes down before it answers."""
        end = time.monotonic() + (self.patience_s if request.timeout_s is None else request.timeout_s)
        failed: list[_Sampler] = []
        while True:
            sampler = await self._least_busy(end, failed)
            version = self.version
            if not sampler.is_up:  # the server failed to get this version
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
                # Otherwise this request may be the cause; a server that does not work at all fails its health checks.
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
                raise EndpointDownError(f"no sampler is up ({reasons})")
            await asyncio.sleep(POLL_S / 5)

    async def _ask(self, sampler: _Sampler, request: Request, version: int) -> Completion | None:
        """The reply, or None once the server is down, because a server that hangs never answers.

        ``version`` is the current weight version, which is the oldest that the reply can be from.
        """
        asked = asyncio.ensure_future(sampler.client.complete(request))
        try:
            while not asked.done() and sampler.is_up:
                await asyncio.wait((asked,), timeout=POLL_S)
            newest = self._newest if self._is_sender else None  # a process that does not send weights cannot know it
            return with_versions(asked.result(), version, newest) if asked.done() else None
        finally:
            asked.cancel()

    def _mark_down(self, sampler: _Sampler, reason: str) -> None:
        if sampler.is_up:
            logger.warning("the sampler %s gets no requests for now: %s", sampler.channel.where, reason)
        sampler.is_up, sampler.reason = False, reason

    # --- weights --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse servers that are down or cannot receive weights, before a model is loaded; `start` checks the rest."""
        for sampler in self._listed():
            try:
                calls.run(sampler.channel.check)
            except Error as error:
                raise _unfit(sampler, error) from error

    def _listed(self) -> list[_Sampler]:
        self._read_files()
        if not self._samplers:
            raise ValueError(f"{self._files[0]} lists no server; write one URL on each line")
        return list(self._samplers.values())

    def start(self, model: Any, tokenizer: Any, version: int, *, is_sender: bool = True) -> None:
        """Send the weights to every server and check that it serves this model; then monitor all until `close`."""
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
        """Send the weights to every server that is up. A server that fails is down until it rejoins."""
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
            self.version = version  # set last: earlier requests may be answered by the old weights

    def _join(self, sampler: _Sampler) -> Error | None:
        """Send the newest weights to a new or returning server, which gets requests only afterwards."""
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
        """Refuse a server that has another tokenizer, or whose logprobs do not match the weights it was sent."""
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
            raise RequestRefusedError("it returns no token ids and logprobs, which training needs")
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
                "it samples from other weights than it was sent: the logprobs of its tokens differ from this model's "
                f"by {difference:.2g} on average, and rounding explains at most {allowed:g}"
            )
        with_versions(completion, self.version, self.version)
        if not tokens.weight_versions:
            logger.warning(
                "%s does not report the weight version of tokens: a reply counts as from the oldest possible version",
                sampler.channel.where,
            )

    def _mean_difference(self, tokens: Tokens) -> float:
        """The mean absolute difference between the logprobs of a reply and this model's own."""
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
        """In a process that does not send weights: refuse a server until it has received the newest ones."""
        await sampler.channel.find_model()
        version = str(await sampler.channel.get("/weight_info", "weight_version"))
        if not version.isdecimal() or int(version) < self.version:
            raise RequestRefusedError(f"it still has the weights of version {version}")

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
    """A prompt that the tokenizer, whose vocabulary may be a few letters, encodes without loss."""
    if tokenizer.decode(tokenizer.encode(TEST_PROMPT, add_special_tokens=False)) == TEST_PROMPT:
        return TEST_PROMPT
    return str(tokenizer.decode(range(min(len(tokenizer), 64)), skip_special_tokens=True))[:16] or "a"
