"""`vf serve` as a user starts it: a process of its own over a tiny model in a folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine import tiny

NAME = "tiny"
STARTED = re.compile(r"serving (\S+) at (http://\S+?);")
CONTEXT = 16384  # agents have long prompts, and a byte is a token here


@dataclass(frozen=True)
class Served:
    """Where a running server is."""

    url: str
    folder: Path

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """A bare request: the status, and the body as JSON where it is."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.root + path, content, {"Content-Type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=100) as response:
                status, read = response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                status, read = error.code, error.read()
        try:
            return status, json.loads(read)
        except ValueError:
            return status, read.decode()

    def ask(self, path: str, **body: Any) -> Any:
        """The reply to a request that is no error."""
        status, reply = self.post(path, {"model": NAME, **body})
        assert status == 200, reply
        return reply

    def chat(self, text: str = "hello world", **body: Any) -> Any:
        """The first choice of a chat."""
        return self.ask("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)["choices"][0]

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream."""
        status, read = self.post(path, {"model": NAME, "stream": True, **body})
        assert status == 200, read
        data = [line.removeprefix("data: ") for line in read.splitlines() if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]


def save_model(folder: Path) -> None:
    """A model that is brief and knows tools, as a folder that `vf serve` takes."""
    tokenizer = tiny.tokenizer(tiny.HERMES)
    tiny.brief_model(tokenizer, context=CONTEXT).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Served]:
    """The program on a free port of this machine, while the block lasts."""
    command = [sys.executable, "-m", "verifiers", "serve", str(folder), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said: list[str] = []
    drain = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
    try:
        url = None
        for line in process.stderr:
            said.append(line)
            if found := STARTED.search(line):
                url = found[2]
                break
        assert url is not None, "".join(said)
        drain.start()  # a full pipe would stop the server
        yield Served(url=url, folder=folder)
    finally:
        process.terminate()
        process.wait(300)  # a loaded machine
        if drain.is_alive():
            drain.join(10)
        process.stderr.close()
