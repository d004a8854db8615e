"""A live model becomes a sampler: requests join and leave between steps, each row its own, tokens exact."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiers.engine import kv_cache as slots
from verifiers.engine import threads
from verifiers.engine.finished import ends
from verifiers.engine.kv_cache import Decode, Prefill, Segment, Shape, SlotCache
from verifiers.engine.logits import LogitsProcessor, note_alternatives, processed
from verifiers.engine.model_runner import LiveModel
from verifiers.engine.prompt_scores import score_prompt
from verifiers.engine.prove import BATCHED, MODULES, SEQUENTIAL, choose_backend
from verifiers.engine.sampler import sample
from verifiers.engine.sequence import Answer, Ask, Generated, OnToken, Sampling, Seeds, check_tokens, delivery, in_order
from verifiers.engine.sequential import SequentialCache
from verifiers.engine.slot_table import Table
from verifiers.errors import InfraError, ModelError, OverlongPromptError

if TYPE_CHECKING:
    from verifiers.engine.cuda import CudaDecoder

logger = logging.getLogger("verifiers.engine")

AHEAD = 2  # steps in flight on CUDA before the host reads the first of them
ADMIT_SHARE = 16  # on CUDA, new requests are taken in when a 16th of the rows is free: each time empties the pipeline

LEAST_SHARED, LEAST_SHARED_CUDA = 16, 64  # tokens: reusing fewer is not worth moving them
NOTHING_SHARED = 1 << 62
SPAN_STEP = 32
PREFILL, PREFILL_CUDA = 1024, 32768  # tokens of prompts run at once
PATIENCE_S = 2.0  # without a new request, before those that have gathered begin without the others
BURST = 8  # tokens at a time of a model that is run in C: who comes meanwhile waits so long


class EngineFullError(ModelError):
    """More requests are waiting than the engine takes."""


class Engine:
    """Continuous batching over one model. ``submit`` from any thread; the work is done on one of the engine's own."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 32,
        length: int | None = None,
        prefill_tokens: int | None = None,
        max_waiting: int = 65536,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.live_model = live = LiveModel(model)
        text = live.text_config
        longest = getattr(text, "max_position_embeddings", None) or 2048
        longest = longest if longest > 0 else 2048  # some say -1 for no limit
        self.length = min(length or longest, longest)
        self.rows = rows
        self.prefill_tokens = prefill_tokens or (PREFILL_CUDA if live.device.type == "cuda" else PREFILL)
        self.max_waiting = max_waiting
        self.device, self.dtype = live.device, live.dtype
        self.cache: SlotCache | SequentialCache
        self.table = Table(rows, self.length)
        self.live: list[Ask] = []
        self.waiting: deque[Ask] = deque()
        self._joining: list[Ask] = []
        self._outbox: list[tuple[Ask, Generated | BaseException]] = []
        self.lock = live.lock
        self.steps = 0
        self.tokens = 0
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._has_cancelled = False
        self.stop_ids = frozenset(stop_ids)
        self.vocabulary = int(text.vocab_size)
        self._is_stop = np.zeros(self.vocabulary + 1, bool)
        self._is_stop[[token for token in stop_ids if token < len(self._is_stop)]] = True
        self._seeds = Seeds()
        self._gathering = 0
        self._cuda: CudaDecoder | None = None
        self.backend = choose_backend(self)

    def run_by(self, backend: str) -> None:
        """Make what a backend needs: the slot cache and the device's graphs, or caches of the model's own."""
        self._cuda = None
        self.table.forget(0)
        if backend not in (BATCHED, MODULES):
            self.cache = SequentialCache(self.model, uses_cache=backend == SEQUENTIAL)
            self.table.least_shared = NOTHING_SHARED
            return
        self.live_model.is_plain = backend == MODULES
        self.table.least_shared = LEAST_SHARED_CUDA if self.device.type == "cuda" else LEAST_SHARED
        shape = Shape.of(self.model.config)
        with torch.inference_mode(False):  # made by a proof, and written to by whoever comes later
            # One position more than is promised: where rows that are not live write on CUDA.
            cache = SlotCache(shape, self.rows, self.length + 1, dtype=self.dtype, device=self.device)
            self.cache = cache
            self._cuda = _cuda_decoder(self, cache) if self.device.type == "cuda" else None

    def start_afresh(self) -> None:
        """Forget all that was run so far."""
        self.table.forget(0)
        self.live_model.start_afresh()
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
            raise OverlongPromptError(f"the prompt has {len(prompt)} tokens, and the context is {self.length}")
        check_tokens((*prompt, *sampling.logit_bias), self.vocabulary)
        first = sampling.seed if sampling.seed is not None else self._seeds.draw(prompt)
        told = list(on_token) if isinstance(on_token, Sequence) else [on_token] * n
        asks = [Ask(prompt, sampling, (first + i) % (1 << 63), told[i]) for i in range(n)]
        for ask in asks:
            ask.future.on_cancel = self._note_cancel
        with self._wake:
            if self._is_closed:
                raise InfraError("the engine is closed")
            if len(self.waiting) + n > self.max_waiting:
                raise EngineFullError(f"{len(self.waiting)} requests are waiting already; try again in a moment")
            is_first = not self.waiting
            self.waiting.extend(asks)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="verifiers-engine", daemon=True)
                self._thread.start()
                threads.remember(self, self._thread)
            if is_first or len(self.waiting) >= self._gathering:  # of those between, the thread need not know
                self._wake.notify()
        return [ask.future for ask in asks]

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

    def _note_cancel(self) -> None:
        self._has_cancelled = True

    def close(self) -> None:
        """Fail what is under way and end the thread."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stop(self) -> None:
        """As `close`, without waiting for the thread: safe wherever garbage is collected."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()

    def forget(self) -> None:
        """Drop every key and value kept for reuse (they were made by other weights, say)."""
        with self.lock:
            self.table.forget(len(self.live))
            self.live_model.forget()  # live rows are not to be kept either, nor packed weights

    # --- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._run()
        finally:
            self._is_closed = True
            self.fail(InfraError("the engine was closed"), waiting=True)

    def _run(self) -> None:
        if self.device.type == "cpu" and threads.wants_one(self.model):
            torch.set_num_threads(1)
        while True:
            with self._wake:
                while not self._is_closed and not self.waiting and not self.live:
                    self._wake.wait()
                if self._gathering:
                    self._wait_for_all()
                if self._is_closed:
                    break
            try:
                with self.lock, torch.inference_mode(), self.live_model.evaluating():
                    self._turn()
            except Exception as error:  # the model is foreign code: it fails its requests, not the engine
                logger.exception("the engine's step failed")
                self.fail(error)
            self._deliver()

    def step(self) -> None:
        """One turn on the caller's thread, who holds the lock: for a proof, before the engine's own thread is there."""
        self._turn()
        self._deliver()

    def _wait_for_all(self) -> None:
        """Let those that were announced arrive, then put them in an order that does not depend on who came first."""
        while not self._is_closed and len(self.waiting) < self._gathering:
            arrived = len(self.waiting)
            if not self._wake.wait(PATIENCE_S) and len(self.waiting) == arrived:
                break
        self._gathering = 0
        self.waiting = deque(in_order(self.waiting))

    def _turn(self) -> None:
        """Take in what fits, then one token for everyone."""
        has_changed, has_moved = self.live_model.notice(is_idle=not self.live)
        if has_changed:
            self.table.forget(len(self.live))
        if has_moved and self._cuda is not None:
            self._cuda.drop_graphs()  # they read from where the parameters were
        if self._cuda is not None:
            self._turn_ahead(self._cuda)
            return
        self._drop_cancelled()
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        if self.live:
            self._decode()

    def _turn_ahead(self, cuda: CudaDecoder) -> None:
        """As above, but the host reads a step only when the next ones have been launched."""
        free = self.rows - len(self.live)
        wants_in = bool(self.waiting) and (free * ADMIT_SHARE >= self.rows or not self.live)
        if wants_in or self._has_cancelled:
            while cuda.in_flight:
                self._land(cuda)
            self._drop_cancelled()
            while admitted := self._admit():
                self._prefill(admitted)
        if self.table.needs_logits[: len(self.live)].any():
            while cuda.in_flight:
                self._land(cuda)
            self._decode()  # what is changed differs from row to row and step to step: not worth a graph
            cuda.seat(np.arange(len(self.live)))
        elif self.live:
            cuda.launch()
            self.steps += 1
        while cuda.in_flight > (AHEAD if self.live else 0):
            self._land(cuda)

    def _land(self, cuda: CudaDecoder) -> None:
        asks, token_N, logprob_N, raw_N = cuda.land()
        if not asks:
            return
        rows_N = np.array([ask.row for ask in asks])
        self.table.length[rows_N] += 1
        self._take(rows_N, asks, token_N, logprob_N, raw_N)

    def fail(self, error: Exception, *, waiting: bool = False) -> None:
        """Fail what is under way; those that wait too if asked to, or if nothing under way could be at fault."""
        with self._wake:
            asks = list(dict.fromkeys([*self.live, *self._joining]))
            if waiting or not asks:
                asks += self.waiting
                self.waiting.clear()
            n = len(self.live)
            self.live.clear()
            self._joining.clear()
        self._deliver()
        for ask in asks:
            # One that waits may be cancelled at any moment: from here on it cannot.
            if not ask.future.done() and (ask.future.running() or ask.future.set_running_or_notify_cancel()):
                ask.future.set_exception(error)
        self.table.forget(0)
        self.cache.clear(range(n))
        if self._cuda is not None:
            self._cuda.reset()

    def _deliver(self) -> None:
        """Hand out what has ended, now that the model is again as its owner left it."""
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        with delivery():
            for ask, outcome in outbox:
                if isinstance(outcome, Generated):
                    ask.future.set_result(outcome)
                else:
                    ask.future.set_exception(outcome)

    def _drop_cancelled(self) -> None:
        if not self._has_cancelled:
            return
        self._has_cancelled = False
        dropped = [ask for ask in self.live if ask.is_cancelled]
        if dropped:
            self._retire(dropped)
        self._outbox += [(ask, CancelledError()) for ask in dropped]
        with self._wake:
            gone = [ask for ask in self.waiting if ask.future.cancelled()]
            if gone:
                self.waiting = deque(ask for ask in self.waiting if not ask.future.cancelled())
        for ask in gone:
            ask.future.set_running_or_notify_cancel()

    # --- taking in ------------------------------------------------------------------------------------------------

    def _admit(self) -> list[tuple[Ask, list[Ask]]]:
        """Waiting requests that fit now: each with those that have the same prompt and share its prefill."""
        groups: dict[tuple[int | None, ...], tuple[Ask, list[Ask]]] = {}
        room, budget = self.rows - len(self.live), self.prefill_tokens
        while self.waiting and room > 0:
            ask = self.waiting[0]
            key = (ask.sampling.prompt_logprobs, *ask.prompt_ids)
            mates = groups.get(key)
            if mates is None and groups and budget < len(ask.prompt_ids):
                break
            self.waiting.popleft()
            if not ask.future.set_running_or_notify_cancel():
                continue
            if ask.is_cancelled:  # a moment too late to be told so
                self._outbox.append((ask, CancelledError()))
                continue
            room -= 1
            if mates is not None:
                mates[1].append(ask)
            else:
                groups[key] = (ask, [])
                budget -= len(ask.prompt_ids)
        return list(groups.values())

    def _prefill(self, groups: list[tuple[Ask, list[Ask]]]) -> None:
        """Run prompts through the model, give their rows to the requests, and draw the first token of each."""
        segments: list[Segment] = []
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        self._joining = [ask for one, mates in groups for ask in (one, *mates)]
        for ask, _ in groups:
            ask.row, ask.reused = self._take_row(ask.prompt_ids)
            past = ask.reused
            if ask.sampling.prompt_logprobs is not None:
                past, ask.reused = score_prompt(self, ask), 0
            fresh = ask.prompt_ids[past:]
            segments.append(Segment(len(ids), len(ids) + len(fresh), ask.row, past))
            ids += fresh
            positions += range(past, len(ask.prompt_ids))
            last.append(len(ids) - 1)
            self._seat(ask)
        logits_NV = self._run_prompts(ids, positions, last, segments)
        order = list(range(len(groups)))
        for i, (ask, mates) in enumerate(groups):
            self._seat_mates(ask, mates)
            order += [i] * len(mates)
        asks = [ask for ask, _ in groups] + [mate for _, mates in groups for mate in mates]
        self._joining = []
        rows_N = np.array([ask.row for ask in asks])
        self._sample(logits_NV[slots.host_index(order, self.device)], rows_N, asks)
        seated = np.array([ask.row for ask in asks if ask.row >= 0], np.int64)
        if self._cuda is not None and len(seated):
            self._cuda.seat(seated)

    def _seat_mates(self, ask: Ask, mates: Sequence[Ask]) -> None:
        """Requests with the same prompt get a copy of its keys and values."""
        if not mates:
            return
        first = len(self.live)
        for i, mate in enumerate(mates):
            self._vacate(first + i)
            mate.row, mate.reused = first + i, len(ask.prompt_ids)
            mate.future.prompt_logprobs = ask.future.prompt_logprobs
            self._seat(mate)
        self.cache.spread(ask.row, range(first, len(self.live)), len(ask.prompt_ids))

    def _run_prompts(self, ids: list[int], positions: list[int], last: list[int], segments: list[Segment]) -> Tensor:
        if isinstance(self.cache, SequentialCache):
            return self.cache.prefill(ids, segments)
        if self._cuda is not None:
            return self._cuda.prefill(ids, positions, last, segments)
        ids_T, positions_T, last_N = (torch.tensor(values) for values in (ids, positions, last))
        attend = Prefill(self.cache, segments)
        return self.live_model.forward(ids_T[None], positions_T[None], attend, last_N)[0]

    def _take_row(self, prompt: list[int]) -> tuple[int, int]:
        """The next live row, holding as much of the prompt as any kept row has; and how much that is."""
        row = len(self.live)
        kept, shared = self.table.best_match(prompt, row)
        if shared:
            self.cache.swap(kept, row, shared, int(self.table.kept_length(row)))
            self.table.swap_kept(kept, row)
        else:
            self._vacate(row)
        return row, shared

    def _vacate(self, row: int) -> None:
        """What a row keeps is moved to the row that is least worth keeping, before it is used."""
        if not self.table.kept[row]:
            return
        oldest = self.table.oldest(row)
        if oldest != row:
            self.cache.move(row, oldest, self.table.kept_length(row))
            self.table.swap_kept(oldest, row)

    def _seat(self, ask: Ask) -> None:
        ask.weights = self.live_model.version
        if ask.sampling.changes_logits:
            ask.processor = LogitsProcessor(
                ask.sampling, ask.prompt_ids, stop_ids=self.stop_ids, vocabulary=self.vocabulary, device=self.device
            )
        self.live.append(ask)
        self.table.seat(ask)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every live row; several, where nobody has to look at them one by one."""
        n, table = len(self.live), self.table
        if isinstance(self.cache, SequentialCache):
            logits_BV = self.cache.decode(table.token[:n].tolist())
        else:
            self.live_model.count_step(self.rows)
            if self._decode_several(min(table.room(n, self.length), BURST), self.cache):
                return
            logits_BV = self._run_step(n, self.cache)
        table.length[:n] += 1
        self.steps += 1
        self._sample(logits_BV, np.arange(n), list(self.live))

    def _run_step(self, n: int, cache: SlotCache) -> Tensor:
        table = self.table
        length_B = torch.from_numpy(table.length[:n]).to(self.device)
        span = min(self.length, (int(table.length[:n].max()) // SPAN_STEP + 1) * SPAN_STEP)
        attend = Decode(cache, torch.arange(n, device=self.device), length_B, span)
        ids = torch.from_numpy(table.token[:n]).to(self.device)[:, None]
        return self.live_model.forward(ids, length_B[:, None], attend)[:, 0]

    def _decode_several(self, most: int, cache: SlotCache) -> bool:
        rows = len(self.live)
        drawn = self.live_model.decode(rows, most, self.table, self._is_stop, cache) if most > 1 else None
        if drawn is None:
            return False
        columns = (drawn.token_KB, drawn.logprob_KB, drawn.raw_KB)
        self.table.record_steps(*(one[:-1] for one in columns))
        self.table.length[:rows] += 1
        self.steps += len(drawn.token_KB)
        self.tokens += drawn.token_KB[:-1].size
        self._take(np.arange(rows), list(self.live), *(one[-1] for one in columns))
        return True

    def _sample(self, logits_NV: Tensor, rows_N: np.ndarray, asks: Sequence[Ask]) -> None:
        """Draw a token for each row, keep it, and let go of the rows that are done."""
        raw_NV = logits_NV
        is_looked_at = bool(self.table.needs_logits[rows_N].any())
        if is_looked_at:
            logits_NV = processed(logits_NV, asks, [self.table.reply(row).tolist() for row in rows_N])
        knobs = self.table.knobs(rows_N, self.device)
        truncates = bool(self.table.truncates[rows_N].any())
        if self._cuda is not None and not truncates:
            token_N, logprob_N, raw_N = self._cuda.sample(logits_NV, knobs)
        else:
            is_plain = not truncates and bool((self.table.temperature[rows_N] == 1.0).all())
            token_N, logprob_N, raw_N = sample(logits_NV, knobs, truncates=truncates, is_plain=is_plain)
        if raw_NV is not logits_NV:
            raw_N = torch.log_softmax(raw_NV.float(), -1).gather(1, token_N[:, None])[:, 0]
        if is_looked_at:
            note_alternatives(logits_NV, asks, knobs)
        self._take(rows_N, asks, *(value.cpu().numpy() for value in (token_N, logprob_N, raw_N)))

    def _take(
        self, rows_N: np.ndarray, asks: Sequence[Ask], token_N: np.ndarray, logprob_N: np.ndarray, raw_N: np.ndarray
    ) -> None:
        """Keep what was drawn, and finish the rows for which it was the last."""
        self.table.record(rows_N, token_N, logprob_N, raw_N)
        self.tokens += len(asks)
        is_full_N = self.table.is_full(rows_N, self.length)
        self._finish(ends(asks, token_N, logprob_N, raw_N, is_full_N, self._is_stop, self.table.is_watched[rows_N]))

    def _finish(self, ended: Sequence[tuple[Ask, str | Exception]]) -> None:
        """Free the rows of requests that have ended; what they gave is handed out when the turn is over."""
        if not ended:
            return
        for ask, reason in ended:
            if isinstance(reason, Exception):
                self._outbox.append((ask, reason))
                continue
            generated = self.table.output(ask, reason, self.live_model.version)
            self._outbox.append((ask, generated))
        self._retire([ask for ask, _ in ended], spoilt=[ask for ask, reason in ended if isinstance(reason, Exception)])

    def _retire(self, asks: Sequence[Ask], *, spoilt: Sequence[Ask] = ()) -> None:
        """Take rows out of the live ones, which stay without gaps; what they hold stays behind, for who comes back."""
        for ask in asks:
            is_kept = ask not in spoilt and ask.weights == self.live_model.version
            self.table.park(ask, keep=is_kept and self.table.length[ask.row] >= self.table.least_shared)
        self.cache.clear([ask.row for ask in spoilt])  # NaN times a weight of zero is NaN: who comes next would see it
        gone = {ask.row for ask in asks}
        n = len(self.live) - len(gone)
        holes = sorted(row for row in gone if row < n)
        movers = [row for row in range(n, len(self.live)) if row not in gone]
        if holes:
            ahead = 0 if self._cuda is None else self._cuda.in_flight + 1  # the device is that much further
            for hole, mover in zip(holes, movers, strict=True):
                filled = min(int(self.table.length[mover]) + ahead, self.length)
                if self.table.kept[hole]:
                    self.cache.swap(hole, mover, int(self.table.kept[hole]), filled)
                else:
                    self.cache.move(mover, hole, filled)
            self.table.exchange(np.array([holes, movers]))
        for hole, mover in zip(holes, movers, strict=True):
            self.live[hole] = self.live[mover]
            self.live[hole].row = hole
        del self.live[n:]
        for ask in asks:
            ask.row = -1
        if self._cuda is not None:
            self._cuda.retire(holes, movers, n, n + len(gone))
        if isinstance(self.cache, SequentialCache):
            self.cache.keep_first(n)


def _cuda_decoder(engine: Engine, cache: SlotCache) -> CudaDecoder:
    from verifiers.engine.cuda import CudaDecoder

    return CudaDecoder(engine, cache)
