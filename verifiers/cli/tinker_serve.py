"""``vf tinker-serve``: serves a local model to Tinker's SDK, for training and sampling."""

from __future__ import annotations

import importlib.util
import os

import click

from verifiers.cli.answering import BUNDLED, LOCAL, check_local
from verifiers.cli.arguments import Integer
from verifiers.cli.serve import check_port
from verifiers.logs import setup_logging


@click.command("tinker-serve", short_help="Serve a local model to Tinker's SDK for training and sampling.")
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=Integer(0, 65535), default=8001, show_default=True, help="Port to listen on.")
@click.option("--dir", "folder", metavar="PATH", help="Where adapters are saved (default outputs/tinker).")
@click.option("--api-key-var", metavar="NAME", help="Environment variable with the key that clients must send.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="A host name that clients may use (repeat).")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without a key.")
@click.option("--name", metavar="NAME", help="The model's name for clients (default: the end of MODEL).")
@click.option("--rows", type=Integer(min=1), metavar="N", help="Concurrent samples.")
@click.option("--length", type=Integer(min=1), metavar="N", help="Maximum tokens of a sequence.")
def tinker_serve(
    model: str,
    host: str,
    port: int,
    folder: str | None,
    api_key_var: str | None,
    allow_host: tuple[str, ...],
    insecure: bool,
    name: str | None,
    rows: int | None,
    length: int | None,
) -> None:
    """Serve MODEL (smollm2, a folder, a hub name) to Tinker's SDK until Ctrl-C; only LoRA adapters are trained.

    \b
    vf tinker-serve smollm2
    TINKER_BASE_URL=http://127.0.0.1:8001 TINKER_API_KEY=tml-local python train.py
    """
    api_key = None if api_key_var is None else os.environ.get(api_key_var)
    if api_key_var is not None and not api_key:
        raise click.UsageError(f"--api-key-var {api_key_var}: this environment variable is not set")
    if name == "":
        raise click.UsageError("--name is empty")
    from verifiers.clients.hosts import is_loopback

    if not is_loopback(host) and api_key is None and not insecure:
        raise click.UsageError(
            f"--host {host} without a key lets anyone who can reach it train and read; pass --api-key-var NAME, or "
            "--insecure if that is intended"
        )
    check_local(model)
    if missing := [one for one in ("peft", "google.protobuf") if not _has(one)]:
        raise click.ClickException(f"{missing[0]} is not installed: pip install 'verifiers[tinker]'")
    check_port(host, port)
    setup_logging("WARNING")
    click.echo(f"loading {model}", err=True)
    from verifiers.integrations.tinker import server as tinker

    try:
        server = tinker.TinkerServer(
            BUNDLED if model in LOCAL else model,
            name=name,
            folder=folder or tinker.DEFAULT_FOLDER,
            host=host,
            port=port,
            api_key=api_key,
            allow_hosts=allow_host,
            insecure=insecure,
            rows=rows,
            length=length,
        )
    except (ValueError, OSError, ImportError) as error:
        raise click.ClickException(f"{model} cannot be served: {error}") from error
    try:
        tinker.serve(server, on_ready=lambda url: _say(server.service.name, url))
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _say(name: str, url: str) -> None:
    click.echo(
        f"serving {name!r} at {url}; clients need TINKER_BASE_URL={url} and a TINKER_API_KEY that begins with tml-\n"
        "press Ctrl-C to stop",
        err=True,
    )


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
