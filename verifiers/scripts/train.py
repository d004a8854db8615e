"""Classic import path: ``vf-train``, which is ``vf train``."""

from verifiers.cli.train import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
