"""Overhead of `HTTPClient.complete` over a bare aiohttp request: CPU per request, memory per waiting request.

    python benchmarks/http_client.py [--requests 6144] [--concurrency 512] [--rounds 7] [--waiting 5000] [--uvloop]

The server runs in a separate process and answers with canned bytes. Rounds of both alternate in one process, and the
median counts. Memory is the growth of RSS, each measured in a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
from yarl import URL

from verifiers.clients.http import HTTPClient
from verifiers.clients.protocol import Request

PROMPT = [{"role": "system", "content": "Think, then answer."}, {"role": "user", "content": "What is 2+2? " * 8}]
SAMPLING = {"max_tokens": 64, "temperature": 0.7}
HEADERS = {"Authorization": "Bearer sk-test", "Content-Type": "application/json"}
BODY = json.dumps({"model": "m", "messages": PROMPT, "max_completion_tokens": 64, "temperature": 0.7}).encode()
Ask = Callable[[], Awaitable[object]]


# --- the server ---------------------------------------------------------------------------------------------------


class Canned(asyncio.Protocol):
    """Answers every POST with the same chat completion, after a delay if the path contains one."""

    text = "<think>Two and two.</think>\n<answer>4</answer> " * 4
    choice = {"index": 0, "message": {"role": "assistant", "content": text, "refusal": None}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 40, "completion_tokens": 60, "total_tokens": 100}
    body = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
    ).encode()
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, blank, rest = self.received.partition(b"\r\n\r\n")
        if not blank:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(rest) < length:
            return
        self.received = rest[length:]
        if b"/slow/" in head.partition(b"\r\n")[0]:
            asyncio.get_running_loop().call_later(15, self.transport.write, self.reply)
        else:
            self.transport.write(self.reply)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def server() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


# --- the two contestants ------------------------------------------------------------------------------------------


def ours(base_url: str, *, at_once: int | None = None) -> Ask:
    client = HTTPClient(base_url, "sk-test", max_concurrent=at_once)

    return lambda: client.complete(Request(model="m", prompt=PROMPT, sampling=SAMPLING))


def bare(base_url: str, session: aiohttp.ClientSession) -> Ask:
    url = URL(f"{base_url}/chat/completions")

    async def ask() -> object:
        async with session.post(url, data=BODY, headers=HEADERS) as response:
            return await response.read()

    return ask


# --- the figures --------------------------------------------------------------------------------------------------


async def cpu_us(ask: Ask, *, requests: int, concurrency: int) -> float:
    async def worker() -> None:
        for _ in range(requests // concurrency):
            await ask()

    gc.collect()
    began = time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return (time.process_time() - began) / (requests // concurrency * concurrency) * 1e6


async def compare_cpu(port: int, options: argparse.Namespace) -> None:
    base_url = f"http://127.0.0.1:{port}/v1"
    tuned = {"cookie_jar": aiohttp.DummyCookieJar(), "timeout": aiohttp.ClientTimeout(total=None)}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), **tuned) as no_frills,
    ):
        asks = {
            "bare aiohttp": bare(base_url, session),
            "no deadline": bare(base_url, no_frills),  # and no cookies: the minimum with aiohttp
            "HTTPClient": ours(base_url),
        }
        rounds: dict[str, list[float]] = {name: [] for name in asks}
        for number in range(options.rounds + 1):
            for name, ask in asks.items():
                figure = await cpu_us(ask, requests=options.requests, concurrency=options.concurrency)
                if number:  # the first round opens the connections
                    rounds[name].append(figure)
    us = {name: statistics.median(figures) for name, figures in rounds.items()}
    for name, figure in us.items():
        print(f"{name:14s} {figure:7.1f} us of CPU per request at concurrency {options.concurrency}")
    for other in ("bare aiohttp", "no deadline"):
        ratios = [own / plain for own, plain in zip(rounds["HTTPClient"], rounds[other], strict=True)]
        print(f"HTTPClient / {other:14s} {statistics.median(ratios):5.2f}")


async def waiting_kb(port: int, contestant: str, count: int) -> float:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        fast, slow = (f"http://127.0.0.1:{port}/{path}v1" for path in ("", "slow/"))
        # Set max_concurrent so that all are sent at once; queued requests would take far less memory.
        warm, ask = (ours(url, at_once=count) if contestant == "ours" else bare(url, session) for url in (fast, slow))
        await warm()
        gc.collect()
        before = rss_bytes()
        tasks = [asyncio.ensure_future(ask()) for _ in range(count)]
        await asyncio.sleep(8)
        grown = rss_bytes() - before
        if any(task.done() for task in tasks) or open_files() < count:
            sys.exit(f"of {count} requests not all were waiting for their reply when memory was measured")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return grown / count / 1000


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def rss_bytes() -> int:
    if not os.path.exists("/proc/self/statm"):  # macOS
        return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) * 1024
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6144)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--waiting", type=int, default=5000)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--wait-as", choices=("ours", "bare"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    run = asyncio.run
    if options.uvloop:
        import uvloop

        run = uvloop.run
    if options.serve:
        return asyncio.run(serve())
    with server() as port:
        if options.wait_as:
            print(f"{run(waiting_kb(port, options.wait_as, options.waiting)):.1f}")
            return None
        run(compare_cpu(port, options))
    for contestant, name in (("bare", "bare aiohttp"), ("ours", "HTTPClient")):
        flags = ["--wait-as", contestant, "--waiting", str(options.waiting)] + ["--uvloop"] * options.uvloop
        kb = subprocess.check_output([sys.executable, __file__, *flags], text=True).strip()
        print(f"{name:14s} {kb:>7s} kB of memory per waiting request, of {options.waiting}")
    return None


if __name__ == "__main__":
    main()
