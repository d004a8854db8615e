"""Tinker's sampling client → one of our clients, with the exact tokens of prompt and reply."""

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
    """The part of the engine's interface that `LocalModel` uses, with sampling by Tinker."""

    def __init__(self, sampling: Any, *, length: int, stop_ids: frozenset[int]) -> None:
        self.sampling = sampling  # the SDK's client; replaced after each update
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
                "Tinker supports temperature, top_p, top_k and stop; no bias, penalty, min_p, format or top_logprobs"
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
            except BaseException as error:  # any error of the SDK
                failure = InfraError(f"Tinker did not answer: {type(error).__name__}: {error}")
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(failure)
                return
            for answer, generated in zip(answers, found, strict=True):
                if not answer.done():
                    answer.set_result(generated)

        drawing.future().add_done_callback(deliver)
        return answers

    @property
    def device(self) -> Any:
        """The device whose memory is freed when the client is closed."""
        import torch

        return torch.device("cpu")

    def tokens_under_way(self) -> int:
        """Always 0: tokens only arrive with the complete reply."""
        return 0

    def forget(self) -> None:
        """Do nothing: there is no cache."""

    def stop(self) -> None:
        """Do nothing: there is no thread to stop."""

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""


def _generated(prompt: list[int], reply: Any, watch: OnToken | None) -> Generated:
    """A reply, cut after the first stop text: Tinker only stops at tokens, so stop texts are searched here."""
    ids, logprobs, reason = list(reply.tokens), list(reply.logprobs or ()), str(reply.stop_reason)
    if len(logprobs) != len(ids):
        raise InfraError(f"Tinker returned {len(ids)} tokens but {len(logprobs)} logprobs")
    if watch is not None:
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if watch(token, logprob):
                ids, logprobs, reason = ids[: i + 1], logprobs[: i + 1], "stop"
                break
    return Generated(prompt_ids=prompt, ids=ids, logprobs=logprobs, raw_logprobs=logprobs, finish_reason=reason)


class TinkerClient(LocalModel):
    """A model at Tinker as a client: like a local model, but Tinker samples the tokens."""

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
