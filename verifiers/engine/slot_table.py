"""What the engine knows of each row, as arrays: how far it is, how it is sampled, what it has said, what it keeps."""

from __future__ import annotations

import numpy as np
import torch

from verifiers.engine.kv_cache import to_device
from verifiers.engine.sampler import Knobs
from verifiers.engine.sequence import NO_TOP_K, Ask, Generated

COLDEST = 1e-5  # a lower temperature is greedy: logits divided by it would not be numbers any more


class Table:
    """One entry a row. Rows below the live count belong to requests; the others may keep the tokens of one gone by."""

    def __init__(self, rows: int, length: int, *, least_shared: int = 0) -> None:
        self.rows = rows
        self.least_shared = least_shared
        self.length = np.zeros(rows, np.int64)
        self.token = np.zeros(rows, np.int64)
        self.steps = np.zeros(rows, np.int64)
        self.max_tokens = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.int64)
        self.top_k = np.zeros(rows, np.int64)
        self.temperature, self.top_p, self.min_p = (np.zeros(rows, np.float32) for _ in range(3))
        self.out_ids = np.zeros((rows, length + 1), np.int32)
        self.out_logprobs, self.out_raw = (np.zeros((rows, length + 1), np.float32) for _ in range(2))
        self.truncates, self.needs_logits, self.is_watched = (np.zeros(rows, bool) for _ in range(3))
        self.kept_ids = np.zeros((rows, length), np.int32)
        self.kept = np.zeros(rows, np.int64)
        self.kept_at = np.zeros(rows, np.int64)
        self._tick = 0
        self._columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def seat(self, ask: Ask) -> None:
        """Give a row to a request whose prompt is being filled in."""
        row, sampling = ask.row, ask.sampling
        self.length[row] = len(ask.prompt_ids)
        self.steps[row] = 0
        self.max_tokens[row] = min(sampling.max_tokens, self.out_ids.shape[1])
        self.seed[row] = ask.seed
        self.top_k[row] = min(sampling.top_k or NO_TOP_K, NO_TOP_K)
        self.temperature[row] = sampling.temperature if sampling.temperature >= COLDEST else 0.0
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.truncates[row] = sampling.truncates
        self.needs_logits[row] = sampling.needs_logits
        self.is_watched[row] = ask.on_token is not None or bool(sampling.stop_ids) or sampling.is_watched
        self.kept[row] = 0

    def knobs(self, rows_N: np.ndarray, device: torch.device) -> Knobs:
        """How these rows are sampled, on the device, without waiting for what it is doing."""
        real = np.stack([column[rows_N] for column in (self.temperature, self.top_p, self.min_p)])
        whole = np.stack([column[rows_N] for column in (self.top_k, self.seed, self.steps)])
        temperature, top_p, min_p = to_device(real, device)
        top_k, seed, steps = to_device(whole, device)
        return Knobs(temperature, top_p, top_k, min_p, seed, steps)

    def record(self, rows_N: np.ndarray, token_N: np.ndarray, logprob_N: np.ndarray, raw_N: np.ndarray) -> None:
        steps_N = self.steps[rows_N]
        self.token[rows_N] = token_N
        self.out_ids[rows_N, steps_N] = token_N
        self.out_logprobs[rows_N, steps_N] = logprob_N
        self.out_raw[rows_N, steps_N] = raw_N
        self.steps[rows_N] = steps_N + 1

    def reply(self, row: int) -> np.ndarray:
        """What a row has sampled so far."""
        return self.out_ids[row, : self.steps[row]]

    def is_full(self, rows_N: np.ndarray, length: int) -> np.ndarray:
        """Which of these rows have as many tokens as they may have."""
        full: np.ndarray = (self.steps[rows_N] >= self.max_tokens[rows_N]) | (self.length[rows_N] + 1 >= length)
        return full

    def room(self, rows: int, length: int) -> int:
        """How many more tokens each of the first rows can have, if none of them has to be looked at before."""
        if (self.is_watched | self.needs_logits)[:rows].any():
            return 1
        left = np.minimum(self.max_tokens[:rows] - self.steps[:rows], length - 1 - self.length[:rows])
        return int(left.min())

    def record_steps(self, token_KN: np.ndarray, logprob_KN: np.ndarray, raw_KN: np.ndarray) -> None:
        """Several tokens of each of the first rows, whose keys and values are there already."""
        steps, rows = token_KN.shape
        if not steps:
            return
        row_N1 = np.arange(rows)[:, None]
        step_NK = self.steps[:rows, None] + np.arange(steps)
        self.out_ids[row_N1, step_NK] = token_KN.T
        self.out_logprobs[row_N1, step_NK] = logprob_KN.T
        self.out_raw[row_N1, step_NK] = raw_KN.T
        self.steps[:rows] += steps
        self.length[:rows] += steps

    def output(self, ask: Ask, finish_reason: str, version: int) -> Generated:
        """All that a request has sampled."""
        n = self.steps[ask.row]
        ids, logprobs, raw = (
            column[ask.row, :n].tolist() for column in (self.out_ids, self.out_logprobs, self.out_raw)
        )
        return Generated(
            prompt_ids=ask.prompt_ids,
            ids=ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            finish_reason=finish_reason,
            reused=ask.reused,
            weights=(ask.weights, version),
            top_logprobs=ask.future.top_logprobs,
            prompt_logprobs=ask.future.prompt_logprobs,
        )

    # --- rows kept for reuse --------------------------------------------------------------------------------------

    def park(self, ask: Ask, *, keep: bool) -> None:
        """Note which tokens a row's keys and values belong to, now that its request is done."""
        row, prompt = ask.row, len(ask.prompt_ids)
        self._tick += 1
        self.kept_at[row] = self._tick
        self.kept[row] = self.length[row] if keep else 0
        if keep:
            self.kept_ids[row, :prompt] = ask.prompt_ids
            self.kept_ids[row, prompt : self.length[row]] = self.out_ids[row, : self.length[row] - prompt]

    def best_match(self, prompt: list[int], first: int) -> tuple[int, int]:
        """The kept row (from ``first`` on) that shares the longest beginning with a prompt, and how long it is."""
        if not self.kept[first:].any():
            return first, 0
        most = min(len(prompt) - 1, self.kept_ids.shape[1])  # the last token has to be run for its logits
        same = self.kept_ids[first:, :most] == np.asarray(prompt[:most], np.int32)
        shared = np.where(same.all(1), most, same.argmin(1)) if most else np.zeros(len(same), np.int64)
        shared = np.minimum(shared, self.kept[first:])
        best = int(shared.argmax())
        return (first + best, int(shared[best])) if shared[best] >= self.least_shared else (first, 0)

    def oldest(self, first: int) -> int:
        """The row (from ``first`` on) that is least worth keeping."""
        age = np.where(self.kept[first:] > 0, self.kept_at[first:], -1)
        return first + int(age.argmin())

    def kept_length(self, row: int) -> int:
        return int(self.kept[row])

    def swap_kept(self, one: int, other: int) -> None:
        for column in (self.kept_ids, self.kept, self.kept_at):
            column[[one, other]] = column[[other, one]]

    def exchange(self, rows: np.ndarray) -> None:
        """Swap the rows of two equally long lists."""
        here, there = rows.reshape(-1), rows[::-1].reshape(-1)
        for column in self._columns:
            column[here] = column[there]

    def forget(self, first: int) -> None:
        self.kept[first:] = 0
