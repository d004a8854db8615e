"""The server that Tinker's SDK trains against, by its wire; the SDK and the cookbook in environments of their own."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import verifiers as vf
from tests.support.venvs import python_with, run_contract
from verifiers.cli.main import vf as command
from verifiers.errors import RequestRefusedError
from verifiers.integrations.tinker import TinkerServer, wire
from verifiers.integrations.tinker.client import TinkerClient
from verifiers.integrations.tinker.custom_losses import CustomLoss
from verifiers.integrations.tinker.losses import LOSSES
from verifiers.integrations.tinker.store import Place
from verifiers.integrations.tinker.trainer import check_sampling
from verifiers.integrations.tinker.turns import Turns
from verifiers.integrations.tinker.update import check_config
from verifiers.trainers.config import GRPOConfig

PROTOBUF = {"Content-Type": wire.PROTOBUF, "Accept": wire.PROTOBUF}


class Wire:
    """A client of the wire alone: JSON and protobuf over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/api/v1"
        self.session = self.post("create_session", {})["session_id"]

    def ask(self, path: str, body: Any, headers: dict[str, str] | None = None, method: str = "POST") -> tuple[int, Any]:
        async def main() -> tuple[int, Any]:
            sent = {"data": body} if isinstance(body, bytes) else {"json": body}
            async with (
                aiohttp.ClientSession() as client,
                client.request(method, f"{self.url}/{path}", headers=headers, **sent) as reply,
            ):
                raw = await reply.read()
                return reply.status, raw if wire.PROTOBUF in reply.content_type else json.loads(raw or b"{}")

        return asyncio.run(main())

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        status, found = self.ask(path, body, headers)
        assert status == 200, found
        return found

    def done(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        """What a request gives, once it has been fetched."""
        request = self.post(path, body, headers)["request_id"]
        accept = None if headers is None else {"Accept": headers["Accept"]}
        return self.post("retrieve_future", {"request_id": request}, accept)

    def model(self, number: int = 0, **lora: Any) -> str:
        body = {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4, **lora},
        }
        return str(self.done("create_model", body)["model_id"])

    def sampler(self, number: int, **what: Any) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": number, **what}
        return str(self.post("create_sampling_session", body)["sampling_session_id"])

    def sample(
        self, sampler: str, ids: list[int], n: int = 1, headers: Any = None, more: Any = None, **params: Any
    ) -> Any:
        body = {"sampling_session_id": sampler, "num_samples": n, "prompt": prompt_of(ids), **(more or {})}
        return self.done("asample", {**body, "sampling_params": {"max_tokens": 4, **params}}, headers)


