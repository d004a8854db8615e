"""``vf publish``: an environment's folder → its wheel, which includes the report of ``vf check``."""

from __future__ import annotations

from pathlib import Path

import click

from verifiers.cli.check import describe
from verifiers.cli.environments import complete_environments, env_dir_option, explained, split_path
from verifiers.cli.telling import told
from verifiers.logs import printable


@click.command("publish", short_help="Check an environment and build its wheel.")
@click.argument("env_id", metavar="ENV", shell_complete=complete_environments)
@env_dir_option
@click.option("-o", "--output", metavar="PATH", default="dist", show_default=True, help="Folder for the wheel.")
@click.option("--allow-failures", is_flag=True, help="Build it even if a check fails; the verdict says so.")
@click.option("--with", "program", type=click.Choice(["pip", "uv"]), help="Default: pip, or uv if there is no pip.")
@click.option("-v", "--verbose", is_flag=True, help="Show the log and tracebacks.")
def publish(
    env_id: str, env_dir_path: str, output: str, allow_failures: bool, program: str | None, verbose: bool
) -> None:
    """Check ENV (a folder, or a name in ./environments) and build a wheel that others can install.

    \b
    vf publish my-env
    vf publish ./environments/my_env -o dist

    The wheel contains the verdict of the check and digests of the checked files; vf install shows it. Nothing is
    uploaded. Exit codes: 0 built, 1 a check or the build failed, 2 wrong usage.
    """
    from verifiers import checks, packages

    name, home = split_path(env_id, env_dir_path)
    folder = packages.local_folder(name, Path(home))
    if folder is None:
        raise click.UsageError(f"there is no environment {env_id!r} in {home}; vf init NAME makes one")
    with told(verbose):
        try:
            packages.read_folder(folder)
            report = checks.check_environment(name, environments_dir=home)
        except packages.NotAnEnvironmentError as error:
            raise click.ClickException(printable(str(error))) from error
        except Exception as error:  # foreign code
            raise explained(error, f"the environment {env_id!r} cannot be checked", verbose) from error
    bad = [line for line in describe(report) if " ok " not in line and " skip" not in line]
    click.echo("\n".join(bad))
    if not report.is_clean and not allow_failures:
        raise click.ClickException("not built: a check failed; fix it, or pass --allow-failures")
    try:
        wheel = packages.publish(folder, output, report.as_data(), program=program)  # type: ignore[arg-type]
    except packages.InstallError as error:
        raise click.ClickException("\n".join(map(printable, str(error).splitlines()))) from error
    click.echo(f"built {wheel}")
    click.echo(f"others install it with: vf install {wheel.name} (or from an index that you upload it to)")
