"""Rewards too large to compute with: a row that has one fails, and the training goes on with finite weights."""

from __future__ import annotations

import itertools
import math

import pytest

pytest.importorskip("torch")

import torch

import verifiers as vf
from tests.trainers import making


@pytest.mark.parametrize("large", [1e308, 1e101, 1e15], ids=lambda large: f"{large:g}")
def test_a_training_survives_a_reward_that_no_trainer_can_compute_with(tmp_path, large):
    calls = itertools.count()

    def reward(completion):
        return large if next(calls) % 5 == 0 else making.share_of_e(completion)

    trainer = making.trainer(tmp_path, env=making.environment(rubric=vf.Rubric([reward])), max_steps=3)
    report = trainer.train()
    assert len(report.rewards) == 3
    assert all(math.isfinite(reward) for reward in report.rewards)
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())
