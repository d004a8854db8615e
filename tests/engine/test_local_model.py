"""A model in this process as a client: exact tokens, sampling arguments, tools, turns that go on, and bad input."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine import tiny  # noqa: E402
from verifiers import errors  # noqa: E402
from verifiers.clients.activity import Activity, count_here  # noqa: E402
from verifiers.clients.protocol import Client, Request  # noqa: E402
from verifiers.clients.resolve import as_client  # noqa: E402
from verifiers.engine import Engine, LocalModel  # noqa: E402
from verifiers.envs import SingleTurnEnv  # noqa: E402
from verifiers.rubrics import Rubric  # noqa: E402

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TOKENIZER = tiny.tokenizer()
MODULE = tiny.model(TOKENIZER)
USER = [{"role": "user", "content": "hello world"}]


@pytest.fixture
def local() -> Iterator[LocalModel]:
    with LocalModel(MODULE, TOKENIZER, rows=4, name="tiny") as model:
        yield model


def chat(prompt: Any = USER, tools: Any = None, timeout_s: float | None = None, **sampling: Any) -> Request:
    sampling.setdefault("max_tokens", 12)
    return Request(model="tiny", prompt=prompt, tools=tools, sampling=sampling, timeout_s=timeout_s)


def ask(local: LocalModel, *args: Any, **kwargs: Any) -> Any:
    return asyncio.run(local.complete(chat(*args, **kwargs)))


def text(prompt: Any, **sampling: Any) -> Request:
    return Request(model="tiny", prompt=prompt, sampling={"max_tokens": 6, **sampling}, message_type="completion")


@pytest.fixture
def scripted() -> Iterator[Any]:
    """A model of its own that says what it is told to, and its tokenizer."""
    tokenizer = tiny.tokenizer(tiny.HERMES)
    module = tiny.model(tokenizer)
    script = tiny.Scripted(module)

    def make(reply: str | list[int], prompt: Any, tools: Any = None) -> LocalModel:
        loaded = local.load()
        writer = loaded.writer
        _, shown = writer.text_prompt(prompt) if isinstance(prompt, str) else writer.prompt(prompt, tools)
        ids = tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else reply
        script.say(ids, after=len(shown))
        return local

    with LocalModel(module, tokenizer, rows=4, name="tiny") as local:
        yield make


# --- what comes back ----------------------------------------------------------------------------------------------


def test_a_completion_carries_exact_tokens_that_the_model_itself_confirms(local: LocalModel) -> None:
    completion = ask(local, temperature=0.7, seed=1)
    tokens = completion.tokens
    rendered = TOKENIZER.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert tokens.prompt_ids == TOKENIZER.encode(rendered, add_special_tokens=False)
    assert completion.usage.prompt_tokens == len(tokens.prompt_ids)
    assert completion.usage.completion_tokens == len(tokens.completion_ids)
    with torch.inference_mode():
        logits = MODULE(torch.tensor([tokens.prompt_ids + tokens.completion_ids])).logits[0] / 0.7
    start = len(tokens.prompt_ids) - 1
    expected = torch.log_softmax(logits, -1)[range(start, start + len(tokens.completion_ids)), tokens.completion_ids]
    assert torch.allclose(torch.tensor(tokens.logprobs), expected, atol=1e-4)
    assert completion.raw["sampling"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 1,
        "logit_bias": {},
    }


def test_raw_logprobs_come_on_request(local: LocalModel) -> None:
    tempered = ask(local, temperature=0.5, seed=1, raw_logprobs=True)
    raw = tempered.raw["choices"][0]["raw_logprobs"]
    assert len(raw) == len(tempered.tokens.logprobs)
    assert raw != tempered.tokens.logprobs
    assert "raw_logprobs" not in ask(local).raw["choices"][0]
    plain = ask(local, temperature=1.0, seed=1, raw_logprobs=True)
    assert plain.raw["choices"][0]["raw_logprobs"] == pytest.approx(plain.tokens.logprobs, abs=1e-4)


def test_the_same_seed_gives_the_same_tokens_whatever_is_asked_beside_it(local: LocalModel) -> None:
    alone = ask(local, seed=3).tokens.completion_ids

    async def crowd() -> Any:
        others = [local.complete(chat([{"role": "user", "content": "x" * n}])) for n in range(6)]
        return (await asyncio.gather(local.complete(chat(seed=3)), *others))[0]

    assert asyncio.run(crowd()).tokens.completion_ids == alone
    assert ask(local, seed=4).tokens.completion_ids != alone
    assert ask(local, seed=3 + (1 << 62)).tokens.completion_ids == alone


def test_sampling_arguments_that_change_between_two_requests_are_read_anew(local: LocalModel) -> None:
    sampling: dict[str, Any] = {"max_tokens": 4, "stop": ["zzz"], "n": 1, "seed": 1}
    request = Request(model="", prompt=USER, sampling=sampling)

    def lengths() -> list[int]:
        return [len(one["token_ids"]) for one in asyncio.run(local.complete(request)).raw["choices"]]

    assert max(lengths()) <= 4
    sampling |= {"max_tokens": 2, "n": 2}
    assert [length <= 2 for length in lengths()] == [True, True]
    sampling["stop"].append("")
    with pytest.raises(errors.RequestRefusedError, match="stop"):
        lengths()
    sampling |= {"max_tokens": 4, "stop": ["zzz"], "n": True}  # equal to the first, but that True is no number
    with pytest.raises(errors.RequestRefusedError, match="'n' must be a whole number"):
        lengths()


def test_requests_that_are_the_same_share_their_prompt_and_nothing_that_a_caller_could_change(
    local: LocalModel,
) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(*(local.complete(chat(prompt=[dict(USER[0])], seed=i)) for i in range(2)))

    one, other = asyncio.run(both())
    assert one.tokens.prompt_ids == other.tokens.prompt_ids == one.raw["prompt_token_ids"]
    assert one.raw["id"] != other.raw["id"]
    for held in ("prompt_token_ids", "sampling", "usage"):
        assert one.raw[held] is not other.raw[held]
    one.tokens.prompt_ids.clear()
    one.raw["sampling"].clear()
    later = ask(local, seed=0)
    assert (later.tokens.prompt_ids, later.raw["sampling"]["seed"]) == (other.tokens.prompt_ids, 0)


def test_a_prompt_is_written_anew_when_the_template_has_changed() -> None:
    tokenizer = tiny.tokenizer()
    with LocalModel(tiny.model(tokenizer), tokenizer, rows=2, name="tiny") as model:
        before = ask(model, seed=1).tokens.prompt_ids
        tokenizer.chat_template = "{{ messages[0].content }}"
        assert ask(model, seed=1).tokens.prompt_ids != before


def test_the_reply_of_a_stream_has_the_name_of_its_chunks(local: LocalModel) -> None:
    async def read() -> Any:
        stream = await local.stream(chat())
        async for _ in stream:
            pass
        return stream

    stream = asyncio.run(read())
    assert stream.completion.raw["id"] == stream.head["id"]
    assert (stream.head["object"], stream.completion.raw["object"]) == ("chat.completion.chunk", "chat.completion")


def test_several_choices_share_one_prefill(local: LocalModel) -> None:
    completion = ask(local, n=3, seed=1, logprobs=True)
    choices = completion.raw["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    assert completion.choices[2].message.content == choices[2]["message"]["content"]
    assert completion.usage.completion_tokens == sum(len(choice["token_ids"]) for choice in choices)
    assert all(len(choice["logprobs"]["content"]) == len(choice["token_ids"]) for choice in choices)


def test_the_bytes_of_tokens_add_up_to_the_text_where_characters_are_split_over_them(local: LocalModel) -> None:
    said = "é🎉漢字 x"
    asked = asyncio.run(local.complete(text(said, echo=True, logprobs=2, max_tokens=0))).raw["choices"][0]
    found = asked["logprobs"]
    assert asked["text"] == said
    assert found["text_offset"][-1] == said.index("x")
    ids = local.load().codec.encode(said, special=False)
    bias = {str(token): 60.0 for token in ids}
    (choice,) = ask(local, logit_bias=bias, logprobs=True, top_logprobs=2, seed=3, max_tokens=24).raw["choices"]
    entries = choice["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled.decode(errors="replace") == choice["message"]["content"]
    assert any(entry["token"] == "\ufffd" and len(entry["bytes"]) == 1 for entry in entries)


def test_the_eos_ends_a_reply_is_among_its_tokens_and_not_in_its_text(scripted: Any) -> None:
    local = scripted("the answer<|im_end|>", USER)
    completion = ask(local, temperature=0, max_tokens=50)
    assert completion.text == "the answer"
    assert completion.finish_reason == "stop"
    assert completion.tokens.completion_ids[-1] == TOKENIZER.eos_token_id


def test_a_stop_string_across_token_borders_is_cut_off_and_its_tokens_are_kept(scripted: Any) -> None:
    local = scripted("so <answer>4</answer> and more", USER)
    completion = ask(local, temperature=0, max_tokens=50, stop=["</answer>"])
    assert completion.text == "so <answer>4"
    assert completion.finish_reason == "stop"
    sampled = TOKENIZER.decode(completion.tokens.completion_ids)
    assert sampled.startswith("so <answer>4</answer>")
    assert "more" not in sampled


def test_stop_strings_of_each_choice_are_watched_apart(scripted: Any) -> None:
    local = scripted("hello world", USER)
    completion = ask(local, temperature=0, n=2, stop="llo")
    assert [choice["message"]["content"] for choice in completion.raw["choices"]] == ["he", "he"]


def test_stops_can_be_given_once_for_every_request() -> None:
    with LocalModel(MODULE, TOKENIZER, rows=2, stop=[5, "zzz"]) as local:
        assert 5 in local.engine.stop_ids
        assert ask(local, stop="yyy").finish_reason in ("stop", "length")
    with pytest.raises(ValueError, match="stop must contain"):
        LocalModel(MODULE, TOKENIZER, stop=[""])


def test_stop_token_ids_and_logit_bias(local: LocalModel) -> None:
    token = TOKENIZER.encode("answer", add_special_tokens=False)[0]
    completion = ask(local, logit_bias={str(token): 100}, stop_token_ids=[token], max_tokens=5)
    assert completion.tokens.completion_ids == [token]
    assert completion.text == ""
    assert completion.finish_reason == "stop"


def test_tool_calls_are_read_out_of_the_reply(scripted: Any) -> None:
    said = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    local = scripted(said, USER, [ADD])
    completion = ask(local, tools=[ADD], temperature=0, max_tokens=200)
    assert completion.finish_reason == "tool_calls"
    assert completion.message["content"] == "Let me see."
    assert completion.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    cut = ask(local, tools=[ADD], temperature=0, max_tokens=60)
    assert cut.finish_reason == "length"
    assert "tool_calls" not in cut.message
    scripted(said, USER)
    unasked = ask(local, temperature=0, max_tokens=200)
    assert "tool_calls" not in unasked.message
    assert "<tool_call>" in unasked.text
    declined = ask(local, tools=[ADD], tool_choice="none", temperature=0, max_tokens=200)
    assert declined.tokens.prompt_ids == unasked.tokens.prompt_ids


CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        f"Let me see. {CALLED}",
        f"\n\nLet me see. \n{CALLED}\n",
        f"first {CALLED} and then {CALLED} the rest",
        f"a<tool_call>no call</tool_call>{CALLED}b",
        f"one <tool_call>{CALLED}",
        f"{CALLED} and <tool_",
        'cut off <tool_call>{"name": "add", "arg',
        "no call </tool_call>  ",
    ],
)
def test_with_tools_a_stream_adds_up_to_the_text_beside_the_calls(said: str, is_special: bool) -> None:
    tokenizer = tiny.tokenizer(tiny.HERMES)
    if is_special:  # the marks of a call are then in no text
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    module = tiny.model(tokenizer)
    script = tiny.Scripted(module)
    asked = chat(tools=[ADD], temperature=0, max_tokens=250)

    async def both(local: LocalModel) -> tuple[Any, Any]:
        script.say(tokenizer.encode(f"{said}<|im_end|>"), after=len(await local.prompt_ids(asked)))
        return await local.complete(asked), [piece async for piece in await local.stream(asked)]

    with LocalModel(module, tokenizer, rows=2) as local:
        whole, pieces = asyncio.run(both(local))
    assert "".join(piece.text for piece in pieces) == (whole.message["content"] or "")
    assert [call for piece in pieces for call in piece.calls] == whole.message.get("tool_calls", [])
    assert len(pieces[-1].calls) == said.count(CALLED)
    assert whole.message["content"] is None or '"a": 1' not in whole.message["content"]


XML_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)


@pytest.mark.parametrize("is_special", [False, True])
def test_a_call_in_elements_arrives_whole_in_a_stream_with_the_types_of_its_schema(is_special: bool) -> None:
    loop = "{% for c in m.tool_calls or [] %}"
    before, _, after = tiny.HERMES.partition(loop)
    tokenizer = tiny.tokenizer(before + XML_CALLS + after.partition("{% endfor %}")[2])
    if is_special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    module = tiny.model(tokenizer)
    script = tiny.Scripted(module)
    schema = {"type": "object", "properties": {"code": {"type": "string"}, "count": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "run", "parameters": schema}}
    asked = chat(tools=[tool], temperature=0, max_tokens=250)
    arguments = "<parameter=code>\n12\n</parameter>\n<parameter=count>\n12\n</parameter>\n"
    said = f"Let me see. <tool_call>\n<function=run>\n{arguments}</function>\n</tool_call><|im_end|>"

    async def both(local: LocalModel) -> tuple[Any, Any]:
        script.say(tokenizer.encode(said), after=len(await local.prompt_ids(asked)))
        return await local.complete(asked), [piece async for piece in await local.stream(asked)]

    with LocalModel(module, tokenizer, rows=2) as local:
        whole, pieces = asyncio.run(both(local))
    assert [call["function"] for call in whole.message["tool_calls"]] == [
        {"name": "run", "arguments": '{"code": "12", "count": 12}'}
    ]
    assert (whole.finish_reason, whole.message["content"]) == ("tool_calls", "Let me see.")
    assert "".join(piece.text for piece in pieces) == "Let me see."
    assert [call for piece in pieces for call in piece.calls] == whole.message["tool_calls"]


def test_plain_completions_take_text_or_ids(local: LocalModel) -> None:
    by_text = asyncio.run(local.complete(text("hello world", seed=1)))
    ids = TOKENIZER.encode("hello world")
    by_ids = asyncio.run(local.complete(text(ids, seed=1)))
    assert by_text.tokens == by_ids.tokens
    assert by_text.tokens.prompt_ids == ids
    assert by_text.raw["choices"][0]["text"] == by_text.text


def test_it_reads_like_openais_client_and_is_one_of_ours(local: LocalModel) -> None:
    assert isinstance(local, Client)
    assert as_client(local) is local
    completion = local.chat.completions.create(messages=USER, max_tokens=4)
    assert completion.choices[0].message.content == completion.text
    assert local.completions.create(prompt="hello", max_tokens=4).choices[0].text is not None


# --- turns --------------------------------------------------------------------------------------------------------


def odd_ids(word: str) -> list[int]:
    """The ids of a word letter by letter: not those that the tokenizer would choose."""
    ids = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in word]
    assert ids != TOKENIZER.encode(word, add_special_tokens=False)
    return ids


def test_a_second_turn_goes_on_from_the_very_tokens_of_the_first(scripted: Any) -> None:
    eos = TOKENIZER.eos_token_id
    local = scripted([*odd_ids("answer"), eos], USER)
    first = ask(local, temperature=0, max_tokens=50)
    assert first.text == "answer"
    history = [*USER, first.message, {"role": "user", "content": "and then?"}]
    scripted([*odd_ids("hello"), eos], history)
    second = ask(local, history, temperature=0, max_tokens=50)
    before = first.tokens.prompt_ids + first.tokens.completion_ids
    assert second.tokens.prompt_ids[: len(before)] == before
    assert TOKENIZER.decode(second.tokens.prompt_ids) == local.load().template.render(history)
    assert second.raw["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(before) - 1
    longer = [*history, second.message, {"role": "user", "content": "go on"}]
    third = ask(local, longer, temperature=0, max_tokens=3)
    before = second.tokens.prompt_ids + second.tokens.completion_ids
    assert third.tokens.prompt_ids[: len(before)] == before


def test_a_turn_cut_off_by_its_length_goes_on_exactly_too(scripted: Any) -> None:
    local = scripted(odd_ids("answer"), USER)
    first = ask(local, temperature=0, max_tokens=6)
    history = [*USER, first.message, {"role": "user", "content": "and then?"}]
    second = ask(local, history, max_tokens=2)
    before = first.tokens.prompt_ids + first.tokens.completion_ids
    assert second.tokens.prompt_ids[: len(before) + 1] == [*before, TOKENIZER.eos_token_id]


def test_a_history_that_was_rewritten_is_tokenized_anew(scripted: Any) -> None:
    local = scripted([*odd_ids("answer"), TOKENIZER.eos_token_id], USER)
    ask(local, temperature=0, max_tokens=50)
    history = [*USER, {"role": "assistant", "content": "ANSWER"}, {"role": "user", "content": "and then?"}]
    second = ask(local, history, max_tokens=2)
    rendered = local.load().template.render(history)
    assert second.tokens.prompt_ids == TOKENIZER.encode(rendered, add_special_tokens=False)


def test_a_reply_of_tokens_without_text_is_no_part_of_the_same_prompt_when_it_is_asked_again() -> None:
    module = tiny.model(TOKENIZER)
    padding = len(TOKENIZER)  # the models of many families have more tokens than their tokenizers
    module.resize_token_embeddings(padding + 3, mean_resizing=False)
    only = {"max_tokens": 1, "logit_bias": {padding: 1e6}}
    with LocalModel(module, TOKENIZER, rows=2, name="tiny") as local:
        for asked in (chat(**only), text("hello", **only)):
            first, again = (asyncio.run(local.complete(asked)).tokens for _ in range(2))
            assert first.completion_ids == again.completion_ids == [padding]
            assert first.prompt_ids == again.prompt_ids


def test_plain_completions_go_on_exactly_too(scripted: Any) -> None:
    local = scripted([*odd_ids("answer"), TOKENIZER.eos_token_id], "the ")
    first = asyncio.run(local.complete(text("the ", temperature=0, max_tokens=50)))
    assert first.text == "answer"
    second = asyncio.run(local.complete(text("the answer is")))
    before = first.tokens.prompt_ids + first.tokens.completion_ids[:-1]  # the text goes on where the model had ended
    assert second.tokens.prompt_ids[: len(before)] == before


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_continuation_is_scored_as_the_tokenizer_writes_it_whatever_was_scored_or_sampled_before(
    local: LocalModel, max_tokens: int
) -> None:
    asyncio.run(local.complete(text("the", max_tokens=1, logit_bias={TOKENIZER.encode(" an")[0]: 100.0})))
    for continuation in ("the an", "the answer"):
        scored = text(continuation, max_tokens=max_tokens, echo=True, logprobs=1, seed=1)
        answer = asyncio.run(local.complete(scored))
        assert answer.tokens.prompt_ids == TOKENIZER.encode(continuation)


# --- its life -----------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_before_the_first_request_and_then_once() -> None:
    missing = LocalModel("./no-such-folder")
    assert missing.model == "./no-such-folder"
    assert missing.needs_no_model
    local = LocalModel(MODULE, TOKENIZER, rows=2)
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.append(local.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(loaded) for loaded in seen}) == 1
    local.close()
    with pytest.raises(errors.InfraError, match="closed"):
        ask(local)


def test_a_cancelled_request_frees_its_row(local: LocalModel) -> None:
    async def main() -> None:
        task = asyncio.create_task(local.complete(chat(max_tokens=480, logit_bias={TOKENIZER.eos_token_id: -100})))
        while not local.engine.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    deadline = time.monotonic() + 5
    while local.engine.running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not local.engine.running
    assert local.engine.tokens < 480


def test_a_reply_that_takes_too_long_is_a_deadline(local: LocalModel) -> None:
    local.load()
    with local.engine.lock, pytest.raises(errors.DeadlineError, match=r"0\.05 s"):
        ask(local, timeout_s=0.05)
    with local.engine.lock, pytest.raises(errors.DeadlineError):
        ask(local, timeout=0.05)


def test_closing_fails_what_is_under_way(local: LocalModel) -> None:
    async def main() -> None:
        task = asyncio.create_task(local.complete(chat(max_tokens=480, logit_bias={TOKENIZER.eos_token_id: -100})))
        while not local.engine.running:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(local.close)
        with pytest.raises(errors.InfraError, match="closed"):
            await task

    asyncio.run(main())


def test_a_module_handed_in_is_sampled_by_one_engine_that_goes_when_nobody_needs_it() -> None:
    module = tiny.model(TOKENIZER)
    module.tokenizer = TOKENIZER
    client: Any = as_client(module)
    assert as_client(module) is client
    assert asyncio.run(client.complete(chat(max_tokens=2))).usage.completion_tokens >= 1
    engine = client.engine
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 5
    while engine._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine._thread.is_alive()


def test_a_module_without_a_tokenizer_says_what_to_do() -> None:
    with pytest.raises(errors.InfraError, match=r"could not be loaded: .* pass its tokenizer too"):
        asyncio.run(as_client(tiny.model(TOKENIZER)).complete(chat()))


def test_an_engine_can_be_handed_in_and_is_left_running() -> None:
    engine = Engine(MODULE, rows=2)
    local = LocalModel(engine, TOKENIZER)
    token = TOKENIZER.eos_token_id
    assert ask(local, logit_bias={token: 100}).finish_reason == "stop"
    local.close()
    assert engine.generate([[1, 2, 3]])
    engine.close()


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    MODULE.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with LocalModel(str(tmp_path), dtype="float32") as loaded, LocalModel(MODULE, TOKENIZER) as live:
        assert loaded.model == str(tmp_path)
        assert greedy(loaded) == greedy(live)


def test_a_model_that_cannot_be_had_is_named_at_once_for_every_request(tmp_path: Path) -> None:
    MODULE.save_pretrained(tmp_path)
    without_tokenizer = LocalModel(str(tmp_path))
    for _ in range(2):
        with pytest.raises(errors.InfraError, match=f"{tmp_path} has no tokenizer"):
            ask(without_tokenizer)
    with pytest.raises(ValueError, match="has no tokenizer"):
        without_tokenizer.load()
    with pytest.raises(errors.InfraError, match="no model at no-such/folder/here"):
        ask(LocalModel("no-such/folder/here"))
    with pytest.raises(errors.InfraError, match="GB are free"):
        ask(LocalModel(MODULE, TOKENIZER, rows=1 << 40))


LEAVES = """
import sys; sys.path.insert(0, {root!r})
from tests.engine import tiny
from verifiers.engine import LocalModel, Sampling
tokenizer = tiny.tokenizer()
local = LocalModel(tiny.model(tokenizer), tokenizer, rows=2)
local.engine.submit([1, 2, 3], Sampling(max_tokens=500))
"""


def test_a_program_may_end_with_a_request_under_way(repo: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES.format(root=str(repo))], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_environment_is_evaluated_without_a_name_for_the_model(local: LocalModel) -> None:
    env = SingleTurnEnv(
        dataset=[{"question": f"hello {n}", "answer": ""} for n in range(3)] + [{"question": "x" * 900, "answer": ""}],
        rubric=Rubric(funcs=[lambda completion: 1.0]),
    )
    results = env.evaluate(client=local, rollouts_per_example=2, sampling_args={"max_tokens": 4, "n": 1})
    assert results["rewards"] == [1.0] * 8
    states = results["states"]
    assert all(state["trajectory"][0]["tokens"]["completion_logprobs"] for state in states[:6])
    assert states[-1]["stop_condition"] == "prompt_too_long"


# --- weights ------------------------------------------------------------------------------------------------------


def greedy(local: LocalModel) -> list[int]:
    ids: list[int] = ask(local, temperature=0).tokens.completion_ids
    return ids


def test_after_a_change_of_the_weights_the_next_reply_is_the_new_models() -> None:
    module, other = tiny.model(TOKENIZER), tiny.model(TOKENIZER, seed=1)
    with LocalModel(module, TOKENIZER, rows=2) as local, LocalModel(other, TOKENIZER, rows=2) as new:
        old = greedy(local)
        with torch.no_grad():
            for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        assert greedy(local) == greedy(new) != old


def test_weights_are_loaded_in_place_from_a_folder(tmp_path: Path) -> None:
    module, other = tiny.model(TOKENIZER), tiny.model(TOKENIZER, seed=1)
    other.save_pretrained(tmp_path)
    where = module.model.embed_tokens.weight.data_ptr()
    with LocalModel(module, TOKENIZER, rows=2) as local, LocalModel(other, TOKENIZER, rows=2) as new:
        old = greedy(local)
        assert local.update_weights(tmp_path) > 10
        assert greedy(local) == greedy(new) != old
    assert module.model.embed_tokens.weight.data_ptr() == where


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE"])
def test_weights_of_experts_which_are_stored_one_by_one_are_loaded_in_place(tmp_path: Path, family: str) -> None:
    from tests.engine.support.exact import prompt_of, random_model

    module, other = random_model(family), random_model(family, seed=1)
    other.save_pretrained(tmp_path)
    ids = torch.tensor([prompt_of(20)])
    where = [one.data_ptr() for one in module.parameters()]
    with LocalModel(module, TOKENIZER, rows=2, length=64) as local:
        assert local.update_weights(tmp_path) > 10
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, other(input_ids=ids).logits)
    assert [one.data_ptr() for one in module.parameters()] == where


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path, local: LocalModel) -> None:
    from safetensors.torch import save_file

    before = greedy(local)
    tiny.model(TOKENIZER, layers=3).save_pretrained(tmp_path / "deeper")
    tiny.model(TOKENIZER, layers=1).save_pretrained(tmp_path / "shallower")
    tiny.model(tiny.tokenizer(vocabulary=300)).save_pretrained(tmp_path / "narrower")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x00" * 20)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "one.safetensors")
    for name, said in [
        ("deeper", "the model has no"),
        ("shallower", "is missing"),
        ("narrower", "has the shape"),
        ("empty", "holds no"),
        ("broken", "cannot be read"),
        ("one.safetensors", "has the shape"),
        ("nowhere", "neither a folder"),
    ]:
        with pytest.raises(ValueError, match=said):
            local.update_weights(tmp_path / name)
    local.forget()
    assert greedy(local) == before


def test_adapters_are_merged_while_the_block_lasts() -> None:
    peft = pytest.importorskip("peft")
    module = tiny.model(TOKENIZER)
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    with LocalModel(adapted, TOKENIZER, rows=2, name="tiny") as local:
        apart = ask(local, temperature=0)
        with local.merge_adapters():
            merged = ask(local, temperature=0)
        again = ask(local, temperature=0)
    assert merged.tokens.completion_ids == apart.tokens.completion_ids == again.tokens.completion_ids
    assert merged.tokens.logprobs == pytest.approx(apart.tokens.logprobs, abs=1e-3)
    with LocalModel(tiny.model(TOKENIZER), TOKENIZER, rows=2) as plain, adapted.disable_adapter():
        assert greedy(plain) != apart.tokens.completion_ids
        with pytest.raises(TypeError, match="no adapters"), plain.merge_adapters():
            pass


# --- bad input ----------------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_is_overlong(local: LocalModel) -> None:
    with pytest.raises(errors.OverlongPromptError, match="maximum context length of tiny is 512 tokens"):
        ask(local, [{"role": "user", "content": "x" * 600}])
    nearly = ask(local, [{"role": "user", "content": "x" * 490}], max_tokens=400)
    assert nearly.usage.total_tokens <= 512


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"top_logprobs": 5}, "set logprobs=true"),
        ({"logprobs": 21}, "'logprobs' must be between 0 and 20"),
        ({"beam_width": 2}, "'beam_width'"),
        ({"extra_body": {"guided_json": {}}}, "'guided_json'"),
        ({"frequency_penalty": "much"}, "'frequency_penalty' must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"response_format": {"type": "xml"}}, "'response_format' must be an object with a type"),
        ({"tool_choice": "required"}, "tool_choice requires a call of a function, but 'tools' has no such function"),
        ({"tool_choice": "maybe"}, "'tool_choice' must be one of auto, none, required"),
        ({"echo": True}, "'echo' is for plain completions"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, but max_tokens is only 8"),
        ({"max_tokens": 8, "max_completion_tokens": 9}, "two values for one thing"),
        ({"top_k": 8, "extra_body": {"top_k": 9}}, "top_k=8 and extra_body.top_k=9 are two values for one thing"),
        ({"stream": True}, "stream=True"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": float("nan")}, "'temperature' must be a finite number"),
        ({"temperature": "hot"}, "'temperature' must be a finite number"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_k": -2}, "top_k must be"),
        ({"min_p": 2}, "min_p must be"),
        ({"max_tokens": 0}, "max_tokens is 0, which only makes sense with echo"),
        ({"max_tokens": 2.5}, "'max_tokens' must be a whole number"),
        ({"n": 0}, "'n' must be between"),
        ({"stop": [""]}, "'stop' must be"),
        ({"stop": 3}, "'stop' must be"),
        ({"seed": "x"}, "'seed' must be"),
        ({"logit_bias": {"99999": 1}}, "token 99999"),
        ({"logit_bias": {"the": 1}}, "'logit_bias' must be"),
        ({"chat_template_kwargs": {"tokenize": True}}, "'chat_template_kwargs' must be"),
        ({"timeout": 0}, "'timeout' must be"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(local: LocalModel, sampling: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.RequestRefusedError, match=said):
        ask(local, **sampling)


def test_a_run_counts_the_tokens_of_a_local_model_before_its_replies_are_there(local: LocalModel) -> None:
    async def two() -> tuple[Activity, int]:
        activity = Activity(tokens=5)
        count_here(activity)
        await local.complete(chat())
        await local.complete(chat())
        return activity, (await local.ready()).engine.tokens_under_way()

    activity, left = asyncio.run(two())
    assert len(activity.under_way) == 1
    assert activity.tokens_so_far == 5 + left
    activity.under_way.add(lambda: 37)
    assert activity.tokens_so_far == 42 + left


def test_arguments_that_change_nothing_are_accepted(local: LocalModel) -> None:
    idle = {"frequency_penalty": 0.0, "top_k": -1, "user": "me", "response_format": {"type": "text"}, "best_of": 1}
    plain, same = (ask(local, seed=5, max_tokens=8, **more) for more in ({}, idle))
    assert same.tokens.completion_ids == plain.tokens.completion_ids
    assert ask(local, seed=None, max_tokens=8).tokens.completion_ids


@pytest.mark.parametrize("prompt", ["a string", [], [{"role": "user", "content": "\ud83d"}]])
def test_prompts_that_are_none_are_refused(local: LocalModel, prompt: Any) -> None:
    with pytest.raises(errors.RequestRefusedError):
        ask(local, prompt)


@pytest.mark.parametrize("prompt", ["", [], [99999], [-1], ["x"], [True], None])
def test_completions_of_nothing_or_of_ids_that_do_not_exist_are_refused(local: LocalModel, prompt: Any) -> None:
    with pytest.raises(errors.RequestRefusedError):
        asyncio.run(local.complete(text(prompt)))


def test_a_token_that_the_tokenizer_has_and_the_model_has_not_is_refused_with_what_to_do() -> None:
    tokenizer = tiny.tokenizer()
    with LocalModel(tiny.model(tokenizer), tokenizer, rows=2, length=128, name="tiny") as local:
        tokenizer.add_tokens(["<new>"], special_tokens=True)
        with pytest.raises(
            errors.RequestRefusedError, match=r"with token \d+, but the model has .* resize its embeddings"
        ):
            ask(local, [{"role": "user", "content": "a <new> one"}], max_tokens=2)


def test_a_model_with_broken_weights_fails_its_requests_and_not_the_engine(local: LocalModel) -> None:
    module = tiny.model(TOKENIZER)
    with LocalModel(module, TOKENIZER, rows=2) as local:
        local.load()
        whole = module.lm_head.weight.detach().clone()
        with torch.no_grad():
            module.lm_head.weight.fill_(float("nan"))
        with pytest.raises(errors.ModelError, match="NaN"):
            ask(local)
        with torch.no_grad():
            module.lm_head.weight.copy_(whole)
        assert ask(local).tokens


def test_a_model_whose_weights_are_not_numbers_is_refused_in_a_sentence() -> None:
    module = tiny.model(TOKENIZER)
    with torch.no_grad():
        module.lm_head.weight.fill_(float("nan"))
    with LocalModel(module, TOKENIZER) as local, pytest.raises(ValueError, match=r"not numbers \(NaN\)"):
        local.load()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_that_raises_fails_every_choice_of_its_requests(local: LocalModel) -> None:
    module = tiny.model(TOKENIZER)
    with LocalModel(module, TOKENIZER, rows=4) as local:
        handle = module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(errors.ModelError, match="ZeroDivisionError"):
            ask(local, n=3, timeout_s=10)
        handle.remove()
        assert ask(local, n=3).tokens


def test_a_temperature_too_low_to_divide_by_is_sampled_greedily_and_recorded_as_0(local: LocalModel) -> None:
    cold, greedy = (ask(local, temperature=value, max_tokens=6) for value in (5e-6, 0.0))
    assert cold.tokens.completion_ids == greedy.tokens.completion_ids
    assert cold.tokens.sampling["temperature"] == 0.0


def test_a_timeout_within_the_model_is_a_failure_of_the_model_where_no_timeout_was_asked_for() -> None:
    def hang(*_: Any) -> None:
        raise TimeoutError("a collective took too long")

    module = tiny.model(TOKENIZER)
    with LocalModel(module, TOKENIZER, rows=4) as local:
        local.load()
        handle = module.register_forward_pre_hook(hang)
        with pytest.raises(errors.ModelError, match="a collective took too long"):
            ask(local)
        handle.remove()


def test_a_closed_model_leaves_no_reference_to_its_weights_its_cache_or_its_engine(tmp_path: Path) -> None:
    MODULE.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    local = LocalModel(str(tmp_path), rows=2, length=64, device="cpu")
    asyncio.run(local.complete(Request(model="", prompt=USER, sampling={"max_tokens": 4})))
    engine = local.engine
    held = [weakref.ref(one) for one in (engine, engine.model, engine.scheduler.cache, next(engine.model.parameters()))]
    del engine
    local.close()
    gc.collect()
    assert [one() for one in held] == [None] * 4


def test_closing_gives_the_cache_back_even_where_the_module_is_its_owners() -> None:
    local = LocalModel(MODULE, TOKENIZER, rows=2, length=64)
    cache = weakref.ref(local.engine.scheduler.cache)
    local.close()
    gc.collect()
    assert cache() is None


def test_a_model_that_was_evaluated_by_plain_code_is_freed_with_its_last_user() -> None:
    """Whatever kept the loops of such calls would keep their models, one a call."""

    def right(completion: Any) -> float:
        return float(len(completion))

    env = SingleTurnEnv(dataset=[{"question": f"{i}"} for i in range(4)], rubric=Rubric([right]))
    held = []
    for _ in range(3):
        model = tiny.model(TOKENIZER)
        held.append(weakref.ref(model))
        env.generate_sync(client=LocalModel(model, TOKENIZER, rows=4), model="", sampling_args={"max_tokens": 2})
        del model
    deadline = time.monotonic() + 5
    while any(one() is not None for one in held) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [one() for one in held] == [None] * 3


RUNNING_TORCH_AT_EXIT = """
import torch
import verifiers as vf

def forever(completion):
    some = torch.ones(300, 300)
    while True:
        some @ some

env = vf.SingleTurnEnv(dataset=[{"question": "?", "answer": ""}], rubric=vf.Rubric([forever]))
results = env.evaluate(client=vf.FakeClient("e"), model="fake", reward_timeout_s=2.0, use_tqdm=False)
print(len(results.failed))
"""


def test_a_function_that_is_inside_torch_when_python_exits_does_not_abort_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUNNING_TORCH_AT_EXIT], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
