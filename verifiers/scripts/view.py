"""Classic import path: ``vf-view`` and ``vf-tui``, which is ``vf view``."""

from __future__ import annotations

import sys

from verifiers.cli.main import vf

__all__ = ["main"]


def main() -> None:
    """The entry point of ``vf-view``."""
    vf(args=["view", *sys.argv[1:]], prog_name="vf")


if __name__ == "__main__":
    main()
