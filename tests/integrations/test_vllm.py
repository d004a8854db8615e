"""vLLM: how it is started, how it gets new weights, how exact tokens are asked of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.fake_vllm import OPTIONS, OPTIONS_0_32, FakeServer, install
from verifiers import errors
from verifiers.clients.http import HTTPClient
from verifiers.clients.protocol import Completion, Request
from verifiers.integrations.vllm import VLLMServer, exact_tokens
from verifiers.integrations.vllm.launch import LaunchError, environment, exposure, prepare

DOCUMENTED = [
    "--model Qwen/Qwen2.5-7B-Instruct --data-parallel-size 4 --enforce-eager --disable-log-requests "
    "--host 0.0.0.0 --port 8000",
    "--model Qwen/Qwen2.5-7B-Instruct --tensor-parallel-size 4 --max-model-len 8192 --dtype bfloat16 "
    "--gpu-memory-utilization 0.9 --enable-prefix-caching --host 0.0.0.0 --port 8000",
    "--model Qwen/Qwen2.5-7B-Instruct --tensor-parallel-size 4",
]
KNOWN = {word.strip("[]|") for word in OPTIONS.split() if "--" in word}


class Started:
    """`vf-vllm` as a process, over the fake package."""

    def __init__(self, repo: Path, folder: Path) -> None:
        self.log = folder / "log.json"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            "PYTHONPATH": os.pathsep.join([str(folder), str(repo)]),
            "FAKE_VLLM_LOG": str(self.log),
            "FAKE_VLLM_OPTIONS": OPTIONS,
        }

    def begin(self, *flags: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "verifiers.integrations.vllm.launch", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.env, **env},
        )

    def run(self, *flags: str, **env: str) -> tuple[int, str, Any]:
        """The exit code, what was said on stderr, and how vLLM was started, if it was."""
        process = self.begin(*flags, **env)
        _, said = process.communicate(timeout=30)
        return process.returncode, said, json.loads(self.log.read_text()) if self.log.exists() else None


@pytest.fixture
def launcher(repo: Path, tmp_path: Path) -> Started:
    install(tmp_path)
    return Started(repo, tmp_path)


# --- starting it --------------------------------------------------------------------------------------------------


def test_the_first_command_of_the_documents_starts_the_server_in_todays_words(launcher: Started) -> None:
    code, said, started = launcher.run(*DOCUMENTED[0].split())
    assert code == 41  # the server's own
    expected = DOCUMENTED[0].replace(" --disable-log-requests", "").split()
    assert started["argv"] == [*expected, "--no-enable-log-requests", "--logprobs-mode", "processed_logprobs"]
    assert started["env"] == {"VLLM_SERVER_DEV_MODE": "1"}
    assert "no longer knows --disable-log-requests; it is started with --no-enable-log-requests" in said
    assert "anyone who can reach 0.0.0.0 can replace the weights" in said


@pytest.mark.parametrize("command", DOCUMENTED[1:])
def test_other_commands_of_the_documents_pass_as_they_are(command: str) -> None:
    flags, notices = prepare(command.split(), KNOWN)
    assert flags[: len(command.split())] == command.split()
    assert ("--host" in command) is (flags.count("127.0.0.1") == 0)  # on this machine only, unless told otherwise
    assert notices == []


@pytest.mark.parametrize("has_card", [True, False])
def test_weights_come_by_nccl_on_cards_and_by_a_gloo_of_ours_without(has_card: bool) -> None:
    known = KNOWN | {"--weight-transfer-config", "--worker-extension-cls"}
    flags, _ = prepare(["--model", "m", "--host", "h"], known, has_card=has_card)
    backend = flags[flags.index("--weight-transfer-config") + 1]
    assert json.loads(backend) == {"backend": "nccl" if has_card else "gloo"}
    assert ("--worker-extension-cls" in flags) is not has_card
    folder = environment(flags, {"PYTHONPATH": "/mine"}).get("PYTHONPATH", "").split(os.pathsep)
    assert folder[-1] == "/mine"
    assert (len(folder) == 2 and (Path(folder[0]) / "verifiers_gloo.py").is_file()) is not has_card
    own = ["--model", "m", "--host", "h", "--weight-transfer-config", "{}"]
    assert prepare(own, known, has_card=has_card)[0][: len(own) + 1] == [*own, "--logprobs-mode"]


def test_a_port_in_use_is_named_before_anything_starts(launcher: Started) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said, started = launcher.run("--model", "m", "--port", str(taken.getsockname()[1]))
    assert (code, started) == (2, None)
    assert re.fullmatch(r"vf-vllm: cannot listen on 127\.0\.0\.1:\d+: Address already in use\n", said)


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS_0_32])
def test_a_signal_reaches_the_server_and_its_exit_code_comes_back(launcher: Started, options: str) -> None:
    process = launcher.begin("--model", "m", "--port=wait", FAKE_VLLM_OPTIONS=options)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert json.loads(launcher.log.read_text())["pid"] == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 43


def test_without_vllm_there_is_one_clear_sentence(repo: Path, tmp_path: Path) -> None:
    code, said, started = Started(repo, tmp_path).run("--model", "m")
    assert (code, started) == (2, None)
    assert len(said.splitlines()) == 1
    assert "vLLM is not installed for" in said
    assert "pip install vllm" in said


def test_vllm_in_an_environment_of_its_own_is_named_by_its_python(launcher: Started) -> None:
    code, _, started = launcher.run("--python", sys.executable, "--model", "m")
    assert code == 41
    assert "--python" not in started["argv"]
    code, said, _ = launcher.run("--python", "/nowhere/python", "--model", "m")
    assert code == 2
    assert "--python /nowhere/python: there is no such program" in said


def test_a_flag_that_this_vllm_does_not_know_is_named_before_anything_starts(launcher: Started) -> None:
    code, said, started = launcher.run("--model", "m", "--max-model-length", "8")
    assert (code, started) == (2, None)
    assert said == "vf-vllm: this vLLM does not know --max-model-length; did you mean --max-model-len?\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--swap-space 4 --dtype auto", "--dtype auto"),
        ("--swap-space=4 --dtype auto", "--dtype auto"),
        ("--device cuda", ""),  # not a short form of --device-ids
        ("--worker-use-ray", "--distributed-executor-backend=ray"),
        ("--guided-decoding-backend outlines", "--structured-outputs-config.backend=outlines"),
        ("--max_model_len 8", "--max_model_len 8"),
        ("--hf-overrides.rope 1", "--hf-overrides.rope 1"),
        ("--tensor-par 2 -dp 2", "--tensor-par 2 -dp 2"),
        ("--no-enforce-eager", "--no-enforce-eager"),
    ],
)
def test_retired_flags_are_translated_or_left_out_and_other_spellings_pass(given: str, expected: str) -> None:
    flags, notices = prepare(["--model", "m", "--host", "h", *given.split()], KNOWN)
    assert flags == ["--model", "m", "--host", "h", *expected.split(), "--logprobs-mode", "processed_logprobs"]
    assert len(notices) == (given != expected)


def test_an_older_vllm_gets_the_older_word() -> None:
    older = {"--model", "--host", "--disable-log-requests"}
    flags, _ = prepare(["--model", "m", "--host", "h", "--no-enable-log-requests"], older)
    assert flags == ["--model", "m", "--host", "h", "--disable-log-requests"]
    with pytest.raises(LaunchError, match="does not know --guided-decoding-backend"):
        prepare(["--model", "m", "--guided-decoding-backend", "outlines"], older)


def test_what_the_caller_said_wins_over_our_defaults() -> None:
    flags, _ = prepare(["--model", "m", "--host=::1", "--logprobs-mode", "raw_logprobs"], KNOWN)
    assert flags == ["--model", "m", "--host=::1", "--logprobs-mode", "raw_logprobs"]
    assert prepare(["--config", "vllm.yaml"], KNOWN) == (["--config", "vllm.yaml"], [])
    assert environment(["--enable-lora"], {"VLLM_SERVER_DEV_MODE": "0"}) == {
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    assert exposure(["--host", "0.0.0.0"], {"VLLM_SERVER_DEV_MODE": "0"}) is None
    assert exposure(["--host", "127.0.0.1"], {}) is None


def test_a_model_must_be_named_and_help_is_there(launcher: Started) -> None:
    code, said, started = launcher.run("--dtype", "auto")
    assert (code, started) == (2, None)
    assert "--model is missing" in said
    process = launcher.begin("--help")
    assert process.communicate(timeout=30)[0].startswith("Usage: vf-vllm --model MODEL")
    assert process.returncode == 0
    process = launcher.begin("--help=all")
    assert process.communicate(timeout=30)[0].startswith("usage: api_server.py")  # vLLM's own
    assert process.returncode == 0


# --- which weights made a token -----------------------------------------------------------------------------------

OLD_AND_NEW = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
OLD = [{"version": "3", "start": 0, "end": 5}]


def test_choices_of_every_endpoint_say_which_weights_made_their_tokens(launcher: Started) -> None:
    """The server is vLLM's own, which answers with what its engine says of each choice added."""
    process = launcher.begin("--model", "m", "--port=answer", FAKE_VLLM_OPTIONS=OPTIONS_0_32)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 41, said
    answers = dict(map(json.loads, out.splitlines()))
    assert answers["started as"][:3] == ["--model", "m", "--port=answer"]

    def versions(name: str) -> list[Any]:
        return [choice.get("weight_versions") for choice in answers[name]]

    assert versions("chat") == [OLD_AND_NEW, OLD]
    assert answers["error"] == {"error": "none"}
    assert versions("beams") == [None, None]  # of which vLLM's engine does not know it
    assert versions("completion") == [OLD, OLD_AND_NEW, OLD_AND_NEW, OLD]  # of two prompts, in the order of choices
    for name, first in (("chat stream", 0), ("completion stream", 2)):
        *events, done = answers[name]
        assert done == "data: [DONE]\n\n"
        assert all(event.startswith("data: {") and event.endswith("}\n\n") for event in events)
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        found = [(one["index"] - first, one.get("weight_versions"), one["delta"]["content"]) for one in choices]
        smile = "\N{GRINNING FACE}"
        expected = [(0, None), (1, None), (1, OLD), (0, None), (0, OLD_AND_NEW)]  # where a choice ends
        assert found == [(index, spans, smile) for index, spans in expected]


