"""Classic import path: ``vf-tui``, which is ``vf view``."""

from verifiers.scripts.view import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
