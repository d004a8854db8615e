"""``python -m verifiers`` is ``vf``."""

from verifiers.cli.main import main

if __name__ == "__main__":
    main()
