"""Continuous batching: sequences join and leave the batch between steps.

`submit` queues a sequence. The scheduler allocates blocks of the KV cache for it. The model runner runs its prompt
(prefill), then one token per step (decode). The sampler draws each token, and the scheduler delivers the reply.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from verifiers.clients.asking_for import asked_for
from verifiers.engine.backends import BATCHED, CPU, MODULES, SEQUENTIAL, Backend, choose_backend
from verifiers.engine.block_manager import BlockManager, blocks_for
from verifiers.engine.cuda_runner import CudaDecoder
from verifiers.engine.kv_cache import KVCache, Shape
from verifiers.engine.model_runner import ModelRunner
from verifiers.engine.scheduler import Scheduler
from verifiers.engine.sequence import ActiveSequence, Answer, Generated, OnToken, Sampling, Seeds, check_tokens
from verifiers.engine.sequential import SequentialCache
from verifiers.engine.steps import StepRunner
from verifiers.errors import InfraError, ModelError, OverlongPromptError, RateLimitError
from verifiers.kernels.cpu.threads import is_small
from verifiers.kernels.devices import current, free_unused
from verifiers.kernels.prove import max_positions

logger = logging.getLogger("verifiers.engine")

LEAST_SHARED, LEAST_SHARED_CUDA = 16, 64  # tokens: a shorter cached prefix is cheaper to run again than to reuse
PREFILL, PREFILL_CUDA = 1024, 32768  # prompt tokens per step
GATHER_TIMEOUT_S = 2.0  # `gather` stops waiting after this long without a new request
PAUSES = ("abort", "wait", "keep")
POLL_S = 0.005
ABORTED = "the request was aborted because the server was paused, perhaps to load new weights; send it again"


_started: WeakSet[Engine] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Join every engine's thread at exit: killing a thread inside torch would abort the process."""
    engines = list(_started)
    for engine in engines:
        engine.stop()
    for engine in engines:
        engine.join()


class EngineFullError(RateLimitError):
    """The queue of waiting requests is full."""


