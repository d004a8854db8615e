"""The methods for training loops: batches of token samples, and setters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from verifiers.rubrics import Rubric, RubricGroup
from verifiers.samples import batches, one_batch
from verifiers.types import ProcessedOutputs, SamplingArgs, State

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment
    from verifiers.results import Results


class TrainerCalls:
    """The methods for trainers of 0.1.x and for users' training loops."""

    rubric: Rubric
    max_seq_len: int | None
    score_rollouts: bool
    interleaved_rollouts: bool

    # --- samples --------------------------------------------------------------------------------------------------

    def _prepare_rollout_results(
        self,
        all_states: Sequence[Mapping[str, Any]],
        model: str,
        client: Any,
        state_columns: Sequence[str] | None = None,
        results_path: Any = None,
        gen_sampling_args: SamplingArgs | None = None,
        start_time: float = 0.0,
    ) -> Results:
        """Rollouts that a host such as prime-rl collected, as results with metadata."""
        from verifiers.envs.host_results import prepare_results

        return prepare_results(
            cast("Environment", self),
            all_states,
            model=model,
            client=client,
            state_columns=state_columns,
            results_path=results_path,
            sampling_args=gen_sampling_args,
            began=start_time,
        )

    def process_env_results(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        states: Sequence[State],
        rewards: Sequence[float],
        processing_class: Any = None,
        batch_size: int = 8,
        max_seq_len: int | None = None,
        **kwargs: Any,
    ) -> list[ProcessedOutputs]:
        """Rollouts as batches of token samples with masks, for a user's training loop."""
        if kwargs:
            raise TypeError(f"process_env_results() got an unknown keyword {next(iter(kwargs))!r}")
        limit = self.max_seq_len if max_seq_len is None or max_seq_len < 0 else max_seq_len
        rollouts = zip(prompts, completions, states, rewards, strict=True)
        return list(batches(rollouts, processing_class, batch_size=batch_size, max_seq_len=limit))

    def process_env_results_vllm(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        states: Sequence[State],
        rewards: Sequence[float],
        processing_class: Any = None,
        max_seq_len: int | None = None,
        mask_env_responses: bool = True,
        mask_truncated_completions: bool = False,
        zero_truncated_completions: bool = False,
    ) -> ProcessedOutputs:
        """Rollouts as one batch, for trainers of 0.1.5. The environment's messages are never trained on."""
        limit = self.max_seq_len if max_seq_len is None or max_seq_len < 0 else max_seq_len
        return one_batch(
            zip(prompts, completions, states, rewards, strict=True),
            processing_class,
            max_seq_len=limit,
            mask_env_responses=mask_env_responses,
            mask_truncated_completions=mask_truncated_completions,
            zero_truncated_completions=zero_truncated_completions,
        )

    # --- setters --------------------------------------------------------------------------------------------------

    def set_kwargs(self, **kwargs: Any) -> None:
        """Set attributes, through ``set_<name>`` if it exists."""
        for name, value in kwargs.items():
            setter: Callable[[Any], None] | None = getattr(self, f"set_{name}", None)
            if setter is None:
                setattr(self, name, value)
            else:
                setter(value)

    def add_rubric(self, rubric: Rubric) -> None:
        """Add another rubric."""
        if isinstance(self.rubric, RubricGroup):
            self.rubric.rubrics.append(rubric)
        else:
            self.rubric = rubric if self.rubric.is_empty else RubricGroup([self.rubric, rubric])

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        """Set the largest number of tokens of a sample; None (or -1, for some trainers) means no limit."""
        if max_seq_len is not None and (type(max_seq_len) is not int or max_seq_len == 0):
            raise ValueError(f"max_seq_len={max_seq_len!r} must be a number of tokens, or None for no limit")
        self.max_seq_len = None if max_seq_len is None or max_seq_len < 0 else max_seq_len

    def set_interleaved_rollouts(self, interleaved_rollouts: bool) -> None:
        self.interleaved_rollouts = interleaved_rollouts
        if interleaved_rollouts:
            warnings.warn(
                "interleaved_rollouts has no effect: tokens are kept exactly as the engine sampled them anyway",
                stacklevel=3,
            )

    def set_score_rollouts(self, score_rollouts: bool) -> None:
        self.score_rollouts = score_rollouts
