"""The server under requests that are too large, too many or nonsense: they cost their sender, and nobody else."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import aiohttp  # noqa: E402

from tests.engine import tiny  # noqa: E402
from verifiers.engine import LocalModel, LocalServer  # noqa: E402
from verifiers.engine.engine import EngineFullError  # noqa: E402
from verifiers.engine.server.shares import Shares  # noqa: E402

USER: Any = [{"role": "user", "content": "hello world"}]
PATIENT_S = 5.0  # /health must not wait longer, whatever else this machine is doing; it waited 37 s


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    tokenizer = tiny.tokenizer(tiny.HERMES)
    with LocalModel(tiny.model(tokenizer), tokenizer, rows=4, name="tiny") as local, LocalServer(local) as server:
        yield server


async def post(session: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(
        url, data=io.BytesIO(content), headers={"Content-Type": "application/json", **headers}
    ) as response:
        return response.status, await response.json()


@asynccontextmanager
async def watched_health(server: LocalServer) -> AsyncIterator[list[float]]:
    """How long /health takes, asked again and again while the block lasts."""
    took: list[float] = []

    async def watch() -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                began = time.monotonic()
                async with session.get(f"{server.root}/health") as response:
                    assert response.status == 200
                took.append(time.monotonic() - began)
                await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.sleep(0.1)
        yield took
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("megabytes", [3, 7])
def test_a_message_of_megabytes_is_refused_by_its_length_while_health_answers(
    server: LocalServer, megabytes: int
) -> None:
    async def main() -> None:
        body = {"messages": [{"role": "user", "content": "hello world " * (megabytes * 80_000)}]}
        async with watched_health(server) as took, aiohttp.ClientSession() as session:
            began = time.monotonic()
            answers = await asyncio.gather(*(post(session, f"{server.url}/chat/completions", body) for _ in range(4)))
            refused_s = time.monotonic() - began
        for status, said in answers:
            assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
            assert "characters" in said["error"]["message"]
        assert refused_s < 4 * PATIENT_S
        assert max(took) < PATIENT_S

    asyncio.run(main())


def test_a_body_that_is_larger_than_any_request_is_not_read(server: LocalServer) -> None:
    async def main() -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            body = b'{"messages": [{"role": "user", "content": "' + b"x" * (10 << 20) + b'"}]}'
            return await post(session, f"{server.url}/chat/completions", body)

    status, said = asyncio.run(main())
    assert status == 413
    assert said["error"]["message"]


def test_a_long_prompt_that_could_fit_is_tokenized_in_a_thread_while_health_answers(server: LocalServer) -> None:
    """It does not fit in the end; how many tokens it has is found out beside the loop."""
    most = server.model.engine.length * server.model.load().codec.longest_token

    async def main() -> None:
        text = "hello world, how are you? "
        body = {"messages": [{"role": "user", "content": (text * (most // len(text) + 1))[: most - 200]}]}
        async with watched_health(server) as took, aiohttp.ClientSession() as session:
            answers = await asyncio.gather(*(post(session, f"{server.url}/chat/completions", body) for _ in range(4)))
        for status, said in answers:
            assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
            assert "tokens" in said["error"]["message"]
        assert max(took) < PATIENT_S

    asyncio.run(main())


@pytest.mark.parametrize("words", [1, 300])
def test_many_prompts_in_one_request_are_tokenized_while_health_answers(server: LocalServer, words: int) -> None:
    async def main() -> None:
        prompts = ["hello world " * words + str(i) for i in range(1000)]
        async with watched_health(server) as took, aiohttp.ClientSession() as session:
            status, _ = await post(session, f"{server.url}/completions", {"prompt": prompts, "max_tokens": 1})
        assert status == (200 if words == 1 else 400)  # 300 words do not fit
        assert max(took) < PATIENT_S

    asyncio.run(main())


def test_prompts_times_n_have_a_limit(server: LocalServer) -> None:
    async def main() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession() as session:
            url = f"{server.url}/completions"
            many = {"prompt": ["a"] * 1024, "n": 128, "max_tokens": 1}
            return [await post(session, url, many), await post(session, url, {**many, "prompt": ["a"] * 9})]

    for status, said in asyncio.run(main()):
        assert status == 400
        assert "at most 1024 replies" in said["error"]["message"]


ODD_NUMBERS = [
    "Infinity",
    "-Infinity",
    "NaN",
    "1e400",
    "1" + "0" * 30,
    "1" + "0" * 5000,
    "-1",
    "0.5",
    '"1"',
    "[]",
    "{}",
]
NUMERIC = ["seed", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "logprobs", "timeout", "top_logprobs"]


@pytest.mark.parametrize("field", [*NUMERIC, "stop_token_ids", "logit_bias", "extra_body", "stop"])
def test_no_number_however_odd_is_an_error_of_the_server(server: LocalServer, field: str) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            for number in ODD_NUMBERS:
                value = {
                    "stop_token_ids": f"[{number}]",
                    "logit_bias": f'{{"1": {number}, "{number[:6000]}": 1}}' if number[0] != '"' else number,
                }.get(field, number)
                fields = f'"max_tokens": 1, "{field}": {value}' if field != "max_tokens" else f'"{field}": {value}'
                body = f'{{"messages": {json.dumps(USER)}, {fields}}}'.encode()
                status, said = await post(session, f"{server.url}/chat/completions", body)
                assert status in (200, 400), (number, said)
                if field == "seed" and number not in ("-1",):
                    assert status == 400, number

    asyncio.run(main())


# --- a share for each client ------------------------------------------------------------------------------------------


def test_a_client_with_one_request_does_not_wait_behind_a_client_with_many(server: LocalServer) -> None:
    async def main() -> None:
        url = f"{server.url}/completions"
        body = {"prompt": "hello", "max_tokens": 24, "temperature": 1.0}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            ended: list[str] = []

            async def ask(name: str) -> None:
                status, _ = await post(session, url, body, Authorization=f"Bearer {name}")
                assert status == 200
                ended.append(name)

            crowd = [asyncio.create_task(ask("crowd")) for _ in range(120)]
            while server.served.serving.waiting < 60:
                await asyncio.sleep(0.01)
            await ask("one")
            behind = ended.index("one")
            waiting = 120 - behind
            await asyncio.gather(*crowd)
        assert waiting > 30, f"{behind} of 120 requests were answered first"

    asyncio.run(main())


def test_clients_are_let_in_by_turns_and_each_in_its_own_order() -> None:
    async def main() -> list[str]:
        shares, order = Shares(1, most_waiting=100), []

        async def work(client: str, number: int) -> None:
            async with shares.turn(client, 1):
                order.append(f"{client}{number}")
                await asyncio.sleep(0)

        await asyncio.gather(*(work("a", i) for i in range(4)), *(work("b", i) for i in range(2)), work("c", 0))
        assert (shares.waiting, shares._free) == (0, 1)
        return order

    assert asyncio.run(main()) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


def test_a_client_that_hangs_up_while_it_waits_or_works_gives_its_room_back() -> None:
    async def main() -> None:
        shares = Shares(2, most_waiting=100)

        async def work() -> None:
            async with shares.turn("a", 2):
                await asyncio.sleep(30)

        tasks = [asyncio.create_task(work()) for _ in range(4)]
        await asyncio.sleep(0)
        for task in (tasks[1], tasks[0], tasks[2]):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (shares.waiting, shares._free) == (0, 2)

    asyncio.run(main())


def test_the_queue_of_one_client_is_full_before_that_of_another() -> None:
    async def main() -> None:
        shares = Shares(1, most_waiting=4)

        async def work(client: str) -> None:
            async with shares.turn(client, 1):
                await asyncio.sleep(30)

        tasks = [asyncio.create_task(work("a")) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(EngineFullError, match="of your requests are already waiting"):
            async with shares.turn("a", 1):
                pass
        tasks.append(asyncio.create_task(work("b")))
        await asyncio.sleep(0)
        assert shares.waiting == 5
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


# --- who may call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
        ("localhost:{port}", 200),
        ("127.0.0.1:{port}", 200),
        ("[::1]:{port}", 200),
        ("GPU.lab:{port}", 200),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_it_answers_only_to_names_it_was_given(server: LocalServer, host: str, status: int, path: str) -> None:
    """A page of evil.example may point that name at 127.0.0.1; the browser then takes this server for its own."""
    with (
        LocalServer(server.model, allow_hosts=["gpu.lab"]) as named,
        socket.create_connection(("127.0.0.1", named.port)) as line,
    ):
        header = host.format(port=named.port)
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: {header}\r\nConnection: close\r\n\r\n".encode())
        said = b"".join(iter(lambda: line.recv(65536), b"")).decode()
    assert said.startswith(f"HTTP/1.1 {status} ")
    assert status == 200 or "--allow-host" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "gpu.lab"])
def test_beyond_this_machine_it_needs_a_key_or_to_be_told_that_none_is_meant(server: LocalServer, host: str) -> None:
    with pytest.raises(ValueError, match="--insecure"):
        LocalServer(server.model, host=host)
    LocalServer(server.model, host=host, api_key="sk-1")
    LocalServer(server.model, host=host, insecure=True)


def test_it_serves_on_every_address_when_that_is_meant(server: LocalServer) -> None:
    async def main(root: str) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{root}/health") as response:
            return response.status

    with LocalServer(server.model, host="0.0.0.0", insecure=True) as open_server:
        assert asyncio.run(main(open_server.root)) == 200
