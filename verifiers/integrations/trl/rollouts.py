"""An environment → ``rollout_func(prompts, trainer)``: rollouts, exact tokens, rewards."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verifiers.calls import both
from verifiers.envs import Environment
from verifiers.samples import Sample, exact_samples
from verifiers.types import Row, SamplingArgs, State

logger = logging.getLogger("verifiers.integrations.trl")


class Rollouts:
    """Runs rollouts of an environment with the model that TRL trains.

    ``GRPOTrainer(model, reward_funcs=rollouts.reward, rollout_func=rollouts, train_dataset=rollouts.dataset())``

    By default our engine samples from the model in the trainer's process, with exact tokens. Pass another ``client``
    with exact tokens (a vLLM URL, with ``sampling_args`` that request them) if the weights are sharded over processes.
    TRL only passes prompts, so each prompt must belong to one row.
    """

    def __init__(
        self, env: Environment, *, client: Any = None, model: str = "policy", sampling_args: SamplingArgs | None = None
    ) -> None:
        self.env = env
        self._client, self._model = client, model
        self._sampling_args = dict(sampling_args or {})
        self._rows = _by_prompt([*env.get_dataset(), *env.get_eval_dataset()])
        self._local: Any = None
        self._local_module: Any = None

    def dataset(self, n: int = -1, *, evaluation: bool = False) -> Any:
        """The prompts of the rows as a Hugging Face ``Dataset``, for ``train_dataset`` or ``eval_dataset``."""
        from datasets import Dataset

        rows = self.env.get_eval_dataset(n) if evaluation else self.env.get_dataset(n)
        return Dataset.from_list([{"prompt": row["prompt"], "example_id": row["example_id"]} for row in rows])

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Run one rollout per prompt; rollouts of the same row are scored as one group."""
        with self._answering(trainer) as client:
            states = _play(self, prompts, client, self.sampling(trainer))
        written: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for state, prompt in zip(states, prompts, strict=True):
            for name, value in _columns(state, prompt, trainer).items():
                written[name].append(value)
        return written

    def reward(self, completions: Sequence[Any], vf_reward: Sequence[float | None], **kwargs: Any) -> list[Any]:
        """The rewards of the rollouts; None for a failed rollout, which TRL ignores."""
        return list(vf_reward)

    def sampling(self, trainer: Any) -> dict[str, Any]:
        """The trainer's sampling settings as sampling arguments; ``sampling_args`` override them."""
        asked = {
            "temperature": trainer.temperature,
            "top_p": trainer.top_p,
            "top_k": trainer.top_k or None,
            "min_p": trainer.min_p,
            "max_tokens": trainer.max_completion_length,
        }
        usual = {name: value for name, value in asked.items() if value is not None}
        if getattr(trainer, "repetition_penalty", 1.0) != 1.0:
            raise ValueError("repetition_penalty changes the sampling distribution; leave it at 1.0")
        return {**usual, **self._sampling_args}

    def row_of(self, prompt: Any) -> Row:
        """The row that a prompt belongs to."""
        row = self._rows.get(_key(prompt))
        if row is None:
            raise ValueError(f"no row of the environment has the prompt {prompt!r:.200}; train on rollouts.dataset()")
        return row

    @contextmanager
    def _answering(self, trainer: Any) -> Iterator[Any]:
        if self._client is not None:
            yield self._client
            return
        if getattr(trainer, "use_vllm", False):
            raise ValueError("with use_vllm=True, pass client=URL of a vLLM server that returns token ids")
        from verifiers.engine.local_model import LocalModel

        module = trainer.accelerator.unwrap_model(trainer.model)
        if self._local_module is not module:
            self._local = LocalModel(module, trainer.processing_class, name=self._model)
            self._local_module = module
        with _in_evaluation(module):
            self._local.forget()  # the weights have changed since the last batch
            yield self._local


@contextmanager
def _in_evaluation(module: Any) -> Iterator[None]:
    """Within this block, put a module into evaluation mode and remove Accelerate's autocast wrapper."""
    was_training, wrapped = module.training, vars(module).get("forward")
    module.eval()
    if wrapped is not None and (original := vars(module).get("_original_forward")) is not None:
        module.forward = original
    try:
        yield
    finally:
        module.train(was_training)
        if wrapped is not None:
            module.forward = wrapped


COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "vf_reward", "vf_metrics")


def _by_prompt(rows: Sequence[Row]) -> dict[str, Row]:
    known: dict[str, Row] = {}
    for row in rows:
        other = known.setdefault(_key(row["prompt"]), row)
        if (other.get("answer"), other.get("info")) != (row.get("answer"), row.get("info")):
            ids = f"{other['example_id']} and {row['example_id']}"
            raise ValueError(f"rows {ids} have the same prompt but different answers; TRL only passes prompts")
    return known


def _key(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    told = [[name, value] for message in prompt for name, value in sorted(message.items()) if value is not None]
    return json.dumps(told, default=str)


async def _play_all(rollouts: Rollouts, prompts: Sequence[Any], client: Any, sampling: dict[str, Any]) -> list[State]:
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(_key(prompt), []).append(i)
    states: dict[int, State] = {}

    async def play(places: Sequence[int]) -> None:
        row = rollouts.row_of(prompts[places[0]])
        group = await rollouts.env.run_group([row] * len(places), client, rollouts._model, gen_sampling_args=sampling)
        states.update(zip(places, [*group, *group.failed], strict=True))

    await asyncio.gather(*map(play, groups.values()))
    return [states[i] for i in range(len(prompts))]


_play = both(_play_all)


def _columns(state: State, prompt: Any, trainer: Any) -> dict[str, Any]:
    """A rollout in TRL's columns. A failed one becomes a single masked end-of-sequence token."""
    if state.get("error") is not None:
        tokenizer = trainer.processing_class
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        sample = Sample(
            prompt_ids=list(ids),
            completion_ids=[tokenizer.eos_token_id],
            completion_mask=[0],
            completion_logprobs=[0.0],
        )
    else:
        sample = _last_sample(state)
    return {
        "prompt_ids": sample.prompt_ids,
        "completion_ids": sample.completion_ids,
        "logprobs": sample.completion_logprobs,
        "env_mask": sample.completion_mask,
        "vf_reward": None if state.get("error") is not None else state["reward"],
        "vf_metrics": dict(state.get("metrics") or {}),
    }


def _last_sample(state: Mapping[str, Any]) -> Sample:
    """The sequence of a rollout. TRL takes one, so if the history was rewritten, it is the last of several."""
    samples = exact_samples(state)
    if len(samples) > 1:
        logger.warning(
            "a rollout of example %s has %d sequences, because the chat template rewrote earlier turns; "
            "TRL takes one, so only the last is trained on",
            state.get("example_id"),
            len(samples),
        )
    return samples[-1]
