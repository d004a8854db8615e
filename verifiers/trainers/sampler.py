"""The model that is being trained, as a client that samples from the live weights and remembers the exact tokens."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from verifiers import calls
from verifiers.clients import HTTPClient, as_client
from verifiers.clients.exact import exact_tokens
from verifiers.clients.protocol import Completion, Request, Tokens
from verifiers.engine.local_model import LocalModel
from verifiers.engine.plan import LEFT_FREE, plan
from verifiers.envs.env_group import EnvGroup
from verifiers.envs.environment import Environment
from verifiers.kernels.prove import max_positions
from verifiers.messages import as_messages
from verifiers.rollout import step_tokens
from verifiers.samples import Sample, samples_of
from verifiers.trainers.distributed.samplers import Samplers
from verifiers.trainers.memory.job import length_asked
from verifiers.trainers.sampling import default_args, flat, merged, names
from verifiers.types import ChatMessage

if TYPE_CHECKING:
    from verifiers.trainers.config import GRPOConfig
    from verifiers.trainers.memory.plan import MemoryPlan

_remembers_here: ContextVar[bool] = ContextVar("remembers_here", default=True)
ROUNDING = 1.001  # by which two ways of counting the same bytes may differ


class Sampler(LocalModel):
    """A `LocalModel` that can find the tokens of a reply again, for a user's loop that kept only its text.

    ``remembers`` is the number of replies to keep; ``default_args`` are sampling arguments for requests without them.
    """

    def __init__(
        self, *args: Any, remembers: int = 4096, default_args: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._remembers, self._default_args = remembers, flat(default_args)
        self._unsorted: deque[tuple[Any, ChatMessage, Tokens]] = deque(maxlen=remembers)
        self._sampled: dict[tuple[Any, ...], deque[Tokens]] = {}  # by prompt and reply
        self._order: deque[tuple[Any, ...]] = deque()  # the keys of `_sampled`, in the order of sampling
        self._found: Counter[tuple[Any, ...]] = Counter()  # searches by key, since a reply was last added to it

    async def complete(self, request: Request) -> Completion:
        given = request.sampling
        if not self._default_args.keys() <= given.keys() or any(one is None for one in given.values()):
            defaults = {name: self._default_args[name] for name in self._default_args.keys() - names(given)}
            request = replace(request, sampling={**given, **defaults})
        completion = await super().complete(request)
        if completion.tokens is not None and _remembers_here.get():
            self.keep(request, completion.message, completion.tokens)
        return completion

    def start(self, seed: int, count: int) -> None:
        """Seed the replies to come, and wait for up to ``count`` requests before the first are answered."""
        self.engine.reseed(seed)
        self.engine.gather(min(count, self.engine.rows))

    def keep(self, request: Request, message: ChatMessage, tokens: Tokens) -> None:
        """Remember the tokens of a reply, and forget the oldest reply."""
        # A copy: the caller may append to its list of messages.
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        self._unsorted.append((prompt, dict(message), tokens))

    def _sort(self) -> None:
        """Index the replies that were kept. This is done only before a search, because searches are rare."""
        while self._unsorted:
            *said, tokens = self._unsorted.popleft()
            self._order.append(key := _key(*said))
            self._sampled.setdefault(key, deque()).append(tokens)
            self._found.pop(key, None)
        while len(self._order) > self._remembers:
            self._sampled[oldest := self._order.popleft()].popleft()
            if not self._sampled[oldest]:
                del self._sampled[oldest]
                self._found.pop(oldest, None)

    def _find(self, prompt: Any, reply: Any) -> Tokens | None:
        """The tokens of a reply. Successive searches return equal replies newest first, because older ones may come
        from earlier weights."""
        self._sort()
        key = _key(prompt, reply)
        if (equal := self._sampled.get(key)) is None:
            return None
        self._found[key] += 1
        return equal[-(self._found[key] % len(equal) or len(equal))]

    def samples(self, prompt: Any, completion: Any) -> list[Sample]:
        """The samples of a conversation with this client; none if the tokens of any of its replies are not known."""
        if isinstance(prompt, str):
            tokens = self._find(prompt, completion)
            return samples_of([{"tokens": step_tokens(tokens)}]) if tokens is not None else []
        messages = as_messages(prompt)
        steps = []
        for message in as_messages(completion, role="assistant"):
            if message.get("role") == "assistant":
                tokens = self._find(messages, message)
                if tokens is None:
                    return []
                steps.append({"tokens": step_tokens(tokens)})
            messages = [*messages, message]
        return samples_of(steps)


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Replies that are sampled within the block are not trained on: they displace none that may be."""
    before = _remembers_here.set(False)
    try:
        yield
    finally:
        _remembers_here.reset(before)


