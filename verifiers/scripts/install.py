"""Classic import path: ``vf-install``, which is ``vf install``."""

from __future__ import annotations

import sys

from verifiers.cli.main import vf

__all__ = ["main"]


def main() -> None:
    """The entry point of ``vf-install``."""
    vf(args=["install", *sys.argv[1:]], prog_name="vf")


if __name__ == "__main__":
    main()
