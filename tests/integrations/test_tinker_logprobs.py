"""Logprobs of a Tinker server: of sampling, of ``forward``, of our trainer, and how far each is from float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import verifiers as vf
from verifiers.integrations.tinker import TinkerServer, wire
from verifiers.integrations.tinker.adapters import LoraShape, Snapshot
from verifiers.integrations.tinker.data import Datum
from verifiers.integrations.tinker.samples import SampleRequest
from verifiers.integrations.tinker.scoring import Reply, Scoring
from verifiers.integrations.tinker.service import Service
from verifiers.integrations.tinker.turns import Turns
from verifiers.samples import Sample
from verifiers.trainers.learning.micro_batches import TrainSample, micro_batches
from verifiers.trainers.learning.proof import Layouts
from verifiers.trainers.sampling import Distribution

pytest.importorskip("peft")

Drawn = list[tuple[list[int], list[int], Any]]  # prompt, reply, logprobs of sampling
SHAPE = LoraShape(rank=8)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ASKED = ("What is the capital of France?", "Write a story about a ship.", "Name five primes.", "Is snow white?")


def add_adapter(service: Service, size: float) -> Snapshot:
    """An adapter that makes another model of the base, in force, and a copy of it to sample from."""
    name = service.adapters.add(SHAPE, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, one in service.adapters._state(name).items():
            if "lora_B" in key:
                one.copy_(torch.randn(one.shape, generator=generator) * size)
    service.adapters.use(name)
    return service.adapters.read(name, SHAPE)


def ask(service: Service, snapshot: Snapshot, prompt: list[int], **more: Any) -> Any:
    """What a client is told of a sample request, begun at once."""
    params = {"max_tokens": 64, "temperature": 1.0, "seed": 5, **more.pop("params", {})}
    chunk = {"type": "encoded_text", "tokens": prompt}
    body = {"prompt": {"chunks": [chunk]}, "sampling_params": params, **more}
    return service.drawing.draw(SampleRequest.read(body, service.ready), snapshot).future


def draw(service: Service, snapshot: Snapshot, prompts: Sequence[list[int]], n_tokens: int, n: int = 2) -> Drawn:
    params = {"max_tokens": n_tokens}
    asked = [(prompt, ask(service, snapshot, prompt, num_samples=n, params=params)) for prompt in prompts]
    return [
        (prompt, one["tokens"], np.array(one["logprobs"]))
        for prompt, answer in asked
        for one in answer.result().json()["sequences"]
    ]


def forward(service: Service, drawn: Drawn, *, has_grad: bool = False) -> list[Any]:
    """What the request ``forward`` gives for the replies, or ``forward_backward``."""
    data = [
        Datum(ids_T=np.array(ids[:-1]), inputs={"target_tokens": np.array(ids[1:])})
        for ids in ([*prompt, *reply] for prompt, reply, _ in drawn)
    ]
    found = [np.empty(0)] * len(drawn)
    with service.ready.engine.lock, torch.set_grad_enabled(has_grad):
        for members, logprob_N, sequence_N in service.scoring.logprobs(data):
            for i, member in enumerate(members):
                found[member] = logprob_N[sequence_N == i].detach().cpu().numpy()[len(drawn[member][0]) - 1 :]
    return found


def trained(service: Service, drawn: Drawn, **layout: Any) -> list[Any]:
    """What GRPOTrainer's update computes for the replies."""
    scorer, found = service.scoring.scorer, [np.empty(0)] * len(drawn)
    sequences = [
        TrainSample(
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
        snapshot = add_adapter(service, 0.02)
        drawn = draw(service, snapshot, [tokenizer.encode("012"), tokenizer.encode("abcabc012")], 24)
        got, limits = forward(service, drawn), service.scoring.scorer.layouts.limits()
        assert limits["longest_packed"], "both layouts are tried"
        assert apart(trained(service, drawn), got)[0] <= 1e-6
        assert apart(trained(service, drawn, **limits), got)[0] <= 1e-5
        assert apart([logprobs for _, _, logprobs in drawn], got)[0] <= 1e-5
        assert apart(plain(service, drawn, torch.float64), got)[0] <= 1e-5
    finally:
        service.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Snapshot]]:
    """SmolLM2-135M: 30 layers, 49,152 tokens, an adapter on every layer and on the head."""
    try:
        server = TinkerServer("smollm2", folder=tmp_path_factory.mktemp("tinker"), rows=16, length=512)
    except OSError as error:
        pytest.skip(f"the model cannot be had here: {error}")
    try:
        yield server.service, add_adapter(server.service, 0.005)
    finally:
        server.service.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_a_real_model_sampling_forward_and_our_trainer_agree_to_1e_5(real: tuple[Service, Snapshot]) -> None:
    service, snapshot = real
    prompts = [service.ready.codec.encode(CHAT.format(text), special=True) for text in ASKED]
    drawn = draw(service, snapshot, prompts, 64, n=4)
    got = forward(service, drawn)
    assert sum(map(len, got)) > 500
    layout = service.scoring.scorer.layouts.limits()
    assert layout["longest_packed"], "prompts are computed once"
    ways = {
        "sampler": [logprobs for _, _, logprobs in drawn],
        "forward, each datum alone": [forward(service, [one])[0] for one in drawn],
        "trainer, rows side by side": trained(service, drawn),
        "trainer, prompts once": trained(service, drawn, **layout),
    }
    for name, one in ways.items():
        print(f"{name}: from forward {figures(one, got)}")
        assert apart(one, got)[0] <= 1e-5, name
    exact = plain(service, drawn, torch.float64)
    print(f"forward: from float64 {figures(got, exact)}")
    found = gaps(got, exact)
    assert np.abs(found).max() < 1e-4
    assert np.sqrt((found**2).mean()) < 1e-5
    assert abs(found.mean()) < 3e-6, "it errs to one side"


