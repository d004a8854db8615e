"""On a card: grammars, penalties, alternatives and scored prompts beside plain rows, and every logprob is exact."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from tests.engine import tiny  # noqa: E402
from verifiers.clients.protocol import Completion, Request  # noqa: E402
from verifiers.engine import LocalModel  # noqa: E402
from verifiers.engine.constraints import schema_grammar  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")]

TOKENIZER = tiny.tokenizer(tiny.HERMES)
SCHEMA = {
    "type": "object",
    "properties": {"rank": {"type": "integer"}, "word": {"enum": ["the", "answer"]}, "said": {"type": "boolean"}},
    "required": ["rank", "word", "said"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def module() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=TOKENIZER.eos_token_id,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval().cuda()


@pytest.fixture(scope="module")
def local(module: Any) -> Iterator[LocalModel]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with LocalModel(module, TOKENIZER, rows=16, name="tiny") as made:
        yield made
    torch.backends.cuda.matmul.allow_tf32 = before


def together(local: LocalModel, *samplings: dict[str, Any]) -> list[Completion]:
    async def main() -> list[Completion]:
        requests = [
            Request(model="tiny", prompt=[{"role": "user", "content": f"hello {i}"}], sampling={"seed": i, **one})
            for i, one in enumerate(samplings)
        ]
        return list(await asyncio.gather(*map(local.complete, requests)))

    return asyncio.run(main())


def raw_logits(module: Any, completion: Completion) -> Any:
    tokens = completion.tokens
    assert tokens is not None
    whole = torch.tensor([[*tokens.prompt_ids, *tokens.completion_ids]], device="cuda")
    with torch.no_grad():
        return module(whole).logits[0, len(tokens.prompt_ids) - 1 : -1].float().cpu()


def test_rows_of_every_kind_are_exact_in_one_batch(local: LocalModel, module: Any) -> None:
    plain = {"max_tokens": 40, "ignore_eos": True, "raw_logprobs": True}
    bound = {"response_format": FORMAT, "max_tokens": 200, "raw_logprobs": True}
    penal = {**plain, "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    shown = {**plain, "logprobs": True, "top_logprobs": 3}
    said = together(local, plain, bound, penal, shown, plain, {**bound, "temperature": 0.5}, {**plain, "top_k": 5})
    for completion in said:
        logits, tokens = raw_logits(module, completion), completion.tokens
        assert tokens is not None
        own = torch.log_softmax(logits, -1)
        expected = [float(own[i, token]) for i, token in enumerate(tokens.completion_ids)]
        assert completion.raw["choices"][0]["raw_logprobs"] == pytest.approx(expected, abs=2e-3)
    matcher = local.load().constraints.compile(schema_grammar(SCHEMA, strict=True)).start()
    logits, tokens = raw_logits(module, said[5]), said[5].tokens
    assert tokens is not None
    for i, token in enumerate(tokens.completion_ids):
        allowed = torch.from_numpy(matcher.allowed(tokens.completion_ids[:i], logits.shape[1]))
        drawn = torch.log_softmax(logits[i].masked_fill(~allowed, -torch.inf) / 0.5, -1)
        assert tokens.logprobs[i] == pytest.approx(float(drawn[token]), abs=2e-3)
    if said[1].finish_reason == "stop":
        assert set(json.loads(said[1].text)) == {"rank", "word", "said"}
    for entry in said[3].raw["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3
    alone = together(local, plain)[0]
    assert alone.tokens is not None
    assert said[0].tokens is not None
    assert alone.tokens.completion_ids == said[0].tokens.completion_ids


@pytest.mark.parametrize("length", [2, 40, 300, 700])
def test_a_prompt_is_scored_as_the_model_scores_it(local: LocalModel, module: Any, length: int) -> None:
    ids = [5 + i * 7 % 250 for i in range(length)]
    request = Request(
        model="tiny", prompt=ids, message_type="completion", sampling={"prompt_logprobs": 2, "max_tokens": 1}
    )
    for _ in range(2):  # the second time from a cache that is warm
        scores = asyncio.run(local.complete(request)).raw["choices"][0]["prompt_logprobs"]
        with torch.no_grad():
            own = torch.log_softmax(module(torch.tensor([ids], device="cuda")).logits[0, :-1].float(), -1).cpu()
        expected = [float(own[i, token]) for i, token in enumerate(ids[1:])]
        found = [score[str(token)]["logprob"] for token, score in zip(ids[1:], scores[1:], strict=True)]
        assert found == pytest.approx(expected, abs=2e-3)
