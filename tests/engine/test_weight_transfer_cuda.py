"""On a card: NCCL's binding, weights into a served model, and versions of tokens that are still in flight."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers.engine.channel import NcclChannel, backend_here, new_unique_id  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")]


def test_nccls_own_calls_are_bound_as_they_are_declared() -> None:
    """A group of one: what several cards do beyond that is NCCL's."""
    assert backend_here() == "nccl"
    channel = NcclChannel(new_unique_id(), rank=0, world_size=1)
    channel.join()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        tensor = torch.arange(1000, device="cuda").to(dtype)
        kept = tensor.clone()
        channel.broadcast(tensor)
        assert torch.equal(tensor, kept)
    channel.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL does not join two processes on one card")
def test_nccl_sends_between_two_cards() -> None:
    import torch.multiprocessing as processes

    unique_id = new_unique_id()
    processes.spawn(_member, (unique_id,), nprocs=2)


def _member(rank: int, unique_id: str) -> None:
    torch.cuda.set_device(rank)
    channel = NcclChannel(unique_id, rank=rank, world_size=2)
    channel.join()
    tensor = torch.full((1000,), float(rank == 0), device="cuda")
    channel.broadcast(tensor)
    assert bool((tensor == 1).all())
    channel.close()


def test_tokens_in_flight_on_the_device_are_of_the_weights_before() -> None:
    model = tiny.model(tiny.tokenizer()).cuda()
    engine = Engine(model, rows=8, length=400)
    engine.name_weights(4)
    answers = engine.submit([1, 2, 3], Sampling(max_tokens=300, ignore_eos=True), n=4)
    while engine.tokens < 40:
        pass
    with engine.lock, torch.no_grad():
        next(model.parameters()).mul_(1.01)
        engine.name_weights(5)
    for answer in answers:
        spans = answer.result(120).weight_versions
        assert [span.version for span in spans] == ["4", "5"]
        assert spans[0].start == 0
        assert spans[0].end == spans[1].start
        assert spans[1].end == 300
    engine.close()


def test_a_training_on_a_card_sends_its_weights_to_a_sampler_on_the_same_card(tmp_path: Any) -> None:
    from verifiers.engine.server.server import LocalServer

    tokenizer = tiny.tokenizer()
    local = vf.LocalModel(tiny.model(tokenizer, seed=9).cuda(), tokenizer, rows=16)
    with LocalServer(local) as server:
        made = making.trainer(tmp_path, model=tiny.model(tokenizer).cuda(), client=vf.Samplers(server.url), max_steps=3)
        report = made.train()
        ahead: dict[str, Any] = {"num_batches_ahead": 1, "max_staleness": 3, "max_steps": 5}
        stale = making.trainer(tmp_path / "b", model=made.model, client=vf.Samplers(server.url), **ahead).train()
    local.close()
    assert [step["ratio_mean"] for step in report.steps] == pytest.approx([1.0] * 3, abs=1e-2)
    assert 1 <= max(step["staleness_max"] for step in stale.steps) <= 3


def test_rollouts_on_a_card_go_on_across_updates_in_one_process(tmp_path: Any) -> None:
    model = tiny.model(tiny.tokenizer()).cuda()
    settings: dict[str, Any] = {"num_batches_ahead": 1, "max_staleness": 2, "max_steps": 6, "max_new_tokens": 200}
    report = making.trainer(tmp_path, model=model, **settings).train()
    assert max(step["staleness_max"] for step in report.steps) <= 2
    assert max(step["staleness_max"] for step in report.steps) >= 1