class Engine:
    """Continuous batching over one model. Any thread may call ``submit``; the model runs on the engine's own thread."""

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
        longest = max_positions(runner.text_config) or 2048
        self.length = min(length or longest, longest, cache_tokens or longest)
        self.rows = rows
        self.cache_tokens = min(cache_tokens or rows * self.length, rows * self.length)
        self.prefill_tokens = prefill_tokens or (PREFILL_CUDA if runner.device.type == "cuda" else PREFILL)
        self.max_waiting = max_waiting
        self.device, self.dtype = runner.device, runner.dtype
        self.stop_ids = frozenset(stop_ids)
        self.vocabulary = runner.vocabulary
        self.scheduler = Scheduler(
            runner, rows=rows, length=self.length, prefill_tokens=self.prefill_tokens, stop_ids=self.stop_ids
        )
        self.table = self.scheduler.table
        self.lock = runner.lock
        self._wake = self.scheduler.wake
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._step_runner = StepRunner(runner, self.scheduler)
        self._seeds = Seeds()
        self._gathering = 0  # requests to wait for before the next step
        self._is_paused = False
        self._held: list[ActiveSequence] | None = None  # requests since `pause("wait")`; they start after `resume`
        self._abort_error: Exception | None = None  # if set, the engine's thread fails all requests with it
        self._has_cache = False
        self.backend: Backend = choose_backend(self)

    @property
    def steps(self) -> int:
        """Decode steps so far."""
        return self._step_runner.steps

    @property
    def tokens(self) -> int:
        """Tokens sampled so far."""
        return self._step_runner.tokens

    def tokens_under_way(self) -> int:
        """Tokens of the unfinished replies so far. Safe to call from any thread."""
        return int(self.table.steps[: len(self.running)].sum())

    @property
    def waiting(self) -> deque[ActiveSequence]:
        """Sequences that have no blocks yet."""
        return self.scheduler.waiting

    @property
    def running(self) -> list[ActiveSequence]:
        """Sequences that decode."""
        return self.scheduler.running

    def use_backend(self, backend: str) -> None:
        """Allocate a backend's caches: the KV cache and CUDA graphs, or one of the model's own caches per sequence."""
        self.scheduler.cuda = None
        if backend not in BATCHED:
            self.scheduler.cache = SequentialCache(self.model, uses_cache=backend == SEQUENTIAL)
            self.scheduler.blocks = BlockManager(self.rows * (blocks_for(self.length) + 1) + 1, least_shared=None)
            self._has_cache = True
            return
        self.runner.uses_c, self.runner.uses_modules = backend == CPU, backend == MODULES
        least = LEAST_SHARED_CUDA if self.device.type == "cuda" else LEAST_SHARED
        # Two extra blocks: the null block, and a source to copy a prefix from while one sequence holds all others.
        blocks = blocks_for(self.cache_tokens) + 2
        self.scheduler.blocks = BlockManager(blocks, least_shared=least)
        with torch.inference_mode(False):  # so that the cache can also be written to outside inference mode
            cache = KVCache(Shape.of(self.model.config), blocks, self.length, dtype=self.dtype, device=self.device)
            self.scheduler.cache = cache
            if self.device.type == "cuda":
                from verifiers.engine.cuda_device import CudaDevice  # needs Triton

                self.scheduler.cuda = CudaDecoder(self.table, self.runner, cache, CudaDevice())
        self._has_cache = True  # last: if the allocation failed, the next request tries again

    def reset(self) -> None:
        """Drop the prefix cache, the state of the weights, and the counters."""
        self.scheduler.blocks.forget()
        self.runner.reset()
        self._step_runner.steps = self._step_runner.tokens = 0

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        on_token: OnToken | Sequence[OnToken] | None = None,
    ) -> list[Answer]:
        """Queue ``n`` completions of one prompt, which runs once. ``on_token``: one callback, or one per completion."""
        sampling = sampling or Sampling()
        if not len(prompt_ids):
            raise ValueError("the prompt is empty: pass at least one token")
        if len(prompt_ids) >= self.length:
            holds = f", the size of the KV cache (cache_tokens={self.cache_tokens})"
            raise OverlongPromptError(
                f"the prompt has {len(prompt_ids)} tokens, but the context is {self.length}"
                f"{holds if self.length == self.cache_tokens else ''}"
            )
        tokens = check_tokens(tuple(prompt_ids), self.vocabulary)
        if sampling.logit_bias:
            check_tokens(tuple(sampling.logit_bias), self.vocabulary)
        first = sampling.seed if sampling.seed is not None else self._seeds.draw(tokens, asked_for())
        prompt = list(tokens)
        callbacks = list(on_token) if isinstance(on_token, Sequence) else [on_token] * n
        sequences = [ActiveSequence(prompt, sampling, (first + i) % (1 << 63), callbacks[i]) for i in range(n)]
        for sequence in sequences:
            sequence.future.on_cancel = self.scheduler.note_cancel
        with self._wake:
            if self._is_closed:
                raise InfraError("the engine is closed")
            queue = self.waiting
            waiting = len(queue) + len(self._held or ())
            if waiting + n > self.max_waiting:
                raise EngineFullError(f"{waiting} requests are already waiting; try again in a moment")
            is_first = not queue
            (queue if self._held is None else self._held).extend(sequences)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="verifiers-engine", daemon=True)
                self._thread.start()
                _started.add(self)
            if is_first or len(queue) >= self._gathering:  # during `gather` the thread sleeps until all have arrived
                self._wake.notify()
        return [sequence.future for sequence in sequences]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None, n: int = 1
    ) -> list[Generated]:
        """The completions of many prompts, in order. Blocks until all have finished."""
        futures = [future for prompt in prompts for future in self.submit(prompt, sampling, n=n)]
        return [future.result() for future in futures]

    def reseed(self, seed: int) -> None:
        """Derive the seed of each later request that has none from this number, its rollout, its prompt, and how often
        that rollout submitted the prompt. Replies then do not depend on the order of arrival."""
        with self._wake:
            self._seeds = Seeds(seed)

    def gather(self, count: int) -> None:
        """Start the next ``count`` requests together, once all have arrived or none arrives for `GATHER_TIMEOUT_S`.
        Equal prompts then run once, and the batches are the same every time."""
        with self._wake:
            self._gathering = count

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self, mode: str = "keep") -> None:
        """Sample nothing until `resume`. Requests in flight stop where they are (``keep``), finish first (``wait``) or
        fail (``abort``). Later requests wait. If the engine is already paused, ``wait`` returns at once."""
        if mode not in PAUSES:
            raise ValueError(f"{mode!r} is not a pause mode; use one of {', '.join(PAUSES)}")
        with self._wake:
            if mode == "wait" and self._held is None:
                self._held = []
        while mode == "wait" and not (self._is_paused or self._is_closed) and self._is_busy():
            time.sleep(POLL_S)
        with self._wake:
            self._is_paused = True
            self._abort_error = ModelError(ABORTED) if mode == "abort" and self._thread is not None else None
            self._wake.notify_all()
        while self._abort_error is not None and not self._is_closed:
            time.sleep(POLL_S)
        with self.lock:  # wait for the current step to end
            return

    def _is_busy(self) -> bool:
        with self.lock:  # between two steps; during a step a sequence may be in none of the queues
            return self.scheduler.has_work

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._wake:
            self.waiting.extend(self._held or ())
            self._held, self._is_paused = None, False
            self._wake.notify_all()

    def close(self) -> None:
        """Fail the requests in flight, end the thread, and free the KV cache."""
        self.stop()
        self.join()
        self.release_cache()

    def join(self) -> None:
        """Wait for the engine's thread to end. Does nothing on that thread itself."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stop(self) -> None:
        """Like `close`, but without joining the thread or freeing the cache, so it is safe in a finalizer."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def name_weights(self, version: int | str) -> None:
        """Record tokens sampled from now on under this version of the weights."""
        with self.lock:
            self.runner.name_weights(version)

    def forget(self) -> None:
        """Drop the prefix cache and everything derived from the weights. Call it after changing weights."""
        with self.lock:
            self.scheduler.blocks.forget()
            self.runner.forget()

    def release_cache(self) -> None:
        """Free the KV cache and its graphs if nothing is running. The next request allocates them again."""
        with self.lock:
            if not self.scheduler.is_idle:
                return
            self.scheduler.cuda = None
            self.scheduler.cache = SequentialCache(self.model, uses_cache=False)  # an empty placeholder
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
                while not (self._is_closed or self._abort_error or (self.scheduler.has_work and not self._is_paused)):
                    self._wake.wait()
                if self._gathering and not self._is_paused:
                    self._wait_for_all()
                if self._is_closed:
                    break
            if self._abort_error is not None:
                self.scheduler.fail(self._abort_error, waiting=True)
                self._abort_error = None
                continue
            try:
                with self.lock, torch.inference_mode(), self.runner.evaluating():
                    self._step()
            except Exception as error:  # the model is foreign code: fail its requests, not the engine
                logger.exception("the engine's step failed")
                self.scheduler.fail(error)
            self.scheduler.deliver()

    def step(self) -> None:
        """Run one step on this thread, which must hold the lock. Used to check a backend before the thread starts."""
        self._step()
        self.scheduler.deliver()

    def _wait_for_all(self) -> None:
        """Wait for the requests that `gather` announced, then sort them, because they arrive in random order."""
        while not self._is_closed and len(self.waiting) < self._gathering:
            arrived = len(self.waiting)
            if not self._wake.wait(GATHER_TIMEOUT_S) and len(self.waiting) == arrived:
                break
        self._gathering = 0
        self.scheduler.sort_waiting()

    def _step(self) -> None:
        self.runner.check_compatible()
        if not self._has_cache:
            self.use_backend(self.backend.name)
        self._step_runner.run()
