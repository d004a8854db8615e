"""Logprobs of a Tinker server: of sampling, of ``forward``, of our trainer, and how far each is from float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import verifiers as vf
from verifiers.engine.sequence import Sampling
from verifiers.integrations.tinker import TinkerServer
from verifiers.integrations.tinker.adapters import LoraShape
from verifiers.integrations.tinker.data import Datum
from verifiers.integrations.tinker.service import Service
from verifiers.samples import Sample
from verifiers.trainers.learning.micro_batches import Trained, micro_batches

pytest.importorskip("peft")

Drawn = list[tuple[list[int], list[int], Any]]  # prompt, reply, logprobs of sampling


def add_adapter(service: Service, size: float) -> str:
    """An adapter that makes another model of the base."""
    name = service.adapters.add(LoraShape(rank=8), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, one in service.adapters._state(name).items():
            if "lora_B" in key:
                one.copy_(torch.randn(one.shape, generator=generator) * size)
    service.adapters.use(name)
    return name


def draw(service: Service, prompts: Sequence[list[int]], n_tokens: int, n: int = 2) -> Drawn:
    sampling = Sampling(max_tokens=n_tokens, temperature=1.0, seed=5)
    asked = [(prompt, one) for prompt in prompts for one in service.ready.engine.submit(prompt, sampling, n=n)]
    found = [(prompt, one.result()) for prompt, one in asked]
    return [(prompt, one.ids, np.array(one.logprobs)) for prompt, one in found]


def forward(service: Service, drawn: Drawn) -> list[Any]:
    """What the request ``forward`` gives for the replies."""
    data = [
        Datum(ids_T=np.array(ids[:-1]), inputs={"target_tokens": np.array(ids[1:])})
        for ids in ([*prompt, *reply] for prompt, reply, _ in drawn)
    ]
    with service.ready.engine.lock, torch.no_grad():
        logprob_N, sequence_N = service.scoring.logprobs(data)
    return [logprob_N[sequence_N == i].numpy()[len(prompt) - 1 :] for i, (prompt, _, _) in enumerate(drawn)]


def trained(service: Service, drawn: Drawn, **layout: Any) -> list[Any]:
    """What GRPOTrainer's update computes for the replies."""
    scorer, found = service.scoring.scorer, [np.empty(0)] * len(drawn)
    sequences = [
        Trained(
            sample=Sample(
                prompt_ids=prompt, completion_ids=reply, completion_mask=[1] * len(reply), completion_logprobs=[*given]
            ),
            advantage=1.0,
        )
        for prompt, reply, given in drawn
    ]
    with service.ready.engine.lock, torch.no_grad():
        for batch in micro_batches(sequences, max_tokens=4096, **layout):
            logprob_N = scorer.logprobs(batch)
            for i, member in enumerate(batch.members):
                found[member] = logprob_N[batch.sequence_N == i].numpy()
    return found


def plain(service: Service, drawn: Drawn, dtype: torch.dtype) -> list[Any]:
    """What the model's own forward gives in some precision."""
    model, found = service.adapters.model.to(dtype), []
    with service.ready.engine.lock, torch.no_grad():
        for prompt, reply, _ in drawn:
            logits = model(input_ids=torch.tensor([[*prompt, *reply[:-1]]])).logits[0, len(prompt) - 1 :]
            found.append(logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0].numpy())
    model.to(torch.float32)
    return found


def gaps(one: Sequence[Any], other: Sequence[Any]) -> Any:
    return np.concatenate([np.float64(a) - np.float64(b) for a, b in zip(one, other, strict=True)])


def apart(one: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
    """The largest distance, and the root mean square."""
    found = gaps(one, other)
    return float(np.abs(found).max()), float(np.sqrt((found**2).mean()))


def figures(one: Sequence[Any], other: Sequence[Any]) -> str:
    found = gaps(one, other)
    most, rms = apart(one, other)
    high = np.quantile(np.abs(found), 0.999)
    return f"mean {found.mean():.1e}, rms {rms:.1e}, 99.9 % {high:.1e}, max {most:.1e} of {len(found)}"


def test_forward_gives_the_trainers_logprobs_and_the_sampler_too_to_1e_5(tmp_path: Path) -> None:
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=64)
    service = TinkerServer(model, tokenizer, name="tiny", folder=tmp_path).service
    try:
        add_adapter(service, 0.02)
        drawn = draw(service, [tokenizer.encode("012"), tokenizer.encode("abcabc012")], 24)
        got, limits = forward(service, drawn), service.scoring.scorer.layouts.limits()
        assert limits["longest_packed"], "both layouts are tried"
        assert apart(trained(service, drawn), got)[0] <= 1e-6
        assert apart(trained(service, drawn, **limits), got)[0] <= 1e-5
        assert apart([logprobs for _, _, logprobs in drawn], got)[0] <= 1e-5
        assert apart(plain(service, drawn, torch.float64), got)[0] <= 1e-5
    finally:
        service.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_a_real_model_what_is_left_is_the_rounding_of_float32(tmp_path: Path) -> None:
    """30 layers, 49,152 tokens: the sampler and forward are as far from float64 as sums of matrix products are."""
    try:
        server = TinkerServer("smollm2", folder=tmp_path, rows=8, length=512)
    except OSError as error:
        pytest.skip(f"the model cannot be had here: {error}")
    service = server.service
    try:
        add_adapter(service, 0.005)
        asked = ("What is the capital of France?", "Write a story about a ship.", "Name five primes.", "Is snow white?")
        chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        prompts = [service.ready.codec.encode(chat.format(text), special=True) for text in asked]
        drawn = draw(service, prompts, 64, n=4)
        exact, got = plain(service, drawn, torch.float64), forward(service, drawn)
        ways = {
            "sampler": [logprobs for _, _, logprobs in drawn],
            "forward": got,
            "trainer, laid out alike": trained(service, drawn),
            "trainer, prompts once": trained(service, drawn, **service.scoring.scorer.layouts.limits()),
            "plain": plain(service, drawn, torch.float32),
        }
    finally:
        service.close()
    for name, one in ways.items():
        print(f"{name}: from float64 {figures(one, exact)}; from forward {figures(one, got)}")
    assert apart(ways["trainer, laid out alike"], got)[0] <= 1e-6
    for one in (ways["sampler"], ways["trainer, prompts once"]):
        assert apart(one, got)[0] < 1e-4
        assert apart(one, got)[1] < 1.5e-5
    for name in ways.keys() - {"plain"}:
        found = gaps(ways[name], exact)
        assert np.abs(found).max() < 1e-4, name
        assert np.sqrt((found**2).mean()) < 1e-5, name
        assert abs(found.mean()) < 3e-6, f"{name} errs to one side"
