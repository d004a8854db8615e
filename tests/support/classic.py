"""What tests of classic 0.1.x code share: the clients that hosts hand in, and an environment as packages write them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

from datasets import Dataset
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

import verifiers as vf


def chat_completion(text: str, finish_reason: Any = "stop", **extra: Any) -> ChatCompletion:
    message = ChatCompletionMessage(role="assistant", content=text)
    choice = Choice(index=0, finish_reason=finish_reason, message=message)
    return ChatCompletion(id="0", created=0, model="m", object="chat.completion", choices=[choice], **extra)


def with_tokens(text: str, prompt_ids: list[int], reply_ids: list[int]) -> ChatCompletion:
    """What vLLM sends with ``return_token_ids``: ids beside the fields that OpenAI's types know."""
    entries = [ChatCompletionTokenLogprob(token=str(i), logprob=-0.5, bytes=None, top_logprobs=[]) for i in reply_ids]
    message = ChatCompletionMessage(role="assistant", content=text)
    logprobs = ChoiceLogprobs(content=entries)
    choice = Choice(index=0, finish_reason="stop", message=message, logprobs=logprobs, token_ids=reply_ids)
    return ChatCompletion(
        id="0", created=0, model="m", object="chat.completion", choices=[choice], prompt_token_ids=prompt_ids
    )


def openai_mock(*replies: str) -> Any:
    """The client of classic's own tests: says these one after the other, then the last one for ever."""
    client = MagicMock(spec=AsyncOpenAI)
    said = iter(replies)

    async def create(**kwargs: Any) -> ChatCompletion:
        return chat_completion(next(said, replies[-1]))

    client.chat.completions.create = AsyncMock(side_effect=create)
    client.base_url = "http://localhost/v1/"
    return client


class HostClient:
    """A trainer's wrapper round its own engine: OpenAI's shape, none of its classes."""

    def __init__(self, answer: Any) -> None:
        self.base_url, self.api_key = "http://engine/v1", "EMPTY"
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, **request: Any) -> Any:
        self.requests.append(request)
        return self.answer(request) if callable(self.answer) else self.answer


def quiet(**kwargs: Any) -> dict[str, Any]:
    return {"model": "m", "use_tqdm": False, **kwargs}


def load_arithmetic(system_prompt: str = "Put the answer into \\boxed{}.", **kwargs: Any) -> vf.Environment:
    dataset = Dataset.from_list([{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(4)])
    parser = vf.MaybeThinkParser(extract_fn=vf.extract_boxed_answer)

    def correct(parser, completion, answer, **kwargs):
        return 1.0 if (parser.parse_answer(completion) or "") == answer else 0.0

    rubric = vf.Rubric(funcs=[correct, parser.get_format_reward_func()], weights=[1.0, 0.0], parser=parser)
    return vf.SingleTurnEnv(dataset=dataset, system_prompt=system_prompt, parser=parser, rubric=rubric, **kwargs)