def check_every_logprob_of_a_sample(service: Service, snapshot: Snapshot, prompt: list[int]) -> None:
    """Of the prompt, of alternatives, of one token, and under other temperatures and truncations."""
    told = ask(
        service, snapshot, prompt, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
        params={"max_tokens": 24},
    ).result()  # fmt: skip
    body, message = told.json(), wire.message("SampleResponse")
    message.ParseFromString(told.protobuf())
    reply = body["sequences"][0]["tokens"]
    wanted = [
        [token, *(other for other, _ in some)]
        for token, some in zip(prompt[1:], body["topk_prompt_logprobs"][1:], strict=True)
    ]
    got = several(service, [*prompt[:-1]], wanted)
    assert np.abs(np.array(body["prompt_logprobs"][1:]) - got[:, 0]).max() <= 1e-5
    assert (
        np.abs(np.array([[value for _, value in some] for some in body["topk_prompt_logprobs"][1:]]) - got[:, 1:]).max()
        <= 1e-5
    )
    top = message.sequences[0].topk_sampled_logprobs
    ids, values = (
        np.frombuffer(one, kind).reshape(-1, 2) for one, kind in ((top.token_ids, np.int32), (top.logprobs, np.float32))
    )
    got = several(service, [*prompt, *reply[:-1]], [[0, 0]] * (len(prompt) - 1) + ids.tolist())[len(prompt) - 1 :]
    assert np.abs(values - got).max() <= 1e-5

    (short,) = draw(service, snapshot, [prompt], 1, n=1)
    assert apart(forward(service, [short]), [short[2]])[0] <= 1e-5
    for params in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5, "temperature": 1.5}, {"temperature": 0.0}):
        one = ask(service, snapshot, prompt, params={"max_tokens": 16, **params}).result().json()["sequences"][0]
        drawn_from = Distribution(**{**params, **({"temperature": 1.0} if params.get("temperature") == 0 else {})})
        (again,) = service.scoring.replies([Reply(prompt, one["tokens"], drawn_from)])
        assert np.abs(np.array(again) - one["logprobs"]).max() <= 1e-5, params


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_a_real_model_every_logprob_of_a_sample_is_that_of_forward(real: tuple[Service, Snapshot]) -> None:
    service, snapshot = real
    check_every_logprob_of_a_sample(service, snapshot, service.ready.codec.encode(CHAT.format(ASKED[1]), special=True))


