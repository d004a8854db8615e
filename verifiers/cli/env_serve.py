"""``vf env-serve``: serves an environment over HTTP, which runs and scores its rollouts."""

from __future__ import annotations

import os
from typing import Any

import click

from verifiers.cli.arguments import Integer, Number, read_json
from verifiers.cli.environments import complete_environments, env_dir_option, load
from verifiers.cli.serve import check_port
from verifiers.logs import setup_logging

ABOVE_0 = Integer(min=1)


@click.command("env-serve", short_help="Serve an environment to trainers elsewhere.")
@click.argument("env_id", metavar="ENV", shell_complete=complete_environments)
@click.option(
    "-a", "--env-args", metavar="JSON", callback=read_json, default="{}", help="Arguments of load_environment()."
)
@env_dir_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=Integer(0, 65535), default=8765, show_default=True, help="Port to listen on.")
@click.option(
    "--api-key", metavar="KEY", help="The key that callers must send; other users of this machine can see it."
)
@click.option("--api-key-var", metavar="NAME", help="Environment variable with that key.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="A host name that callers may use (repeat).")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without a key.")
@click.option("-c", "--max-concurrent", type=ABOVE_0, default=64, show_default=True, help="Concurrent rollouts.")
@click.option("--max-waiting", type=Integer(min=0), default=1024, show_default=True, help="Rollouts that may wait.")
@click.option(
    "--deadline",
    type=Number(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Seconds a rollout may take.",
)
@click.option("--max-body-mb", type=ABOVE_0, default=64, show_default=True, help="Maximum megabytes of a request.")
@click.option(
    "--grace",
    type=Number(min=0),
    default=60.0,
    show_default=True,
    help="Seconds for running rollouts to finish when the server is stopped.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the log and tracebacks.")
def env_serve(
    env_id: str,
    env_args: dict[str, Any],
    env_dir_path: str,
    host: str,
    port: int,
    api_key: str | None,
    api_key_var: str | None,
    allow_host: tuple[str, ...],
    insecure: bool,
    max_concurrent: int,
    max_waiting: int,
    deadline: float,
    max_body_mb: int,
    grace: float,
    verbose: bool,
) -> None:
    """Serve ENV: trainers run its rollouts at http://HOST:PORT, with vf.RemoteEnv(URL) or vf eval URL.

    The caller calls the model, and needs no open port. Ctrl-C or SIGTERM finishes running rollouts.
    """
    from verifiers.clients.hosts import is_loopback

    if api_key is not None and api_key_var is not None:
        raise click.UsageError("--api-key and --api-key-var are the same setting; pass one of them")
    if api_key_var is not None:
        api_key = os.environ.get(api_key_var)
        if not api_key:
            raise click.UsageError(f"--api-key-var {api_key_var}: this environment variable is not set")
    if not is_loopback(host) and api_key is None and not insecure:
        raise click.UsageError(
            f"--host {host} without a key lets anyone who can reach it run the environment; pass --api-key-var NAME, "
            "or --insecure if that is intended"
        )
    check_port(host, port)
    setup_logging("INFO" if verbose else "WARNING")
    env = load(env_id, env_dir_path, env_args, verbose=verbose)
    from verifiers.envs.remote.server import EnvServer, ServerLimits, serve

    limits = ServerLimits(
        at_once=max_concurrent, waiting=max_waiting, deadline_s=deadline, body_bytes=max_body_mb * 1_000_000
    )
    server = EnvServer(
        env, host=host, port=port, api_key=api_key, allow_hosts=allow_host, insecure=insecure, limits=limits
    )
    try:
        serve(server, grace_s=grace, on_ready=lambda url: _say(env_id, url), on_stop=_say_stopping)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _say(env_id: str, url: str) -> None:
    click.echo(f"serving {env_id} at {url}; try: vf eval {url} -m fake\npress Ctrl-C to stop", err=True)


def _say_stopping(count: int) -> None:
    if count:
        click.echo(f"stopping: finishing {count} running rollouts; press Ctrl-C again to stop at once", err=True)
