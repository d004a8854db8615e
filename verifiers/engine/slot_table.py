"""What is known of each slot, as columns: how far it is, how it is sampled, what it has sampled, what it keeps."""

from __future__ import annotations

import numpy as np
import torch

from verifiers.engine.sequence import NO_TOP_K, ActiveSequence, Generated
from verifiers.kernels.cpu.model import DecodeColumns
from verifiers.kernels.devices import to_device
from verifiers.kernels.sampling import SamplingColumns

COLDEST = 1e-5  # a lower temperature is greedy: logits divided by it would not be numbers any more


class SlotTable:
    """One entry a slot. Rows below the live count belong to requests; the others may keep the tokens of one gone by."""

    def __init__(self, slots: int, length: int, *, least_shared: int = 0) -> None:
        self.least_shared = least_shared
        self.length = np.zeros(slots, np.int64)
        self.token = np.zeros(slots, np.int64)
        self.steps = np.zeros(slots, np.int64)
        self.max_tokens = np.zeros(slots, np.int64)
        self.seed = np.zeros(slots, np.int64)
        self.top_k = np.zeros(slots, np.int64)
        self.temperature, self.top_p, self.min_p = (np.zeros(slots, np.float32) for _ in range(3))
        self.out_ids = np.zeros((slots, length + 1), np.int32)
        self.out_logprobs, self.out_raw = (np.zeros((slots, length + 1), np.float32) for _ in range(2))
        self.truncates, self.needs_logits, self.is_watched = (np.zeros(slots, bool) for _ in range(3))
        self.cached_ids = np.zeros((slots, length), np.int32)
        self.cached = np.zeros(slots, np.int64)
        self.cached_at = np.zeros(slots, np.int64)
        self._tick = 0
        self._columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def assign(self, sequence: ActiveSequence) -> None:
        """Give a slot to a request whose prompt is being filled in."""
        slot, sampling = sequence.slot, sequence.sampling
        self.length[slot] = len(sequence.prompt_ids)
        self.steps[slot] = 0
        self.max_tokens[slot] = min(sampling.max_tokens, self.out_ids.shape[1])
        self.seed[slot] = sequence.seed
        self.top_k[slot] = min(sampling.top_k or NO_TOP_K, NO_TOP_K)
        self.temperature[slot] = sampling.temperature if sampling.temperature >= COLDEST else 0.0
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.truncates[slot] = sampling.truncates
        self.needs_logits[slot] = sampling.needs_logits
        self.is_watched[slot] = sequence.on_token is not None or bool(sampling.stop_ids) or sampling.is_watched
        self.cached[slot] = 0

    def columns(self, slots_N: np.ndarray, device: torch.device) -> SamplingColumns:
        """How these slots are sampled, on the device, without waiting for what it is doing."""
        real = np.stack([column[slots_N] for column in (self.temperature, self.top_p, self.min_p)])
        whole = np.stack([column[slots_N] for column in (self.top_k, self.seed, self.steps)])
        temperature, top_p, min_p = to_device(real, device)
        top_k, seed, steps = to_device(whole, device)
        return SamplingColumns(temperature, top_p, top_k, min_p, seed, steps)

    def decode_columns(self, n: int) -> DecodeColumns:
        """The first slots, as C takes them."""
        return DecodeColumns(
            token=self.token[:n], position=self.length[:n], step=self.steps[:n], temperature=self.temperature[:n],
            top_p=self.top_p[:n], min_p=self.min_p[:n], top_k=self.top_k[:n], seed=self.seed[:n],
        )  # fmt: skip

    def record(self, slots_N: np.ndarray, token_N: np.ndarray, logprob_N: np.ndarray, raw_N: np.ndarray) -> None:
        steps_N = self.steps[slots_N]
        self.token[slots_N] = token_N
        self.out_ids[slots_N, steps_N] = token_N
        self.out_logprobs[slots_N, steps_N] = logprob_N
        self.out_raw[slots_N, steps_N] = raw_N
        self.steps[slots_N] = steps_N + 1

    def reply(self, slot: int) -> np.ndarray:
        """What a slot's sequence has sampled so far."""
        return self.out_ids[slot, : self.steps[slot]]

    def is_full(self, slots_N: np.ndarray, length: int) -> np.ndarray:
        """Which of these slots have as many tokens as they may have."""
        full: np.ndarray = (self.steps[slots_N] >= self.max_tokens[slots_N]) | (self.length[slots_N] + 1 >= length)
        return full

    def room(self, slots: int, length: int) -> int:
        """How many more tokens each of the first slots can have, if none of them has to be looked at before."""
        if (self.is_watched | self.needs_logits)[:slots].any():
            return 1
        left = np.minimum(self.max_tokens[:slots] - self.steps[:slots], length - 1 - self.length[:slots])
        return int(left.min())

    def record_steps(self, token_KN: np.ndarray, logprob_KN: np.ndarray, raw_KN: np.ndarray) -> None:
        """Several tokens of each of the first slots, whose keys and values are there already."""
        steps, slots = token_KN.shape
        if not steps:
            return
        slot_N1 = np.arange(slots)[:, None]
        step_NK = self.steps[:slots, None] + np.arange(steps)
        self.out_ids[slot_N1, step_NK] = token_KN.T
        self.out_logprobs[slot_N1, step_NK] = logprob_KN.T
        self.out_raw[slot_N1, step_NK] = raw_KN.T
        self.steps[:slots] += steps
        self.length[:slots] += steps

    def output(self, sequence: ActiveSequence, finish_reason: str, version: int) -> Generated:
        """All that a request has sampled."""
        n = self.steps[sequence.slot]
        ids, logprobs, raw = (
            column[sequence.slot, :n].tolist() for column in (self.out_ids, self.out_logprobs, self.out_raw)
        )
        return Generated(
            prompt_ids=sequence.prompt_ids,
            ids=ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            finish_reason=finish_reason,
            reused=sequence.reused,
            weights=(sequence.weights, version),
            weight_versions=sequence.version_spans(int(n)),
            top_logprobs=sequence.future.top_logprobs,
            prompt_logprobs=sequence.future.prompt_logprobs,
        )

    # --- slots kept for reuse --------------------------------------------------------------------------------------

    def keep_prefix(self, sequence: ActiveSequence, *, keep: bool) -> None:
        """Note which tokens a slot's keys and values belong to, now that its request is done."""
        slot, prompt = sequence.slot, len(sequence.prompt_ids)
        self._tick += 1
        self.cached_at[slot] = self._tick
        self.cached[slot] = self.length[slot] if keep else 0
        if keep:
            self.cached_ids[slot, :prompt] = sequence.prompt_ids
            self.cached_ids[slot, prompt : self.length[slot]] = self.out_ids[slot, : self.length[slot] - prompt]

    def longest_prefix(self, prompt: list[int], first: int) -> tuple[int, int]:
        """The kept slot (from ``first`` on) that shares the longest beginning with a prompt, and how long it is."""
        if not self.cached[first:].any():
            return first, 0
        most = min(len(prompt) - 1, self.cached_ids.shape[1])  # the last token has to be run for its logits
        same = self.cached_ids[first:, :most] == np.asarray(prompt[:most], np.int32)
        shared = np.where(same.all(1), most, same.argmin(1)) if most else np.zeros(len(same), np.int64)
        shared = np.minimum(shared, self.cached[first:])
        best = int(shared.argmax())
        return (first + best, int(shared[best])) if shared[best] >= self.least_shared else (first, 0)

    def oldest(self, first: int) -> int:
        """The slot (from ``first`` on) that is least worth keeping."""
        age = np.where(self.cached[first:] > 0, self.cached_at[first:], -1)
        return first + int(age.argmin())

    def cached_length(self, slot: int) -> int:
        return int(self.cached[slot])

    def swap_cached(self, one: int, other: int) -> None:
        for column in (self.cached_ids, self.cached, self.cached_at):
            column[[one, other]] = column[[other, one]]

    def exchange(self, slots: np.ndarray) -> None:
        """Swap the slots of two equally long lists."""
        here, there = slots.reshape(-1), slots[::-1].reshape(-1)
        for column in self._columns:
            column[here] = column[there]

    def forget(self, first: int) -> None:
        self.cached[first:] = 0