def _key(prompt: Any, reply: Any) -> tuple[Any, ...]:
    if isinstance(prompt, str):
        return prompt, reply if isinstance(reply, str) else str(reply.get("content"))
    said = reply if isinstance(reply, (dict, Mapping)) else {"content": str(reply)}
    turns = [(one.get("role"), str(one.get("content")), str(one.get("tool_calls"))) for one in prompt]
    return tuple(turns), str(said.get("content")), str(said.get("tool_calls"))


def make_sampler(
    model: Any, tokenizer: Any, config: GRPOConfig, env: Environment | None, memory: MemoryPlan
) -> Sampler:
    """The model as a client, with the number of slots and the size of the KV cache from the memory plan."""
    parameter = next(model.parameters())
    fits = plan(
        model.config,
        rows=memory.slots,
        length=length_asked(config, env, max_positions(model.config)),
        dtype=parameter.dtype,
        device=parameter.device,
        weights_loaded=True,
        free_bytes=int(memory.cache_room * ROUNDING / (1 - LEFT_FREE)),
    )
    return Sampler(
        model,
        tokenizer,
        rows=fits.rows,
        length=fits.length,
        cache_tokens=fits.cache_tokens,
        remembers=8 * config.rollouts_per_generation * (1 + config.num_batches_ahead),  # 8: a few turns per rollout
        default_args=default_args(config, env),
    )


def sampling_args(config: GRPOConfig, env: Environment | None) -> dict[str, Any]:
    """Sampling arguments of rollouts, without the defaults that environments of a group set themselves."""
    return merged(config, None if env is None else env.sampling_args, [one.sampling_args for one in _members(env)])


def _members(env: Any) -> Iterator[Any]:
    for one in env.envs if isinstance(env, EnvGroup) else ():
        yield one
        yield from _members(one)


def exact_sampling(sampling: dict[str, Any], client: Any, env: Environment) -> dict[str, Any]:
    """Sampling arguments that request token ids and logprobs from a served model; training needs them."""
    is_served = isinstance(client, Samplers) or (
        not isinstance(client, Sampler) and isinstance(as_client(client), HTTPClient)
    )
    return exact_tokens(sampling, message_type=env.message_type) if is_served else sampling


def seed_of(*parts: object) -> int:
    """A seed derived from all of these parts, the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def weights_lock(client: Any) -> AbstractContextManager[Any]:
    """The lock to hold while the weights are changed, or while another thread than the trainer's reads them."""
    if isinstance(client, Samplers):
        return client.lock
    return client.engine.lock if isinstance(client, Sampler) else nullcontext()


def ask(client: Any, prompts: Sequence[Any], sampling: Mapping[str, Any], *, is_chat: bool) -> list[Completion]:
    """The completion of each prompt, all requested at once."""
    asked = [as_messages(prompt) if is_chat else prompt for prompt in prompts]
    kind: Literal["chat", "completion"] = "chat" if is_chat else "completion"
    requests = [Request(model="", prompt=one, sampling=sampling, message_type=kind) for one in asked]

    async def ask_all() -> list[Completion]:
        return await asyncio.gather(*(as_client(client).complete(request) for request in requests))

    return calls.run(ask_all)
