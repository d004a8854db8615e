"""The Tinker server on a CUDA device: it learns, its samplers do not mix, and trainer and sampler agree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import verifiers as vf
from tests.integrations.test_tinker import PROTOBUF, Wire, json_datum, protobuf_request
from tests.integrations.test_tinker_logprobs import (
    add_adapter,
    apart,
    check_every_logprob_of_a_sample,
    draw,
    figures,
    forward,
)
from verifiers.integrations.tinker import TinkerServer
from verifiers.integrations.tinker.adapters import Snapshot
from verifiers.integrations.tinker.service import Service

pytestmark = pytest.mark.gpu


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_card_learns_and_agrees_with_itself(tmp_path: Path, dtype: Any) -> None:
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=128)
    base = model.to(device="cuda", dtype=dtype)
    with TinkerServer(base, tokenizer, name="tiny", folder=tmp_path, rows=64, length=256) as server:
        client, ids = Wire(server.url), tokenizer.encode("0123456789abc")
        asked: dict[str, Any] = {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}

        def learned(model_id: str) -> Any:
            out = client.done("forward", {"model_id": model_id, "forward_input": asked})
            return np.array(out["loss_fn_outputs"][0]["logprobs"]["data"])

        def sampled(model_id: str, number: int) -> tuple[str, Any]:
            body = {"model_id": model_id, "sampling_session_seq_id": number}
            sampler = client.done("save_weights_for_sampler", body)["sampling_session_id"]
            scores = client.sample(sampler, ids, more={"prompt_logprobs": True})["prompt_logprobs"]
            return sampler, np.array(scores[1:])

        models = [client.model(i, rank=4 * (i + 1), seed=i) for i in range(2)]
        start = learned(models[0]).sum()
        for model_id in (models[0], *[models[1]] * 10):
            client.done("forward_backward", protobuf_request(model_id, ids), PROTOBUF)
            client.done("optim_step", {"model_id": model_id, "adam_params": {"learning_rate": 0.005}})
        pairs = [sampled(model_id, i) for i, model_id in enumerate(models)]
        for model_id, (sampler, scores) in zip(models, pairs, strict=True):
            assert np.abs(scores - learned(model_id)).max() <= 1e-5
            replies = client.sample(sampler, ids[:4], n=16, max_tokens=32, seed=1)["sequences"]
            again = client.sample(sampler, ids[:4], n=16, max_tokens=32, seed=1)["sequences"]
            assert [one["tokens"] for one in replies] == [one["tokens"] for one in again]
        assert learned(models[1]).sum() > learned(models[0]).sum() > start


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def large(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Snapshot]]:
    """A model of SmolLM2-135M's shape with random weights that prefer some tokens, and an adapter on every layer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.06,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).to(device="cuda", dtype=request.param)
    _, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    folder = tmp_path_factory.mktemp("tinker")
    with TinkerServer(base, tokenizer, name="large", folder=folder, rows=64, length=1024) as server:
        yield server.service, add_adapter(server.service, 0.01)


def test_on_a_card_samples_have_the_logprobs_of_forward_whatever_is_computed_beside_them(
    large: tuple[Service, Snapshot],
) -> None:
    service, snapshot = large
    some = random.Random(0)
    prompts = [[some.randrange(3, 49152) for _ in range(n)] for n in (2, 17, 64, 65, 200, 300, 511, 700)]
    drawn = draw(service, snapshot, prompts, 150, n=8)
    sampled = [logprobs for _, _, logprobs in drawn]
    got = forward(service, drawn)
    assert sum(map(len, got)) > 5000
    assert float(np.concatenate(got).std()) > 0.3, "the tokens are not all alike"
    ways = {
        "sampler": sampled,
        "the other way around": forward(service, drawn[::-1])[::-1],
        "each datum alone": [forward(service, [one])[0] for one in drawn[::7]],
        "with gradients": forward(service, drawn, has_grad=True),
    }
    for name, one in ways.items():
        wanted = got[::7] if name == "each datum alone" else got
        print(f"{name}: from forward {figures(one, wanted)}")
        assert apart(one, wanted)[0] <= 1e-5, name


def test_on_a_card_every_logprob_of_a_sample_is_that_of_forward(large: tuple[Service, Snapshot]) -> None:
    service, snapshot = large
    check_every_logprob_of_a_sample(service, snapshot, [random.Random(1).randrange(3, 49152) for _ in range(40)])
