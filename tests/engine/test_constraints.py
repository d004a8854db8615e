"""Constrained replies in this process: exact logprobs, refused for training, and free for those who ask for nothing."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from tests.engine import tiny  # noqa: E402
from verifiers import errors  # noqa: E402
from verifiers.clients.protocol import Completion, Request  # noqa: E402
from verifiers.engine import LocalModel  # noqa: E402
from verifiers.engine.constraints import Constraints, call_grammar, schema_grammar  # noqa: E402
from verifiers.trainers.sampling import read_distribution  # noqa: E402

TOKENIZER = tiny.tokenizer(tiny.HERMES, special=["[TOOL_CALLS]", "<|python_tag|>"])
MODULE = tiny.brief_model(TOKENIZER, context=1024)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"rank": {"type": "integer", "minimum": 0, "maximum": 500}, "word": {"enum": ["the", "answer"]}},
    "required": ["rank", "word"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
USER: Any = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def local() -> Iterator[LocalModel]:
    with LocalModel(MODULE, TOKENIZER, rows=8, name="tiny") as made:
        yield made


def ask(local: LocalModel, tools: Any = None, **sampling: Any) -> Completion:
    return asyncio.run(local.complete(Request(model="tiny", prompt=USER, tools=tools, sampling=sampling)))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_logprobs_are_those_of_the_constrained_distribution_and_raw_ones_stay_raw(
    local: LocalModel, temperature: float
) -> None:
    said = ask(local, response_format=FORMAT, seed=5, temperature=temperature, raw_logprobs=True)
    tokens, raw = said.tokens, said.raw["choices"][0]["raw_logprobs"]
    assert tokens is not None
    matcher = local.load().constraints.compile(schema_grammar(SCHEMA, strict=True)).start()
    whole = torch.tensor([[*tokens.prompt_ids, *tokens.completion_ids]])
    with torch.no_grad():
        logits = MODULE(whole).logits[0, len(tokens.prompt_ids) - 1 : -1].float()
    for i, token in enumerate(tokens.completion_ids):
        allowed = torch.from_numpy(matcher.allowed(tokens.completion_ids[:i], logits.shape[1]))
        masked = logits[i].masked_fill(~allowed, -torch.inf) / (temperature or 1.0)
        assert tokens.logprobs[i] == pytest.approx(float(torch.log_softmax(masked, -1)[token]), abs=1e-4)
        assert raw[i] == pytest.approx(float(torch.log_softmax(logits[i], -1)[token]), abs=1e-4)


def test_every_one_of_several_replies_follows_the_schema_and_they_differ(local: LocalModel) -> None:
    said = ask(local, response_format=FORMAT, n=6, seed=1)
    texts = [choice["message"]["content"] for choice in said.raw["choices"]]
    assert all(set(json.loads(text)) == {"rank", "word"} for text in texts)
    assert len(set(texts)) > 1


def test_a_constrained_reply_is_refused_for_training_in_one_sentence(local: LocalModel) -> None:
    for sampling, name in (
        ({"response_format": FORMAT}, "response_format"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"min_tokens": 2}, "min_tokens"),
    ):
        tokens = ask(local, **sampling).tokens
        assert tokens is not None
        assert tokens.sampling is not None
        with pytest.raises(ValueError, match=f"{name}.*leave it out for training"):
            read_distribution(tokens.sampling)
    free = ask(local, ignore_eos=True, max_tokens=8).tokens
    assert free is not None
    assert free.sampling is not None
    assert read_distribution(free.sampling).is_tempered


def test_with_tools_at_hand_a_reply_is_a_call_or_fits_the_format_and_a_forced_one_is_a_call(local: LocalModel) -> None:
    asked = {"response_format": FORMAT, "tools": [ADD], "seed": 1}
    start, brace = (TOKENIZER.convert_tokens_to_ids(one) for one in ("<", "{"))
    assert ask(local, **asked, logit_bias={start: 50}).message["tool_calls"]
    text = ask(local, **asked, logit_bias={brace: 50, start: -50}).text
    assert set(json.loads(text)) == {"rank", "word"}
    assert ask(local, **asked, logit_bias={brace: 50, start: -50}, tool_choice="required").message["tool_calls"]
    assert json.loads(ask(local, response_format=FORMAT, tools=[ADD], tool_choice="none").text)


def test_a_schema_may_come_in_extra_body(local: LocalModel) -> None:
    assert json.loads(ask(local, extra_body={"response_format": FORMAT}).text)


def test_min_tokens_does_not_contradict_a_grammar_that_is_through(local: LocalModel) -> None:
    said = ask(local, response_format=FORMAT, min_tokens=60)
    assert json.loads(said.text)
    assert said.finish_reason == "stop"


def test_penalties_and_a_bias_work_on_what_the_grammar_leaves(local: LocalModel) -> None:
    rank = TOKENIZER.convert_tokens_to_ids("4")
    said = ask(local, response_format=FORMAT, logit_bias={rank: 100}, presence_penalty=1.0, temperature=0)
    assert "4" in str(json.loads(said.text)["rank"])


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "'sub'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "a name and a schema"),
    ],
)
def test_what_contradicts_itself_is_refused(local: LocalModel, sampling: Any, said: str) -> None:
    with pytest.raises(errors.RequestRefusedError, match=said):
        ask(local, **sampling)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"rank": 4, "word": "the"}}\n</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"rank": 4, "word": "the"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"rank": 4, "word": "the"}}]'),
    ],
)
def test_a_forced_call_is_written_as_the_model_writes_calls(local: LocalModel, style: Any, text: str) -> None:
    loaded = local.load()
    matcher = loaded.constraints.compile(call_grammar([ADD], style, loaded.codec)).start()
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for i, token in enumerate(ids):
        assert matcher.allowed(ids[:i], len(TOKENIZER))[token], TOKENIZER.decode(ids[: i + 1])
    last = matcher.allowed(ids, len(TOKENIZER))
    assert [i for i, allowed in enumerate(last) if allowed] == sorted(loaded.stop_ids)


def test_a_model_with_more_logits_than_its_tokenizer_has_tokens_never_draws_the_spare_ones(local: LocalModel) -> None:
    loaded = local.load()
    wide = Constraints(loaded.codec, vocabulary=len(TOKENIZER) + 40, stop_ids=loaded.stop_ids)
    allowed = wide.compile(schema_grammar({"type": "string"}, strict=True)).start().allowed((), len(TOKENIZER) + 40)
    assert not allowed[len(TOKENIZER) :].any()


def test_a_tokenizer_of_single_characters_is_constrained_too() -> None:
    from verifiers.trainers import tiny_model

    with LocalModel(*tiny_model(hidden_size=32, context=512), rows=2, name="tiny") as letters:
        said = ask(letters, response_format=FORMAT, seed=1)
        assert set(json.loads(said.text)) == {"rank", "word"}


def test_requests_that_ask_for_nothing_special_leave_the_engine_on_its_quick_path(local: LocalModel) -> None:
    from verifiers.engine.sequence import Sampling

    plain = Sampling(max_tokens=8, temperature=0.7, top_p=0.9)
    assert not plain.needs_logits
    assert not plain.needs_token_check
    future = local.engine.submit([5, 6, 7], plain)[0]
    assert future.result().top_logprobs == []
    assert not local.engine.table.needs_logits[0]  # the first row: nobody else was there


@pytest.mark.parametrize("stop_id", [-100_000, -1, 10**9])
def test_a_stop_id_that_is_no_token_fails_nobody_and_forbids_no_token(local: LocalModel, stop_id: int) -> None:
    last = local.load().vocabulary - 1
    said = ask(local, stop_token_ids=[stop_id], min_tokens=3, max_tokens=3, logit_bias={last: 1e9})
    assert said.tokens is not None
    assert list(said.tokens.completion_ids) == [last] * 3


def test_a_repetition_penalty_next_to_nothing_gives_logprobs_that_are_numbers(local: LocalModel) -> None:
    said = ask(local, repetition_penalty=1e-45, temperature=0.5, max_tokens=4)
    assert said.tokens is not None
    assert all(map(math.isfinite, said.tokens.logprobs))


def test_closing_while_grammars_are_compiled_tells_those_who_wait_that_the_model_is_closed() -> None:
    local = LocalModel(MODULE, TOKENIZER, rows=2, name="tiny")
    constraints, is_closed = local.load().constraints, threading.Event()
    slow = constraints.submit(is_closed.wait)
    request = Request(model="tiny", prompt=USER, sampling={"response_format": FORMAT})

    async def close_meanwhile() -> Any:
        waiting = asyncio.ensure_future(local.complete(request))
        await asyncio.sleep(0)
        local.close()
        is_closed.set()
        return await asyncio.gather(waiting, return_exceptions=True)

    (failure,) = asyncio.run(close_meanwhile())
    assert isinstance(failure, errors.InfraError)
    assert "closed" in str(failure)
    assert slow.result(60)
    with pytest.raises(errors.InfraError, match="closed"):
        constraints.submit(is_closed.wait)


def test_what_is_no_part_of_the_prompt_does_not_make_it_too_long() -> None:
    words = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [f"word{i}" for i in range(900)]}}}
    with LocalModel(MODULE, TOKENIZER, rows=2, length=64, name="tiny") as local:
        said = ask(local, extra_body={"response_format": words}, max_tokens=4)
        assert (said.text or "").startswith('"wor')
        assert ask(local, stop=["x" * 1000] * 40, logit_bias={str(i): 0.0 for i in range(300)}, max_tokens=4).tokens
        with pytest.raises(errors.OverlongPromptError, match="characters"):
            ask(local, chat_template_kwargs={"doc": "word " * 9000}, max_tokens=4)
