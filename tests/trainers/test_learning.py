"""It is seen to learn: a model made on the spot, from mostly wrong to mostly right, by reward alone."""

from __future__ import annotations

import pytest

from examples.train_tiny import environment, learn


@pytest.mark.timeout(600)
def test_a_tiny_transformer_learns_to_reverse_texts_it_has_never_seen(tmp_path):
    done = learn(tmp_path, steps=35, seed=0)
    assert done.start < 0.3
    assert done.before.mean_reward < 0.3
    assert done.end > 0.7
    assert done.after.mean_reward > 0.7
    env = environment()
    assert not set(env.dataset["question"]) & set(env.eval_dataset["question"])