@pytest.mark.parametrize(
    ("module", "word", "missing"),
    [
        ("outputs.py", "weight_versions", "CompletionOutput has no weight_versions"),
        (
            "entrypoints/openai/chat_completion/serving.py",
            "result_generator",
            "OpenAIServingChat has no chat_completion_full_generator(request, result_generator, …)",
        ),
        (
            "entrypoints/openai/completion/serving.py",
            "completion_stream_generator",
            "OpenAIServingCompletion has no completion_stream_generator(request, engine_inputs, result_generator, …)",
        ),
        ("entrypoints/openai/completion/serving.py", "OpenAIServingCompletion", "cannot import name"),
    ],
)
def test_a_vllm_that_is_made_in_another_way_is_one_sentence_and_not_started(
    launcher: Started, tmp_path: Path, module: str, word: str, missing: str
) -> None:
    path = tmp_path / "vllm" / module
    path.write_text(path.read_text().replace(word, f"{word}s"))
    code, said, started = launcher.run("--model", "m", FAKE_VLLM_OPTIONS=OPTIONS_0_32)
    assert (code, started) == (2, None)
    assert said.startswith("vf-vllm: the weight version of each token cannot be added to this vLLM (")
    assert missing in said
    assert len(said.splitlines()) == 1


def test_an_older_vllm_that_knows_no_versions_is_started_as_it_is(launcher: Started, tmp_path: Path) -> None:
    (tmp_path / "vllm" / "outputs.py").unlink()
    assert launcher.run("--model", "m")[0] == 41


