"""Weights from one process's memory into a served model: vLLM's endpoints on our server, versions on every token."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from verifiers import errors  # noqa: E402
from verifiers.clients.control import ServerControl  # noqa: E402
from verifiers.clients.exact import exact_tokens  # noqa: E402
from verifiers.clients.http import HTTPClient  # noqa: E402
from verifiers.clients.protocol import Completion, Request  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.engine.server.server import LocalServer  # noqa: E402
from verifiers.trainers.distributed.weight_sender import WeightChannel, parameters_of, send  # noqa: E402

CHAT: list[Any] = [{"role": "user", "content": "hello world, the answer is"}]


@dataclass
class Served:
    server: LocalServer
    local: Any
    tokenizer: Any

    @property
    def root(self) -> str:
        return self.server.url.removesuffix("/v1")

    async def ask(self, **sampling: Any) -> Completion:
        args = exact_tokens({"temperature": 1.0, "max_tokens": 8, **sampling})
        return await HTTPClient(self.server.url, max_retries=0).complete(
            Request(model="tiny", prompt=CHAT, sampling=args)
        )

    async def channel(self) -> WeightChannel:
        made = WeightChannel(ServerControl(self.server.url, timeout_s=30))
        await made.open()
        return made


@pytest.fixture
def served() -> Iterator[Served]:
    tokenizer = tiny.tokenizer()
    local = vf.LocalModel(tiny.model(tokenizer), tokenizer, name="tiny")
    with LocalServer(local) as server:
        yield Served(server, local, tokenizer)
    local.close()


def off_by(model: Any, completion: Completion) -> float:
    """How far the logprobs of a reply are from those of a model."""
    tokens = completion.tokens
    assert tokens is not None
    with torch.no_grad():
        logits = model(torch.tensor([tokens.prompt_ids + tokens.completion_ids])).logits[
            0, len(tokens.prompt_ids) - 1 :
        ]
    found = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens.completion_ids)[:, None])[:, 0]
    return float((found - torch.tensor(tokens.logprobs)).abs().max())


def post(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method="POST", headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_weights_go_from_memory_to_memory_and_the_next_tokens_say_their_version(served: Served) -> None:
    new = tiny.model(served.tokenizer, seed=7)

    async def story() -> None:
        before = await served.ask()
        assert before.tokens is not None
        assert [tuple(span) for span in before.tokens.weight_versions] == [("0", 0, len(before.tokens.logprobs))]
        again = await served.ask()
        assert again.raw["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        channel = await served.channel()
        assert await send(parameters_of(new), [channel], 7) == [None]
        after = await served.ask()
        assert after.raw["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # dropped with the weights
        assert after.tokens is not None
        assert {span.version for span in after.tokens.weight_versions} == {"7"}
        assert off_by(new, before) > 0.01
        assert off_by(new, after) < 1e-4
        assert (await channel.control.ask("GET", "/weight_info"))["weight_version"] == "7"
        assert await send(parameters_of(new), [channel], 8) == [None]  # the group is opened once
        channel.close()

    asyncio.run(story())


def test_a_stream_says_of_each_choice_which_weights_made_it_where_that_ends(served: Served) -> None:
    served.local.engine.name_weights("7")
    sampling = {"stream": True, "max_tokens": 5, "ignore_eos": True, "n": 2}
    for path, prompt in (("chat/completions", {"messages": CHAT}), ("completions", {"prompt": "hello"})):
        request = urllib.request.Request(
            f"{served.server.url}/{path}", data=json.dumps({"model": "tiny", **prompt, **sampling}).encode()
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as reply:
            events = [line.removeprefix(b"data: ") for line in reply if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        said = {one["index"]: one["weight_versions"] for one in choices if "weight_versions" in one}
        assert said == {index: [{"version": "7", "start": 0, "end": 5}] for index in range(2)}
        assert all(("weight_versions" in one) is (one["finish_reason"] is not None) for one in choices)


def test_adapters_are_sent_as_what_they_make_of_the_weights(served: Served) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny.model(served.tokenizer), lora).eval()

    async def story() -> Completion:
        channel = await served.channel()
        assert await send(parameters_of(adapted), [channel], 1) == [None]
        return await served.ask()

    assert off_by(adapted, asyncio.run(story())) < 1e-4


def test_a_request_in_flight_goes_on_with_the_new_weights_and_says_where(served: Served) -> None:
    new = tiny.model(served.tokenizer, seed=7)

    async def story() -> Completion:
        channel = await served.channel()
        await channel.control.ask("POST", "/pause?mode=keep")
        asked = asyncio.create_task(served.ask(max_tokens=200, ignore_eos=True))
        served.local.engine.resume()
        while not served.local.engine.tokens:
            await asyncio.sleep(0)
        assert await send(parameters_of(new), [channel], 3) == [None]
        return await asked

    tokens = asyncio.run(story()).tokens
    assert tokens is not None
    assert [span.version for span in tokens.weight_versions] in (["0", "3"], ["3"])
    assert tokens.weight_versions[-1].end == 200 == len(tokens.logprobs)


def test_a_sequence_that_crosses_an_update_in_this_process_has_two_versions() -> None:
    model = tiny.model(tiny.tokenizer())
    engine = Engine(model, rows=2, length=400)
    seen: list[int] = []

    def change(token: int, _: float) -> bool:
        seen.append(token)
        if len(seen) == 3:  # between two steps, as a trainer that holds the lock does it
            with torch.no_grad():
                next(model.parameters()).mul_(1.01)
            engine.name_weights(5)
        return False

    engine.name_weights(4)
    (answer,) = engine.submit([1, 2, 3], Sampling(max_tokens=20, ignore_eos=True), on_token=change)
    generated = answer.result(60)
    assert [tuple(span) for span in generated.weight_versions] == [("4", 0, 3), ("5", 3, 20)]
    (later,) = engine.submit([1, 2, 3], Sampling(max_tokens=4, ignore_eos=True))
    assert [tuple(span) for span in later.result(60).weight_versions] == [("5", 0, 4)]
    engine.close()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_paused_engine_samples_nothing_until_it_goes_on(mode: str) -> None:
    engine = Engine(tiny.model(tiny.tokenizer()), rows=2, length=400)
    (answer,) = engine.submit([1, 2, 3], Sampling(max_tokens=300, ignore_eos=True))
    while not engine.tokens:
        time.sleep(0.001)
    engine.pause(mode)
    assert engine.is_paused
    if mode == "abort":
        with pytest.raises(errors.ModelError, match="paused"):
            answer.result(30)
    (later,) = engine.submit([1, 2], Sampling(max_tokens=2, ignore_eos=True))
    drawn = engine.tokens
    assert answer.done() is (mode != "keep") or drawn >= 300
    time.sleep(0.05)
    assert engine.tokens == drawn
    assert not later.done()
    engine.resume()
    assert len(later.result(30).ids) == 2
    if mode != "abort":
        assert len(answer.result(30).ids) == 300
    engine.close()


def test_another_model_is_refused_in_a_sentence_and_nothing_is_changed(served: Served) -> None:
    deeper = tiny.model(served.tokenizer, layers=3)
    before = {name: one.clone() for name, one in served.local.engine.model.named_parameters()}

    async def story() -> list[Any]:
        return await send(parameters_of(deeper), [await served.channel()], 1)

    (error,) = asyncio.run(story())
    assert "the sampler has another model: it has no parameter 'model.layers.2" in str(error)
    for name, one in served.local.engine.model.named_parameters():
        assert torch.equal(one, before[name])


def test_weights_of_two_versions_are_never_sampled_from(served: Served) -> None:
    """A trainer that is killed in the middle of a transfer leaves a server that waits for whole weights."""
    new = tiny.model(served.tokenizer, seed=7)

    async def story() -> None:
        channel = await served.channel()
        await channel.begin()
        parameters = parameters_of(new)
        update = {
            "names": [one.name for one in parameters],
            "dtype_names": ["float32"] * len(parameters),
            "shapes": [list(one.shape) for one in parameters],
        }
        asked = asyncio.create_task(channel.control.ask("POST", "/update_weights", {"update_info": update}))
        await asyncio.to_thread(channel.broadcast, parameters[0].read())
        await asyncio.sleep(0.2)
        channel.close()
        with pytest.raises(errors.RequestRefusedError, match="broke off"):
            await asked
        with pytest.raises(errors.RequestRefusedError, match="of two versions"):
            await channel.control.ask("POST", "/resume")
        whole = await served.channel()
        assert await send(parameters, [whole], 2) == [None]
        assert off_by(new, await served.ask()) < 1e-4

    asyncio.run(story())


def test_an_update_given_up_after_some_of_its_tensors_leaves_nothing_to_sample_from(
    served: Served, tmp_path: Any
) -> None:
    parameters = parameters_of(tiny.model(served.tokenizer, seed=7))
    one = {"names": [parameters[0].name], "dtype_names": ["float32"], "shapes": [list(parameters[0].shape)]}

    async def story() -> None:
        channel = await served.channel()
        ask = channel.control.ask
        await ask("POST", "/pause?mode=keep")
        await ask("POST", "/start_weight_update")
        asked = asyncio.create_task(ask("POST", "/update_weights", {"update_info": one}))
        await asyncio.to_thread(channel.broadcast, parameters[0].read())
        await asked
        wrong = {**one, "names": [["a", "list"]]}
        with pytest.raises(errors.RequestRefusedError, match="a name and a list of sizes"):
            await ask("POST", "/update_weights", {"update_info": wrong})
        assert served.local.engine.is_paused
        with pytest.raises(errors.RequestRefusedError, match="of two versions"):
            await ask("POST", "/resume")
        channel.close()
        tiny.model(served.tokenizer, seed=7).save_pretrained(tmp_path)
        await ask("POST", "/update_weights", {"path": str(tmp_path)})  # these are whole, too
        await ask("POST", "/resume")
        assert off_by(tiny.model(served.tokenizer, seed=7), await served.ask()) < 1e-4

    asyncio.run(story())


def test_an_update_of_several_calls_is_taken_while_paused_only_and_sampled_from_when_it_is_whole(
    served: Served,
) -> None:
    new = tiny.model(served.tokenizer, seed=7)
    parameters = parameters_of(new)

    async def story() -> None:
        channel = await served.channel()
        ask = channel.control.ask
        with pytest.raises(errors.RequestRefusedError, match=r"would mix the weights .* POST /pause\?mode=keep first"):
            await ask("POST", "/start_weight_update")
        await ask("POST", "/pause?mode=keep")
        await ask("POST", "/start_weight_update")
        await ask("POST", "/resume")  # nothing has come: there is nothing to mix
        one = {"names": [parameters[0].name], "dtype_names": ["float32"], "shapes": [list(parameters[0].shape)]}
        with pytest.raises(errors.RequestRefusedError, match="would mix the weights"):
            await ask("POST", "/update_weights", {"update_info": one})
        channel = await served.channel()
        await channel.begin()
        waiting = asyncio.create_task(served.ask())
        for half in (parameters[:5], parameters[5:]):
            update = {
                "names": [one.name for one in half],
                "dtype_names": ["float32"] * len(half),
                "shapes": [list(one.shape) for one in half],
            }
            asked = asyncio.create_task(channel.control.ask("POST", "/update_weights", {"update_info": update}))
            for one in half:
                await asyncio.to_thread(channel.broadcast, one.read())
            await asked
            with pytest.raises(errors.RequestRefusedError, match="POST /finish_weight_update first"):
                await channel.control.ask("POST", "/resume")
        assert not waiting.done()
        await channel.end(1)
        assert off_by(new, await waiting) < 1e-4
        channel.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/pause?mode=sideways", None, "'mode' must be one of abort, wait, keep"),
        ("/init_weight_transfer_engine", {}, "'init_info' is missing"),
        ("/init_weight_transfer_engine", {"init_info": {"world_size": 3}}, "world_size 2"),
        ("/init_weight_transfer_engine", {"init_info": {"world_size": 2}}, "master_address"),
        ("/start_weight_update", None, "no trainer is connected"),
        ("/update_weights", {}, "pass 'update_info'"),
        ("/update_weights", {"update_info": {"names": []}}, "POST /start_weight_update first"),
        ("/finish_weight_update", None, "no update was started"),
        ("/finish_weight_update", {"weight_version": 7}, "must be a text"),
        ("/update_weight_version", {}, "'new_version' is missing"),
    ],
)
def test_a_body_that_is_not_vllms_is_refused_in_a_sentence(served: Served, path: str, body: Any, said: str) -> None:
    status, reply = post(served.root + path, body)
    assert status == 400
    assert said in reply["error"]["message"]


def test_weights_from_a_folder_count_as_the_next_version(served: Served, tmp_path: Any) -> None:
    tiny.model(served.tokenizer, seed=3).save_pretrained(tmp_path)
    assert post(f"{served.root}/update_weight_version", {"new_version": "4"})[0] == 200
    assert post(f"{served.root}/update_weights", {"path": str(tmp_path)})[0] == 200
    tokens = asyncio.run(served.ask()).tokens
    assert tokens is not None
    assert {span.version for span in tokens.weight_versions} == {"5"}
