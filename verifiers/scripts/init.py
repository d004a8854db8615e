"""Classic import path: ``vf-init``, which is ``vf init``."""

from __future__ import annotations

import sys
from pathlib import Path

from verifiers.cli.main import vf
from verifiers.packages import new_package

__all__ = ["init_environment", "main"]


def init_environment(
    env: str, path: str = "./environments", rewrite_readme: bool = False, multi_file: bool = False
) -> Path:
    """Create an environment package, as ``vf init`` does; returns its folder."""
    new_package(env, path, is_multi_file=multi_file, rewrites_readme=rewrite_readme)
    return Path(path) / env.replace("-", "_")


def main() -> None:
    """The entry point of ``vf-init``."""
    vf(args=["init", *sys.argv[1:]], prog_name="vf")


if __name__ == "__main__":
    main()
