"""A chat endpoint that answers immediately (or after a latency) with one canned reply, with minimal CPU time."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

REPLY = "<reasoning>\nTwo and two are four, and nothing more is asked.\n</reasoning>\n<answer>\n4\n</answer>"
BODY = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "canned",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": REPLY}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 30, "total_tokens": 50},
    }
).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


class Canned(asyncio.Protocol):
    """Finds the end of requests by their Content-Length, and parses nothing else."""

    latency_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.pending = b""

    def data_received(self, data: bytes) -> None:
        self.pending += data
        while (end := self.pending.find(b"\r\n\r\n")) >= 0:
            head = self.pending[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.pending) < end + 4 + length:
                return
            self.pending = self.pending[end + 4 + length :]
            if self.latency_s:
                asyncio.get_running_loop().call_later(self.latency_s, self.answer)
            else:
                self.answer()

    def answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(HEAD + BODY)


async def main(latency_s: float) -> None:
    Canned.latency_s = latency_s
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def raise_open_files() -> int:
    """Raise the soft limit of file descriptors, because thousands of sockets need more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(65536, hard) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


@contextmanager
def running(latency_s: float = 0.0) -> Iterator[str]:
    """The server in a separate process; yields its base URL."""
    raise_open_files()
    process = subprocess.Popen(
        [sys.executable, __file__, str(latency_s)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
