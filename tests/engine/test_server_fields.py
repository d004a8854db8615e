"""Fields of the OpenAI endpoints over HTTP: logprobs of every kind, penalties, ends, tokens; what is ignored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.served import NAME, Served, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER: Any = [{"role": "user", "content": "hello world"}]


def refusal(served: Served, path: str, **body: Any) -> str:
    status, reply = served.post(path, {"model": NAME, **body})
    assert status == 400, reply
    return str(reply["error"]["message"])


def test_weights_have_the_dtype_that_the_server_was_started_with(served: Served) -> None:
    asked = {"prompt": "hello world, 2 + 2 is", "echo": True, "logprobs": 0, "max_tokens": 0}
    exact = served.ask(TEXT, **asked)["choices"][0]["logprobs"]["token_logprobs"][1:]
    with serving(served.folder, "--name", NAME, "--rows", "2", "--length", "256", "--dtype", "bfloat16") as other:
        rounded = other.ask(TEXT, **asked)["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert rounded == pytest.approx(exact, abs=0.2)
    assert rounded != pytest.approx(exact, abs=1e-5)


# --- logprobs -----------------------------------------------------------------------------------------------------


def test_top_logprobs_of_a_chat_are_the_likeliest_and_hold_a_greedy_token_first(served: Served) -> None:
    choice = served.chat(logprobs=True, top_logprobs=4, temperature=0, max_tokens=6)
    for entry in choice["logprobs"]["content"]:
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["logprob"] == pytest.approx(values[0], abs=1e-4)


def test_top_logprobs_are_of_the_distribution_that_was_drawn_from(served: Served) -> None:
    choice = served.chat(logprobs=True, top_logprobs=20, temperature=0.5, top_k=5, max_tokens=6, seed=3)
    for entry in choice["logprobs"]["content"]:
        top = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
        assert len(entry["top_logprobs"]) == 5
        assert sum(math.exp(one["logprob"]) for one in entry["top_logprobs"]) == pytest.approx(1, abs=1e-4)
        assert entry["logprob"] == pytest.approx(top[entry["token"]], abs=1e-4)


def test_a_number_of_logprobs_of_a_plain_completion_is_how_many_alternatives(served: Served) -> None:
    logprobs = served.ask(TEXT, prompt="hello", logprobs=3, max_tokens=5, seed=1)["choices"][0]["logprobs"]
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert 1 <= len(top) <= 4
        assert top[token] == pytest.approx(value, abs=1e-4)
    assert served.ask(TEXT, prompt="hello", logprobs=0, max_tokens=2)["choices"][0]["logprobs"]["top_logprobs"] is None


def test_streamed_alternatives_are_those_of_the_whole_reply(served: Served) -> None:
    asked = {"messages": USER, "logprobs": True, "top_logprobs": 3, "seed": 4, "max_tokens": 12}
    whole = served.ask(CHAT, **asked)["choices"][0]["logprobs"]["content"]
    chunks = served.events(CHAT, **asked)
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert [top["token"] for top in one["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]


def test_an_echoed_prompt_has_the_logprobs_that_sampling_it_would_have_had(served: Served) -> None:
    asked = {"temperature": 0, "max_tokens": 6, "logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    said = served.ask(TEXT, prompt="hello", **asked)
    choice, ids = said["choices"][0], said["prompt_token_ids"]
    whole = [*ids, *choice["token_ids"]]
    echoed = served.ask(TEXT, prompt=whole, echo=True, logprobs=2, max_tokens=0)["choices"][0]
    found = echoed["logprobs"]
    assert len(found["token_logprobs"]) == len(whole)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][len(ids) :] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
    assert found["tokens"][len(ids) :] == choice["logprobs"]["tokens"]
    for value, top in zip(found["token_logprobs"][len(ids) :], found["top_logprobs"][len(ids) :], strict=True):
        assert value == max(top.values())  # as lm-eval asks whether a continuation is the greedy one
    assert echoed["finish_reason"] == "length"


def test_a_long_prompt_is_scored_in_parts_as_it_is_in_one(served: Served) -> None:
    ids = [5 + i % 200 for i in range(700)]
    whole = served.ask(TEXT, prompt=ids, echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    short = served.ask(TEXT, prompt=ids[:300], echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    assert short["token_logprobs"][1:] == pytest.approx(whole[1:300], abs=1e-3)


def test_echo_without_logprobs_is_the_prompt_and_the_reply(served: Served) -> None:
    asked = {"prompt": "hello world", "max_tokens": 5, "seed": 2}
    plain, echoed = served.ask(TEXT, **asked), served.ask(TEXT, **asked, echo=True)
    assert echoed["choices"][0]["text"] == "hello world" + plain["choices"][0]["text"]
    streamed = served.events(TEXT, **asked, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == echoed["choices"][0]["text"]


def test_prompt_logprobs_come_by_token_id(served: Served) -> None:
    said = served.ask(CHAT, messages=USER, prompt_logprobs=2, max_tokens=1, return_token_ids=True)
    scores, ids = said["choices"][0]["prompt_logprobs"], said["prompt_token_ids"]
    assert len(scores) == len(ids)
    assert scores[0] is None
    for token, score in zip(ids[1:], scores[1:], strict=True):
        assert score[str(token)]["logprob"] <= 0
        assert 2 <= len(score) <= 3


# --- what is drawn, and when it ends --------------------------------------------------------------------------------


def test_penalties_keep_a_greedy_reply_from_saying_the_same_again(served: Served) -> None:
    asked = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    plain = served.chat(**asked)["token_ids"]
    assert len(set(plain)) < 30
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 5.0}):
        assert len(set(served.chat(**asked, **penalty)["token_ids"])) > len(set(plain))
    strong = served.chat(**asked, extra_body={"presence_penalty": 1000.0})["token_ids"]
    assert len(set(strong)) == 30


def test_min_tokens_and_ignore_eos_put_off_the_end(served: Served) -> None:
    lengths = [len(served.chat(seed=seed, return_token_ids=True)["token_ids"]) for seed in range(6)]
    assert min(lengths) < 20
    for seed in range(6):
        least = served.chat(seed=seed, min_tokens=20, max_tokens=200, return_token_ids=True)
        assert len(least["token_ids"]) >= 20
        going_on = served.chat(seed=seed, ignore_eos=True, max_tokens=40, return_token_ids=True)
        assert len(going_on["token_ids"]) == 40
        assert going_on["finish_reason"] == "length"


def test_several_prompts_stream_side_by_side_each_under_its_own_index(served: Served) -> None:
    asked = {"prompt": ["hello", [5, 6, 7], "world"], "n": 2, "seed": 1, "max_tokens": 8}
    whole = served.ask(TEXT, **asked)["choices"]
    chunks = served.events(TEXT, **asked, stream_options={"include_usage": True})
    texts = ["" for _ in whole]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert chunks[-1]["choices"] == []


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_text_and_conversations_are_tokenized_and_read_back(served: Served) -> None:
    plain = served.ask("/tokenize", prompt="hello world", return_token_strs=True)
    assert plain["count"] == len(plain["tokens"])
    assert "".join(plain["token_strs"]) == "hello world"
    assert plain["max_model_len"] == 2048
    assert served.ask("/detokenize", tokens=plain["tokens"])["prompt"] == "hello world"
    chat = served.ask("/tokenize", messages=USER)
    said = served.ask(CHAT, messages=USER, max_tokens=1, return_token_ids=True)
    assert chat["tokens"] == said["prompt_token_ids"]
    assert "'nonsense'" in refusal(served, "/tokenize", prompt="a", nonsense=1)
    assert "below" in refusal(served, "/detokenize", tokens=[10**9])


# --- fields and names -----------------------------------------------------------------------------------------------


def test_fields_that_change_nothing_are_taken_and_ignored(served: Served) -> None:
    ignored = {
        "user": "me",
        "store": True,
        "parallel_tool_calls": False,
        "reasoning_effort": "high",
        "verbosity": "low",
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    assert served.chat(seed=1, **ignored)["message"] == served.chat(seed=1)["message"]


def test_unknown_fields_stay_errors(served: Served) -> None:
    assert "'nonsense'" in refusal(served, CHAT, messages=USER, nonsense=1)
    assert "'nonsense'" in refusal(served, "/v1/responses", input="hi", nonsense=1)
    status, reply = served.post("/v1/messages", {"model": NAME, "max_tokens": 4, "messages": USER, "nonsense": 1})
    assert (status, reply["type"], reply["error"]["type"]) == (400, "error", "invalid_request_error")
    assert "'nonsense'" in reply["error"]["message"]


def test_two_names_for_one_thing_with_two_values_are_refused_and_with_one_are_not(served: Served) -> None:
    said = refusal(served, CHAT, messages=USER, max_tokens=4, max_completion_tokens=5)
    assert "max_tokens=4 and max_completion_tokens=5 are two values for one thing" in said
    assert served.chat(max_tokens=4, max_completion_tokens=4)
    assert "top_k" in refusal(served, CHAT, messages=USER, top_k=4, extra_body={"top_k": 5})
    assert "max_output_tokens" in refusal(served, "/v1/responses", input="hi", max_tokens=4, max_output_tokens=5)
    assert "logprobs" in refusal(served, TEXT, prompt="hi", logprobs=2, top_logprobs=3)


def test_the_model_has_the_name_it_was_served_under_and_no_path(served: Served) -> None:
    assert served.chat()
    said = served.ask(CHAT, messages=USER, max_tokens=1)
    assert said["model"] == NAME
    assert served.ask("/v1/responses", input="hi", max_output_tokens=1)["model"] == NAME
    assert served.events(TEXT, prompt="a", max_tokens=1)[0]["model"] == NAME
    status, reply = served.post(CHAT, {"model": str(served.folder), "messages": USER})
    assert status == 404
    assert "has 'tiny'" in reply["error"]["message"]
    overlong = refusal(served, CHAT, messages=[{"role": "user", "content": "x" * 4000}])
    assert str(served.folder) not in overlong


def test_a_folder_that_is_served_without_a_name_is_called_by_its_last_part(tmp_path: Path) -> None:
    from verifiers.engine.server.serving import served_name

    folder = tmp_path / "policy-100"
    folder.mkdir()
    assert served_name(str(folder)) == "policy-100"
    assert served_name(str(folder) + "/") == "policy-100"
    assert served_name("org/model") == "org/model"
    assert served_name("smollm2") == "smollm2"
