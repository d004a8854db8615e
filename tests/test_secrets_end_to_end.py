"""An API key goes to its endpoint and nowhere else: not into files, logs, errors or reprs, even if it comes back."""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI

import verifiers as vf
from verifiers.clients import ReplicaClient, resolve_endpoint

KEY = "sk-Very/Secret+Key=42"
SPELLINGS = (KEY, quote(KEY), quote(KEY, safe=""), KEY.replace("/", "\\/"), "Secret+Key", "Secret%2BKey")


class Echo(BaseHTTPRequestHandler):
    """Answers with an error that spells out every header it was sent, as careless gateways do."""

    heard: list[str] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = f"{dict(self.headers)} {self.path}"
        Echo.heard.append(said)
        mode = self.path.strip("/").split("/")[0]
        status, body = self.reply(mode, said)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-should-retry", "false")
        if mode == "redirect":
            self.send_header("Location", f"http://127.0.0.1/elsewhere?api_key={quote(KEY, safe='')}")
        self.end_headers()
        self.wfile.write(body)

    def reply(self, mode: str, said: str) -> tuple[int, bytes]:
        error = json.dumps({"error": {"message": f"Incorrect API key provided: {said}", "code": "invalid"}}).encode()
        if mode == "broken":
            return 200, b'{"choices": [' + said.encode()
        if mode == "empty":
            return 200, json.dumps({"choices": [], "debug": said}).encode()
        return {"refused": 401, "down": 500, "busy": 429, "inside": 200, "redirect": 307}[mode], error

    def log_message(self, *args: object) -> None: ...


