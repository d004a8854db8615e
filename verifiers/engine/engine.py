"""Prompts → completions: requests join and leave between steps (continuous batching), and their tokens are exact.

The story of a token: `submit` queues a sequence, the scheduler gives it blocks of the KV cache, the model runner runs
its prompt and then one token a step, the sampler draws, and the scheduler hands it out when it has finished.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verifiers.engine import threads
from verifiers.engine.backends import BATCHED, CPU, MODULES, SEQUENTIAL, Backend, choose_backend
from verifiers.engine.block_manager import BlockManager, blocks_for
from verifiers.engine.cuda_runner import CudaDecoder
from verifiers.engine.kv_cache import KVCache, Shape
from verifiers.engine.model_runner import ModelRunner
from verifiers.engine.scheduler import Scheduler
from verifiers.engine.sequence import (
    ActiveSequence,
    Answer,
    Generated,
    OnToken,
    Sampling,
    Seeds,
    check_tokens,
)
from verifiers.engine.sequential import SequentialCache
from verifiers.engine.steps import Steps
from verifiers.errors import InfraError, ModelError, OverlongPromptError, RateLimitError
from verifiers.kernels.cpu.threads import is_small
from verifiers.kernels.devices import current, free_unused

logger = logging.getLogger("verifiers.engine")

LEAST_SHARED, LEAST_SHARED_CUDA = 16, 64  # tokens: reusing fewer is not worth its while
PREFILL, PREFILL_CUDA = 1024, 32768  # tokens of prompts run at once
PATIENCE_S = 2.0  # without a new request, before those that have gathered begin without the others
PAUSES = ("abort", "wait", "keep")
ASK_AGAIN_S = 0.005
ABORTED = "the request was aborted: the server was paused, for new weights perhaps; ask again"


class EngineFullError(RateLimitError):
    """More requests are waiting than the engine takes."""


class Engine:
    """Continuous batching over one model. ``submit`` from any thread; the work is done on one of the engine's own."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 32,
        length: int | None = None,
        cache_tokens: int | None = None,
        prefill_tokens: int | None = None,
        max_waiting: int = 65536,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.runner = runner = ModelRunner(model)
        text = runner.text_config
        longest = getattr(text, "max_position_embeddings", None) or 2048
        longest = longest if longest > 0 else 2048  # some say -1 for no limit
        self.length = min(length or longest, longest, cache_tokens or longest)
        self.rows = rows
        self.cache_tokens = min(cache_tokens or rows * self.length, rows * self.length)
        self.prefill_tokens = prefill_tokens or (PREFILL_CUDA if runner.device.type == "cuda" else PREFILL)
        self.max_waiting = max_waiting
        self.device, self.dtype = runner.device, runner.dtype
        self.stop_ids = frozenset(stop_ids)
        self.vocabulary = runner.vocabulary
        self.scheduler = Scheduler(
            runner,
            rows=rows,
            length=self.length,
            prefill_tokens=self.prefill_tokens,
            vocabulary=self.vocabulary,
            stop_ids=self.stop_ids,
        )
        self.table = self.scheduler.table
        self.lock = runner.lock
        self._wake = self.scheduler.wake
        self._thread: threading.Thread | None = None
        self._is_closed = False
        is_stop_V = np.zeros(self.vocabulary + 1, bool)
        is_stop_V[[token for token in stop_ids if 0 <= token < self.vocabulary]] = True
        self._steps = Steps(runner, self.scheduler, rows=rows, length=self.length, is_stop_V=is_stop_V)
        self._seeds = Seeds()
        self._gathering = 0
        self._is_paused = False
        self._held: list[ActiveSequence] | None = None  # requests that came since those before them were to end
        self._aborts: Exception | None = None
        self._has_cache = False
        self.backend: Backend = choose_backend(self)

    @property
    def steps(self) -> int:
        """How many were run."""
        return self._steps.steps

    @property
    def tokens(self) -> int:
        """How many were drawn."""
        return self._steps.tokens

    def tokens_under_way(self) -> int:
        """How many the replies that are not finished have so far; any thread may ask."""
        return int(self.table.steps[: len(self.live)].sum())

    @property
    def waiting(self) -> deque[ActiveSequence]:
        """Requests that have no blocks yet."""
        return self.scheduler.waiting

    @property
    def live(self) -> list[ActiveSequence]:
        """Requests that decode."""
        return self.scheduler.running

    def run_by(self, backend: str) -> None:
        """Make what a backend needs: the KV cache and the device's graphs, or caches of the model's own."""
        self.scheduler.cuda = None
        if backend not in BATCHED:
            self.scheduler.cache = SequentialCache(self.model, uses_cache=backend == SEQUENTIAL)
            self.scheduler.blocks = BlockManager(self.rows * (blocks_for(self.length) + 1) + 1, least_shared=None)
            self._has_cache = True
            return
        self.runner.uses_c, self.runner.uses_modules = backend == CPU, backend == MODULES
        least = LEAST_SHARED_CUDA if self.device.type == "cuda" else LEAST_SHARED
        # One that is nobody's, and one that a prefix is copied from while a sequence has all others.
        blocks = blocks_for(self.cache_tokens) + 2
        self.scheduler.blocks = BlockManager(blocks, least_shared=least)
        with torch.inference_mode(False):  # made by a proof, and written to by whoever comes later
            cache = KVCache(Shape.of(self.model.config), blocks, self.length, dtype=self.dtype, device=self.device)
            self.scheduler.cache = cache
            if self.device.type == "cuda":
                from verifiers.engine.cuda_device import CudaDevice  # needs Triton

                self.scheduler.cuda = CudaDecoder(self.table, self.runner, cache, CudaDevice())
        self._has_cache = True  # not before: where there was no memory for it, the next request tries again

    def reset(self) -> None:
        """Forget all that was run so far."""
        self.scheduler.blocks.forget()
        self.runner.reset()
        self._steps.steps = self._steps.tokens = 0

    # --- asking ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        on_token: OnToken | Sequence[OnToken] | None = None,
    ) -> list[Answer]:
        """Queue ``n`` completions of one prompt, which is run once; ``on_token`` may be one function for each."""
        sampling = sampling or Sampling()
        if not len(prompt_ids):
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt_ids) >= self.length:
            holds = f", all that the KV cache holds (cache_tokens={self.cache_tokens})"
            raise OverlongPromptError(
                f"the prompt has {len(prompt_ids)} tokens, and the context is {self.length}"
                f"{holds if self.length == self.cache_tokens else ''}"
            )
        tokens = check_tokens(tuple(prompt_ids), self.vocabulary)
        if sampling.logit_bias:
            check_tokens(tuple(sampling.logit_bias), self.vocabulary)
        first = sampling.seed if sampling.seed is not None else self._seeds.draw(tokens)
        prompt = list(tokens)
        told = [on_token] * n if on_token is None or not isinstance(on_token, Sequence) else list(on_token)
        sequences = [ActiveSequence(prompt, sampling, (first + i) % (1 << 63), told[i]) for i in range(n)]
        for sequence in sequences:
            sequence.future.on_cancel = self.scheduler.note_cancel
        with self._wake:
            if self._is_closed:
                raise InfraError("the engine is closed")
            queue = self.waiting
            waiting = len(queue) + len(self._held or ())
            if waiting + n > self.max_waiting:
                raise EngineFullError(f"{waiting} requests are waiting already; try again in a moment")
            is_first = not queue
            (queue if self._held is None else self._held).extend(sequences)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="verifiers-engine", daemon=True)
                self._thread.start()
                threads.remember(self, self._thread)
            if is_first or len(queue) >= self._gathering:  # of those between, the thread need not know
                self._wake.notify()
        return [sequence.future for sequence in sequences]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None, n: int = 1
    ) -> list[Generated]:
        """Completions of many prompts, in order: plain code that waits."""
        futures = [future for prompt in prompts for future in self.submit(prompt, sampling, n=n)]
        return [future.result() for future in futures]

    def reseed(self, seed: int) -> None:
        """From here on a request without a seed gets one made of this number, its prompt, and how often it was asked.

        The order in which requests arrive then makes no difference to what is sampled.
        """
        with self._wake:
            self._seeds = Seeds(seed)

    def gather(self, count: int) -> None:
        """Begin the next ``count`` requests together, when all are there (or no more come): prompts are run at once,
        equal ones once, and the batches are the same ones each time."""
        with self._wake:
            self._gathering = count

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self, mode: str = "keep") -> None:
        """Sample nothing until `resume`: requests under way stop where they are (``keep``), end first (``wait``) or
        fail (``abort``); later ones wait. What is paused already ends nothing first."""
        if mode not in PAUSES:
            raise ValueError(f"there is no way {mode!r} to pause; there are {', '.join(PAUSES)}")
        with self._wake:
            if mode == "wait" and self._held is None:
                self._held = []
        while mode == "wait" and not (self._is_paused or self._is_closed) and self._is_busy():
            time.sleep(ASK_AGAIN_S)
        with self._wake:
            self._is_paused = True
            self._aborts = ModelError(ABORTED) if mode == "abort" and self._thread is not None else None
            self._wake.notify_all()
        while self._aborts is not None and not self._is_closed:
            time.sleep(ASK_AGAIN_S)
        with self.lock:  # the step that is under way has ended
            return

    def _is_busy(self) -> bool:
        with self.lock:  # between two steps: within one, a request may be nowhere
            return bool(self.waiting or self.live or self.scheduler.prefilling)

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        with self._wake:
            self.waiting.extend(self._held or ())
            self._held, self._is_paused = None, False
            self._wake.notify_all()

    def close(self) -> None:
        """Fail what is under way, end the thread, and give the KV cache back."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.release_cache()

    def stop(self) -> None:
        """As `close`, without waiting for the thread: safe wherever garbage is collected."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def name_weights(self, version: int | str) -> None:
        """What is sampled from here on says that it is from this version of the weights."""
        with self.lock:
            self.runner.name_weights(version)

    def forget(self) -> None:
        """Drop every key and value kept for reuse (they were made by other weights, say)."""
        with self.lock:
            self.scheduler.blocks.forget()
            self.runner.forget()

    def release_cache(self) -> None:
        """Give the KV cache and its graphs back, if nothing is running; the next request takes them again."""
        with self.lock:
            if self.live or self.scheduler.prefilling:
                return
            self.scheduler.cuda = None
            self.scheduler.cache = SequentialCache(self.model, uses_cache=False)  # in its place, and empty
            self.scheduler.blocks.forget()
            self.runner.forget()
            self._has_cache = False
        free_unused(self.device)

    # --- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            with current(self.device):
                self._run()
        finally:
            self._is_closed = True
            self.waiting.extend(self._held or ())
            self.scheduler.fail(InfraError("the engine was closed"), waiting=True)

    def _run(self) -> None:
        if self.device.type == "cpu" and is_small(self.model):
            torch.set_num_threads(1)
        while True:
            with self._wake:
                while not self._is_closed and self._aborts is None and self._has_nothing_to_do:
                    self._wake.wait()
                if self._gathering and not self._is_paused:
                    self._wait_for_all()
                if self._is_closed:
                    break
            if self._aborts is not None:
                self.scheduler.fail(self._aborts, waiting=True)
                self._aborts = None
                continue
            try:
                with self.lock, torch.inference_mode(), self.runner.evaluating():
                    self._step()
            except Exception as error:  # the model is foreign code: it fails its requests, not the engine
                logger.exception("the engine's step failed")
                self.scheduler.fail(error)
            self.scheduler.deliver()

    @property
    def _has_nothing_to_do(self) -> bool:
        return self._is_paused or not (self.waiting or self.live or self.scheduler.prefilling)

    def step(self) -> None:
        """One step on the caller's thread, who holds the lock: for a proof, before the engine's own thread is there."""
        self._step()
        self.scheduler.deliver()

    def _wait_for_all(self) -> None:
        """Let those that were announced arrive, then put them in an order that does not depend on who came first."""
        while not self._is_closed and len(self.waiting) < self._gathering:
            arrived = len(self.waiting)
            if not self._wake.wait(PATIENCE_S) and len(self.waiting) == arrived:
                break
        self._gathering = 0
        self.scheduler.sort_waiting()

    def _step(self) -> None:
        self.runner.check_kind()
        if not self._has_cache:
            self.run_by(self.backend.name)
        self._steps.run()
