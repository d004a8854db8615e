"""Tiny models: what they can read and write, and that a seed makes the same one again."""

from __future__ import annotations

import asyncio

import pytest
import torch

import verifiers as vf
from verifiers.clients import Request


def test_it_reads_and_writes_the_characters_it_was_made_of_and_says_so_of_others():
    _, tokenizer = vf.tiny_model("abc", texts=["é\n ", {"role": "user", "content": "xy", "n": 12}])
    text = "cab é\nxy21user"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a?b")) == "a<|unknown|>b"
    assert len(tokenizer.encode("abc")) == 3


def test_without_characters_it_knows_printable_ascii():
    _, tokenizer = vf.tiny_model()
    text = "What is (3 + 4) * 5?\n<answer>35</answer>\t~"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chat_is_its_text_with_one_token_for_each_role_and_end():
    _, tokenizer = vf.tiny_model("ab")
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "b"}]
    before = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=True)["input_ids"]
    whole = tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
    assert len(before) == 5
    assert whole[: len(before)] == before
    assert whole[-1] == tokenizer.eos_token_id


def test_a_seed_makes_the_same_weights_and_leaves_the_global_random_numbers_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, same, other = (vf.tiny_model("ab", hidden_size=32, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    weights = [model.state_dict()["model.layers.0.mlp.up_proj.weight"] for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_saved_and_loaded_it_samples_the_same(tmp_path):
    model, tokenizer = vf.tiny_model("abc", hidden_size=32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def say(client: vf.LocalModel) -> str:
        prompt = [{"role": "user", "content": "ab"}]
        request = Request(model="", prompt=prompt, sampling={"temperature": 0.0, "max_tokens": 8})
        with client:
            return asyncio.run(client.complete(request)).text

    assert say(vf.LocalModel(model, tokenizer=tokenizer)) == say(vf.LocalModel(str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 60, "heads": 4}, "hidden_size=60 must be a multiple of 2 × heads=4"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
    ],
    ids=["width", "layers"],
)
def test_sizes_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        vf.tiny_model("ab", **arguments)
