"""The Tinker server on a CUDA device: it learns, its samplers do not mix, and trainer and sampler agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import verifiers as vf
from tests.integrations.test_tinker import PROTOBUF, Wire, json_datum, protobuf_request
from verifiers.integrations.tinker import TinkerServer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_a_card_learns_and_agrees_with_itself(tmp_path: Path, dtype: Any, within: float) -> None:
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
            assert np.abs(scores - learned(model_id)).max() < within
            replies = client.sample(sampler, ids[:4], n=16, max_tokens=32, seed=1)["sequences"]
            again = client.sample(sampler, ids[:4], n=16, max_tokens=32, seed=1)["sequences"]
            assert [one["tokens"] for one in replies] == [one["tokens"] for one in again]
        assert learned(models[1]).sum() > learned(models[0]).sum() > start
