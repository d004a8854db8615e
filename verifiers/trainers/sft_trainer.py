"""Supervised fine-tuning on examples, for instance as a warm-up for GRPO."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from verifiers.samples import Sample
from verifiers.trainers import setup
from verifiers.trainers.config import SFTConfig
from verifiers.trainers.distributed import processes
from verifiers.trainers.learning.logprobs import TokenScorer
from verifiers.trainers.learning.micro_batches import TrainSample
from verifiers.trainers.sft_rows import SFTSamples, read_samples
from verifiers.trainers.threads import sensible_threads
from verifiers.trainers.trainer import Trainer
from verifiers.trainers.watch.report import Report
from verifiers.trainers.weights import learning_rate


class SFTTrainer(Trainer):
    """Trains a model to imitate examples: minimises the mean negative logprob of the tokens of their replies.

    ``dataset`` is one of: rows with prompt and completion (texts or messages); rows with messages, of which every
    assistant turn is trained on; saved rollouts (`Results`, a run directory, a file), filtered by ``min_reward``; or,
    with ``env``, rows with an answer, which is put into the parser's format (default: the environment's own rows).

    >>> from verifiers.trainers import SFTTrainer, tiny_model
    >>> model, tokenizer = tiny_model("ab", hidden_size=32)
    >>> rows = [{"prompt": "a", "completion": "bb"}, {"prompt": "b", "completion": "aa"}]
    >>> trainer = SFTTrainer(model=model, tokenizer=tokenizer, dataset=rows, config={"show_progress": False})
    >>> len(trainer.rows), trainer.total_steps
    (2, 1)
    """

    config: SFTConfig

    def __init__(
        self,
        model: Any = None,
        dataset: Any = None,
        config: Any = None,
        *,
        args: Any = None,
        tokenizer: Any = None,
        processing_class: Any = None,
        env: Any = None,
        eval_dataset: Any = None,
        peft_config: Any = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.config = SFTConfig.of(setup.one_of("config", config, "args", args))
        tokenizer = setup.one_of("tokenizer", tokenizer, "processing_class", processing_class)
        self._check_config()
        self.env, self.callbacks = env, list(callbacks)
        self._load(model, tokenizer, adapters=peft_config, is_read=False)
        self.examples = self._read(dataset)
        self.eval_samples: list[Sample] = [] if eval_dataset is None else self._read(eval_dataset).samples
        self._check_evaluation()
        self._make_weights("saved")
        self._make_stream(self.examples.samples)
        self._scorer: TokenScorer | None = None

    def train(self, resume: bool | str | Path = False) -> Report:
        """Train for ``max_steps`` steps, or for ``num_epochs`` passes through the examples; returns the report."""
        with self._training(resume) as report:
            while self.step < self.total_steps and not self.should_stop:
                self.epoch = self.step // self.num_steps_per_epoch
                began = time.perf_counter()
                report.display.enter("learning from a batch")
                figures = self.train_step(self.get_batch())
                self.step += 1
                self._note_learned(range(self.rows.first_unlearned, self.rows.cursor))
                seconds = time.perf_counter() - began
                figures["training_s"] = seconds
                report.note(self, figures, tokens=figures["tokens"], seconds=seconds)
                self._after_step(report)
            self.weights.module.eval()
        return report

    def get_batch(self) -> list[Sample]:
        """The samples of the next step."""
        return self.rows.take(self.rows_per_step)

    def train_step(self, batch: Sequence[Sample]) -> dict[str, Any]:
        """One update from these samples; returns loss, tokens, grad_norm, learning_rate."""
        rate = learning_rate(self.config, self.step, self.total_steps)
        own = sum(sum(sample.completion_mask) for sample in batch)
        count = sum(processes.all_gather(self.accelerator, own))
        total = 0.0
        self.weights.refresh()
        self.weights.module.train()
        for loss, is_last in self._losses(batch):
            self.weights.backward(loss / max(count, 1), is_last=is_last)
            total += float(loss.detach())
        self.weights.collect()
        norm = self.weights.step(rate)
        return {
            "loss": sum(processes.all_gather(self.accelerator, total)) / max(count, 1),
            "tokens": count,
            "samples": sum(processes.all_gather(self.accelerator, len(batch))),
            "grad_norm": norm,
            "learning_rate": rate,
        }

    def evaluate(self) -> dict[str, Any]:
        """The loss over ``eval_dataset`` with the current weights."""
        if not self.eval_samples:
            raise ValueError("there are no examples to evaluate on; pass eval_dataset=")
        self.weights.module.eval()
        count = sum(sum(sample.completion_mask) for sample in self.eval_samples)
        with torch.no_grad(), sensible_threads(self.unwrapped_model):
            total = sum(float(loss) for loss, _ in self._losses(self.eval_samples))
        return {"loss": total / max(count, 1), "n": len(self.eval_samples)}

    @property
    def rows_per_step(self) -> int:
        """Samples of one update, in this process."""
        return self.config.batch_size * self.config.gradient_accumulation_steps

    @property
    def can_evaluate(self) -> bool:
        return bool(self.eval_samples)

    def _read(self, dataset: Any) -> SFTSamples:
        most = self._longest(self.config.max_seq_length)
        return read_samples(dataset, self.tokenizer, env=self.env, min_reward=self.config.min_reward, max_length=most)

    def _losses(self, batch: Sequence[Sample]) -> Iterator[tuple[torch.Tensor, bool]]:
        """The summed loss of each micro-batch's trained tokens, and whether it is the last one."""
        if self._scorer is None:
            self._scorer = self.weights.scorer()
        limits = {"max_tokens": self.memory.micro_batch_tokens, **self._scorer.layouts.limits()}
        samples = [TrainSample(sample=sample, advantage=1.0) for sample in batch]
        made = self.weights.micro_batches(samples, self.tokenizer.pad_token_id, **limits)
        for i, one in enumerate(made, 1):
            on_device = one.to(self.weights.device)
            yield -(self._scorer.logprobs(on_device) * on_device.weight_N).sum(), i == len(made)