# --- talking to it ------------------------------------------------------------------------------------------------


def with_server(use: Callable[[FakeServer, VLLMServer], Awaitable[None]], **options: Any) -> FakeServer:
    """Run some steps against the fake server; it comes back with what it was asked."""
    fake = FakeServer()

    async def main() -> None:
        async with fake.running() as url:
            await use(fake, VLLMServer(f"{url}/v1", **options))

    asyncio.run(main())
    return fake


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_new_weights_come_in_while_no_request_runs_and_the_cache_is_reset(weights: Path) -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        await server.reload_weights(weights)

    assert with_server(use).asked == [
        ("/pause", {"mode": "wait"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}),
        ("/reset_prefix_cache", {}),
        ("/resume", {}),
    ]


def test_new_weights_are_named_before_anything_is_sampled_from_them(weights: Path) -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        await server.reload_weights(weights, version=12)
        fake.answer("/update_weight_version", (422, {"detail": "no"}))
        with pytest.raises(errors.RequestRefusedError, match="/update_weight_version"):
            await server.name_weights(13)

    asked = with_server(use).asked
    assert [path for path, _ in asked[2:5]] == ["/update_weight_version", "/reset_prefix_cache", "/resume"]
    assert asked[2][1] == {"new_version": "12"}


def test_an_older_vllm_that_cannot_pause_gets_new_weights_all_the_same(weights: Path) -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        for path in ("/pause", "/update_weight_version"):
            fake.answer(path, (404, {"detail": "Not Found"}))
        await server.reload_weights(str(weights), version=1)

    expected = ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache"]
    assert with_server(use).paths == expected


