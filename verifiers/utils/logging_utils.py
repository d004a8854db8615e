"""Classic import path: the log, and a sample of rollouts on the terminal."""

from verifiers.logs import print_prompt_completions_sample, setup_logging

__all__ = ["print_prompt_completions_sample", "setup_logging"]