def several(service: Service, ids: list[int], targets: list[list[int]]) -> Any:
    """The logprobs that ``forward`` gives for several targets at each place."""
    datum = Datum(ids_T=np.array(ids), inputs={"target_tokens": np.array(targets)})
    with service.ready.engine.lock, torch.no_grad():
        ((_, logprob_N, _),) = service.scoring.logprobs([datum])
    return logprob_N.cpu().numpy().reshape(len(ids), -1)


def test_a_model_that_computes_one_sequence_at_a_time_scores_short_ones_too(tmp_path: Path) -> None:
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    service = TinkerServer(model, tokenizer, name="tiny", folder=tmp_path).service
    try:
        snapshot = add_adapter(service, 0.02)
        drawn = draw(service, snapshot, [tokenizer.encode("01")], 3, n=1)
        before = forward(service, drawn)
        service.scoring.scorer.layouts = Layouts()
        assert apart(forward(service, drawn), before)[0] <= 1e-5
        told = (
            ask(service, snapshot, tokenizer.encode("01"), prompt_logprobs=True, topk_prompt_logprobs=2).result().json()
        )
        assert told["topk_prompt_logprobs"][1][0][1] >= told["prompt_logprobs"][1] - 1e-6
    finally:
        service.close()


def test_rectangles_of_fixed_sizes_give_the_logprobs_of_packed_rows(tmp_path: Path, monkeypatch: Any) -> None:
    """The layout of a card, here on the CPU: the same numbers, and gradients from the same places."""
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    service = TinkerServer(model, tokenizer, name="tiny", folder=tmp_path, length=256).service
    try:
        snapshot = add_adapter(service, 0.02)
        prompts = [tokenizer.encode("01" * n) for n in (1, 5, 40)]
        drawn = draw(service, snapshot, prompts, 70, n=3)
        packed, several_packed = forward(service, drawn), several(service, prompts[2], [[3, 4, 5]] * len(prompts[2]))
        monkeypatch.setattr(Scoring, "_packed", Scoring._rectangles)
        monkeypatch.setattr(service.scoring, "_tokens", 1024)
        assert apart(forward(service, drawn), packed)[0] <= 1e-5
        assert np.abs(several(service, prompts[2], [[3, 4, 5]] * len(prompts[2])) - several_packed).max() <= 1e-5
        check_every_logprob_of_a_sample(service, snapshot, prompts[1])
        service.scoring.scorer.layouts = Layouts()
        assert apart(forward(service, drawn), packed)[0] <= 1e-5, "one sequence at a time"
    finally:
        service.close()


def test_a_request_that_cannot_be_finished_fails_alone_among_those_that_end_with_it(tmp_path: Path) -> None:
    def finish(done: list[tuple[Any, Any]]) -> list[Any]:
        if any(asked == "bad" for asked, _ in done):
            raise ValueError("no")
        return [f"{asked}: {found}" for asked, found in done]

    turns, started = Turns(lambda key: None), [Future[Any]() for _ in range(3)]
    try:
        asked = ("one", "bad", "two")
        jobs = [
            turns.submit(lambda one=one: one, key=(1,), finish=finish, asked=name)  # type: ignore[misc]
            for one, name in zip(started, asked, strict=True)
        ]
        for i, one in enumerate(started):
            one.set_result(i)
        assert jobs[0].result(20) == "one: 0"
        assert jobs[2].result(20) == "two: 2"
        with pytest.raises(ValueError, match="no"):
            jobs[1].result(20)
    finally:
        turns.close()