def test_a_folder_without_weights_never_reaches_the_server_which_it_would_kill(tmp_path: Path) -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        with pytest.raises(errors.RequestRefusedError, match="has no weights"):
            await server.reload_weights(tmp_path / "nowhere")
        await server.reload_weights("/only/there", check=False)

    assert with_server(use).paths.count("/collective_rpc") == 1


def test_requests_go_on_after_an_update_that_failed(weights: Path) -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        fake.answer("/collective_rpc", (500, {"error": {"message": "Worker failed", "code": 500}}))
        fake.answer("/resume", (500, {"error": "dead"}))
        with pytest.raises(errors.ServerError, match=r"POST /collective_rpc: 500 .*Worker failed"):
            await server.reload_weights(weights)

    assert with_server(use).paths == ["/pause", "/collective_rpc", "/resume"]


def test_a_cache_still_in_use_is_reset_when_it_is_free_and_not_waited_for_without_end() -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        fake.answer("/reset_prefix_cache", (200, {"success": False}), (200, {"success": True}))
        await server.reset_prefix_cache()
        fake.answer("/reset_prefix_cache", *[(200, {"success": False})] * 500)
        with pytest.raises(errors.DeadlineError, match="still in use after"):
            await server.reset_prefix_cache()

    assert with_server(use, timeout_s=2.0).paths.count("/reset_prefix_cache") >= 3


def test_an_adapter_is_loaded_replaced_and_dropped(tmp_path: Path) -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        await server.load_lora("a", tmp_path)
        await server.unload_lora("a")
        said = {"error": {"message": "The lora adapter 'a' has already been loaded.", "type": "InvalidUserInput"}}
        fake.answer("/v1/load_lora_adapter", (400, said))
        await server.load_lora("a", tmp_path)

    fake = with_server(use, api_key="sk-secret")
    load = ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path), "load_inplace": True})
    unload = ("/v1/unload_lora_adapter", {"lora_name": "a"})
    pause, reset, resume = ("/pause", {"mode": "wait"}), ("/reset_prefix_cache", {}), ("/resume", {})
    assert fake.asked == [pause, load, reset, resume, unload, pause, load, unload, load, reset, resume]
    assert set(fake.keys) == {"Bearer sk-secret"}


