"""A Tinker server and clients that send nonsense, vanish or come all at once; one that is killed while it saves."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

import verifiers as vf
from tests.integrations.test_tinker import Wire, json_datum, prompt_of
from verifiers.errors import RequestRefusedError
from verifiers.integrations.tinker import TinkerServer
from verifiers.integrations.tinker.data import Datum, Span
from verifiers.integrations.tinker.learner import read_adam
from verifiers.integrations.tinker.service import SILENT_S
from verifiers.integrations.tinker.store import Place, Store

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinkerServer, list[int]]]:
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    with TinkerServer(model, tokenizer, name="tiny", folder=tmp_path_factory.mktemp("tinker")) as server:
        yield server, tokenizer.encode("0123abc")


def test_tensors_of_any_shape_and_kind_are_refused_in_a_sentence(served: tuple[TinkerServer, list[int]]) -> None:
    server, ids = served
    client = Wire(server.url)
    model, sampler = client.model(), client.sampler(0, base_model="tiny")
    good = {"data": [1] * (len(ids) - 1), "dtype": "int64", "shape": [len(ids) - 1, 1]}
    odd: tuple[Any, ...] = (5, "x", [], {}, [1], True, 1.5)
    tensors = [
        *odd,
        *({**good, name: value} for name in good for value in (*odd, None, -1, 10**30, ["x"], [[1], [1, 2]])),
    ]
    tensors += [{**good, "sparse_crow_indices": value} for value in odd]
    for tensor in tensors:
        sample = {"sampling_session_id": sampler, "prompt": prompt_of(ids), "target_prompt_logprobs": tensor}
        datum = json_datum(ids)
        datum["loss_fn_inputs"]["weights"] = tensor
        learn = {"model_id": model, "forward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
        for path, body in (("asample", {**sample, "sampling_params": {"max_tokens": 1}}), ("forward", learn)):
            status, told = client.ask(path, body)
            assert status in (200, 400), (tensor, told)
            assert status == 200 or "Error" not in told["error"].split(":")[0], told
    for params in ({"top_k": 10**30}, {"stop": [10**30, -4]}, {"seed": 10**30}):
        assert client.sample(sampler, ids, **params)["sequences"][0]["tokens"]


def test_a_server_that_was_killed_while_it_overwrote_a_checkpoint_has_one_of_the_two_afterwards(tmp_path: Path) -> None:
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    with TinkerServer(model, tokenizer, name="tiny", folder=tmp_path) as server:
        client = Wire(server.url)
        name = client.model()
        for path in ("whole", "half", "kept"):
            client.done("save_weights", {"model_id": name, "path": path})
    folder = tmp_path / name / "weights"
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    dead = gone.stdout.strip()
    (folder / "whole").rename(folder / f".whole.{dead}")  # killed after the old one went and before the new one came
    (folder / "half").rename(folder / f".half.{dead}")
    (folder / f".half.{dead}" / "checkpoint.json").unlink()  # killed while it wrote
    shutil.copytree(folder / "kept", folder / f".kept.{dead}")  # killed before the old one went
    shutil.copytree(folder / "kept", folder / f".other.{os.getppid()}")  # another server is writing it now
    store = Store(tmp_path)
    places = {one: Place(run=name, kind="weights", name=one) for one in ("whole", "half", "kept", "other")}
    assert store.load(places["whole"]).tensors.keys() == store.load(places["kept"]).tensors.keys()
    for one in ("half", "other"):
        with pytest.raises(RequestRefusedError, match="there are no saved weights"):
            store.load(places[one])
    assert sorted(one.name for one in folder.iterdir()) == [f".other.{os.getppid()}", "kept", "whole"]


def test_a_checkpoint_that_is_being_overwritten_is_always_there(tmp_path: Path) -> None:
    """One client saves under the same name again and again; others load it, and are never told that it is gone."""
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    with TinkerServer(model, tokenizer, name="tiny", folder=tmp_path) as server:
        client = Wire(server.url)
        client.model()
        service, place = server.service, Place(run=f"{client.session}:train:0", kind="weights", name="same")
        learner = service._learners[place.run]
        snapshot, config = learner.snapshot(), service.adapters.config_of(learner.shape)

        def save() -> None:
            service.store.save(place, snapshot, config, state={"masters": []}, overwrite=True)

        save()
        saves = threading.Thread(target=lambda: [save() for _ in range(40)])
        saves.start()
        while saves.is_alive():
            assert service.store.load(place).shape == snapshot.shape
            assert service.store.load_state(place) == {"masters": []}
            assert len(service.store.checkpoints(place.run)) == 1
        saves.join()


def test_what_is_saved_by_one_request_can_be_loaded_by_the_next_without_waiting(
    served: tuple[TinkerServer, list[int]],
) -> None:
    client = Wire(served[0].url)
    model = client.model()
    path = f"tinker://{model}/weights/next"
    saving = client.post("save_weights", {"model_id": model, "path": "next"})
    loading = client.post("load_weights", {"model_id": model, "path": path, "optimizer": True})
    for request in (saving, loading):
        assert client.post("retrieve_future", {"request_id": request["request_id"]})["path"] == path
    missing = client.done("load_weights", {"model_id": model, "path": f"{path}-not"})
    assert missing["category"] == "user"
    assert "there are no saved weights" in missing["error"]


def test_a_session_that_is_at_work_is_not_over_for_want_of_a_heartbeat(served: tuple[TinkerServer, list[int]]) -> None:
    server, ids = served
    client = Wire(server.url)
    model, sampler = client.model(), client.sampler(0, base_model="tiny")
    session = server.service.sessions[client.session]
    for work in (lambda: client.sample(sampler, ids), lambda: client.post("get_info", {"model_id": model})):
        session.seen -= 2 * SILENT_S
        work()
        Wire(server.url)  # another one begins, and those that are silent are over
        assert client.session in server.service.sessions
    session.seen -= 2 * SILENT_S
    Wire(server.url)
    assert client.session not in server.service.sessions


def test_numbers_beyond_any_type_are_refused(served: tuple[TinkerServer, list[int]]) -> None:
    server, ids = served
    client = Wire(server.url)
    model = client.model()
    datum = {**json_datum(ids), "model_input": prompt_of([10**40, *ids[2:]])}
    learn = {"model_id": model, "forward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
    create = {"session_id": client.session, "model_seq_id": 10**300, "base_model": "tiny", "lora_config": {"rank": 1}}
    for path, body in (("forward", learn), ("create_model", create), ("optim_step", {"model_id": model, "seq_id": -1})):
        assert client.ask(path, body)[0] == 400, path


def test_a_damaged_checkpoint_and_a_flood_of_metadata_are_refused_and_the_rest_is_listed(tmp_path: Path) -> None:
    model, tokenizer = vf.tiny_model("0123456789abc", hidden_size=32)
    with TinkerServer(model, tokenizer, name="tiny", folder=tmp_path) as server:
        client = Wire(server.url)
        name = client.model()
        client.done("save_weights", {"model_id": name, "path": "a"})
        flood = {"model_id": name, "path": "b", "user_metadata": {"x": "y" * (1 << 17)}}
        assert "user_metadata has more than" in client.done("save_weights", flood)["error"]
        (found,) = client.ask(f"training_runs/{name}/checkpoints", {}, method="GET")[1]["checkpoints"]
        weights = tmp_path / name / "weights" / "a" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
        path = found["tinker_path"]
        assert f"{path} is damaged" in client.done("load_weights", {"model_id": name, "path": path})["error"]
        asked = {"session_id": client.session, "sampling_session_seq_id": 1, "model_path": path}
        assert client.ask("create_sampling_session", asked)[0] == 400


def test_a_checkpoint_that_was_overwritten_is_what_its_path_samples_from(
    served: tuple[TinkerServer, list[int]],
) -> None:
    """By clients that name the path in every request."""
    server, ids = served
    client = Wire(server.url)
    model = client.model()
    save = {"model_id": model, "path": "latest", "overwrite": True}
    learn = {"model_id": model, "forward_backward_input": {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}}

    def likely() -> float:
        path = client.done("save_weights_for_sampler", save)["path"]
        asked = {"model_path": path, "prompt": prompt_of(ids), "sampling_params": {"max_tokens": 1}}
        return float(sum(client.done("asample", {**asked, "prompt_logprobs": True})["prompt_logprobs"][1:]))

    likely()
    client.done("forward_backward", learn)
    client.done("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.05}})
    told = client.done("forward", {"model_id": model, "forward_input": learn["forward_backward_input"]})
    assert likely() == pytest.approx(-told["metrics"]["loss:sum"], abs=1e-5)


def test_what_a_session_still_waits_for_is_dropped_when_it_ends(served: tuple[TinkerServer, list[int]]) -> None:
    server, ids = served
    client, service = Wire(server.url), server.service
    sampler = client.sampler(0, base_model="tiny")
    asked = {"sampling_session_id": sampler, "prompt": prompt_of(ids), "sampling_params": {"max_tokens": 200}}
    with service.ready.engine.lock:  # nothing is drawn meanwhile
        pending = service.sample(asked)
        service.end_session(client.session)
    assert isinstance(pending.future.exception(timeout=60), CancelledError | RequestRefusedError)
    assert (
        len(Wire(server.url).sample("", ids, more={"sampling_session_id": None, "base_model": "tiny"})["sequences"])
        == 1
    )


def test_a_client_that_lost_its_connection_fetches_the_same_reply_again(served: tuple[TinkerServer, list[int]]) -> None:
    server, ids = served
    client = Wire(server.url)
    asked = {"base_model": "tiny", "prompt": prompt_of(ids), "sampling_params": {"max_tokens": 8, "seed": 3}}

    async def hang_up(request: dict[str, str]) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.05)) as session:
            await session.post(f"{client.url}/retrieve_future", json=request)

    with server.service.ready.engine.lock:
        request = {"request_id": client.post("asample", asked)["request_id"]}
        with pytest.raises(TimeoutError):
            asyncio.run(hang_up(request))
    told = client.post("retrieve_future", request)
    assert client.post("retrieve_future", request) == told
    assert 1 <= len(told["sequences"][0]["tokens"]) <= 8


def test_clients_that_train_and_sample_at_once_are_told_the_logprobs_of_their_own_weights(
    served: tuple[TinkerServer, list[int]],
) -> None:
    server, ids = served

    def play(number: int) -> float:
        client = Wire(server.url)
        model = client.model(seed=number)
        for turn in range(4):
            learn = {"data": [json_datum(ids[number:])], "loss_fn": "cross_entropy"}
            client.done("forward_backward", {"model_id": model, "forward_backward_input": learn})
            client.done("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.02 * (number + 1)}})
            saved = client.done("save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": turn})
            (drawn,) = client.sample(saved["sampling_session_id"], ids, max_tokens=16)["sequences"]
            score = {"data": [json_datum([*ids, *drawn["tokens"]])], "loss_fn": "cross_entropy"}
            told = client.done("forward", {"model_id": model, "forward_input": score})
            own = told["loss_fn_outputs"][0]["logprobs"]["data"][len(ids) - 1 :]
            assert np.allclose(own, drawn["logprobs"], atol=1e-5, rtol=0)
        return float(sum(own))

    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(play, range(3)))) == 3


def test_a_state_that_does_not_fit_leaves_a_training_as_it_was(served: tuple[TinkerServer, list[int]]) -> None:
    server, ids = served
    client, service = Wire(server.url), server.service
    model_id = client.model(31, rank=4)
    body = {"data": [json_datum(ids)], "loss_fn": "cross_entropy"}

    def learn() -> Any:
        told = client.done("forward_backward", {"model_id": model_id, "forward_backward_input": body})
        client.done("optim_step", {"model_id": model_id, "adam_params": {"learning_rate": 0.01}})
        return told["loss_fn_outputs"][0]["logprobs"]["data"]

    learn()
    learner = service._learner(model_id)
    snapshot, state = learner.snapshot(), learner.state()
    state = {"masters": [one.clone() for one in state["masters"]], "optimizer": state["optimizer"]}
    learn()
    with service.ready.engine.lock:
        before = learner.snapshot()
        for wrong in ({}, {**state, "masters": state["masters"][:1]}, {**state, "optimizer": {"param_groups": []}}):
            with pytest.raises(RequestRefusedError, match="does not match this training"):
                learner.restore(snapshot, wrong)
        after = learner.snapshot()
        assert all(np.array_equal(before.tensors[name], one) for name, one in after.tensors.items())
        learner.restore(snapshot, state)
    assert learn()


def test_settings_and_spans_that_are_no_such_numbers_are_refused(served: tuple[TinkerServer, list[int]]) -> None:
    server, _ = served
    for wrong in (10**400, -1, float("nan"), True, "x"):
        with pytest.raises(RequestRefusedError, match="weight_decay of a step is out of range"):
            read_adam({"weight_decay": wrong})
    for span in (Span(length=-1), Span(length=1, sequence_id="x", offset=-1)):
        datum = Datum(ids_T=np.array([1]), inputs={}, spans=[span])
        with pytest.raises(RequestRefusedError, match="datum 0: invalid span of"):
            server.service.drawing.with_recorded(0, datum)
