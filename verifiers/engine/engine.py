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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiers.engine import threads
from verifiers.engine.backends import BATCHED, CPU, MODULES, SEQUENTIAL, Backend, choose_backend
from verifiers.engine.block_manager import BLOCK, BlockManager, blocks_for
from verifiers.engine.finished import ends
from verifiers.engine.kv_cache import Decode, KVCache, Prefill, Segment, Shape
from verifiers.engine.model_runner import ModelRunner
from verifiers.engine.prompt_scores import score_prompt
from verifiers.engine.sampler import draw
from verifiers.engine.scheduler import Chunk, Scheduler
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
from verifiers.errors import InfraError, ModelError, OverlongPromptError, RateLimitError
from verifiers.kernels.cpu.model import Paged
from verifiers.kernels.cpu.threads import is_small
from verifiers.kernels.devices import current, free_unused, host_index

if TYPE_CHECKING:
    from verifiers.engine.cuda_runner import CudaDecoder

logger = logging.getLogger("verifiers.engine")

AHEAD = 2  # steps in flight on CUDA before the host reads the first of them
ADMIT_SHARE = 16  # on CUDA, new requests are taken in when a 16th of the rows is free: each time empties the pipeline

LEAST_SHARED, LEAST_SHARED_CUDA = 16, 64  # tokens: reusing fewer is not worth its while
SPAN_STEP = 2 * BLOCK
LOOK_AHEAD = 4  # tokens for which blocks are taken at once on CUDA: telling the device takes as long for many
PREFILL, PREFILL_CUDA = 1024, 32768  # tokens of prompts run at once
PATIENCE_S = 2.0  # without a new request, before those that have gathered begin without the others
PAUSES = ("abort", "wait", "keep")
ASK_AGAIN_S = 0.005
ABORTED = "the request was aborted: the server was paused, for new weights perhaps; ask again"
BURST = 32  # tokens at most that each sequence draws in one call of C; how many are, its speed decides


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
        self.vocabulary = int(text.vocab_size)
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
        self.steps = 0
        self.tokens = 0
        self._wake = self.scheduler.wake
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_stop = np.zeros(self.vocabulary + 1, bool)
        self._is_stop[[token for token in stop_ids if 0 <= token < self.vocabulary]] = True
        self._seeds = Seeds()
        self._gathering = 0
        self._is_paused = False
        self._held: list[ActiveSequence] | None = None  # requests that came since those before them were to end
        self._aborts: Exception | None = None
        self._version = runner.weight_version
        self._cuda: CudaDecoder | None = None
        self._has_cache = False
        self.backend: Backend = choose_backend(self)

    @property
    def waiting(self) -> deque[ActiveSequence]:
        """Requests that have no blocks yet."""
        return self.scheduler.waiting

    @property
    def live(self) -> list[ActiveSequence]:
        """Requests that decode."""
        return self.scheduler.running

    @property
    def prefilling(self) -> list[ActiveSequence]:
        """Requests whose prompt is being run."""
        return [sequence for group in self.scheduler.prefilling for sequence in group.members]

    @property
    def cache(self) -> KVCache | SequentialCache:
        return self.scheduler.cache

    def run_by(self, backend: str) -> None:
        """Make what a backend needs: the KV cache and the device's graphs, or caches of the model's own."""
        self._cuda = self.scheduler.cuda = None
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
            self._cuda = self.scheduler.cuda = _cuda_decoder(self, cache) if self.device.type == "cuda" else None
        self._has_cache = True  # not before: where there was no memory for it, the next request tries again

    def start_afresh(self) -> None:
        """Forget all that was run so far."""
        self.scheduler.blocks.forget()
        self.runner.start_afresh()
        self.steps = self.tokens = 0

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
        prompt = list(map(int, prompt_ids))
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) >= self.length:
            holds = f", all that the KV cache holds (cache_tokens={self.cache_tokens})"
            raise OverlongPromptError(
                f"the prompt has {len(prompt)} tokens, and the context is {self.length}"
                f"{holds if self.length == self.cache_tokens else ''}"
            )
        check_tokens((*prompt, *sampling.logit_bias), self.vocabulary)
        first = sampling.seed if sampling.seed is not None else self._seeds.draw(prompt)
        told = list(on_token) if isinstance(on_token, Sequence) else [on_token] * n
        sequences = [ActiveSequence(prompt, sampling, (first + i) % (1 << 63), told[i]) for i in range(n)]
        for sequence in sequences:
            sequence.future.on_cancel = self.scheduler.note_cancel
        with self._wake:
            if self._is_closed:
                raise InfraError("the engine is closed")
            waiting = len(self.waiting) + len(self._held or ())
            if waiting + n > self.max_waiting:
                raise EngineFullError(f"{waiting} requests are waiting already; try again in a moment")
            is_first = not self.waiting
            (self.waiting if self._held is None else self._held).extend(sequences)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="verifiers-engine", daemon=True)
                self._thread.start()
                threads.remember(self, self._thread)
            if is_first or len(self.waiting) >= self._gathering:  # of those between, the thread need not know
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
            self._cuda = self.scheduler.cuda = None
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
        """A chunk of the prompts that are being run, then one token for every sequence that decodes."""
        if not self._has_cache:
            self.run_by(self.backend.name)
        is_idle = not self.live and not self.scheduler.prefilling
        has_changed, has_moved = self.runner.notice(is_idle=is_idle)
        if has_changed:
            self.scheduler.blocks.forget()
        if self._version != self.runner.weight_version:
            self._note_version()
        if has_moved and self._cuda is not None:
            self._cuda.drop_graphs()  # they read from where the parameters were
        if self._cuda is not None:
            self._step_ahead(self._cuda)
            return
        self.scheduler.drop_cancelled()
        if chunks := self.scheduler.admit():
            self._prefill(chunks)
        if self.live:
            self._decode()

    def _note_version(self) -> None:
        """Running sequences go on with other weights: what they sample from here on is of another version."""
        while self._cuda is not None and self._cuda.in_flight:  # these tokens are of the weights before
            self._collect(self._cuda)
        self._version = self.runner.weight_version
        for sequence in self.live:
            sequence.note_version(self._version, int(self.table.steps[sequence.row]))

    def _step_ahead(self, cuda: CudaDecoder) -> None:
        """As above, but the host reads a step only when the next ones have been launched."""
        self.scheduler.drop_cancelled()
        wants_in = bool(self.waiting) and (self.scheduler.free_rows * ADMIT_SHARE >= self.rows or not self.live)
        if (wants_in or self.scheduler.prefilling) and (chunks := self.scheduler.admit()):
            self._prefill(chunks)
        if self.table.needs_logits[: len(self.live)].any():
            self._settle()
            if self.live:
                self._decode()  # what is changed differs between sequences and steps: not worth a graph
                cuda.assign(np.arange(len(self.live)))
        elif self.live:
            _, rows = self.scheduler.reserve(LOOK_AHEAD, self._settle)
            cuda.add_blocks(rows)
            cuda.launch()
            self.steps += 1
        while cuda.in_flight > (AHEAD if self.live else 0):
            self._collect(cuda)

    def _settle(self) -> None:
        """Read all that was launched."""
        while self._cuda is not None and self._cuda.in_flight:
            self._collect(self._cuda)

    def _collect(self, cuda: CudaDecoder) -> None:
        """Read the oldest step that was launched."""
        sequences, is_first, drawn = cuda.collect()
        if not sequences:
            return
        rows = [sequence.row for sequence in sequences]
        if not is_first:
            self.table.length[rows] += 1
            self.table.ahead[rows] -= 1
        self._record(sequences, *drawn, is_first=is_first)

    # --- tokens ------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        """Run tokens of prompts, and draw a token of each sequence whose prompt is complete."""
        logits_NV = self._run_chunks(chunks)
        started = self.scheduler.start(chunks)
        if not started:
            return
        sequences, order = [sequence for sequence, _ in started], [i for _, i in started]
        logits_NV = logits_NV[host_index(order, self.device)]
        if self._cuda is not None and not any(one.sampling.needs_logits for one in sequences):
            self._cuda.launch_first(logits_NV, sequences)
            return
        rows_N = np.array([sequence.row for sequence in sequences])
        self._record(sequences, *draw(logits_NV, sequences, rows_N, self.table, self._cuda), is_first=True)
        if self._cuda is not None and (begun := [sequence.row for sequence in sequences if sequence.row >= 0]):
            self._cuda.assign(np.array(begun))

    def _run_chunks(self, chunks: Sequence[Chunk]) -> Tensor:
        """The logits behind the last token of each chunk; those before it too where a prompt is to be scored."""
        sequences = [chunk.group.first for chunk in chunks]
        if isinstance(self.cache, SequentialCache):
            for one in sequences:
                if one.is_to_be_scored:
                    score_prompt(one, 0, self.cache.logits(one.prompt_ids))
            return self.cache.prefill(sequences)
        segments, ids, positions, kept = [], list[int](), list[int](), list[int]()
        for i, (sequence, (_, start, end)) in enumerate(zip(sequences, chunks, strict=True)):
            segments.append(Segment(len(ids), len(ids) + end - start, i, start))
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            kept += range(segments[-1].start, len(ids)) if sequence.is_to_be_scored else [len(ids) - 1]
        tables = np.zeros((len(chunks), max(len(one.blocks) for one in sequences)), np.int32)
        for table, sequence in zip(tables, sequences, strict=True):
            table[: len(sequence.blocks)] = sequence.blocks
        logits_NV = self._run_prompts(ids, positions, kept, segments, tables, self.cache)
        last, n = [], 0
        for sequence, (_, start, end) in zip(sequences, chunks, strict=True):
            if sequence.is_to_be_scored:
                score_prompt(sequence, start, logits_NV[n : n + end - start])
                n += end - start - 1
            last.append(n)
            n += 1
        return logits_NV if n == len(last) else logits_NV[host_index(last, self.device)]

    def _run_prompts(
        self, ids: list[int], positions: list[int], kept: list[int], segments: list[Segment], tables: np.ndarray,
        cache: KVCache,
    ) -> Tensor:  # fmt: skip
        """The logits behind the tokens at ``kept``, of prompts laid end to end; their keys and values are stored."""
        if self._cuda is not None:
            return self._cuda.prefill(ids, positions, kept, segments, tables)
        ids_T, positions_T, kept_N = (torch.tensor(values) for values in (ids, positions, kept))
        attend = Prefill(cache, tables, segments)
        return self.runner.forward(ids_T[None], positions_T[None], attend, kept_N)[0]

    def _decode(self) -> None:
        """One token for every running sequence; several, where none of them has to be looked at before the next."""
        table = self.table
        if isinstance(self.cache, SequentialCache):
            logits_BV = self.cache.decode(self.live, table.token[: len(self.live)].tolist())
        else:
            self.runner.count_step(self.rows)
            room = min(table.room(len(self.live), self.length), BURST)
            burst = self.runner.burst(room, len(self._is_stop)) if room > 1 else 0
            steps, _ = self.scheduler.reserve(max(burst, 1))
            if not self.live:  # the only one had to make room for a prompt that came before it
                return
            if burst:
                self._decode_several(steps, self.cache)
                return
            logits_BV = self._run_step(self.cache)
        sequences = list(self.live)
        rows_N = np.arange(len(sequences))
        table.length[rows_N] += 1
        self.steps += 1
        self._record(sequences, *draw(logits_BV, sequences, rows_N, table, self._cuda))

    def _run_step(self, cache: KVCache) -> Tensor:
        table, n = self.table, len(self.live)
        length_B = torch.from_numpy(table.length[:n]).to(self.device)
        span = (int(table.length[:n].max()) // SPAN_STEP + 1) * SPAN_STEP
        attend = Decode(cache, table.blocks[:n], length_B, min(span, blocks_for(self.length) * BLOCK))
        ids = torch.from_numpy(table.token[:n]).to(self.device)[:, None]
        return self.runner.forward(ids, length_B[:, None], attend)[:, 0]

    def _decode_several(self, most: int, cache: KVCache) -> None:
        rows = len(self.live)
        drawn = self.runner.decode(
            self.table.decode_columns(rows), most, self._is_stop, Paged(cache.store, self.table.blocks, cache.length)
        )
        steps = (drawn.token_KB, drawn.logprob_KB, drawn.raw_KB)
        self.table.record_steps(*(one[:-1] for one in steps))
        self.table.length[:rows] += 1
        self.steps += len(drawn.token_KB)
        self.tokens += drawn.token_KB[:-1].size
        self._record(list(self.live), *(one[-1] for one in steps))
        if len(drawn.token_KB) < most:
            self.scheduler.trim()

    def _record(
        self, sequences: Sequence[ActiveSequence], token_N: np.ndarray, logprob_N: np.ndarray, raw_N: np.ndarray,
        *, is_first: bool = False,
    ) -> None:  # fmt: skip
        """Keep what was drawn, and finish the sequences for which it was the last."""
        table, rows_N = self.table, np.array([sequence.row for sequence in sequences])
        table.record(rows_N, token_N, logprob_N, raw_N)
        self.tokens += len(sequences)
        is_full_N, is_watched_N = table.is_full(rows_N, self.length), table.is_watched[rows_N]
        self.scheduler.finish(ends(sequences, token_N, logprob_N, raw_N, is_full_N, self._is_stop, is_watched_N))
        if is_first:
            for sequence in sequences:
                self.scheduler.keep_prompt(sequence)


def _cuda_decoder(engine: Engine, cache: KVCache) -> CudaDecoder:
    from verifiers.engine.cuda_runner import CudaDecoder

    return CudaDecoder(engine, cache)
