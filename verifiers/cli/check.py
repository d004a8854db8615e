"""``vf check``: checks an environment, prints a table of verdicts, and sets the exit code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.arguments import Integer, read_json
from verifiers.cli.environments import complete_environments, env_dir_option, explained, split_path
from verifiers.cli.tables import hang, heading, some, status_word
from verifiers.cli.telling import told

if TYPE_CHECKING:
    from verifiers.checks import Report


@click.command("check", short_help="Check an environment before paying for a run.")
@click.argument("env_ids", metavar="ENV...", nargs=-1, required=True, shell_complete=complete_environments)
@click.option(
    "-a", "--env-args", metavar="JSON", callback=read_json, default="{}", help="Arguments of load_environment()."
)
@env_dir_option
@click.option("-n", "--num-examples", type=Integer(min=1), default=8, show_default=True, help="Rows to try replies on.")
@click.option("--strict", is_flag=True, help="A warning counts as a failure.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show the log and tracebacks.")
@click.pass_context
def check(
    ctx: click.Context,
    env_ids: tuple[str, ...],
    env_args: dict[str, Any],
    env_dir_path: str,
    num_examples: int,
    strict: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Check ENV: an installed environment, one in ./environments, or a folder. No model is called.

    \b
    vf check arithmetic
    vf check ./environments/my_env -a '{"difficulty": "hard"}'
    vf check arithmetic gsm8k --strict --json

    Exit codes: 0 nothing failed, 1 a check failed, 2 wrong usage.
    """
    reports = []
    with told(verbose):
        for env_id in env_ids:
            report = _check(env_id, env_dir_path, env_args, num_examples, verbose)
            reports.append(report)
            if not as_json:
                click.echo("\n".join(describe(report)))
    if as_json:
        data = [report.as_data() for report in reports]
        click.echo(json.dumps(data[0] if len(data) == 1 else data, ensure_ascii=False))
    is_bad = any(not report.is_clean or (strict and report.counts["warn"]) for report in reports)
    ctx.exit(1 if is_bad else 0)


def _check(env_id: str, folder: str, env_args: dict[str, Any], num_examples: int, verbose: bool) -> Report:
    from verifiers.checks import Report, check_environment

    name, home = split_path(env_id, folder)
    try:
        return check_environment(name, env_args=env_args, environments_dir=home, examples=num_examples)
    except Exception as error:  # foreign code
        shown = explained(error, f"the environment {env_id!r} cannot be loaded", verbose)
        if isinstance(shown, click.UsageError):
            raise shown from error
        report = Report(env_id=env_id)
        report.add("it loads", "fail", shown.message)
        return report


def describe(report: Report) -> list[str]:
    """The verdicts as a table, and a last line with their counts."""
    width = max(len(verdict.name) for verdict in report.verdicts)
    lines = [heading(report.env_id)]
    for verdict in report.verdicts:
        found = hang(verdict.found, width + 10)
        lines.append(f"  {status_word(verdict.status)}  {verdict.name:<{width}}  {found}".rstrip())
    counts = report.counts
    parts = [f"{count} {word}" for count, word in ((counts["fail"], "failed"), (counts["ok"], "passed")) if count]
    parts += [some(counts["warn"], "warning")] if counts["warn"] else []
    parts += [f"{counts['skip']} skipped"] if counts["skip"] else []
    return [*lines, f"  {', '.join(parts)}"]
