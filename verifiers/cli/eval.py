"""``vf eval``: flags → an environment, a model and the options of a run → one evaluation and its report."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from verifiers.cli.answering import Found, Wanted, find_model
from verifiers.cli.arguments import command_line, read_count, read_headers, read_json, read_names
from verifiers.cli.defaults import Defaults, read_defaults
from verifiers.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.envs.rows import Rows
    from verifiers.results import Results

FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What was said on the command line; None where nothing was."""

    env_id: str
    env_args: dict[str, Any]
    env_dir_path: str
    endpoints_path: str | None
    model: str | None
    api_key_var: str | None
    api_base_url: str | None
    header: dict[str, str]
    num_examples: int | None
    rollouts_per_example: int | None
    max_concurrent: int | None
    max_concurrent_generation: int | None
    max_concurrent_scoring: int | None
    max_tokens: int | None
    temperature: float | None
    sampling_args: dict[str, Any] | None
    verbose: bool
    no_interleave_scoring: bool
    state_columns: list[str]
    save_results: bool
    save_every: int
    independent_scoring: bool
    save_to_hf_hub: bool
    hf_hub_dataset_name: str
    extra_env_kwargs: dict[str, Any]
    resume: str | None
    dry_run: bool
    max_retries: int | None
    timeout: float | None
    as_json: bool
    max_failure_rate: float

    def wanted(self) -> Wanted:
        return Wanted(
            model=self.model,
            api_key_var=self.api_key_var,
            api_base_url=self.api_base_url,
            headers=self.header,
            endpoints_path=self.endpoints_path,
            max_retries=self.max_retries,
        )

    def run_options(self, defaults: Defaults) -> dict[str, Any]:
        """The keywords of ``env.evaluate``, apart from who answers."""
        single = {
            "max_tokens": defaults.max_tokens if self.max_tokens is None else self.max_tokens,
            "temperature": defaults.temperature if self.temperature is None else self.temperature,
        }
        sampling = {**{key: value for key, value in single.items() if value is not None}, **(self.sampling_args or {})}
        return {
            "sampling_args": sampling,
            "num_examples": defaults.num_examples if self.num_examples is None else self.num_examples,
            "rollouts_per_example": self.rollouts_per_example or defaults.rollouts_per_example,
            "max_concurrent": defaults.max_concurrent if self.max_concurrent is None else self.max_concurrent,
            "max_concurrent_generation": self.max_concurrent_generation,
            "max_concurrent_scoring": self.max_concurrent_scoring,
            "state_columns": self.state_columns,
            "independent_scoring": self.independent_scoring,
            "save_every": self.save_every,
            "save_results": self.save_results and self.resume is None,
            "resume": self.resume or False,
        }


def _environment_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    folder = Path(ctx.params.get("env_dir_path") or "environments")
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


ABOVE_0 = click.IntRange(min=1)


