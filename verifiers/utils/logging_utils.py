"""Classic import path: the log, and a sample of rollouts on the terminal."""

from verifiers.logs import log_level, print_prompt_completions_sample, quiet_verifiers, setup_logging

__all__ = ["log_level", "print_prompt_completions_sample", "quiet_verifiers", "setup_logging"]