MODES = ("refused", "down", "busy", "inside", "broken", "empty", "redirect")


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """The base of URLs whose path says how the server answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    Echo.heard.clear()


def leaks(text: str) -> list[str]:
    """The lines in which a spelling of the key is found."""
    return [line for line in text.splitlines() if any(spelling in line for spelling in SPELLINGS)]


def check_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert leaks(path.read_bytes().decode(errors="replace")) == [], path


def check_error(error: BaseException) -> None:
    link: BaseException | None = error
    while link is not None:
        assert leaks(f"{link} {link!r} {link.args!r}") == []
        link = link.__cause__ or link.__context__
    assert leaks("".join(traceback.format_exception(error))) == []


def check_results(results: vf.Results) -> None:
    for state in results.rollouts:
        assert leaks(f"{state!r} {state['client']!r} {state['client']}") == []
        if state["error"] is not None:
            check_error(state["error"])
    assert leaks(f"{results} {results!r}") == []


def make_env(rubric: vf.Rubric | None = None, **kwargs: Any) -> vf.SingleTurnEnv:
    rows = [{"question": f"question {i}", "answer": "x"} for i in range(2)]
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric, env_id="secretive", **kwargs)


def evaluate(env: vf.Environment, folder: Path, client: Any, **kwargs: Any) -> vf.Results:
    results: vf.Results = env.evaluate(
        client=client,
        results_path=folder / "run",
        state_columns=["client", "sampling_args", "trajectory", "model"],
        **{"model": "m", **kwargs},
    )
    return results


CLIENTS: dict[str, Callable[[str], Any]] = {
    "HTTPClient": lambda url: vf.HTTPClient(url, KEY, max_retries=1),
    "key in a header": lambda url: vf.HTTPClient(url, headers={"X-Api-Key": KEY}, max_retries=0),
    "key in the query": lambda url: vf.HTTPClient(f"{url}?api_key={quote(KEY, safe='')}", max_retries=0),
    "password in the URL": lambda url: vf.HTTPClient(
        url.replace("http://", f"http://me:{quote(KEY, safe='')}@"), max_retries=0
    ),
    "AnthropicClient": lambda url: vf.AnthropicClient(url, KEY, max_retries=0),
    "ResponsesClient": lambda url: vf.ResponsesClient(url, KEY, max_retries=0),
    "AsyncOpenAI": lambda url: AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0),
    "OpenAI": lambda url: OpenAI(base_url=url, api_key=KEY, max_retries=0),
    "AsyncOpenAI on its own transport": lambda url: AsyncOpenAI(
        base_url=url, api_key=KEY, max_retries=0, http_client=httpx2.AsyncClient(timeout=5)
    ),
    "OpenAI on its own transport": lambda url: OpenAI(
        base_url=url, api_key=KEY, max_retries=0, http_client=httpx2.Client(timeout=5)
    ),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_key_that_is_echoed_in_an_error_stays_hidden(
    kind: str,
    mode: str,
    echo: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = CLIENTS[kind](f"{echo}/{mode}/v1")
    results = evaluate(make_env(), tmp_path, client)
    print(results)
    assert len(results.failed) == 2
    assert any(leaks(said) for said in Echo.heard) or kind == "password in the URL"
    check_results(results)
    check_files(tmp_path)
    # What the SDK's own transport logs of a redirect is not for us to say.
    ours = [record for record in caplog.records if "own transport" not in kind or record.name.startswith("verifiers")]
    assert leaks("\n".join(record.getMessage() for record in ours)) == []
    assert leaks("".join(capfd.readouterr())) == []
    if "OpenAI" not in kind:
        assert leaks(f"{client!r} {client}") == []


def test_a_key_among_the_sampling_arguments_is_not_written_down(echo: str, tmp_path: Path) -> None:
    secrets = {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY}
    client = vf.HTTPClient(f"{echo}/refused/v1")
    results = evaluate(make_env(), tmp_path, client, sampling_args={"extra_headers": secrets, "temperature": 1.0})
    assert any(leaks(said) for said in Echo.heard)
    assert len(results.failed) == 2
    for state in results.failed:
        check_error(state["error"])
    check_files(tmp_path)
    assert json.loads((tmp_path / "run/metadata.json").read_bytes())["sampling_args"]["temperature"] == 1.0


def test_a_key_among_the_environments_arguments_is_not_written_down(tmp_path: Path) -> None:
    env = make_env(env_args={"judge_api_key": KEY, "judge": {"api-key": KEY, "apiKey": KEY}, "hf_token": KEY})
    evaluate(env, tmp_path, vf.FakeClient("x"))
    check_files(tmp_path)


def test_the_key_of_a_registry_stays_in_its_environment_variable(
    echo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    entry = f'[[endpoint]]\nendpoint_id = "mine"\nmodel = "m"\nurl = "{echo}/refused/v1"\nkey = "SOME_API_KEY"\n'
    (tmp_path / "configs/endpoints.toml").write_text(entry)
    client, model = resolve_endpoint("mine")
    assert leaks(f"{client!r} {client} {model}") == []
    results = evaluate(make_env(), tmp_path, None, model="mine")
    assert any(leaks(said) for said in Echo.heard)
    assert len(results.failed) == 2
    check_results(results)
    check_files(tmp_path)
    assert leaks(caplog.text) == []


@pytest.mark.parametrize("kind", ["HTTPClient", "AsyncOpenAI", "AsyncOpenAI on its own transport"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_key_of_a_judge_stays_hidden(
    kind: str, echo: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def judged(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        return float("yes" in await judge(prompt, completion, answer, state))

    client = CLIENTS[kind](f"{echo}/refused/v1")
    for number, rubric in enumerate(
        [vf.JudgeRubric(judge_client=client, funcs=[judged]), vf.JudgeRubric(client=client, judge_models=["a"])]
    ):
        results = evaluate(make_env(rubric), tmp_path / str(number), vf.FakeClient("x"))
        assert len(results.failed) == 2
        check_results(results)
    assert any(leaks(said) for said in Echo.heard)
    check_files(tmp_path)
    assert leaks(caplog.text) == []


def test_cassettes_and_caches_hold_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampling = {"temperature": 0.0, "extra_headers": {"X-Api-Key": KEY}}
    with vf.FakeServer(f"your key is {KEY}, is it not?", api_key=KEY) as server:
        client = vf.HTTPClient(server.url, KEY)
        for wrapped in (vf.Cassette(tmp_path / "tape.jsonl", client), vf.CachedClient(client, tmp_path / "cache.db")):
            results = make_env().evaluate(client=wrapped, model="m", sampling_args=sampling)
            assert not results.failed
            assert leaks(f"{wrapped!r}") == []
            if isinstance(wrapped, vf.CachedClient):
                wrapped.close()
        assert len(server.requests) == 4
    check_files_for_keys_of_requests(tmp_path)
    assert leaks(caplog.text) == []


def test_the_addresses_of_replicas_are_written_without_any_of_their_passwords(tmp_path: Path) -> None:
    with vf.FakeServer("<score>1</score>") as one, vf.FakeServer("<score>1</score>") as other:
        words = {"another-word": one, quote(KEY, safe=""): other}
        urls = [server.url.replace("http://", f"http://me:{word}@") for word, server in words.items()]
        replicas = ReplicaClient([vf.HTTPClient(url) for url in urls])
        clients = (vf.FakeClient("<score>1</score>"), replicas)
        judges = [vf.JudgeRubric(judge_models=["m"], client=client) for client in clients]
        evaluate(make_env(vf.RubricGroup(judges)), tmp_path, replicas)
    metadata = json.loads((tmp_path / "run" / "metadata.json").read_text())
    assert metadata["base_url"].count("[hidden]") == 2
    assert "[m at http://me:[hidden]@" in (tmp_path / "run" / "results.jsonl").read_text()
    check_files(tmp_path)


def check_files_for_keys_of_requests(folder: Path) -> None:
    """What the model itself said is its reply, and stays; what was sent along with a request does not."""
    for path in folder.rglob("*"):
        text = path.read_bytes().decode(errors="replace")
        assert leaks(text.replace(f"your key is {KEY}, is it not?", "")) == [], path


def test_a_reward_function_that_fails_with_the_clients_key_in_hand_does_not_tell_it(tmp_path: Path) -> None:
    def careless(state: vf.State) -> float:
        raise RuntimeError(f"cannot reach {state['client']!r}")

    env = make_env(vf.Rubric(funcs=[careless]))
    with vf.FakeServer("x", api_key=KEY) as server:
        results = evaluate(env, tmp_path, vf.HTTPClient(server.url, KEY))
    assert len(results.failed) == 2
    check_results(results)
    check_files(tmp_path)


@pytest.mark.parametrize("url", [f"ftp://me:{quote(KEY, safe='')}@host/v1", f"host?api_key={quote(KEY, safe='')}"])
def test_a_url_that_is_refused_is_not_repeated_with_its_key(url: str) -> None:
    for make in (vf.HTTPClient, vf.as_client):
        with pytest.raises((ValueError, TypeError)) as caught:
            make(url)
        check_error(caught.value)