@click.command("eval", short_help="Evaluate a model on an environment.")
@click.argument("env_id", metavar="ENV", shell_complete=_environment_names)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="A name of the registry, a model of the endpoint, local, ./folder, x.gguf, fake.",
)
@click.option(
    "-n",
    "--num-examples",
    type=int,
    callback=read_count,
    metavar="N",
    help="Examples to evaluate; -1 for all (default 5).",
)
@click.option("-r", "--rollouts-per-example", type=ABOVE_0, metavar="N", help="Rollouts of each (default 3).")
@click.option(
    "-a", "--env-args", metavar="JSON", callback=read_json, default="{}", help="Arguments of load_environment()."
)
@click.option(
    "-x",
    "--extra-env-kwargs",
    metavar="JSON",
    callback=read_json,
    default="{}",
    help="Attributes to set on the environment.",
)
@click.option(
    "-p",
    "--env-dir-path",
    metavar="PATH",
    default="./environments",
    help="Folder of environments (default ./environments).",
)
@click.option(
    "-b", "--api-base-url", metavar="URL", help="URL of an OpenAI-compatible server; the registry is then left alone."
)
@click.option("-k", "--api-key-var", metavar="NAME", help="Environment variable with the key (default OPENAI_API_KEY).")
@click.option(
    "-e", "--endpoints-path", metavar="PATH", help="Registry of endpoints: a file or its folder (default ./configs)."
)
@click.option(
    "--header",
    metavar="NAME:VALUE",
    callback=read_headers,
    multiple=True,
    help="Sent with each request; may be repeated.",
)
@click.option("-t", "--max-tokens", type=ABOVE_0, metavar="N", help="Tokens of a reply at most.")
@click.option("-T", "--temperature", type=float, metavar="T", help="Sampling temperature.")
@click.option(
    "-S",
    "--sampling-args",
    metavar="JSON",
    callback=read_json,
    help="Further sampling arguments; they win over -t and -T.",
)
@click.option(
    "-c",
    "--max-concurrent",
    type=int,
    callback=read_count,
    metavar="N",
    help="Rollouts at once; -1 for no limit (default 32).",
)
@click.option("--max-concurrent-generation", type=ABOVE_0, metavar="N", help="Rollouts being generated at once.")
@click.option("--max-concurrent-scoring", type=ABOVE_0, metavar="N", help="Rollouts being scored at once.")
@click.option(
    "--max-retries", type=click.IntRange(min=0), metavar="N", help="Times a failed request is repeated (default 8)."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds a request may take (default 600).",
)
@click.option("-s", "--save-results", is_flag=True, help="Save each rollout under outputs/evals as it is done.")
@click.option("--resume", metavar="PATH", help="Go on with a saved run: what is missing and what failed.")
@click.option(
    "-C",
    "--state-columns",
    metavar="NAMES",
    callback=read_names,
    default="",
    help="State keys to save, with commas between.",
)
@click.option("-H", "--save-to-hf-hub", is_flag=True, help="Push the scored rollouts to the Hugging Face hub.")
@click.option(
    "-D", "--hf-hub-dataset-name", metavar="NAME", default="", help="Name of that data set (default env_model_nN_rR)."
)
@click.option("-R", "--independent-scoring", is_flag=True, help="Group rewards see one rollout at a time.")
@click.option("--dry-run", is_flag=True, help="Load everything but the model, show the plan and a prompt, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option(
    "--max-failure-rate",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    default=0.0,
    help="Exit with 1 if a larger share of rollouts failed (default 0).",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the log and tracebacks.")
@click.option("-N", "--no-interleave-scoring", is_flag=True, help="Accepted for 0.1.x; it has no effect.")
@click.option(
    "-f", "--save-every", type=int, metavar="N", default=-1, help="Accepted for 0.1.x; each rollout is saved anyway."
)
@click.pass_context
def eval_command(ctx: click.Context, /, **given: Any) -> None:
    """Evaluate a model on ENV, an installed environment or one in ./environments.

    \b
    vf eval arithmetic -m fake                      a first look, with no model
    vf eval arithmetic -m local -n 10 -r 1          a real model in this process
    vf eval gsm8k -m gpt-5-mini -n 50 -r 4 -s       an endpoint; saved, can be resumed
    vf eval gsm8k -m Qwen/Qwen3-4B -b http://localhost:8000/v1

    Defaults for -n, -r, -c, -t and -T come from [tool.verifiers.eval] in the environment's pyproject.toml.
    Exit codes: 0 done, 1 failures (see --max-failure-rate), 2 wrong usage, 130 stopped by Ctrl-C.
    """
    flags = Flags(**given)
    with _told(flags.verbose):
        if flags.no_interleave_scoring:
            warnings.warn("-N has no effect: each rollout is scored when it is done", stacklevel=2)
        found = find_model(flags.wanted())
        env, defaults = _load(flags)
        options = flags.run_options(defaults)
        _check_resume(flags)
        if flags.dry_run:
            _show_plan(env, found, options, flags)
            return
        ctx.exit(_evaluate(ctx, env, found, options, flags))


# --- the environment ----------------------------------------------------------------------------------------------


def _load(flags: Flags) -> tuple[Environment, Defaults]:
    from verifiers.envs import loading

    env_id, folder = _split_path(flags.env_id, flags.env_dir_path)
    try:
        env = loading.load_environment(env_id, environments_dir=folder, **flags.env_args)
        env.set_kwargs(**flags.extra_env_kwargs)
        if flags.timeout is not None:
            env.timeout = flags.timeout
        name, _ = loading.split_id(env_id)
        return env, read_defaults(name)
    except Exception as error:  # foreign code
        raise _explained(error, f"the environment {env_id!r} cannot be loaded", flags.verbose) from error


def _split_path(env_id: str, folder: str) -> tuple[str, str]:
    """An environment's folder, as the shell completes it, is that environment; anything else is an id."""
    path = Path(env_id)
    return (path.name, str(path.parent)) if "/" in env_id and path.is_dir() else (env_id, folder)


def _explained(error: Exception, what: str, verbose: bool) -> click.ClickException:
    """A sentence about an error: as it is where the library says it, with its place where foreign code raised it."""
    if verbose:
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    library = Path(__file__).resolve().parents[1]
    if Path(place.filename).resolve().is_relative_to(library) and isinstance(error, ValueError | TypeError):
        return click.UsageError(str(error))
    hint = "" if verbose else "; -v shows the traceback"
    return click.ClickException(f"{what}: {type(error).__name__}: {error} ({place.filename}:{place.lineno}{hint})")


def _check_resume(flags: Flags) -> None:
    from verifiers.store import is_run_dir

    if flags.resume is not None and not is_run_dir(flags.resume):
        raise click.UsageError(f"--resume {flags.resume}: there is no saved run in this folder")


# --- the run ------------------------------------------------------------------------------------------------------


def _evaluate(ctx: click.Context, env: Environment, found: Found, options: Mapping[str, Any], flags: Flags) -> int:
    from verifiers.runner import RunInterruptedError

    rows = _rows(env, options, flags)
    size = f"{len(rows)} example{'s' * (len(rows) != 1)} × {options['rollouts_per_example']}"
    click.echo(f"{env.env_id or type(env).__name__}: {size} with {found.model} ({found.where})", err=True)
    client = found.open()
    is_stopped = False
    try:
        results = env.evaluate_sync(client=client, model=found.model, **options)
    except RunInterruptedError as error:
        results, is_stopped = error.results, True
    except Exception as error:  # foreign code: the rows of an environment are made while it runs
        raise _explained(error, "the run ended", flags.verbose) from error
    finally:
        found.close(client)
    _show(ctx, results, flags, is_stopped=is_stopped)
    if is_stopped:
        return INTERRUPTED
    if flags.save_to_hf_hub:
        _push(results, flags)
    return _verdict(results, flags.max_failure_rate)


def _rows(env: Environment, options: Mapping[str, Any], flags: Flags) -> Rows:
    """The rows to evaluate; many environments read or fetch them only now."""
    try:
        rows = env.get_eval_dataset(options["num_examples"])
        len(rows)
    except Exception as error:  # foreign code
        raise _explained(error, f"the rows of {flags.env_id!r} cannot be read", flags.verbose) from error
    return rows


def _show(ctx: click.Context, results: Results, flags: Flags, *, is_stopped: bool) -> None:
    from verifiers.cli.report import report, summary

    path = results.metadata.get("path_to_save")
    can_resume = path is not None and (results.failed or is_stopped)
    resume = command_line(ctx, without=("save_results",), resume=str(path)) if can_resume else None
    if flags.as_json:
        figures = {**summary(results), "interrupted": is_stopped, "resume": resume}
        click.echo(json.dumps(figures, ensure_ascii=False, allow_nan=False, default=str))
        return
    click.echo("\n".join(report(results)))
    if is_stopped:
        click.echo("stopped by Ctrl-C" if path else "stopped by Ctrl-C; nothing was saved (-s saves each rollout)")
    elif path is None:
        click.echo("not saved (-s saves each rollout as it is done)")
    if resume is not None:
        click.echo(f"{'go on' if is_stopped else 'run the failed ones again'} with: {resume}")


def _push(results: Results, flags: Flags) -> None:
    from verifiers.envs.evaluation import make_dataset

    metadata = results.metadata
    size = f"n{metadata['num_examples']}_r{metadata['rollouts_per_example']}"
    name = flags.hf_hub_dataset_name or f"{metadata['env_id']}_{metadata['model'].replace('/', '_')}_{size}"
    try:
        make_dataset(results, push_to_hub=True, hub_name=name)
    except Exception as error:  # foreign code
        raise _explained(error, f"the data set {name!r} was not pushed", flags.verbose) from error
    click.echo(f"pushed to the hub as {name}", err=flags.as_json)


def _verdict(results: Results, max_failure_rate: float) -> int:
    share = len(results.failed) / len(results.rollouts) if results.rollouts else 0.0
    if share <= max_failure_rate:
        return 0
    click.echo(f"{share:.1%} of the rollouts failed, more than --max-failure-rate {max_failure_rate:g}", err=True)
    return FAILED


def _show_plan(env: Environment, found: Found, options: Mapping[str, Any], flags: Flags) -> None:
    from verifiers.cli.report import conversation

    rows = _rows(env, options, flags)
    plan = {
        "env_id": env.env_id or type(env).__name__,
        "env_args": env.env_args,
        "model": found.model,
        "where": found.where,
        "num_examples": len(rows),
        **{key: options[key] for key in ("rollouts_per_example", "max_concurrent", "sampling_args")},
        "rollouts": len(rows) * options["rollouts_per_example"],
    }
    if flags.as_json:
        click.echo(json.dumps(plan, ensure_ascii=False, default=str))
        return
    width = max(map(len, plan))
    click.echo("\n".join(f"{key:<{width}}  {value}" for key, value in plan.items()))
    if len(rows):
        click.echo("\n".join(["the first prompt:", *conversation(rows[0]["prompt"])]))
    click.echo("a dry run: no model was asked")


# --- what a person is told meanwhile ------------------------------------------------------------------------------


@contextmanager
def _told(verbose: bool) -> Iterator[None]:
    """The log on stderr and warnings as single lines, for as long as the command lasts."""
    from verifiers.logs import setup_logging

    logger = logging.getLogger("verifiers")
    handlers, level = list(logger.handlers), logger.level
    setup_logging("DEBUG" if verbose else os.environ.get("VF_LOG_LEVEL", "WARNING"))
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _warn
        try:
            yield
        finally:
            logger.handlers[:] = handlers
            logger.setLevel(level)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