def prompt_of(ids: list[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": ids}]}


def json_datum(ids: list[int]) -> dict[str, Any]:
    targets = {"data": ids[1:], "dtype": "int64", "shape": [len(ids) - 1]}
    return {"model_input": prompt_of(ids[:-1]), "loss_fn_inputs": {"target_tokens": targets}}


def protobuf_request(model: str, ids: list[int], *, seq_id: int = 0, forward_only: bool = False) -> bytes:
    request = wire.message("ForwardBackwardRequest")
    request.model_id, request.seq_id, request.loss_fn, request.forward_only = (
        model,
        seq_id,
        "cross_entropy",
        forward_only,
    )
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(ids[:-1], np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dense, tensor.dtype = np.array(ids[1:], np.int64).tobytes(), wire.INT64
    tensor.shape.append(len(ids) - 1)
    return bytes(request.SerializeToString())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinkerServer, Any]]:
    pytest.importorskip("peft")
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    with TinkerServer(model, tokenizer, name="tiny", folder=tmp_path_factory.mktemp("tinker")) as server:
        yield server, tokenizer


def test_protobuf_and_json_say_the_same_and_agree_with_the_sampler_to_1e_5(served: tuple[TinkerServer, Any]) -> None:
    server, tokenizer = served
    client, ids = Wire(server.url), tokenizer.encode("0123abc")
    model = client.model()
    asked = {"model_id": model, "forward_input": {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}}
    told = client.done("forward", asked)["loss_fn_outputs"][0]["logprobs"]
    assert (told["dtype"], told["shape"]) == ("float32", [len(ids) - 1])
    raw = client.done("forward_backward", protobuf_request(model, ids, forward_only=True), PROTOBUF)
    out = wire.message("ForwardBackwardOutput")
    out.ParseFromString(raw)
    binary = np.frombuffer(out.loss_fn_outputs[0].fields["logprobs"].data, np.float32)
    assert np.allclose(binary, told["data"], atol=1e-7)
    assert out.metrics["loss:sum"] == pytest.approx(-sum(told["data"]), rel=1e-5)
    snapshot = {"model_id": model, "sampling_session_seq_id": 50}
    sampler = client.done("save_weights_for_sampler", snapshot)["sampling_session_id"]
    scored = client.sample(sampler, ids, more={"prompt_logprobs": True})
    assert scored["prompt_logprobs"][0] is None
    assert np.allclose(scored["prompt_logprobs"][1:], told["data"], atol=1e-5)
    reply = wire.message("SampleResponse")
    reply.ParseFromString(client.sample(sampler, ids, n=3, headers=PROTOBUF, seed=1))
    assert [len(one.tokens) // 4 for one in reply.sequences] == [len(one.logprobs) // 4 for one in reply.sequences]
    again = client.sample(sampler, ids, n=3, seed=1)["sequences"]
    assert [np.frombuffer(one.tokens, np.int32).tolist() for one in reply.sequences] == [one["tokens"] for one in again]


def test_a_step_moves_one_adapter_and_no_sampler_that_was_there_before(served: tuple[TinkerServer, Any]) -> None:
    server, tokenizer = served
    client, ids = Wire(server.url), tokenizer.encode("abcabc")
    first, second = client.model(0, seed=1), client.model(1, rank=8, train_unembed=False, seed=2)

    def snapshot(model: str, number: int) -> str:
        body = {"model_id": model, "sampling_session_seq_id": number}
        return str(client.done("save_weights_for_sampler", body)["sampling_session_id"])

    def scores(sampler: str) -> list[float]:
        return list(client.sample(sampler, ids, more={"prompt_logprobs": True})["prompt_logprobs"][1:])

    before = snapshot(first, 60)
    base = client.sampler(61, base_model="tiny")
    start = scores(base)
    assert np.allclose(scores(before), start, atol=1e-6)  # a new adapter changes nothing
    for model in (first, second, second):
        client.done("forward_backward", protobuf_request(model, ids), PROTOBUF)
        step = client.done("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.01}})
        assert step["metrics"]["grad_norm"] > 0
    samplers = [snapshot(first, 62), snapshot(second, 63)]
    one, two = (scores(sampler) for sampler in samplers)
    assert sum(one) > sum(start)
    assert sum(two) > sum(one)
    assert np.allclose(scores(before), start, atol=1e-6)
    assert np.allclose([scores(samplers[i]) for i in (1, 0, 1, 0)], [two, one, two, one], atol=1e-6)
    assert np.allclose(scores(base), start, atol=1e-6)


def test_a_request_that_is_sent_again_is_not_done_again(served: tuple[TinkerServer, Any]) -> None:
    server, tokenizer = served
    client, ids = Wire(server.url), tokenizer.encode("012012")
    model = client.model()
    sent = protobuf_request(model, ids, seq_id=5)
    twice = [client.post("forward_backward", sent, PROTOBUF)["request_id"] for _ in range(2)]
    assert twice[0] == twice[1]
    step = {"model_id": model, "seq_id": 6, "adam_params": {"learning_rate": 0.01}}
    assert client.post("optim_step", step)["request_id"] == client.post("optim_step", step)["request_id"]


def test_what_is_saved_is_there_in_a_server_that_is_started_anew(tmp_path: Path) -> None:
    pytest.importorskip("peft")

    def serve() -> TinkerServer:
        model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
        return TinkerServer(model, tokenizer, name="tiny", folder=tmp_path)

    ids = [8, 9, 10, 11, 12]
    with serve() as server:
        client = Wire(server.url)
        model = client.model(seed=3)
        for _ in range(2):
            client.done("forward_backward", protobuf_request(model, ids), PROTOBUF)
            client.done("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.01}})
        path = client.done("save_weights", {"model_id": model, "path": "two"})["path"]
        for_sampler = client.done("save_weights_for_sampler", {"model_id": model, "path": "two"})["path"]
        client.done("forward_backward", protobuf_request(model, ids), PROTOBUF)
        client.done("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.01}})
        wanted = client.done(
            "forward", {"model_id": model, "forward_input": {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}}
        )
        refused = client.done("save_weights", {"model_id": model, "path": "two"})
        assert "already exists" in refused["error"]
        assert refused["category"] == "user"
    with serve() as server:
        client = Wire(server.url)
        assert client.ask("optim_step", {"model_id": model})[0] == 404  # the training itself is gone
        told = client.post("weights_info", {"tinker_path": path})
        assert (told["base_model"], told["lora_rank"], told["train_mlp"]) == ("tiny", 4, True)
        model = client.model()
        client.done("load_weights", {"model_id": model, "path": path, "optimizer": True})
        client.done("forward_backward", protobuf_request(model, ids), PROTOBUF)
        client.done("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.01}})
        got = client.done(
            "forward", {"model_id": model, "forward_input": {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}}
        )
        assert got["loss_fn_outputs"][0]["logprobs"]["data"] == pytest.approx(
            wanted["loss_fn_outputs"][0]["logprobs"]["data"], abs=1e-6
        )
        assert client.sample(client.sampler(1, model_path=for_sampler), ids)["sequences"][0]["tokens"]
        other = client.model(1, rank=2)
        assert "LoRA" in client.done("load_weights", {"model_id": other, "path": path, "optimizer": False})["error"]


def test_bad_input_is_refused_in_a_sentence_that_names_it(served: tuple[TinkerServer, Any]) -> None:
    server, tokenizer = served
    client, ids = Wire(server.url), tokenizer.encode("0123")
    model, sampler = client.model(), client.sampler(70, base_model="tiny")
    good = {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}
    wide = json_datum([5, 10**6])

    def learn(**changes: Any) -> Any:
        return "forward_backward", {"model_id": model, "forward_backward_input": {**good, **changes}}

    def sample(**changes: Any) -> Any:
        return "asample", {"sampling_session_id": sampler, "prompt": prompt_of(ids), "sampling_params": {}, **changes}

    for (path, body), status, words in (
        (learn(loss_fn="no_loss"), 400, "unknown loss 'no_loss'"),
        (learn(loss_fn="ppo"), 400, "datum 0 has no logprobs"),
        (learn(loss_fn="custom", loss_fn_config={"loss_id": "x"}), 404, "no custom loss 'x'"),
        (learn(loss_fn_config={"beta": 1}), 400, "no setting 'beta'"),
        (learn(loss_fn_config=[1]), 400, "loss_fn_config must be an object"),
        (learn(data=[]), 400, "no data"),
        (learn(data=[wide]), 400, "not tokens of this model"),
        (learn(data=[json_datum(ids * 100)]), 400, "the context of the model is 256"),
        (("forward_backward", {"model_id": "gone", "forward_backward_input": good}), 404, "no training 'gone'"),
        (("optim_step", {"model_id": model, "adam_params": {"lr": 1}}), 400, "no setting 'lr'"),
        (("optim_step", {"model_id": model, "adam_params": {"learning_rate": "x"}}), 400, "learning_rate"),
        (
            ("optim_step", {"model_id": model, "adam_params": {"learning_rate": 1e30}}),
            400,
            "the learning rate is 1e+30",
        ),
        (("optim_step", {"model_id": model, "adam_params": {"learning_rate": -1e-4}}), 400, "out of range: -0.0001"),
        (
            ("optim_step", {"model_id": model, "adam_params": {"learning_rate": float("nan")}}),
            400,
            "out of range: nan",
        ),
        (("optim_step", {"model_id": model, "adam_params": {"learning_rate": 1, "weight_decay": 2}}), 400, "is 2"),
        (("save_weights", {"model_id": model, "path": "../up"}), 400, "name"),
        (("load_weights", {"model_id": model, "path": "tinker://a/weights/../../x"}), 400, "not a path of saved"),
        (
            ("create_model", {"session_id": client.session, "base_model": "other"}),
            404,
            "this server has no model 'other'",
        ),
        (
            ("create_model", {"session_id": client.session, "base_model": "tiny", "model_seq_id": 9}),
            400,
            "lora_config",
        ),
        (
            ("create_model", {"session_id": client.session, "base_model": "tiny", "model_seq_id": "../../up"}),
            400,
            "model_seq_id",
        ),
        (
            (
                "create_model",
                {"session_id": client.session, "base_model": "tiny", "model_seq_id": 8, "optimizer_config": [1]},
            ),
            400,
            "this server is adamw, not [1]",
        ),
        (("create_session_of_my_own", {}), 404, "has no such endpoint"),
        (sample(sampling_session_id="gone"), 404, "no sampling session 'gone'"),
        (sample(sampling_params={"beams": 4}), 400, "unknown sampling parameter 'beams'"),
        (sample(sampling_params={"temperature": -1}), 400, "temperature"),
        (sample(prompt=prompt_of([])), 400, "prompt is empty"),
        (sample(prompt={"chunks": [{"type": "image", "data": ""}]}), 400, "text tokens"),
        (sample(num_samples=0), 400, "num_samples"),
    ):
        found = client.ask(path, body)
        assert found[0] == status, (path, found)
        assert words in found[1]["error"], found
    assert client.ask("forward_backward", b"\xff\xff", PROTOBUF)[0] == 400
    assert client.ask("retrieve_future", {"request_id": "gone"})[0] == 410
    assert client.ask("create_session", {}, {"Host": "evil.example"})[0] == 421
    assert client.ask("create_session", {}, {"Origin": "http://evil.example"})[0] == 403


def test_numbers_that_are_not_finite_move_no_weights_and_are_told(served: tuple[TinkerServer, Any]) -> None:
    server, tokenizer = served
    client, ids = Wire(server.url), tokenizer.encode("0123")
    model, step = client.model(), {"adam_params": {"learning_rate": 0.01}}

    def learn(advantage: float, loss_fn: str = "importance_sampling", **config: float) -> tuple[int, Any]:
        one = json_datum(ids)
        for name, value in (("logprobs", -3.0), ("advantages", advantage)):
            column = {"data": [value] * (len(ids) - 1), "dtype": "float32", "shape": [len(ids) - 1]}
            one["loss_fn_inputs"][name] = column
        body = {"model_id": model, "forward_backward_input": {"data": [one], "loss_fn": loss_fn}}
        body["forward_backward_input"]["loss_fn_config"] = config
        return fetched("forward_backward", body)

    def fetched(path: str, body: Any) -> tuple[int, Any]:
        status, found = client.ask(path, body)
        return client.ask("retrieve_future", {"request_id": found["request_id"]}) if status == 200 else (status, found)

    def of(found: tuple[int, Any]) -> Any:
        return found[1]["loss_fn_outputs"][0]["logprobs"]["data"]

    before = of(learn(0.0))
    for wrong, words in (
        (learn(float("nan")), "advantages has a value that is not finite"),
        (learn(1.0, "ppo", clip_low_threshold=float("nan")), "clip_low_threshold must be a number, not nan"),
        (learn(3e38), "the loss is -inf"),
    ):
        assert words in str(wrong[1]), wrong
    learn(1e37)  # its loss is a number; the square of its gradient is not
    assert "norm of the gradients is inf" in str(fetched("optim_step", {"model_id": model, **step})[1])
    assert of(learn(0.0)) == before
    assert fetched("optim_step", {"model_id": model, **step})[1]["metrics"]["grad_norm"] == 0.0


def test_a_reply_ends_at_the_stops_that_are_given_and_at_no_other(served: tuple[TinkerServer, Any]) -> None:
    server, tokenizer = served
    client, ids = Wire(server.url), tokenizer.encode("01")
    sampler = client.sampler(80, base_model="tiny")
    end = tokenizer.eos_token_id
    for seed in range(3):
        drawn = client.sample(sampler, ids, n=4, seed=seed, max_tokens=60)["sequences"]
        for one in drawn:
            assert (one["stop_reason"] == "stop") == (one["tokens"][-1] == end)
            assert end not in one["tokens"][:-1]
        endless = client.sample(sampler, ids, seed=seed, max_tokens=20, stop=[])["sequences"][0]
        assert len(endless["tokens"]) == 20
        by_text = client.sample(sampler, ids, seed=seed, max_tokens=60, stop=["a"])["sequences"][0]
        assert tokenizer.encode("a")[0] not in by_text["tokens"][:-1]


def test_a_session_that_ends_takes_its_trainings_and_samplers_with_it(served: tuple[TinkerServer, Any]) -> None:
    server, _ = served
    client = Wire(server.url)
    model, sampler = client.model(), client.sampler(90, base_model="tiny")
    client.ask(f"sessions/{client.session}/finish", {})
    assert client.ask("optim_step", {"model_id": model})[0] == 404
    assert client.ask("asample", {"sampling_session_id": sampler})[0] == 404
    assert client.ask("session_heartbeat", {"session_id": client.session})[0] == 404


def test_a_server_with_a_key_answers_to_it_only(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, tokenizer = vf.tiny_model("01", hidden_size=32)
    with pytest.raises(ValueError, match="API key"):
        TinkerServer(model, tokenizer, folder=tmp_path, host="0.0.0.0")
    with TinkerServer(model, tokenizer, name="tiny", folder=tmp_path, api_key="tml-secret") as server:
        client = object.__new__(Wire)
        client.url = f"{server.url}/api/v1"
        assert client.ask("create_session", {})[0] == 401
        assert client.ask("create_session", {}, {"X-API-Key": "tml-other"})[0] == 401
        assert client.ask("create_session", {}, {"X-API-Key": "tml-secret"})[0] == 200


# --- whose turn it is -----------------------------------------------------------------------------------------------


def test_samples_of_one_snapshot_run_together_and_never_beside_another_or_a_training() -> None:
    in_force: list[Any] = []
    turns = Turns(lambda key: in_force.append(key))
    running: dict[str, Future[str]] = {}
    seen: list[str] = []
    started = threading.Semaphore(0)

    def sampling(name: str) -> Any:
        def start() -> Future[str]:
            seen.append(name)
            running[name] = Future()
            started.release()
            return running[name]

        return start

    gate = threading.Event()
    turns.submit(gate.wait)
    futures = [turns.submit(sampling(name), key=(name[0],)) for name in ("a1", "b1", "a2")]
    training = turns.submit(lambda: seen.append("train"))
    futures.append(turns.submit(sampling("b2"), key=("b",)))
    gate.set()
    for _ in range(2):
        assert started.acquire(timeout=30)
    assert sorted(seen) == ["a1", "a2"]  # b and the training wait until both are done
    running["a1"].set_result("a1")
    assert not futures[1].done()
    running["a2"].set_result("a2")
    for _ in range(2):
        assert started.acquire(timeout=30)
    assert "train" not in seen
    for name in ("b1", "b2"):
        running[name].set_result(name)
    training.result(30)
    assert [one.result(30) for one in futures] == ["a1", "b1", "a2", "b2"]
    assert in_force == [("a",), ("b",)]
    turns.close()


# --- losses ---------------------------------------------------------------------------------------------------------


def test_every_loss_of_the_sdk_is_its_formula_with_a_gradient() -> None:
    torch.manual_seed(0)
    lp = torch.randn(9, dtype=torch.float64).sub(2).requires_grad_()
    q, a = lp.detach() + 0.4 * torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    sequences = torch.tensor([0] * 4 + [1] * 5)
    inputs = {"logprobs": q, "advantages": a, "weights": a.abs()}
    r = (lp - q).exp()
    means = torch.stack([(lp - q)[sequences == i].mean() for i in range(2)]).exp()[sequences]
    s = means.detach() * (lp - lp.detach()).exp()
    wanted = {
        "cross_entropy": -a.abs() * lp,
        "importance_sampling": -r * a,
        "ppo": -torch.minimum(r * a, r.clamp(0.8, 1.2) * a),
        "cispo": -r.detach().clamp(0.8, 1.2) * a * lp,
        "dro": -(a * lp - 0.025 * (lp - q) ** 2),
        "gspo": -torch.minimum(s * a, s.clamp(0.8, 1.2) * a),
        "stable_reinforce": -r.detach().clamp(max=2) * a * lp + 0.01 * ((q - lp).exp() - (q - lp) - 1),
    }
    assert wanted.keys() == LOSSES.keys()
    for name, expected in wanted.items():
        got = LOSSES[name][0](lp, inputs, {}, sequences)
        assert torch.allclose(got, expected.to(got.dtype)), name
        ours, theirs = (torch.autograd.grad(one.sum(), lp, retain_graph=True)[0] for one in (got, expected))
        assert torch.allclose(ours, theirs), name
    for_each = {**inputs, "clip_low_threshold": torch.full((9,), 0.5), "clip_high_threshold": torch.full((9,), 3.0)}
    assert torch.allclose(LOSSES["ppo"][0](lp, for_each, {}, sequences), -torch.minimum(r * a, r.clamp(0.5, 3.0) * a))


def test_a_traced_loss_runs_and_one_that_reaches_further_is_refused() -> None:
    def node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
        return {"op": op, "name": name, "target": target, "args": list(args)}

    def loss(*nodes: dict[str, Any]) -> dict[str, Any]:
        given = [node("placeholder", "logprobs", "logprobs")]
        return {"name": "mine", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"nodes": [*given, *nodes]}}

    total = node("call_method", "total", "sum", {"ref": "logprobs"})
    negative = node("call_function", "negative", "operator.neg", {"ref": "total"})
    out = node(
        "output", "output", "output", {"tuple": [{"ref": "negative"}, {"dict": {"custom/n:sum": {"ref": "total"}}}]}
    )
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    value, figures = CustomLoss.read(loss(total, negative, out))(logprobs, {})
    assert (float(value.detach()), figures) == (3.0, {"custom/n:sum": -3.0})
    for op, target in (
        ("call_function", "os.system"),
        ("call_function", "torch.load"),
        ("call_function", "builtins.eval"),
        ("call_method", "__reduce__"),
        ("call_method", "numpy"),
        ("get_attr", "weight"),
        ("call_module", "net"),
    ):
        with pytest.raises(RequestRefusedError, match="may not use"):
            CustomLoss.read(loss(node(op, "x", target, {"ref": "logprobs"})))
    reading = node("call_function", "x", "builtins.getattr", {"ref": "logprobs"}, "__class__")
    with pytest.raises(RequestRefusedError, match="__class__"):
        CustomLoss.read(loss(reading, out))(logprobs, {})

    def growing(target: str, *args: Any, times: int = 100) -> list[dict[str, Any]]:
        nodes = [node("call_function", "x0", target, *args)]
        return [*nodes, *(node("call_function", f"x{i}", target, *[{"ref": f"x{i - 1}"}] * 2) for i in range(1, times))]

    wide = node("call_method", "wide", "expand", {"ref": "total"}, 1 << 20)
    for nodes, words in (
        ([node("call_function", "x", "operator.pow", 9, 10**9)], "exponents up to 64"),
        ([node("call_function", "x", "operator.pow", {"float": "2.0"}, 10**400)], "accept this int"),
        (growing("operator.mul", 3, 3), "accept this int"),
        (growing("operator.add", {"tuple": [1] * 9}, {"tuple": [1] * 9}), "accept this tuple"),
        ([node("call_function", "x", "operator.mul", {"tuple": [1]}, 10**12)], "accept this tuple"),
        ([node("call_function", "x", "operator.mod", "%1000000000d", 1)], "accept this str"),
        ([total, node("call_method", "x", "expand", {"ref": "total"}, 1 << 20, 1 << 20)], "at expand"),
        ([total, wide, *growing("operator.mul", {"ref": "wide"}, {"ref": "wide"}, times=600)], "at operator.mul"),
        (
            [
                *(total, wide, node("call_method", "tall", "unsqueeze", {"ref": "wide"}, 1)),
                node("call_function", "x", "torch.add", {"ref": "wide"}, {"ref": "tall"}),
            ],
            "at torch.add",
        ),
    ):
        with pytest.raises(RequestRefusedError, match=words):
            CustomLoss.read(loss(*nodes, out))(logprobs, {})


# --- the backend and the command line -------------------------------------------------------------------------------


def test_tinker_is_asked_for_temperature_1_and_for_nothing_it_cannot_do() -> None:
    check_sampling({"temperature": 1.0, "max_tokens": 8})
    with pytest.raises(ValueError, match=r"temperature must be 1\.0 with Tinker, got 0\.7"):
        check_sampling({"temperature": 0.7})
    with pytest.raises(ValueError, match="top_p"):
        check_sampling({"temperature": 1.0, "top_p": 0.9})
    for wrong in (
        *({"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"importance_sampling_mode": "token_mask"}),
        *({"bf16": True}, {"optim": "adamw_8bit"}, {"load_in_4bit": True}),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            check_config(GRPOConfig(**wrong), 1)
    usual = GRPOConfig()
    usual.check()
    check_config(usual, 1)


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of the SDK as a request for samples is made of."""
    types = SimpleNamespace(ModelInput=SimpleNamespace(from_ints=list), SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "tinker", SimpleNamespace(types=types))


@pytest.mark.usefixtures("sdk")
def test_what_tinker_samples_is_a_rollout_and_an_answer_that_makes_no_sense_fails_it_at_once() -> None:
    _, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    (four,) = tokenizer.encode("4")
    whole = SimpleNamespace(tokens=[four], logprobs=[-0.5], stop_reason="stop")
    env = vf.SingleTurnEnv(
        eval_dataset=[{"prompt": "012", "answer": "4"}],
        rubric=vf.Rubric([lambda completion, answer: float(completion == answer)]),
        message_type="completion",
    )
    for sequences, rewards, error in (
        ([whole], [1.0], None),
        (
            [SimpleNamespace(tokens=[four], logprobs=[], stop_reason="stop")],
            [],
            "Tinker returned 1 tokens but 0 logprobs",
        ),
        ([], [], "Tinker did not answer"),
    ):
        answered: Future[Any] = Future()
        answered.set_result(SimpleNamespace(sequences=sequences))
        given = SimpleNamespace(future=lambda answered=answered: answered)
        client = TinkerClient(SimpleNamespace(sample=lambda given=given, **_: given), tokenizer, name="tiny")
        results = env.evaluate(client=client, model="tiny", use_tqdm=False)
        client.close()
        assert results["reward"] == rewards
        assert [error in str(one["error"]) for one in results.failed if error] == [True] * (1 - len(rewards))


def test_paths_of_saved_weights_name_a_place_in_the_folder_and_nowhere_else() -> None:
    place = Place.read("tinker://a1:train:0/sampler_weights/000010")
    assert str(place) == "tinker://a1:train:0/sampler_weights/000010"
    for wrong in (
        "tinker://../weights/x",
        "tinker://a/other/x",
        "tinker://a/weights/..",
        "/etc/passwd",
        None,
        "tinker://a/weights/b/c",
    ):
        with pytest.raises(RequestRefusedError, match="not a path of saved weights"):
            Place.read(wrong)


def test_tinker_serve_says_in_one_sentence_what_is_wrong(tmp_path: Path, served: tuple[TinkerServer, Any]) -> None:
    def run(*args: str) -> Any:
        return CliRunner().invoke(command, ["tinker-serve", *args])

    missing = run(str(tmp_path / "nothing"))
    assert missing.exit_code in (1, 2)
    assert "nothing" in missing.output
    assert "Traceback" not in missing.output
    model, tokenizer = vf.tiny_model("01", hidden_size=32)
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    taken = run(str(tmp_path / "tiny"), "--port", str(served[0].port), "--dir", str(tmp_path / "saved"))
    assert taken.exit_code == 1
    assert "cannot listen on" in taken.output
    assert "Traceback" not in taken.output
    assert run("smollm2", "--host", "0.0.0.0").exit_code == 2
    local = CliRunner().invoke(command, ["train", "arithmetic", "-m", "x", "--base-url", "http://localhost:1"])
    assert local.exit_code == 2
    assert "--backend tinker" in local.output


def test_a_new_training_may_begin_with_saved_weights(served: tuple[TinkerServer, Any]) -> None:
    client, ids = Wire(served[0].url), served[1].encode("0123abc")
    first = client.model(rank=2, train_mlp=False)
    learn = {"forward_backward_input": {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}}

    def step(model: str) -> Any:
        told = client.done("forward_backward", {"model_id": model, **learn})["loss_fn_outputs"][0]["logprobs"]["data"]
        client.done("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.01}})
        return told

    step(first)
    path = client.done("save_weights", {"model_id": first, "path": "begun"})["path"]
    load = {"session_id": client.session, "model_seq_id": 7, "path": path, "optimizer": True, "type": "load_weights"}
    made = client.done("load_weights", load)
    assert made["path"] == path
    assert client.done("load_weights", load) == made  # a repeated request gives the same training
    assert client.post("get_info", {"model_id": made["model_id"]})["lora_rank"] == 2
    assert [step(made["model_id"]) for _ in range(2)] == [step(first) for _ in range(2)]
    for wrong, reason in (({"path": "tinker://no/weights/x"}, "no"), ({"base_model": "other"}, "no model 'other'")):
        status, said = client.ask("load_weights", {**load, "model_seq_id": 8, **wrong})
        assert status in (400, 404), said
        assert reason in said["error"]


def test_samplers_in_flight_use_the_newest_weights_of_their_training(served: tuple[TinkerServer, Any]) -> None:
    client, ids = Wire(served[0].url), served[1].encode("0123abc")
    model = client.model()

    def sampler(number: int, kind: str) -> str:
        body = {"model_id": model, "sampling_session_seq_id": number, "kind": kind}
        return str(client.done("save_weights_for_sampler", body)["sampling_session_id"])

    def logprobs(name: str) -> Any:
        return client.sample(name, ids, more={"prompt_logprobs": True})["prompt_logprobs"]

    early, fixed = sampler(1, "inflight"), sampler(2, "snapshot")
    before = logprobs(early)
    assert logprobs(fixed) == before
    learn = {"forward_backward_input": {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}}
    client.done("forward_backward", {"model_id": model, **learn})
    client.done("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.01}})
    assert logprobs(early) == before  # nothing new was saved
    late = sampler(3, "inflight")
    assert logprobs(early) == logprobs(late) != before
    assert logprobs(fixed) == before
    body = {"model_id": model, "sampling_session_seq_id": 4, "kind": "alive"}
    status, said = client.ask("save_weights_for_sampler", body)
    assert status == 400
    assert "snapshot or inflight" in said["error"]


# --- the real packages ----------------------------------------------------------------------------------------------


def test_a_training_with_the_model_at_tinker_learns_saves_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("tinker")
    # In a process of its own: the SDK keeps connections and threads as long as the process lives.
    said = run_contract(Path(sys.executable), "tinker_training_contract.py", str(tmp_path), timeout_s=100)
    assert said.splitlines()[-1] == "training: holds"


SDK = ("tinker==0.38.0", "torch==2.13.0", "peft==0.21.2", "llguidance>=1.7", "math-verify>=0.8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sdk_itself_trains_samples_saves_and_is_refused_and_our_trainer_trains_through_it(tmp_path: Path) -> None:
    said = run_contract(python_with("tinker", *SDK), "tinker_contract.py", str(tmp_path))
    assert [line for line in said.splitlines() if line.endswith(": holds")] == [
        f"{part}: holds"
        for part in (
            "learn",
            "every_loss",
            "cross_entropy_and_custom",
            "several_loras",
            "stable",
            "refuse",
            "restart",
            "backend",
            "documented",
        )
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_cookbooks_recipe_learns_on_our_environment_and_server(tmp_path: Path) -> None:
    # Without the last two pip looks for a set that fits for a quarter of an hour.
    pins = ("transformers==5.5.4", "huggingface-hub==1.33.0", "datasets==5.2.0")
    python = python_with("tinker-cookbook", "tinker-cookbook==0.5.8", *pins, *SDK)
    said = run_contract(python, "tinker_recipe_contract.py", str(tmp_path))
    assert [line for line in said.splitlines() if line.endswith(": holds")] == [
        "learn: holds",
        "same logprobs: holds",
        "evaluate after a restart: holds",
    ]
