"""``vf serve``: serves a local model with an OpenAI-compatible API."""

from __future__ import annotations

import os
import socket

import click

from verifiers.cli.answering import BUNDLED, LOCAL, check_local, load_local
from verifiers.cli.arguments import Integer
from verifiers.logs import setup_logging

DTYPES = ("float32", "bfloat16", "float16")


@click.command("serve", short_help="Serve a local model to OpenAI clients.")
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=Integer(0, 65535), default=8000, show_default=True, help="Port to listen on.")
@click.option(
    "--api-key", metavar="KEY", help="The key that clients must send; other users of this machine can see it."
)
@click.option("--api-key-var", metavar="NAME", help="Environment variable with that key.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="A host name that clients may use (repeat).")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without a key.")
@click.option("--name", metavar="NAME", help="The model's name for clients (default: the end of MODEL).")
@click.option("--rows", type=Integer(min=1), metavar="N", help="Concurrent requests.")
@click.option("--length", type=Integer(min=1), metavar="N", help="Maximum tokens of a conversation.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Of the weights (default: float32 on a CPU, bfloat16 on a GPU)."
)
def serve(
    model: str,
    host: str,
    port: int,
    api_key: str | None,
    api_key_var: str | None,
    allow_host: tuple[str, ...],
    insecure: bool,
    name: str | None,
    rows: int | None,
    length: int | None,
    dtype: str | None,
) -> None:
    """Serve MODEL (smollm2, a folder, a GGUF file, a hub name) at http://HOST:PORT/v1 until Ctrl-C."""
    if api_key is not None and api_key_var is not None:
        raise click.UsageError("--api-key and --api-key-var are the same setting; pass one of them")
    if api_key_var is not None:
        api_key = os.environ.get(api_key_var)
        if not api_key:
            raise click.UsageError(f"--api-key-var {api_key_var}: this environment variable is not set")
    from verifiers.clients.hosts import is_loopback

    if not is_loopback(host) and api_key is None and not insecure:
        raise click.UsageError(
            f"--host {host} without a key lets anyone who can reach it use the model and replace its weights; pass "
            "--api-key-var NAME, or --insecure if that is intended"
        )
    check_local(model)
    check_port(host, port)
    if name == "":
        raise click.UsageError("--name is empty")
    setup_logging("WARNING")
    click.echo(f"loading {model}", err=True)
    from verifiers.engine.server import server
    from verifiers.engine.server.serving import served_name

    shown = name or served_name(BUNDLED if model in LOCAL else model)
    local_model = load_local(model, rows=rows, length=length, dtype=dtype, name=shown)

    try:
        server.serve(
            local_model,
            host,
            port,
            api_key,
            allow_hosts=allow_host,
            insecure=insecure,
            on_ready=lambda url: _say(local_model.model, url),
        )
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    finally:
        local_model.close()


def check_port(host: str, port: int) -> None:
    """Raise an error if the port is in use, before anything is loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _say(model: str, url: str) -> None:
    click.echo(f"serving {model} at {url}; try: vf eval arithmetic -m {model} -b {url}\npress Ctrl-C to stop", err=True)
