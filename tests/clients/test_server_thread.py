"""A server in a thread: it stops without leaving a connection open, whatever its clients do at that moment."""

import gc
import socket
import threading
import time
import warnings

import pytest
from aiohttp import web

from verifiers.clients.server_thread import ServerThread


class Endless(ServerThread):
    """It answers ``/`` with more than a socket takes, for as long as somebody reads."""

    def make_runner(self) -> web.AppRunner:
        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"x" * 1_000_000)

        app = web.Application()
        app.router.add_get("/", endless)
        return web.AppRunner(app, shutdown_timeout=0.2)


@pytest.fixture
def nothing_is_left():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert not [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)]


def test_a_connection_accepted_as_the_server_stops_is_closed(nothing_is_left):
    server = Endless()
    server.start()
    loop, blocked = server._loop, threading.Event()
    assert loop is not None
    loop.call_soon_threadsafe(lambda: (blocked.set(), time.sleep(0.3)))
    blocked.wait()
    with socket.create_connection((server.host, server.port), timeout=10) as client:  # waits to be accepted
        server.stop()  # which the loop hears in the round in which it accepts
        assert client.recv(1) == b""


def test_a_connection_whose_client_reads_no_more_is_closed(nothing_is_left):
    server = Endless()
    server.start()
    with socket.create_connection((server.host, server.port), timeout=10) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert client.recv(4) == b"HTTP"
        time.sleep(0.1)
        server.stop()
