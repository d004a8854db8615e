"""The ``vf`` program: the list of commands, each imported only when it is used."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import importlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import click

INTERRUPTED = 130  # 128 + SIGINT, as in a shell; SIGTERM gives 143 and SIGHUP 129

# command name → (module:attribute, its line in `vf --help`)
COMMANDS = {
    "eval": ("verifiers.cli.eval:eval_command", "Evaluate models on environments."),
    "check": ("verifiers.cli.check:check", "Check an environment before paying for a run."),
    "init": ("verifiers.cli.init:init", "Make a new environment package."),
    "install": ("verifiers.cli.install:install", "Install an environment."),
    "uninstall": ("verifiers.cli.uninstall:uninstall", "Uninstall environments."),
    "publish": ("verifiers.cli.publish:publish", "Check an environment and build its wheel."),
    "list": ("verifiers.cli.list:list_command", "List environments, with their arguments."),
    "runs": ("verifiers.cli.runs_command:runs", "List, tag, annotate and delete saved runs."),
    "view": ("verifiers.cli.view:view", "Look at runs and trainings in the browser."),
    "compare": ("verifiers.cli.compare:compare", "Compare two runs on the same examples."),
    "power": ("verifiers.cli.power:power", "Compute how many examples to run."),
    "export": ("verifiers.cli.export:export", "Write a run as a table or as training data."),
    "rescore": ("verifiers.cli.rescore:rescore", "Score a saved run again, without a model."),
    "replay": ("verifiers.cli.replay:replay", "Replay a saved run from its record."),
    "import": ("verifiers.cli.import_command:import_command", "Make a run from traces recorded elsewhere."),
    "train": ("verifiers.cli.train:train", "Train a model on an environment."),
    "sft": ("verifiers.cli.sft:sft", "Train a model to imitate examples."),
    "plan": ("verifiers.cli.plan:plan", "Show which training of a model fits into which GPUs."),
    "models": ("verifiers.cli.models:models", "Download and list the model that runs in this process."),
    "serve": ("verifiers.cli.serve:serve", "Serve a local model to OpenAI clients."),
    "tinker-serve": (
        "verifiers.cli.tinker_serve:tinker_serve",
        "Serve a local model to Tinker's SDK for training and sampling.",
    ),
    "env-serve": ("verifiers.cli.env_serve:env_serve", "Serve an environment to trainers elsewhere."),
    "simulate": ("verifiers.cli.simulate:simulate", "Predict how well a large run will use its GPUs."),
    "doctor": ("verifiers.cli.doctor:doctor", "Show what is installed and what this machine can do."),
}


class LazyGroup(click.Group):
    """A group with its commands in a table, so that help and completion import none of them."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, _, attribute = self.table[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.table.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.table and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.table, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(self.table)}"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        from verifiers.cli.ending import said_in_one_sentence

        with said_in_one_sentence():  # --help and --version write here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        from verifiers.cli import ending

        ending.open_closed_streams()
        try:
            with (
                ending.steady_stderr(),
                ending.told_by_signals(),
                ending.exits_reported(),
                ending.said_in_one_sentence(),
            ):
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            click.echo("stopped", err=True)
            ctx.exit(getattr(error, "exit_code", INTERRUPTED))
        except click.ClickException as error:
            if error.message:
                vars(error)["message"] = _between_words(error.message)
            raise


def _between_words(message: str) -> str:
    """Wrap an error message between words, where a terminal would break it anywhere."""
    from verifiers.cli.tables import fitted

    first, *shown = f"Error: {message}".splitlines()  # further lines show a place in a file, and are not wrapped
    return "\n".join([*fitted([first], indent=2, stream=sys.stderr), *shown]).removeprefix("Error: ")


def own_version() -> str:
    """The version of this package; `verifiers` is imported dynamically because of the layer rules."""
    version: str = importlib.import_module("verifiers").__version__
    return version


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="To try it without a key or a model: vf eval arithmetic -m fake",
)
@click.version_option(own_version(), prog_name="vf")
def vf() -> None:
    """Environments for language models: evaluate, serve and train models with them."""


def main() -> None:
    """The entry point of ``vf``."""
    try:
        vf(prog_name="vf")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            leave_now()
        raise


def leave_now() -> None:
    """After Ctrl-C: exit even if a thread of an environment never ends. By now, all results are on disk."""
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        atexit._run_exitfuncs()  # a normal exit would wait for those threads first
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader has closed it
                stream.flush()
        os._exit(INTERRUPTED)