@pytest.mark.parametrize(
    ("path", "call", "hint"),
    [
        ("/reset_prefix_cache", lambda server: server.reset_prefix_cache(), "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/unload_lora_adapter", lambda server: server.unload_lora("a"), "vf-vllm --enable-lora"),
    ],
)
def test_an_endpoint_that_is_not_there_says_how_to_start_the_server(path: str, call: Any, hint: str) -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        fake.answer(path, (404, {"detail": "Not Found"}), (404, {"error": {"type": "NotFoundError"}}))
        with pytest.raises(errors.RequestRefusedError, match=hint):
            await call(server)
        with pytest.raises(errors.RequestRefusedError) as raised:
            await call(server)
        assert hint not in str(raised.value)

    with_server(use)


def test_health_is_a_plain_answer_and_waiting_for_it_has_an_end() -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        fake.answer("/health", (503, {}), (503, {}))
        assert not await server.health()
        await server.wait(5)
        assert await server.health()

    with_server(use)

    async def nobody() -> None:
        server = VLLMServer("http://127.0.0.1:9")
        assert not await server.health()
        with pytest.raises(errors.DeadlineError, match=r"no healthy server at http://127\.0\.0\.1:9"):
            await server.wait(0.1)
        with pytest.raises(errors.ConnectionFailedError, match=r"is the server at .* running"):
            await server.reset_prefix_cache()

    asyncio.run(nobody())


def test_a_server_that_hangs_is_given_up_and_no_error_shows_the_key() -> None:
    async def use(fake: FakeServer, server: VLLMServer) -> None:
        fake.answer("/reset_prefix_cache", (401, {"error": "sk-secret is not welcome"}))
        with pytest.raises(errors.RequestRefusedError) as raised:
            await server.reset_prefix_cache()
        assert "sk-secret" not in f"{raised.value!r}{raised.value.__context__!r}{server!r}"
        fake.delay_s = 6.0
        started = time.monotonic()
        with pytest.raises(errors.DeadlineError, match=r"no complete reply within 1 s"):
            await server.reset_prefix_cache()
        assert time.monotonic() - started < 5
        fake.delay_s = 0.0

    with_server(use, api_key="sk-secret", timeout_s=1.0)


@pytest.mark.parametrize(("url", "options"), [("localhost:8000", {}), ("http://h", {"timeout_s": 0})])
def test_nonsense_is_rejected_at_birth(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must (look like|be above)"):
        VLLMServer(url, **options)


# --- exact tokens -------------------------------------------------------------------------------------------------


def ask(url: str, sampling: dict[str, Any], *, model: str = "m", prompt: Any = "hello world") -> Awaitable[Completion]:
    is_chat = isinstance(prompt, list)
    request = Request(model=model, prompt=prompt, sampling=sampling, message_type="chat" if is_chat else "completion")
    return HTTPClient(f"{url}/v1", max_retries=0).complete(request)


def test_completions_carry_their_tokens_once_they_are_asked_for() -> None:
    async def main() -> None:
        fake = FakeServer()
        async with fake.running() as url:
            chat: list[Any] = [{"role": "user", "content": "2 + 2"}]
            given = {"temperature": 0.5, "extra_body": {"top_k": 20}}
            for completion in (
                await ask(url, exact_tokens(given), prompt=chat),
                await ask(url, exact_tokens(given, message_type="completion"), prompt="2 + 2"),
            ):
                assert completion.tokens is not None
                assert completion.tokens.prompt_ids == [1, 282, 201]
                assert completion.tokens.completion_ids == [52, 2]
                assert completion.tokens.logprobs == [-0.5, -0.1]
                assert completion.tokens.weight_versions == (("default", 0, 2),)
            assert (await ask(url, given, prompt=chat)).tokens is None
            bodies = [body for _, body in fake.asked]
            assert [body["top_k"] for body in bodies] == [20, 20, 20]
            assert [body.get("logprobs") for body in bodies] == [True, 1, None]
        assert given == {"temperature": 0.5, "extra_body": {"top_k": 20}}

    asyncio.run(main())
