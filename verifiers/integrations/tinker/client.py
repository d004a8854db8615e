"""Tinker's sampling client → a client of ours, with the exact tokens of prompt and reply."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from verifiers.chat import ChatWriter
from verifiers.engine.constraints import Constraints
from verifiers.engine.local_model import LocalModel
from verifiers.engine.ready_model import ReadyModel, stop_ids_of
from verifiers.engine.sequence import Answer, Generated, OnToken, Sampling
from verifiers.errors import InfraError, RequestRefusedError

DEFAULT_LENGTH = 32768


class RemoteEngine:
    """An engine whose tokens are drawn by Tinker: what `LocalModel` asks of one, and nothing more."""

    def __init__(self, sampling: Any, *, length: int, stop_ids: frozenset[int]) -> None:
        self.sampling = sampling  # the SDK's client; another one after each update
        self.length, self.stop_ids = length, stop_ids
        self.lock = threading.RLock()
        self.rows, self.max_waiting = 1024, 65536
        self.backend = "by Tinker"

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        on_token: OnToken | Sequence[OnToken] | None = None,
    ) -> list[Answer]:
        from tinker import types

        asked = sampling or Sampling()
        if asked.changes_logits or asked.top_logprobs or asked.prompt_logprobs is not None or asked.min_p:
            raise RequestRefusedError(
                "Tinker samples by temperature, top_p, top_k and stops: no bias, penalty, min_p, format or alternatives"
            )
        prompt, told = list(prompt_ids), list(on_token) if isinstance(on_token, Sequence) else [on_token] * n
        stops = asked.stop_ids if asked.ignore_eos else asked.stop_ids | self.stop_ids
        answers = [Answer() for _ in range(n)]
        drawing = self.sampling.sample(
            prompt=types.ModelInput.from_ints(prompt),
            num_samples=n,
            sampling_params=types.SamplingParams(
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k or -1,
                seed=asked.seed,
                stop=sorted(stops),
            ),
        )

        def deliver(done: Any) -> None:
            try:
                replies = done.result().sequences
                found = [_generated(prompt, reply, watch) for reply, watch in zip(replies, told, strict=True)]
            except BaseException as error:  # of the SDK, whatever it is
                failure = InfraError(f"Tinker did not answer: {type(error).__name__}: {error}")
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(failure)
                return
            for answer, generated in zip(answers, found, strict=True):
                if not answer.done():
                    answer.set_result(generated)

        drawing.add_done_callback(deliver)
        return answers

    @property
    def device(self) -> Any:
        """Where memory is given back when the client is closed."""
        import torch

        return torch.device("cpu")

    def tokens_under_way(self) -> int:
        """Tokens are not seen before a reply is whole."""
        return 0

    def forget(self) -> None:
        """Nothing is kept for reuse here."""

    def stop(self) -> None:
        """Nothing runs here."""

    def close(self) -> None:
        """Nothing runs here."""


def _generated(prompt: list[int], reply: Any, watch: OnToken | None) -> Generated:
    """A reply, up to where a stop text is complete: Tinker ends replies at tokens, and texts are looked for here."""
    ids, logprobs, reason = list(reply.tokens), list(reply.logprobs or ()), str(reply.stop_reason)
    if len(logprobs) != len(ids):
        raise InfraError(f"Tinker gave {len(ids)} tokens and {len(logprobs)} logprobs")
    if watch is not None:
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if watch(token, logprob):
                ids, logprobs, reason = ids[: i + 1], logprobs[: i + 1], "stop"
                break
    return Generated(prompt_ids=prompt, ids=ids, logprobs=logprobs, raw_logprobs=logprobs, finish_reason=reason)


class TinkerClient(LocalModel):
    """A model that Tinker samples from, as a client: prompts are written and replies read here, as of a local model."""

    def __init__(self, sampling: Any, tokenizer: Any, *, name: str, length: int = DEFAULT_LENGTH) -> None:
        super().__init__(name, tokenizer, name=name)
        writer = ChatWriter(tokenizer, model=name)
        ends = stop_ids_of(None, tokenizer, writer.template, writer.codec)
        self.remote = RemoteEngine(sampling, length=length, stop_ids=ends)
        vocabulary = len(tokenizer)
        self._loaded = ReadyModel(
            engine=self.remote,  # type: ignore[arg-type]
            writer=writer,
            stop_ids=ends,
            vocabulary=vocabulary,
            constraints=Constraints(writer.codec, vocabulary=vocabulary, stop_ids=ends),
        )

    def __repr__(self) -> str:
        return f"TinkerClient({self.model!r})"
